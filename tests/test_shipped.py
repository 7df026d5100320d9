"""The shipped drafters on the bundled model: exactness on 200 prompts, alone and in mixed batches, and that they help.

The prompts are those the bundled model wrote itself (data/smollm2-135m), so nothing is needed beyond the repository.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspine.api import LLM, find_drafter
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.targets.model import Target

pytestmark = pytest.mark.real

PROMPTS = Path(__file__).parents[1] / "data" / "smollm2-135m" / "synthesised.jsonl"
NUM_PROMPTS = 200
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def encoded(target: Target) -> list[list[int]]:
    """Token ids of the first short prompts in the chat template."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    texts = [row["turns"][0] for row in rows if len(row["turns"][0]) < 300][:NUM_PROMPTS]
    assert len(texts) == NUM_PROMPTS
    return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def plain(target: Target, encoded: list[list[int]]) -> list[list[int]]:
    """Plain greedy decoding, one prompt at a time."""
    return decode(Engine(target, max_rows=1), encoded)[0]


def decode(engine: Engine, encoded: list[list[int]], params: SamplingParams = GREEDY) -> tuple[list[list[int]], DecodeStats]:
    """Outputs in order, and all requests' statistics."""
    requests = [engine.submit(ids, params) for ids in encoded]
    engine.run()
    stats = DecodeStats()
    for request in requests:
        stats.merge(request.stats)
    return [request.output_ids for request in requests], stats


@pytest.mark.parametrize("name", ["dspine", "dflash"])
def test_greedy_output_is_plain_decodings_alone(
    target: Target, encoded: list[list[int]], plain: list[list[int]], name: str
) -> None:
    llm = LLM(target, find_drafter(target, name), max_rows=1)
    outputs, stats = decode(llm.engine(), encoded)
    assert outputs == plain
    assert stats.acceptance_length > 1.2  # on unlike prompts; most of the training answers are arithmetic


@pytest.mark.parametrize("name", ["dspine", "dflash"])
def test_greedy_output_is_plain_decodings_in_mixed_batches_of_eight(
    target: Target, encoded: list[list[int]], plain: list[list[int]], name: str
) -> None:
    """Eight rows of unlike lengths, every fourth one sampled: the greedy ones do not notice."""
    engine = LLM(target, find_drafter(target, name), max_rows=8).engine()
    greedy = []
    for number, ids in enumerate(encoded):
        greedy.append(engine.submit(ids, GREEDY))
        if number % 3 == 0:
            engine.submit(ids, SamplingParams(temperature=0.9, max_new_tokens=10 + number % 20, seed=number))
    engine.run()
    assert [request.output_ids for request in greedy] == plain


def test_conditioning_through_depth_beats_the_backbone(target: Target, encoded: list[list[int]]) -> None:
    """DSpine's greedy acceptance length against DFlash's of the same budget.

    Sampled at temperature 1 the two are within each other's noise on 32 short prompts (the model cards have both), so
    nothing is claimed of them here.
    """
    lengths = {}
    for name in ("dspine", "dflash"):
        engine = LLM(target, find_drafter(target, name), max_rows=8, width=8).engine()
        lengths[name] = decode(engine, encoded[:32], GREEDY)[1].acceptance_length
    assert lengths["dspine"] > 1.05 * lengths["dflash"], lengths


def test_the_same_seed_gives_the_same_text(target: Target, encoded: list[list[int]]) -> None:
    engine = LLM(target, find_drafter(target, "dspine"), max_rows=2).engine()
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_new_tokens=32)
    first, again = (decode(engine, encoded[:1], params)[0] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", ["dspine", "dflash"])
def test_widths_by_confidence_change_nothing(target: Target, encoded: list[list[int]], name: str) -> None:
    """The shipped calibrations belong to the shipped weights, and greedy output stays plain decoding's."""
    llm = LLM(target, find_drafter(target, name), max_rows=4, width="confidence")
    assert llm.calibration is not None
    outputs, stats = decode(llm.engine(), encoded[:16])
    assert outputs == decode(Engine(target, max_rows=1), encoded[:16])[0]
    assert 1 < stats.mean_width < 8
