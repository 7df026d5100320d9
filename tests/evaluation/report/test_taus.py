"""Which acceptance lengths are compared, and the lead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dspine.evaluation.report.results import read_results
from dspine.evaluation.report.taus import by_setting, lead_of, read_taus, reference_of

Make = Callable[..., Path]


def test_the_lead_is_over_the_strongest_other_drafter(make_acceptance: Make, tmp_path: Path) -> None:
    for drafter, tau in (("dflash", 2.0), ("dflash2", 2.5), ("domino", 2.25), ("dspine", 3.0)):
        make_acceptance(f"{drafter}.json", drafter=drafter, acceptance_length=tau)
    groups = by_setting(read_taus(read_results([tmp_path])))
    ((setting, taus),) = groups.items()
    assert (setting.benchmark, setting.prompts) == ("gsm8k", 100)
    assert taus[-1].drafter == "dspine"
    lead = lead_of(taus)
    assert lead is not None
    assert lead.rival.row == "dflash2"
    assert lead.gain == pytest.approx(0.2)
    assert lead.interval == (0.0, 0.0), "the same conversations behind both"


@pytest.mark.parametrize(
    "change",
    [
        {"benchmark": "mbpp"},
        {"temperature": 1.0},
        {"target": "other"},
        {"prompts": 99},
        {"max_new_tokens": 80},
        {"chat": False},
        {"thinking": "on"},
        {"prompts_sha256": "0123456789abcdef"},
    ],
    ids=str,
)
def test_what_was_measured_otherwise_is_not_compared(change: dict[str, object], make_acceptance: Make, tmp_path: Path) -> None:
    make_acceptance("dspine.json")
    make_acceptance("dflash.json", drafter="dflash", **change)
    groups = by_setting(read_taus(read_results([tmp_path])))
    assert [len(taus) for taus in groups.values()] == [1, 1]
    assert [lead_of(taus) for taus in groups.values()] == [None, None]


def test_the_interval_holds_the_lead_and_pairs_conversations(committed: tuple[Path, Path]) -> None:
    groups = by_setting(read_taus(read_results([committed[0]])))
    assert len(groups) == 6
    for setting, taus in groups.items():
        lead = lead_of(taus)
        assert lead is not None
        assert lead.interval is not None
        low, high = lead.interval
        assert low < lead.gain < high
        if (setting.benchmark, setting.temperature) == ("gsm8k", 0.0):
            assert lead.gain == pytest.approx(0.2209, abs=1e-4)
            # Both drafters find the same conversations hard: paired, the interval is narrower than either tau's own.
            assert high - low < (taus[0].high - taus[0].low) / taus[0].value


def test_other_conversations_give_no_interval(make_acceptance: Make, tmp_path: Path) -> None:
    conversation = {"index": 0, "turns": 1, "skipped_turns": 0, "tokens": 4, "rounds": 2, "acceptance_length": 2.0}
    make_acceptance("dspine.json", conversations=[conversation])
    make_acceptance("dflash.json", drafter="dflash", conversations=[{**conversation, "index": 1}])
    ((_, taus),) = by_setting(read_taus(read_results([tmp_path]))).items()
    lead = lead_of(taus)
    assert lead is not None
    assert lead.interval is None


def test_a_drafter_measured_twice_is_told_apart(make_acceptance: Make, tmp_path: Path) -> None:
    make_acceptance("first.json")
    make_acceptance("second.json")
    assert [tau.row for tau in read_taus(read_results([tmp_path]))] == ["dspine", "dspine (second)"]


def test_a_server_is_named_in_its_row(make_acceptance: Make, tmp_path: Path) -> None:
    make_acceptance("a.json", decoder="OpenAIServer http://localhost/v1 m")
    assert [tau.row for tau in read_taus(read_results([tmp_path]))] == ["dspine, OpenAIServer http://localhost/v1 m"]


def test_a_comparison_table_fills_in_rows_whose_files_are_missing(comparison: Path) -> None:
    taus = read_taus(read_results([comparison]))
    assert [(tau.row, tau.value, tau.report is None) for tau in taus] == [
        ("dflash", 2.0, False),
        ("dspine", 3.0, False),
        ("dspine-k4", 2.5, False),
    ]
    reference = reference_of(taus)
    assert reference is not None
    assert reference.row == "dspine"
    (alone,) = read_taus(read_results([comparison / "table.json"]))
    assert (alone.row, alone.value, alone.low, alone.high, alone.setting.collection) == ("dspine", 3.0, 2.9, 3.1, "six")
