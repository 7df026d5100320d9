"""Sampled requests: what the proposer drafts and what vLLM's rejection sampler makes of it follow the target exactly.

The proposer and the rejection sampler are the real ones; the tables they read are small and random.
V tokens, M slots, K candidates.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

import dspine_vllm
from dspine.modules.selection import walk_transitions
from dspine_vllm.dspine import DSpineForCausalLM
from dspine_vllm.proposer import DSpineProposer

V, M, K = 5, 2, 3
ROWS = 40_000
SURE = 1e-6  # a right sampler fails once in a million runs; seeds are fixed


class Tables(DSpineForCausalLM):
    """A drafter whose transition cache is given, the same for every request."""

    def __init__(self, ids: Tensor, first: Tensor, transitions: Tensor) -> None:
        nn.Module.__init__(self)
        self.tables = ids, first, transitions
        self.anchors: list[int] = []

    def transition_cache(self, u: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.anchors = anchors.tolist()
        ids, first, transitions = self.tables
        b = u.shape[0]
        return ids.expand(b, -1, -1), first.expand(b, -1), transitions.expand(b, -1, -1, -1)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    dspine_vllm.register()


@pytest.fixture
def tables() -> Tables:
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(V)[:K] for _ in range(M)])[None]
    return Tables(ids, torch.randn(1, K) * 1.5, torch.randn(1, M - 1, K, K) * 1.5)


@pytest.fixture
def target_logits() -> Tensor:
    """[M + 1, V, V]: slot t's logits after each token (slot 0's after the anchor, whatever its row)."""
    torch.manual_seed(2)
    return torch.randn(M + 1, V, V) * 1.5


def proposer_of(tables: Tables, rows: int, probabilistic: bool) -> DSpineProposer:
    proposer = object.__new__(DSpineProposer)
    proposer.drafter, proposer.num_speculative_tokens = tables, M
    proposer.input_ids = torch.arange(rows * (M + 1), dtype=torch.int32)
    proposer._enable_probabilistic_draft_probs = probabilistic
    proposer.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: V))
    return proposer


def sampling(temperatures: Tensor, generators: dict[int, torch.Generator] | None = None) -> SamplingMetadata:
    none = torch.zeros(0)
    return SamplingMetadata(
        temperature=temperatures, all_greedy=bool((temperatures == 0).all()), all_random=bool((temperatures > 0).all()),
        top_p=None, top_k=None, generators=generators or {}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=none, output_token_ids=[],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip


def draft(proposer: DSpineProposer, rows: int, metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
    return proposer._sample_draft_tokens(torch.zeros(rows * M, 4), metadata)


def verified(tokens: Tensor, q: Tensor | None, target_logits: Tensor, temperature: float, metadata: SamplingMetadata) -> Tensor:
    """[rows, M + 1] tokens: what vLLM's rejection sampler lets through, completed by plain draws from the target."""
    rows = tokens.numel() // M
    drafted = tokens.view(rows, M)
    previous = torch.cat((torch.zeros(rows, 1, dtype=torch.long), drafted), 1)  # [rows, M + 1]
    logits = torch.stack([target_logits[t][previous[:, t]] for t in range(M + 1)], 1)  # [rows, M + 1, V]
    bonus = torch.multinomial((logits[:, M] / temperature).softmax(-1), 1).int()
    ends = torch.arange(1, rows + 1, dtype=torch.int32) * M
    flat = rejection_sampler.apply_sampling_constraints(logits[:, :M].reshape(-1, V).clone(), ends, metadata)
    out = rejection_sampler.rejection_sample(tokens.int(), [M] * rows, M, ends, q, flat, bonus, metadata).long()
    for t in range(M + 1):
        before = out[:, t - 1] if t else torch.zeros(rows, dtype=torch.long)
        fresh = torch.multinomial((target_logits[t][before] / temperature).softmax(-1), 1)[:, 0]
        out[:, t] = torch.where(out[:, t] < 0, fresh, out[:, t])
    return out


def p_value(tokens: Tensor, target_logits: Tensor, temperature: float) -> float:
    """Of the joint distribution of M + 1 tokens, by chi-square."""
    p = (target_logits / temperature).double().softmax(-1)
    joint = p[0][0][:, None, None] * p[1][:, :, None] * p[2][None]
    seen = torch.bincount((tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2], minlength=V**3)
    return goodness(seen, joint.flatten())


def goodness(seen: Tensor, probs: Tensor) -> float:
    """p-value of counts under probabilities, by chi-square."""
    expected = probs.double() / probs.double().sum() * seen.sum()
    return float(chisquare(seen.double().numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("probabilistic", [False, True])
def test_sampled_output_follows_the_target(
    tables: Tables, target_logits: Tensor, temperature: float, probabilistic: bool
) -> None:
    torch.manual_seed(3)
    metadata = sampling(torch.full((ROWS,), temperature))
    tokens, q = draft(proposer_of(tables, ROWS, probabilistic), ROWS, metadata)
    assert (q is not None) == probabilistic
    assert p_value(verified(tokens, q, target_logits, temperature, metadata), target_logits, temperature) > SURE


def test_a_wrong_q_would_be_seen(tables: Tables, target_logits: Tensor) -> None:
    torch.manual_seed(3)
    metadata = sampling(torch.ones(ROWS))
    tokens, q = draft(proposer_of(tables, ROWS, True), ROWS, metadata)
    assert q is not None
    wrong = q.sqrt() / q.sqrt().sum(-1, keepdim=True)
    assert p_value(verified(tokens, wrong, target_logits, 1.0, metadata), target_logits, 1.0) < SURE


def test_candidates_are_drawn_from_the_q_that_is_handed_over(tables: Tables) -> None:
    torch.manual_seed(4)
    tokens, q = draft(proposer_of(tables, ROWS, True), ROWS, sampling(torch.full((ROWS,), 0.7)))
    assert q is not None
    tokens, q = tokens.view(ROWS, M), q.view(ROWS, M, V)
    assert torch.allclose(q.sum(-1), torch.ones(ROWS, M))
    assert int((q > 0).sum(-1).max()) == K
    after = tokens[:, 0] == tables.tables[0][0, 0, 1]  # slot 2 after slot 1's second candidate
    for drawn, handed_over in ((tokens[:, 0], q[:, 0]), (tokens[after, 1], q[after, 1])):
        assert torch.equal(handed_over, handed_over[0].expand(len(drawn), -1))
        known = handed_over[0] > 0
        seen = torch.bincount(drawn, minlength=V)
        assert int(seen[~known].sum()) == 0
        assert goodness(seen[known], handed_over[0][known]) > SURE


@pytest.mark.parametrize("probabilistic", [False, True])
def test_greedy_requests_take_the_best_chain(tables: Tables, probabilistic: bool) -> None:
    ids, first, transitions = tables.tables
    index, _ = walk_transitions(first, transitions, torch.zeros(1), None)
    expected = ids.gather(2, index[..., None]).flatten().tolist()
    proposer = proposer_of(tables, 3, probabilistic)
    tokens, q = draft(proposer, 3, sampling(torch.zeros(3)))
    assert tokens.tolist() == expected * 3
    assert q is None
    assert tables.anchors == [0, M + 1, 2 * (M + 1)]
    mixed, _ = draft(proposer, 3, sampling(torch.tensor((0.0, 1.0, 1e-6))))
    assert mixed.view(3, M)[[0, 2]].flatten().tolist() == expected * 2


def test_a_seeded_request_drafts_the_same_again(tables: Tables) -> None:
    def drawn(seed: int) -> Any:
        generators = {1: torch.Generator().manual_seed(seed)}
        return draft(proposer_of(tables, 64, True), 64, sampling(torch.ones(64), generators))[0].view(64, M)

    runs = [drawn(5) for _ in range(20)]
    assert all(torch.equal(run[1], runs[0][1]) for run in runs)
    assert not all(torch.equal(run[0], runs[0][0]) for run in runs)


def test_parameters_are_repeated_for_every_drafted_token() -> None:
    ends = torch.tensor([3, 3, 5], dtype=torch.int32)
    for values in (torch.tensor([0.7, 0.3, 0.0]), torch.tensor([3, 9, 0], dtype=torch.int32)):
        expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
        assert expanded.dtype == values.dtype
        assert expanded.tolist() == [*[values[0].item()] * 3, 1, 1]


def test_a_step_without_drafted_tokens_has_nothing_to_cut() -> None:
    metadata = dataclasses.replace(sampling(torch.ones(1)), top_k=torch.tensor([3], dtype=torch.int32))
    logits = torch.zeros(0, V)
    assert rejection_sampler.apply_sampling_constraints(logits, torch.zeros(1, dtype=torch.int32), metadata).shape == (0, V)
