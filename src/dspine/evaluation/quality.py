"""That speed costs no quality: a benchmark's own score with and without the drafter, and the texts compared prompt by prompt.

    report = measure_quality(llm, load_named("humaneval", folder=folder, graded=True), SamplingParams(max_new_tokens=512))
    report.identical, report.plain_score, report.spec_score

Greedy texts must be the same token for token: that is the proof, and needs no reference answers. With references both texts are
scored too (GSM8K and MATH-500 by their final answer, HumanEval and MBPP by pass@1). Sampled texts differ by chance; their scores
may differ within the interval of their difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.errors import UserError
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.conversations import Conversation, decode_conversations
from dspine.evaluation.grading import is_right
from dspine.evaluation.intervals import ratio_interval
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.references import Reference
from dspine.evaluation.resume import RunReport, resumed
from dspine.evaluation.sandbox import is_offline
from dspine.evaluation.settings import RunSettings, engine_settings


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One conversation both ways. `first_difference` is (turn, output token) of the first one, None where all are the same;
    `*_right` is None without a reference."""

    index: int
    skipped_turns: int
    plain_tokens: int
    spec_tokens: int
    first_difference: tuple[int, int] | None
    plain_right: bool | None
    spec_right: bool | None


@dataclass(frozen=True, kw_only=True)
class QualityReport(RunReport):
    """Scores are shares of the `graded` conversations; their difference is speculative minus plain, per conversation.

    `score_difference_ci95` is a bootstrap over conversations. `identical` counts conversations of `compared`, those that
    had room for an answer.
    """

    skipped_turns: int
    compared: int
    identical: int
    graded: int
    plain_score: float | None
    spec_score: float | None
    score_difference_ci95: tuple[float, float] | None
    sandboxed_offline: bool
    conversations: tuple[PromptResult, ...]
    machine: dict[str, str | int]


def measure_quality(
    llm: LLM,
    benchmark: Benchmark,
    params: SamplingParams,
    *,
    chat: bool = True,
    thinking: bool | None = None,
    file: Path | None = None,
    on_result: Callable[[PromptResult], None] = lambda result: None,
) -> QualityReport:
    """Decode every conversation plainly and speculatively, `llm.max_rows` at a time, and score both.

    The first turn's answer is the one that is scored. With `file` the result is kept there; see `evaluation.resume`. Raises
    UserError when no conversation has room for an answer.
    """
    settings = engine_settings(llm, benchmark, params, chat=chat, thinking=thinking)
    settings = replace(settings, references_sha256=benchmark.references_sha256)

    def both_ways(batch: Sequence[int]) -> Iterator[PromptResult]:
        plain, spec = (
            {
                conversation.index: conversation
                for conversation in decode_conversations(
                    llm,
                    [Conversation(index, benchmark.conversations[index]) for index in batch],
                    params,
                    chat=chat,
                    thinking=thinking,
                    speculative=speculative,
                )
            }
            for speculative in (False, True)
        )
        for index in batch:
            yield compare(plain[index], spec[index], benchmark.references[index] if benchmark.references else None)

    def run(done: list[PromptResult], keep: Callable[[PromptResult], None]) -> QualityReport:
        results = {result.index: result for result in done}
        todo = [index for index in range(len(benchmark.conversations)) if index not in results]
        for start in range(0, len(todo), llm.max_rows):
            for result in both_ways(todo[start : start + llm.max_rows]):
                results[result.index] = result
                keep(result)
        return _report(settings, [results[index] for index in sorted(results)], machine_facts(llm.target.device))

    if file is None:
        return run([], on_result)
    return resumed(file, QualityReport, PromptResult, settings, run, on_result)


def compare(plain: Conversation, spec: Conversation, reference: Reference | None) -> PromptResult:
    """Both ways of one conversation, the answer to its first turn graded; equal answers are graded once."""
    difference = first_difference(plain.output_ids, spec.output_ids)
    plain_right = is_right(reference, plain.answers[0]) if reference is not None and plain.answers else None
    same = plain.answers[:1] == spec.answers[:1]
    spec_right = plain_right if same or reference is None else is_right(reference, spec.answers[0]) if spec.answers else None
    return PromptResult(
        index=plain.index,
        skipped_turns=plain.skipped_turns,
        plain_tokens=sum(map(len, plain.output_ids)),
        spec_tokens=sum(map(len, spec.output_ids)),
        first_difference=difference,
        plain_right=plain_right,
        spec_right=spec_right,
    )


def first_difference(plain: Sequence[Sequence[int]], spec: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """(turn, output token) from which on two conversations differ; one that ends earlier differs at its end."""
    for turn in range(max(len(plain), len(spec))):
        ours = plain[turn] if turn < len(plain) else []
        theirs = spec[turn] if turn < len(spec) else []
        if list(ours) != list(theirs):
            pairs = zip(ours, theirs, strict=False)
            return turn, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return None


def _report(settings: RunSettings, results: list[PromptResult], machine: dict[str, str | int]) -> QualityReport:
    compared = [result for result in results if result.plain_tokens]
    if not compared:
        raise UserError(
            f"nothing was decoded on {settings.benchmark}: its prompts leave no room for {settings.max_new_tokens} new tokens in "
            f"the context of {settings.target}"
        )
    marks = [(r.plain_right, r.spec_right) for r in compared if r.plain_right is not None and r.spec_right is not None]
    plain, spec = (sum(marks_of) for marks_of in zip(*marks, strict=True)) if marks else (0, 0)
    gains = [int(after) - int(before) for before, after in marks]
    return QualityReport(
        **asdict(settings),
        skipped_turns=sum(result.skipped_turns for result in results),
        compared=len(compared),
        identical=sum(result.first_difference is None for result in compared),
        graded=len(marks),
        plain_score=plain / len(marks) if marks else None,
        spec_score=spec / len(marks) if marks else None,
        score_difference_ci95=ratio_interval(gains, [1] * len(gains)) if marks else None,
        sandboxed_offline=is_offline(),
        conversations=tuple(results),
        machine=machine,
    )
