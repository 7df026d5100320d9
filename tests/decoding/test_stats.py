"""DecodeStats against a plain recount of the same rounds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.decoding.stats import DecodeStats

# (num_drafted, num_accepted) of each round
ROUNDS = st.lists(st.integers(0, 7).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m))), max_size=30)


def recorded(rounds: list[tuple[int, int]]) -> DecodeStats:
    stats = DecodeStats()
    for drafted, accepted in rounds:
        stats.record_round(drafted, accepted)
    return stats


def test_one_round_by_hand() -> None:
    stats = recorded([(4, 2)])
    assert stats.rounds == 1
    assert (stats.drafted_at, stats.reached_at, stats.accepted_at) == ([1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0])
    assert stats.acceptance_length == 3.0
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert stats.conditional_acceptance == [1.0, 1.0, 0.0, 0.0]


def test_means_run_over_rounds_of_different_widths() -> None:
    stats = recorded([(3, 3), (1, 1), (3, 0), (2, 1)])
    assert stats.acceptance_length == 5 / 4 + 1
    assert stats.acceptance_by_position == [3 / 4, 1 / 3, 1 / 2]
    # Position 2 was proposed after an accepted position 1 twice: the width-1 round must not count as its refusal.
    assert stats.conditional_acceptance == [3 / 4, 1 / 2, 1.0]


@given(ROUNDS)
def test_equals_a_recount(rounds: list[tuple[int, int]]) -> None:
    stats = recorded(rounds)
    widest = max((m for m, _ in rounds), default=0)
    for j in range(1, widest + 1):
        proposed = [n for m, n in rounds if m >= j]
        reached = [n for n in proposed if n >= j - 1]
        accepted = [n for n in proposed if n >= j]
        assert stats.acceptance_by_position[j - 1] == len(accepted) / len(proposed)
        assert stats.conditional_acceptance[j - 1] == (len(accepted) / len(reached) if reached else 0.0)
    assert len(stats.drafted_at) == len(stats.reached_at) == len(stats.accepted_at) == widest
    assert stats.num_drafted_tokens == sum(m for m, _ in rounds)
    assert stats.num_accepted_tokens == sum(n for _, n in rounds)
    if rounds:
        assert stats.acceptance_length == pytest.approx(sum(n for _, n in rounds) / len(rounds) + 1)


@given(ROUNDS, ROUNDS)
def test_merging_equals_recording_everything_in_one(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    merged = recorded(first)
    merged.merge(recorded(second))
    assert merged == recorded(first + second)


def test_merge_adds_tokens_and_times_and_leaves_the_other_alone() -> None:
    one = DecodeStats(tokens=3, draft_s=1.0, verify_s=2.0, other_s=0.5, prefill_s=4.0)
    two = DecodeStats(rounds=1, tokens=2, drafted_at=[1], reached_at=[1], accepted_at=[0], draft_s=0.25, prefill_s=1.0)
    one.merge(two)
    assert (one.tokens, one.draft_s, one.verify_s, one.other_s, one.prefill_s) == (5, 1.25, 2.0, 0.5, 5.0)
    one.record_round(2, 2)
    assert two.drafted_at == [1]


def test_plain_decoding_has_acceptance_length_one() -> None:
    stats = recorded([(0, 0)] * 5)
    assert stats.acceptance_length == 1.0
    assert stats.acceptance_rate == 0.0
    assert stats.acceptance_by_position == []


def test_time_per_token_counts_bonus_tokens_and_no_prefill() -> None:
    stats = recorded([(4, 4), (4, 0)])
    stats.draft_s, stats.verify_s, stats.other_s, stats.prefill_s = 0.5, 2.0, 0.5, 100.0
    assert stats.decode_s == 3.0
    assert stats.tpot_s == pytest.approx(3.0 / 6)
    assert stats.tpot_s == pytest.approx((stats.decode_s / stats.rounds) / stats.acceptance_length)


def test_empty_stats_and_json() -> None:
    empty = DecodeStats()
    assert (empty.acceptance_length, empty.tpot_s, empty.acceptance_rate) == (0.0, 0.0, 0.0)
    assert json.loads(json.dumps(empty.to_dict(), allow_nan=False)) == empty.to_dict()
    told = recorded([(2, 1)]).to_dict()
    assert told["acceptance_length"] == 2.0
    assert told["acceptance_by_position"] == [1.0, 0.0]
    told["drafted_at"].append(9)
    assert recorded([(2, 1)]).drafted_at == [1, 1]


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1)])
def test_impossible_rounds_are_refused(drafted: int, accepted: int) -> None:
    with pytest.raises(AssertionError, match="accepted"):
        DecodeStats().record_round(drafted, accepted)
