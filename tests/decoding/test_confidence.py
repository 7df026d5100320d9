"""The rule that decides how much of a draft to verify: by brute force where there is one, and what must not mislead it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspine.decoding.calibration import Calibration, ConfidenceMap
from dspine.decoding.confidence import ConfidenceScheduler
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.width import PROBE_EVERY, CostTable

M = 5
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=0)


def as_it_is(temperature: float = 0.0, mean: float = 0.5) -> ConfidenceMap:
    return ConfidenceMap(temperature=temperature, slope=(1.0,) * M, offset=(0.0,) * M, mean_acceptance=(mean,) * M)


def scheduler(costs: CostTable, *maps: ConfidenceMap) -> ConfidenceScheduler:
    maps = maps or (as_it_is(),)
    calibration = Calibration(drafter="any", drafter_sha256="", prompts="none", num_prompts=0, maps=maps)
    return ConfidenceScheduler(calibration, M, costs)


def linear(base: float, per_token: float) -> CostTable:
    return CostTable(lambda tokens: base + per_token * tokens)


def test_surer_tokens_are_verified() -> None:
    made = scheduler(linear(1.0, 0.3))
    assert made.tokens_to_verify([[0.9, 0.9, 0.2, 0.9, 0.9]], [GREEDY]) == 2
    assert made.tokens_to_verify([[0.01, 0.9, 0.9, 0.9, 0.9]], [GREEDY]) == 0
    assert made.tokens_to_verify([[0.99] * M], [GREEDY]) == M


def test_free_verification_takes_everything() -> None:
    assert scheduler(linear(1.0, 0.0)).tokens_to_verify([[0.01] * M], [GREEDY]) == M


def test_the_long_run_rate_is_the_best_that_any_threshold_gives() -> None:
    """Played many times on two kinds of rounds: the rule's rate against that of every pair of fixed lengths for them."""
    costs, draft_s = linear(1.0, 0.4), 0.2
    kinds = [np.array([0.95] * M), np.array([0.45] * M)]

    def yields(kind: int, length: int) -> tuple[float, float]:
        return 1 + float(np.cumprod(kinds[kind])[:length].sum()), draft_s + costs.seconds(length + 1)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens, seconds = np.array([yields(kind, length) for kind, length in enumerate(lengths)]).sum(0)
        return float(tokens / seconds)

    best = max(itertools.product(range(M + 1), repeat=2), key=rate)
    made = scheduler(costs)
    for _ in range(300):
        lengths = tuple(made.tokens_to_verify([kind.tolist()], [GREEDY]) for kind in kinds)
        for kind, length in enumerate(lengths):
            made.record([GREEDY], draft_s, length, 0)  # its seconds; then the tokens it is expected to give
            made._yields[1].tokens += yields(kind, length)[0] - 1
    assert lengths == best
    assert best[0] > best[1]


def test_a_step_in_the_cost_is_crossed_where_what_lies_behind_pays_for_it() -> None:
    seconds = {1: 1.0, 2: 3.0, 3: 3.0, 4: 3.0, 5: 3.0, 6: 3.0, 7: 3.0, 8: 3.0}
    costs = CostTable(lambda tokens: seconds[tokens])
    costs.seconds = lambda tokens: seconds[tokens]  # type: ignore[method-assign] # the table itself draws straight lines
    assert scheduler(costs, as_it_is(mean=0.9)).tokens_to_verify([[0.9] * M], [GREEDY]) == M
    assert scheduler(costs, as_it_is(mean=0.01)).tokens_to_verify([[0.5] * M], [GREEDY]) == 0


def test_what_lies_behind_counts_with_its_mean_not_with_what_was_drafted() -> None:
    """A confidence behind slot t depends on the token at t, which must not decide on itself."""
    made = scheduler(linear(1.0, 0.3))
    for t in range(M):
        low, high = [0.9] * M, [0.9] * M
        low[t:], high[t + 1 :] = [1e-3] * (M - t), [0.999] * (M - t - 1)
        high[t] = 1e-3
        assert made.tokens_to_verify([low], [SAMPLED]) == made.tokens_to_verify([high], [SAMPLED]), t


def test_rows_share_a_width_that_the_sure_ones_may_carry() -> None:
    made = scheduler(linear(1.0, 0.2))
    sure, unsure = [0.95] * M, [0.05] * M
    alone = made.tokens_to_verify([unsure, unsure], [GREEDY] * 2)
    together = made.tokens_to_verify([sure, unsure], [GREEDY] * 2)
    assert alone < together <= made.tokens_to_verify([sure, sure], [GREEDY] * 2)


def test_requests_of_a_kind_without_a_map_verify_everything() -> None:
    made = scheduler(linear(1.0, 5.0))
    assert made.tokens_to_verify([[0.01] * M], [GREEDY]) == 0
    assert made.tokens_to_verify([[0.01] * M], [SAMPLED]) == M
    assert made.tokens_to_verify([[0.01] * M] * 2, [GREEDY, SAMPLED]) == M


def test_the_nearest_temperature_is_taken() -> None:
    calibration = Calibration(
        drafter="any", drafter_sha256="", prompts="none", num_prompts=0, maps=(as_it_is(0.0), as_it_is(0.5), as_it_is(1.0))
    )
    found = [calibration.map_for(SamplingParams(temperature=t)) for t in (0.0, 0.3, 0.9, 2.0)]
    assert [m.temperature for m in found if m is not None] == [0.0, 0.5, 1.0, 1.0]


def test_drafting_pauses_while_it_does_not_pay_and_looks_again() -> None:
    made = scheduler(linear(0.1, 1.0))
    drafts = [made.tokens_to_draft([GREEDY]) for _ in range(2 * PROBE_EVERY)]
    assert [i + 1 for i, tokens in enumerate(drafts) if tokens] == [PROBE_EVERY, 2 * PROBE_EVERY]
    for _ in range(500):
        made.record([GREEDY], 0.0, 1, 9)
    assert made.tokens_to_draft([GREEDY]) == M


def test_sampled_requests_always_draft_and_nothing_learned_moves_them() -> None:
    made = scheduler(linear(0.5, 0.4), as_it_is(0.0), as_it_is(1.0))
    confidence = [[0.8, 0.7, 0.6, 0.5, 0.4]]
    before = [made.tokens_to_verify(confidence, [params]) for params in (SAMPLED, GREEDY)]
    assert max(before) < M
    for _ in range(500):
        made.record([SAMPLED], 5.0, M, 0)
    assert [made.tokens_to_verify(confidence, [params]) for params in (SAMPLED, GREEDY)] == before
    for _ in range(500):
        made.record([GREEDY], 5.0, M, 0)
    assert made.tokens_to_verify(confidence, [SAMPLED]) == before[0]
    assert made.tokens_to_verify(confidence, [GREEDY]) == M, "after a slow past any token is worth its time"
    assert made.tokens_to_draft([SAMPLED]) == M


@pytest.mark.parametrize("drafted", [1, 3])
def test_drafts_shorter_than_the_block(drafted: int) -> None:
    assert scheduler(linear(1.0, 0.0)).tokens_to_verify([[0.5] * drafted], [GREEDY]) == drafted
