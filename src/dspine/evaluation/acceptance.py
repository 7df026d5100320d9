"""How many drafted tokens the target accepts on a set of prompts.

    report = measure_acceptance(llm, load_benchmark(Path("gsm8k.jsonl"), 100), SamplingParams(max_new_tokens=160))
    report.acceptance_length

Acceptance does not depend on the machine, so conversations are decoded in batches. What decodes them is a `Meter`: dspine's
engine here, a server in `evaluation.served`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.conversations import Conversation, conversations_of, decode_conversations
from dspine.evaluation.intervals import RESAMPLES, ratio_interval
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.resume import RunReport, resumed
from dspine.evaluation.settings import RunSettings, engine_settings


@dataclass(frozen=True, kw_only=True)
class ConversationResult:
    """The counts of one conversation. Lists are by draft position 1..M (see decoding.stats); a server may not tell them."""

    index: int
    turns: int
    skipped_turns: int
    tokens: int
    rounds: int
    acceptance_length: float
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @classmethod
    def of(cls, conversation: Conversation) -> ConversationResult:
        stats = conversation.stats
        return cls(
            index=conversation.index,
            turns=len(conversation.answers),
            skipped_turns=conversation.skipped_turns,
            tokens=stats.tokens,
            rounds=stats.rounds,
            acceptance_length=stats.acceptance_length,
            num_drafted_tokens=stats.num_drafted_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            drafted_at=tuple(stats.drafted_at),
            reached_at=tuple(stats.reached_at),
            accepted_at=tuple(stats.accepted_at),
        )


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport(RunReport):
    """tau and acceptance by draft position over all rounds (see decoding.stats for the definitions)."""

    skipped_turns: int
    tokens: int
    rounds: int
    acceptance_length: float
    acceptance_length_ci95: tuple[float, float]
    acceptance_by_position: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    conversations: tuple[ConversationResult, ...]
    machine: dict[str, str | int]


class Meter(Protocol):
    """What decodes a benchmark's conversations and counts what was accepted."""

    def settings(self, benchmark: Benchmark, params: SamplingParams) -> RunSettings: ...

    def results(self, benchmark: Benchmark, params: SamplingParams, skip: Iterable[int]) -> Iterator[ConversationResult]:
        """Every conversation whose index is not in `skip`, as it is finished."""

    def machine(self) -> dict[str, str | int]: ...


@dataclass(frozen=True)
class EngineMeter:
    """dspine's engine. `chat=False` takes prompts as plain text; `thinking` is the chat template's switch."""

    llm: LLM
    chat: bool = True
    thinking: bool | None = None

    def settings(self, benchmark: Benchmark, params: SamplingParams) -> RunSettings:
        return engine_settings(self.llm, benchmark, params, chat=self.chat, thinking=self.thinking)

    def results(self, benchmark: Benchmark, params: SamplingParams, skip: Iterable[int]) -> Iterator[ConversationResult]:
        todo = conversations_of(benchmark, skip)
        for conversation in decode_conversations(self.llm, todo, params, chat=self.chat, thinking=self.thinking):
            yield ConversationResult.of(conversation)

    def machine(self) -> dict[str, str | int]:
        return machine_facts(self.llm.target.device)


def measure_acceptance(
    llm: LLM,
    benchmark: Benchmark,
    params: SamplingParams,
    *,
    chat: bool = True,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> AcceptanceReport:
    """Decode every conversation speculatively. `on_progress(n)` is told of n finished conversations.

    Turns for which the target's context has no room are skipped and counted; UserError when nothing is left.
    """
    return measure(EngineMeter(llm, chat), benchmark, params, on_result=lambda result: on_progress(1))


def measure(
    meter: Meter,
    benchmark: Benchmark,
    params: SamplingParams,
    *,
    file: Path | None = None,
    on_result: Callable[[ConversationResult], None] = lambda result: None,
) -> AcceptanceReport:
    """The report over all conversations; `on_result` is told of each as it is finished.

    With `file` the result is kept there; see `evaluation.resume`. Raises UserError when nothing was drafted.
    """
    settings = meter.settings(benchmark, params)

    def run(done: list[ConversationResult], keep: Callable[[ConversationResult], None]) -> AcceptanceReport:
        results = {result.index: result for result in done}
        for result in meter.results(benchmark, params, tuple(results)):
            results[result.index] = result
            keep(result)
        return _report(settings, [results[index] for index in sorted(results)], meter.machine())

    if file is None:
        return run([], on_result)
    return resumed(file, AcceptanceReport, ConversationResult, settings, run, on_result)


def _report(settings: RunSettings, results: list[ConversationResult], machine: dict[str, str | int]) -> AcceptanceReport:
    counted = [result for result in results if result.rounds]
    if not counted:
        raise UserError(
            f"nothing was drafted on {settings.benchmark}: its prompts leave no room for {settings.max_new_tokens} new tokens in "
            f"the context of {settings.target}, or every answer was a single token"
        )
    accepted, rounds = [result.num_accepted_tokens for result in counted], [result.rounds for result in counted]
    positions = DecodeStats()
    if all(result.drafted_at for result in counted):  # of some conversations alone they would not belong to this tau
        for r in counted:
            positions.merge(DecodeStats(drafted_at=[*r.drafted_at], reached_at=[*r.reached_at], accepted_at=[*r.accepted_at]))
    return AcceptanceReport(
        **asdict(settings),
        skipped_turns=sum(result.skipped_turns for result in results),
        tokens=sum(result.tokens for result in results),
        rounds=sum(rounds),
        acceptance_length=sum(accepted) / sum(rounds) + 1.0,
        acceptance_length_ci95=bootstrap_interval(accepted, rounds, RESAMPLES),
        acceptance_by_position=tuple(positions.acceptance_by_position),
        conditional_acceptance=tuple(positions.conditional_acceptance),
        conversations=tuple(results),
        machine=machine,
    )


def bootstrap_interval(accepted: list[int], rounds: list[int], resamples: int) -> tuple[float, float]:
    """95 % interval over conversations of tau = sum(accepted) / sum(rounds) + 1."""
    low, high = ratio_interval(accepted, rounds, resamples)
    return low + 1.0, high + 1.0
