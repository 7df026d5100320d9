"""vLLM itself, with the bundled model and its shipped drafters: a minute each.

The same greedy text as dspine's plain decoding, whatever is drafted; and as many tokens of each draft accepted as in dspine's own
engine, which is what proves the drafter's context keys and values, positions, taps and mask token right.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from vllm import SamplingParams as VllmSamplingParams

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams, target_distribution
from dspine.drafters.checkpoint import load_drafter
from dspine.integrations.side_by_side import decode_in_dspine
from dspine.integrations.vllm_export import export_checkpoint
from dspine.targets.model import Target
from dspine_vllm.comparison import decode_in_vllm, vllm_engine

pytestmark = pytest.mark.engine

MAX_NEW_TOKENS = 64
GREEDY = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
TOLERANCE = 0.02  # the last round of an answer may draft less in dspine's engine, which knows how much is still wanted
MAX_MODEL_LEN = 512
ANSWERS = 400  # of the distribution test


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """dspine's plain greedy answers."""
    return decode_in_dspine(LLM(target, None, max_rows=8), prompts, GREEDY).outputs


@pytest.fixture
def compared(target: Target, model_folder: Path, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path) -> Any:
    """Starts vLLM with a checkpoint, decodes the prompts twice in it and once in dspine, and holds the two against each other."""

    def compare(checkpoint: Path, num_draft_tokens: int, **options: Any) -> tuple[int, ...]:
        export = export_checkpoint(checkpoint, target, tmp_path / "draft")
        config = {**export.speculative_config, "num_speculative_tokens": num_draft_tokens}
        with vllm_engine(model_folder, config, **{"max_model_len": MAX_MODEL_LEN, **options}) as engine:
            theirs = decode_in_vllm(engine, prompts, GREEDY)
            again = decode_in_vllm(engine, prompts, GREEDY)  # the prompts' keys and values now come from the prefix cache
        drafter = load_drafter(checkpoint, target)
        ours = decode_in_dspine(LLM(target, drafter, max_rows=8, width=num_draft_tokens + 1), prompts, GREEDY)
        assert theirs.outputs == again.outputs == plain == ours.outputs
        tau = ours.acceptance_length
        assert theirs.acceptance_length == pytest.approx(tau, rel=TOLERANCE)
        assert again.acceptance_length == pytest.approx(tau, rel=TOLERANCE)
        accepted_at = theirs.accepted_at
        assert len(accepted_at) == num_draft_tokens
        # Partial acceptance: some rounds refused the first token, some accepted it and refused a later one.
        assert theirs.rounds > accepted_at[0] > accepted_at[-1] >= 0
        return accepted_at

    return compare


def test_plain_decoding_is_the_same(model_folder: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    with vllm_engine(model_folder, None, max_model_len=MAX_MODEL_LEN) as engine:
        assert decode_in_vllm(engine, prompts, GREEDY).outputs == plain


def test_dspine(compared: Any, shipped: Callable[[str], Path]) -> None:
    assert compared(shipped("dspine"), 7)[-1] > 0  # whole drafts are accepted as well


def test_a_narrower_dspine_in_chunks(compared: Any, shipped: Callable[[str], Path]) -> None:
    """Any smaller width; prompts longer than a step's budget are prefilled over several, and requests come and go."""
    compared(shipped("dspine"), 3, max_num_batched_tokens=40, max_num_seqs=3)


def test_dflash(compared: Any, shipped: Callable[[str], Path]) -> None:
    compared(shipped("dflash"), 7)


def test_a_dflash_that_vllm_runs_alone(
    compared: Any, shipped: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped weights with QK-norm switched on are no good drafter, but the same one in both engines. No plugin is loaded."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = json.loads((shipped("dflash") / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "qk_norm": True}), encoding="utf-8")
    state = load_file(shipped("dflash") / "model.safetensors")
    torch.manual_seed(0)
    for layer, norm in itertools.product(range(config["num_layers"]), ("q_norm", "k_norm")):
        state[f"backbone.layers.{layer}.self_attn.{norm}.weight"] = 1.5 + 0.2 * torch.randn(config["head_dim"])
    save_file(state, folder / "model.safetensors")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    compared(folder, 7)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_text_follows_the_target(
    target: Target, model_folder: Path, prompts: list[list[int]], shipped: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    """Chi-square over the first four tokens, the last three of them drafted, of many answers to one prompt."""
    params = SamplingParams(temperature=0.8, top_k=3, max_new_tokens=4)
    expected = exact(target, prompts[0], params)
    config = {
        **export_checkpoint(shipped("dspine"), target, tmp_path / "draft").speculative_config,
        "draft_sample_method": method,
    }
    wanted = VllmSamplingParams(n=ANSWERS, temperature=0.8, top_k=3, max_tokens=4)
    with vllm_engine(model_folder, config, max_model_len=MAX_MODEL_LEN, max_num_seqs=64) as engine:
        (result,) = engine.generate([{"prompt_token_ids": prompts[0]}], wanted, use_tqdm=False)
    seen = Counter(tuple(answer.token_ids) for answer in result.outputs)
    assert set(seen) <= set(expected)
    often = [tokens for tokens, p in expected.items() if p * ANSWERS >= 5]
    assert len(often) >= 10
    rest = sum(p for tokens, p in expected.items() if tokens not in often)
    counts = np.array([*(seen[tokens] for tokens in often), ANSWERS - sum(seen[tokens] for tokens in often)])
    probs = np.array([*(expected[tokens] for tokens in often), rest])
    assert chisquare(counts, probs / probs.sum() * ANSWERS).pvalue > 1e-4


def exact(target: Target, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every answer of `max_new_tokens` tokens, or fewer up to an end of sequence."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_new_tokens):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, p in answers.items():
            if tokens and tokens[-1] in target.eos_token_ids:
                grown[tokens] = p
                continue
            ids = torch.tensor([[*prompt, *tokens]])
            hidden = target.forward(ids, target.new_cache(1, ids.shape[1])).hidden[:, -1]
            following = target_distribution(target.logits(hidden), params)[0]
            grown |= {(*tokens, int(token)): p * float(following[token]) for token in following.nonzero()[:, 0]}
        answers = grown
    return answers
