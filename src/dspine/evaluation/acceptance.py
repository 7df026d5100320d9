"""How many drafted tokens the target accepts on a set of prompts.

    report = measure_acceptance(llm, load_benchmark(Path("gsm8k.jsonl"), 100), SamplingParams(max_new_tokens=160))
    report.acceptance_length

Acceptance does not depend on the machine, so conversations are decoded in batches. Every turn after the first
continues the conversation with the answer that was just generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dspine.api import LLM
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.benchmarks import Benchmark, encode_conversation
from dspine.evaluation.machine import machine_facts
from dspine.files import write_text

TURN_SEEDS = 64  # seeds set aside for one conversation's turns
RESAMPLES = 2000


@dataclass
class Conversation:
    """One conversation of the benchmark on its way: what it asks and what has been answered."""

    index: int
    turns: tuple[str, ...]
    answers: list[str] = field(default_factory=list)
    skipped_turns: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)


@dataclass(frozen=True, kw_only=True)
class ConversationResult:
    index: int
    turns: int
    skipped_turns: int
    tokens: int
    rounds: int
    acceptance_length: float


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport:
    """tau and acceptance by draft position over all rounds (see decoding.stats for the definitions)."""

    benchmark: str
    target: str
    drafter: str
    width: str
    chat: bool
    temperature: float
    max_new_tokens: int
    seed: int | None
    prompts: int
    skipped_turns: int
    tokens: int
    rounds: int
    acceptance_length: float
    acceptance_length_ci95: tuple[float, float]
    acceptance_by_position: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    conversations: tuple[ConversationResult, ...]
    machine: dict[str, str | int]

    def summary(self) -> dict[str, Any]:
        """Everything but the single conversations."""
        return {key: value for key, value in asdict(self).items() if key != "conversations"}

    def write(self, file: Path) -> None:
        """Write JSON by one rename: readers see the old file or the whole new one."""
        write_text(file, json.dumps(asdict(self), indent=2) + "\n")


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
    if llm.drafter is None:
        raise UserError(f"{llm.target.name} has no drafter here; name a draft checkpoint to measure")
    conversations = [Conversation(index, turns) for index, turns in enumerate(benchmark.conversations)]
    _decode(llm, conversations, params, chat, on_progress)
    return _report(llm, benchmark, params, chat, conversations)


def _decode(
    llm: LLM, conversations: list[Conversation], params: SamplingParams, chat: bool, on_progress: Callable[[int], None]
) -> None:
    engine = llm.engine()
    running: dict[int, Conversation] = {}

    def start_turn(conversation: Conversation) -> None:
        number = len(conversation.answers)
        prompt = encode_conversation(llm.target, conversation.turns[: number + 1], conversation.answers, chat=chat)
        if len(prompt) + params.max_new_tokens > llm.target.max_length:
            conversation.skipped_turns = len(conversation.turns) - number  # later turns would be longer still
            on_progress(1)
            return
        seed = None if params.seed is None else params.seed + TURN_SEEDS * conversation.index + number
        running[engine.submit(prompt, replace(params, seed=seed)).id] = conversation

    def finish_turn(request: Request) -> None:
        conversation = running.pop(request.id, None)
        if conversation is None:  # one step may report a request twice: its first token, then its first round
            return
        conversation.stats.merge(request.stats)
        conversation.answers.append(request.text.text)
        if len(conversation.answers) < len(conversation.turns):
            start_turn(conversation)
        else:
            on_progress(1)

    for conversation in conversations:
        start_turn(conversation)
    while engine.has_work:
        for progress in engine.step():
            if progress.request.finish_reason is not None:
                finish_turn(progress.request)


def _report(
    llm: LLM, benchmark: Benchmark, params: SamplingParams, chat: bool, conversations: list[Conversation]
) -> AcceptanceReport:
    total = DecodeStats()
    for conversation in conversations:
        total.merge(conversation.stats)
    if not total.rounds:
        raise UserError(
            f"nothing was drafted on {benchmark.name}: its prompts leave no room for {params.max_new_tokens} new tokens in the "
            f"{llm.target.max_length} that {llm.target.name} holds, or every answer was a single token"
        )
    assert llm.drafter is not None
    counted = [c.stats for c in conversations if c.stats.rounds]
    return AcceptanceReport(
        benchmark=benchmark.name,
        target=llm.target.name,
        drafter=llm.drafter.config.drafter,
        width=str(llm.width),
        chat=chat,
        temperature=params.temperature,
        max_new_tokens=params.max_new_tokens,
        seed=params.seed,
        prompts=len(conversations),
        skipped_turns=sum(c.skipped_turns for c in conversations),
        tokens=total.tokens,
        rounds=total.rounds,
        acceptance_length=total.acceptance_length,
        acceptance_length_ci95=bootstrap_interval(
            [s.num_accepted_tokens for s in counted], [s.rounds for s in counted], RESAMPLES
        ),
        acceptance_by_position=tuple(total.acceptance_by_position),
        conditional_acceptance=tuple(total.conditional_acceptance),
        conversations=tuple(_result(c) for c in conversations),
        machine=machine_facts(llm.target.device),
    )


def _result(conversation: Conversation) -> ConversationResult:
    stats = conversation.stats
    return ConversationResult(
        index=conversation.index,
        turns=len(conversation.answers),
        skipped_turns=conversation.skipped_turns,
        tokens=stats.tokens,
        rounds=stats.rounds,
        acceptance_length=stats.acceptance_length,
    )


def bootstrap_interval(accepted: list[int], rounds: list[int], resamples: int) -> tuple[float, float]:
    """95 % percentile interval of tau = sum(accepted) / sum(rounds) + 1, conversations drawn with replacement.

    Rounds of one answer resemble each other, so it is answers that are resampled, not rounds.
    """
    count = len(rounds)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    totals = torch.tensor([accepted, rounds], dtype=torch.float64)[:, drawn].sum(-1)  # [2, resamples]
    low, high = torch.quantile(totals[0] / totals[1] + 1.0, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
