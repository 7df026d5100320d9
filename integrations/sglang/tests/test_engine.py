"""SGLang with the bundled model and its shipped drafter: greedy text as without a drafter, as many tokens accepted as by dspine's
engine, sampled text distributed as the target's. The engine takes half a minute to start; all tests here share one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang
import torch
from dspine_sglang.comparison import decode_in_sglang, sglang_engine
from engines import GREEDY, in_dspine
from scipy.stats import chisquare

from dspine.targets.model import Target

pytestmark = pytest.mark.engine

SAMPLED = {"temperature": 0.9, "top_k": 3, "max_new_tokens": 3, "ignore_eos": True}
SAMPLES = 480


@pytest.fixture(scope="module")
def engine(target_folder: Path, dspine_checkpoint: Path) -> Iterator[sglang.Engine]:
    with sglang_engine(target_folder, dspine_checkpoint) as started:
        yield started


def test_greedy_text_and_acceptance(
    engine: sglang.Engine, target: Target, dspine_checkpoint: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    theirs = decode_in_sglang(engine, prompts, GREEDY)
    assert theirs.outputs == plain
    ours = in_dspine(target, dspine_checkpoint, prompts, width=8)
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    assert theirs.acceptance_length > 1.5
    # Blocks of which a part is accepted: fewer rounds accepted the next token than this one.
    assert sum(a > b for a, b in itertools.pairwise(theirs.accepted_at)) >= 3


def test_greedy_rows_among_sampled_ones(engine: sglang.Engine, prompts: list[list[int]], plain: list[list[int]]) -> None:
    sampling = [GREEDY, {**GREEDY, "temperature": 1.0}] * (len(prompts) // 2)
    results = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert [result["output_ids"] for result in results[::2]] == plain[::2]
    assert [result["output_ids"] for result in results[1::2]] != plain[1::2]


def test_sampled_text_is_distributed_as_the_targets(engine: sglang.Engine, target: Target, prompts: list[list[int]]) -> None:
    """The joint distribution of an answer's first three tokens. The first is the prefill's, the others are verification's."""
    expected = joint_distribution(target, prompts[2])
    results = engine.generate(input_ids=[prompts[2]] * SAMPLES, sampling_params=SAMPLED)
    counts = Counter(tuple(result["output_ids"]) for result in results)
    assert counts.keys() <= expected.keys()
    common = {tokens: p for tokens, p in expected.items() if p * SAMPLES >= 5}
    rest = 1.0 - sum(common.values())
    observed = [counts[tokens] for tokens in common]
    bins, probabilities = [*observed, SAMPLES - sum(observed)], [*common.values(), rest]
    assert len(common) >= 8
    assert chisquare(bins, [p * SAMPLES for p in probabilities]).pvalue > 1e-3
    assert any(result["meta_info"]["spec_num_correct_drafts"] for result in results)


def joint_distribution(target: Target, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every answer of three tokens that SAMPLED allows, with its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            cache = target.new_cache(1, len(prompt) + 3)
            hidden = target.forward(torch.tensor([[*prompt, *tokens]]), cache).hidden[0, -1:]
            likeliest = (target.logits(hidden)[0] / SAMPLED["temperature"]).topk(int(SAMPLED["top_k"]))
            shares = torch.softmax(likeliest.values, -1)
            for token, share in zip(likeliest.indices.tolist(), shares.tolist(), strict=True):
                answer = (*tokens, token)
                longer[answer] = probability * share
        found = longer
    return found


def test_a_refused_request_says_why(engine: sglang.Engine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"does not support repetition_penalty=1\.3"):
        engine.generate(input_ids=prompts[0], sampling_params={**GREEDY, "repetition_penalty": 1.3})
