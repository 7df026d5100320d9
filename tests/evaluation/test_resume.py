"""Result files found again: read, continued, or refused with the setting that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import drafter_sha256
from dspine.errors import UserError
from dspine.evaluation.acceptance import AcceptanceReport, EngineMeter, measure
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.resume import result_name
from dspine.targets.model import Target

BENCHMARK = Benchmark("little", (("first", "and then?"), ("second",), ("third",)))
PARAMS = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)
MakeDrafter = Callable[..., BlockDrafter]


@pytest.fixture(scope="module")
def meter(tiny_target: Target, make_drafter: MakeDrafter) -> EngineMeter:
    return EngineMeter(LLM(tiny_target, make_drafter(tiny_target, "dflash"), max_rows=1, width=4), chat=False)


def test_a_stopped_measurement_goes_on_and_gives_the_same_report(meter: EngineMeter, tmp_path: Path) -> None:
    file, seen = tmp_path / "r.json", []

    def stop(result: object) -> None:
        seen.append(result)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(meter, BENCHMARK, PARAMS, file=file, on_result=stop)
    assert not file.exists()
    told: list[int] = []
    report = measure(meter, BENCHMARK, PARAMS, file=file, on_result=lambda result: told.append(result.index))
    assert sorted(told) == [0, 1, 2]
    whole = measure(meter, BENCHMARK, PARAMS)
    assert replace(report, machine={}) == replace(whole, machine={})
    assert [f.name for f in tmp_path.iterdir()] == ["r.json"]


def test_a_finished_measurement_is_read(meter: EngineMeter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measure(meter, BENCHMARK, PARAMS, file=tmp_path / "r.json")
    monkeypatch.setattr(EngineMeter, "results", lambda *a: pytest.fail("nothing is left to decode"))
    again = measure(meter, replace(BENCHMARK, source="elsewhere"), PARAMS, file=tmp_path / "r.json")
    assert again == report
    assert isinstance(again, AcceptanceReport)


@pytest.mark.parametrize("stopped", [False, True])
def test_another_measurements_file_is_refused(meter: EngineMeter, tmp_path: Path, stopped: bool) -> None:
    file = tmp_path / "r.json"
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            measure(meter, BENCHMARK, PARAMS, file=file, on_result=lambda result: _interrupt())
    else:
        measure(meter, BENCHMARK, PARAMS, file=file)
    with pytest.raises(
        UserError, match=r"r\.json.* was measured with max_new_tokens = 10, this one has 9; choose another output"
    ):
        measure(meter, BENCHMARK, replace(PARAMS, max_new_tokens=9), file=file)
    other = replace(BENCHMARK, conversations=(*BENCHMARK.conversations[:2], ("other",)))
    with pytest.raises(UserError, match="was measured with prompts_sha256 = "):
        measure(meter, other, PARAMS, file=file)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"benchmark": 1}'])
def test_a_foreign_file_is_not_overwritten(content: str, meter: EngineMeter, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"r\.json (is no result of this command|was measured with)"):
        measure(meter, BENCHMARK, PARAMS, file=file)
    assert file.read_text() == content


def test_a_damaged_result_is_refused(meter: EngineMeter, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    measure(meter, BENCHMARK, PARAMS, file=file)
    data = json.loads(file.read_text())
    del data["rounds"]
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match="is no result of this command; choose another output, or remove that file"):
        measure(meter, BENCHMARK, PARAMS, file=file)


def test_drafters_are_told_apart_by_weights_and_options(tiny_target: Target, make_drafter: MakeDrafter) -> None:
    digests = {
        drafter_sha256(make_drafter(tiny_target, "dspine", **changes))
        for changes in ({}, {"seed": 1}, {"num_candidates": 3}, {"seed": 0})
    }
    assert len(digests) == 3


def test_names_of_results() -> None:
    assert [result_name("gsm8k", t) for t in (0.0, 1.0, 0.7)] == ["gsm8k-T0.json", "gsm8k-T1.json", "gsm8k-T0.7.json"]
