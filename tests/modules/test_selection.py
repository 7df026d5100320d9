"""Walks over score tables: against loops, and against the exact distribution on a grid of uniforms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspine.modules.selection import chosen_scores, independent_slots, pick, tempered, top_probability, walk_transitions


@pytest.mark.parametrize(
    ("uniform", "index"), [(0.0, 1), (0.2, 1), (0.2499, 1), (0.25, 3), (0.7, 3), (0.75, 4), (0.99, 4), (1.0 - 2**-24, 4)]
)
def test_pick_inverts_the_cumulative_sum(uniform: float, index: int) -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    assert pick(probs, torch.tensor([uniform])).tolist() == [index]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9).filter(lambda p: sum(p) > 1e-3), st.floats(0, 1, exclude_max=True)
)
def test_pick_never_names_an_impossible_entry(masses: list[float], uniform: float) -> None:
    probs = torch.tensor([masses]) / torch.tensor(masses).sum()
    index = int(pick(probs, torch.tensor([uniform]))[0])
    assert probs[0, index] > 0


def test_pick_survives_a_sum_that_rounding_left_short_of_one() -> None:
    assert pick(torch.tensor([[0.5, 0.4999, 0.0]]), torch.tensor([0.99995])).tolist() == [1]


def test_tempered_rows_have_their_own_temperature() -> None:
    scores = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    q = tempered(scores, torch.tensor([0.5, 2.0, 0.0]))
    for row, temperature in enumerate((0.5, 2.0, 1.0)):
        weights = torch.exp(scores[row].double() / temperature)
        torch.testing.assert_close(q[row].double(), weights / weights.sum(-1, keepdim=True), rtol=0, atol=1e-6)


def random_table(b: int, m: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(b, k, generator=generator), 2 * torch.randn(b, m - 1, k, k, generator=generator)


@pytest.mark.parametrize(("m", "k"), [(1, 4), (2, 3), (7, 5), (15, 16)])
def test_greedy_walk_follows_the_table(m: int, k: int) -> None:
    first, transitions = random_table(4, m, k)
    index, q = walk_transitions(first, transitions, torch.zeros(4), None)
    assert q is None
    assert index.shape == (4, m)
    for row in range(4):
        previous = max(range(k), key=lambda j: float(first[row, j]))
        assert index[row, 0] == previous
        for t in range(m - 1):
            scores = transitions[row, t, previous].tolist()
            previous = scores.index(max(scores))
            assert index[row, t + 1] == previous


def test_sampled_walk_has_the_exact_joint_distribution() -> None:
    """On a fine grid of uniforms every pair comes up in its exact proportion, and the q kept is the one sampled from."""
    k, grid, temperature = 3, 400, 0.7
    first, transitions = (0.4 * table for table in random_table(1, 2, k))
    points = (torch.arange(grid) + 0.5) / grid
    uniforms = torch.cartesian_prod(points, points)
    b = uniforms.shape[0]
    index, q = walk_transitions(first.expand(b, -1), transitions.expand(b, -1, -1, -1), torch.full((b,), temperature), uniforms)
    assert q is not None
    p1 = torch.softmax(first[0] / temperature, -1)
    for i, j in itertools.product(range(k), range(k)):
        p2 = torch.softmax(transitions[0, 0, i] / temperature, -1)
        hits = (index == torch.tensor([i, j])).all(-1)
        assert float(hits.float().mean()) == pytest.approx(float(p1[i] * p2[j]), abs=0.01)
        torch.testing.assert_close(q[hits][0], torch.stack((p1, p2)))


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    first, transitions = random_table(3, 4, 5)
    temperatures = torch.tensor([0.0, 1.0, 0.0])
    uniforms = torch.full((3, 4), 0.97)
    mixed, q = walk_transitions(first, transitions, temperatures, uniforms)
    greedy, _ = walk_transitions(first, transitions, torch.zeros(3), None)
    alone, q_alone = walk_transitions(first[1:2], transitions[1:2], temperatures[1:2], uniforms[1:2])
    assert torch.equal(mixed[::2], greedy[::2])
    assert torch.equal(mixed[1:2], alone)
    assert not torch.equal(mixed[1], greedy[1])
    assert q is not None
    assert q_alone is not None
    torch.testing.assert_close(q[1:2], q_alone)


def test_independent_slots() -> None:
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2))
    temperatures = torch.tensor([0.0, 0.5, 1.5])
    # More uniforms than slots: the first ones count.
    uniforms = torch.rand(3, 7, generator=torch.Generator().manual_seed(3))
    index, q = independent_slots(logits, temperatures, uniforms)
    assert q is not None
    for row, t in itertools.product(range(3), range(4)):
        if temperatures[row] == 0:
            assert index[row, t] == logits[row, t].argmax()
            continue
        expected = torch.softmax(logits[row, t] / temperatures[row], -1)
        torch.testing.assert_close(q[row, t], expected)
        assert index[row, t] == int((expected.cumsum(-1) <= uniforms[row, t]).sum())
    greedy, none = independent_slots(logits, temperatures, None)
    assert none is None
    assert torch.equal(greedy, logits.argmax(-1))


def test_top_probability_survives_large_scores() -> None:
    scores = torch.tensor([[0.0, math.log(3.0)], [1000.0, 1000.0], [-5.0, float("-inf")]])
    torch.testing.assert_close(top_probability(scores), torch.tensor([0.75, 0.5, 1.0]))


def test_chosen_scores_are_those_that_the_walk_looked_at() -> None:
    first, transitions = torch.randn(3, 4), torch.randn(3, 5, 4, 4)
    index, q = walk_transitions(first, transitions, torch.ones(3), torch.rand(3, 6))
    torch.testing.assert_close(chosen_scores(first, transitions, index).softmax(-1), q)
    assert torch.equal(chosen_scores(first, transitions[:, :0], index[:, :1]), first[:, None])
