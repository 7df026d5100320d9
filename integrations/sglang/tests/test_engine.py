"""SGLang with the bundled model: greedy text as without a drafter, as many tokens accepted as by dspine's engine, sampled text
distributed as the target's. An engine takes half a minute to start, and there is one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang
import torch
from checkpoints import changed_checkpoint, with_norms_and_whole_vocabulary
from dspine_sglang.comparison import Decoded, decode_in_dspine, decode_in_sglang, sglang_engine
from scipy.stats import chisquare

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.checkpoint import load_drafter
from dspine.targets.model import Target

pytestmark = pytest.mark.engine

QUESTIONS = (
    "A shop sells 14 pens a day at 3 dollars each. How much does it take in a week? Reason step by step.",
    "What is 17 times 6? Reason step by step.",
    "Write a short poem about the sea.",
    "Name three uses of copper.",
    "A train covers 180 miles in 3 hours. How far does it go in 5 hours at the same speed? Reason step by step.",
    "Write a Python function that returns the larger of two numbers.",
    "Tom has 24 marbles and gives a third of them to Ann. How many are left? Reason step by step.",
    "Why do leaves fall in autumn?",
)
MAX_NEW_TOKENS = 96
GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
SAMPLED = {"temperature": 0.9, "top_k": 3, "max_new_tokens": 3, "ignore_eos": True}
SAMPLES = 1200


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [target.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """What the target writes by itself, in dspine's engine."""
    return in_dspine(target, None, prompts, width=1).outputs


@pytest.fixture(scope="module")
def engine(target_folder: Path, dspine_checkpoint: Path) -> Iterator[sglang.Engine]:
    with sglang_engine(target_folder, dspine_checkpoint) as started:
        yield started


def in_dspine(target: Target, checkpoint: Path | None, prompts: list[list[int]], width: int) -> Decoded:
    drafter = None if checkpoint is None else load_drafter(checkpoint, target)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    return decode_in_dspine(LLM(target, drafter, max_rows=len(prompts), width=width), prompts, params)


def test_sglang_alone_writes_what_dspine_does(target_folder: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    with sglang_engine(target_folder, None) as alone:
        assert decode_in_sglang(alone, prompts, GREEDY).outputs == plain


def test_greedy_text_and_acceptance(
    engine: sglang.Engine, target: Target, dspine_checkpoint: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    theirs = decode_in_sglang(engine, prompts, GREEDY)
    assert theirs.outputs == plain
    ours = in_dspine(target, dspine_checkpoint, prompts, width=8)
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    assert theirs.acceptance_length > 1.5
    assert sum(count > 0 for count in theirs.rounds_by_num_accepted[1:7]) >= 3  # blocks of which a part is accepted


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


def test_another_drafter_and_another_width(
    dspine_checkpoint: Path, tmp_path: Path, target_folder: Path, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    other_checkpoint = changed_checkpoint(dspine_checkpoint, tmp_path, with_norms_and_whole_vocabulary)
    with sglang_engine(target_folder, other_checkpoint, speculative_num_draft_tokens=5) as started:
        theirs = decode_in_sglang(started, prompts, GREEDY)
    ours = in_dspine(target, other_checkpoint, prompts, width=5)
    assert theirs.outputs == ours.outputs == plain
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    assert theirs.acceptance_length > 1.1
