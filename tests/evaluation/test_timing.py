"""Timing prompts: medians, and ways that take turns."""

from __future__ import annotations

from dspine.decoding.sampling import SamplingParams
from dspine.evaluation.timing import WARM_UP_TOKENS, Decode, PromptTimings, Timing, interleave


def test_an_answers_speed_is_the_median_of_its_repeats() -> None:
    timings = tuple(Timing([1] * 10, seconds) for seconds in (1.0, 2.0, 50.0))
    assert PromptTimings(timings=timings).tok_per_s == 5.0


def test_ways_are_interleaved_and_take_turns_in_going_first() -> None:
    calls: list[tuple[str, int, int]] = []

    def way(name: str) -> Decode:
        def decode(prompt: list[int], params: SamplingParams) -> Timing:
            calls.append((name, prompt[0], params.max_new_tokens))
            return Timing([1], 1.0)

        return decode

    steps: list[int] = []
    measured = interleave([way("a"), way("b")], [[1], [2]], SamplingParams(max_new_tokens=50), 2, steps.append)
    assert calls[:2] == [("a", 1, WARM_UP_TOKENS), ("b", 1, WARM_UP_TOKENS)]
    assert [(name, prompt) for name, prompt, _ in calls[2:]] == [
        ("a", 1), ("b", 1), ("b", 2), ("a", 2),
        ("b", 1), ("a", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip
    assert [[len(prompt.timings) for prompt in prompts] for prompts in measured] == [[2, 2], [2, 2]]
    assert sum(steps) == 4
