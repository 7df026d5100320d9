"""A benchmark's conversations through the engine, many at a time; every later turn goes on from the answer just generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from dspine.api import LLM
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.evaluation.benchmarks import Benchmark, encode_conversation

TURN_SEEDS = 64  # seeds set aside for one conversation's turns


@dataclass
class Conversation:
    """One conversation on its way: what it asks, and what has been answered (text and output ids of each turn)."""

    index: int
    turns: tuple[str, ...]
    answers: list[str] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)
    skipped_turns: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)


def conversations_of(benchmark: Benchmark, skip: Iterable[int] = ()) -> list[Conversation]:
    """All that is to be decoded, `skip` being the indices of those that were before."""
    done = set(skip)
    return [Conversation(i, turns) for i, turns in enumerate(benchmark.conversations) if i not in done]


def turn_seed(params: SamplingParams, conversation: Conversation) -> int | None:
    """The seed of the turn that comes next: the same whatever else is decoded, and in whichever order."""
    number = len(conversation.answers)
    return None if params.seed is None else params.seed + TURN_SEEDS * conversation.index + number


def decode_conversations(
    llm: LLM,
    conversations: Iterable[Conversation],
    params: SamplingParams,
    *,
    chat: bool,
    thinking: bool | None = None,
    speculative: bool = True,
) -> Iterator[Conversation]:
    """Decode and yield the conversations as they are finished.

    Turns for which the target's context has no room are skipped and counted. Requests of an iteration that is not finished
    are cancelled.
    """
    engine = llm.engine(speculative)
    running: dict[Request, Conversation] = {}

    def start_turn(conversation: Conversation) -> bool:
        number = len(conversation.answers)
        asked = conversation.turns[: number + 1]
        prompt = encode_conversation(llm.target, asked, conversation.answers, chat=chat, thinking=thinking)
        if len(prompt) + params.max_new_tokens > llm.target.max_length:
            conversation.skipped_turns = len(conversation.turns) - number  # later turns would be longer still
            return False
        running[engine.submit(prompt, replace(params, seed=turn_seed(params, conversation)))] = conversation
        return True

    try:
        for conversation in conversations:
            if not start_turn(conversation):
                yield conversation
        while running:
            engine.step()
            for request in [request for request in running if request.finish_reason is not None]:
                conversation = running.pop(request)
                conversation.stats.merge(request.stats)
                conversation.answers.append(request.text.text)
                conversation.output_ids.append(request.output_ids)
                if len(conversation.answers) == len(conversation.turns) or not start_turn(conversation):
                    yield conversation
    finally:
        for request in running:
            engine.cancel(request)
