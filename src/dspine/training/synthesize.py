"""Prompts without a prompt set: the target writes the user's turns itself.

It is given its chat template up to where the user's text begins, and goes on as the user. A system turn that describes
the user steers the topic. At temperature 0.9 an instruction-tuned model writes plausible requests; what is unfinished,
too short, marked up or a repetition is dropped.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.errors import UserError
from dspine.journal import Journal, Row, numbered_rows, partial_file, write_rows
from dspine.targets.chat import SENTINEL, ChatFormat, Message
from dspine.targets.model import Target
from dspine.training.prompts import SUFFIX

TOPICS: dict[str, tuple[str, ...]] = {
    "chat": (
        "You are a helpful assistant. The user asks an everyday question.",
        "You are a friendly assistant. The user asks for advice about work, health, travel or family.",
        "You are a writing assistant. The user asks for a short text such as an email, a story, a poem, a speech or a blog post.",
        "You are a knowledgeable assistant. The user asks to explain a concept from science, history, economics or technology.",
        "You are an assistant that plays a role. The user asks the assistant to act as a given person and answer.",
        "You are an editing assistant. The user gives a short passage and asks to rewrite, summarise, classify or translate it.",
        "You are a reasoning assistant. The user poses a riddle, a puzzle or a question that needs careful logic.",
    ),
    "code": (
        "You are a programming assistant. The user asks to write a Python function.",
        "You are a programming assistant. The user gives a Python function signature with a docstring and asks to complete the "
        "function.",
        "You are a programming assistant. The user asks to write a small program or explain a piece of code in Python, "
        "JavaScript, C++ or SQL.",
        "You are a programming assistant. The user asks how to implement an algorithm or data structure.",
    ),
    "math": (
        "You are a math tutor. The user poses a word problem with numbers.",
        "You are a math tutor. The user asks to solve an equation, a geometry problem or a probability problem step by step.",
    ),
}
DEFAULT_KINDS = {"chat": 4.0, "code": 3.0, "math": 1.0}
MIN_WORDS = 4
STEP_TOKENS = 2  # that a plain step adds at most: a request's first round follows its prompt at once
ATTEMPTS_PER_PROMPT = 10  # then a kind gives up: the model does not write such turns


@dataclass(frozen=True, kw_only=True)
class SynthesizeSettings:
    """`kinds`: share of each kind of TOPICS. A prompt longer than `max_new_tokens` is dropped as unfinished."""

    count: int
    kinds: tuple[tuple[str, float], ...] = tuple(DEFAULT_KINDS.items())
    temperature: float = 0.9
    max_new_tokens: int = 120
    seed: int = 0
    rows: int = 32

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("rows", self.rows)):
            if value < 1:
                raise UserError(f"{name}={value} is not possible; give a number from 1")
        if self.params(self.seed, ()).is_greedy:
            raise UserError(f"temperature={self.temperature} would write the same prompt again and again; give for example 0.9")

    def params(self, seed: int, stop: tuple[str, ...]) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=seed, stop=stop)

    def quotas(self) -> dict[str, int]:
        """Prompts of each kind, `count` together (largest remainders)."""
        whole = sum(share for _, share in self.kinds)
        exact = {kind: self.count * share / whole for kind, share in self.kinds}
        quotas = {kind: int(number) for kind, number in exact.items()}
        by_rest = sorted(exact, key=lambda kind: quotas[kind] - exact[kind])
        for kind in by_rest[: self.count - sum(quotas.values())]:
            quotas[kind] += 1
        return quotas


def parse_kinds(text: str) -> tuple[tuple[str, float], ...]:
    """ "chat,code" or "chat=4,code=3,math=1". Raises UserError for an unknown kind or a share that is no positive number."""
    kinds: dict[str, float] = {}
    for part in text.split(","):
        kind, _, share = (piece.strip() for piece in part.partition("="))
        if kind not in TOPICS:
            raise UserError(f"unknown kind of prompt {kind!r}; choose from {', '.join(TOPICS)}, as in chat=4,code=3,math=1")
        if kind in kinds:
            raise UserError(f"kind {kind} is named twice in {text!r}; name it once")
        try:
            kinds[kind] = float(share or 1)
        except ValueError:
            kinds[kind] = 0.0
        if not 0 < kinds[kind] < 1e9:
            raise UserError(f"share {share!r} of {kind} is no positive number; write for example {kind}=4")
    return tuple(kinds.items())


@dataclass(frozen=True)
class UserTurn:
    """Where a user's turn begins and how it ends: `end_ids` are tokens, `stop` strings that end it."""

    prefix_ids: list[int]
    end_ids: frozenset[int]
    stop: tuple[str, ...]


def user_turn(chat: ChatFormat, topic: str) -> UserTurn:
    """Take the template apart around a user's turn under the system turn `topic`.

    A template without system turns gets the topic as an exchange before. Raises UserError where neither works.
    """
    user = {"role": "user", "content": SENTINEL}
    beginnings: tuple[list[Message], ...] = (
        [{"role": "system", "content": topic}],
        [{"role": "user", "content": topic}, {"role": "assistant", "content": "Understood."}],
    )
    for beginning in beginnings:
        try:
            text = chat.render([*beginning, user])
        except UserError:
            raise
        except Exception:  # the template's code is not ours, and some refuse system turns by an error of their own
            continue
        prefix, found, closing = text.partition(SENTINEL)
        if found and SENTINEL not in closing and topic in prefix:
            end_ids, stop = _closing(chat, closing)
            return UserTurn(chat.encode(prefix), end_ids, stop)
    raise UserError(
        f"the chat template of {chat.name} does not show a user's turn as it is written; synthesize needs one that does"
    )


def _closing(chat: ChatFormat, closing: str) -> tuple[frozenset[int], tuple[str, ...]]:
    """What ends a user's turn: the end tokens, and the first thing that the template puts after it."""
    ids = chat.encode(closing.lstrip())
    if ids and ids[0] in chat.special_ids:
        return chat.eos_token_ids | {ids[0]}, ()
    words = closing
    for token in chat.special_ids:  # a request's text does not show them, so no stop string may hold one
        words = words.partition(chat.tokenizer.convert_ids_to_tokens(token))[0]
    first = words.strip().partition("\n")[0]
    return chat.eos_token_ids, (first,) if first else ()


@dataclass(frozen=True)
class Attempt:
    """One turn to be written. Its seed depends on the run's seed, its kind and its number alone."""

    kind: str
    number: int

    def seed(self, seed: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed} {self.kind} {self.number}".encode()).digest()[:7], "big")


@dataclass(frozen=True)
class SynthesizeSummary:
    """`attempts` are those of all runs that made the file; `by_kind` the prompts written."""

    attempts: int
    by_kind: dict[str, int]
    output_bytes: int

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def synthesize(
    target: Target, output: Path, settings: SynthesizeSettings, on_prompts: Callable[[int], None] = lambda more: None
) -> SynthesizeSummary:
    """Write `count` prompts to `output`, JSONL of {"kind", "turns"}; `on_prompts` hears of new ones.

    Which attempts succeed depends on the seed alone, and each kind keeps its first ones, so an interrupted run ends in the
    same file. Raises UserError when `output` exists, or holds a different run's journal, or no attempt gives a prompt.
    """
    chat = ChatFormat.of(target)
    _check_output(output)
    turns = {kind: [user_turn(chat, topic) for topic in TOPICS[kind]] for kind, _ in settings.kinds}
    journal = _open_journal(output, chat, settings)
    try:
        state = _Collection(settings.quotas(), journal.rows, journal.file)
        count = state.count
        on_prompts(count)
        for attempt, text in _attempts(target, chat, state, turns, settings):
            journal.append({"kind": attempt.kind, "attempt": attempt.number, "text": text})
            state.add(attempt, text)
            on_prompts(state.count - count)
            count = state.count
        chosen = state.chosen()
        rows = [{"kind": kind, "turns": [text]} for kind, texts in chosen.items() for text in texts]
        if not rows:
            tried = f"{target.name} wrote no usable prompt in {len(journal.rows)} attempts"
            raise UserError(f"{tried}; use an instruction-tuned model or give more --max-new-tokens")
        random.Random(settings.seed).shuffle(rows)
        write_rows(output, rows)
        attempts = len(journal.rows)
        journal.delete()
    finally:
        journal.close()
    return SynthesizeSummary(attempts, {kind: len(texts) for kind, texts in chosen.items()}, output.stat().st_size)


def count_prompts(output: Path) -> int:
    """Prompts in a finished output; 0 where there is none."""
    return sum(1 for _ in numbered_rows(output)) if output.is_file() else 0


def _check_output(output: Path) -> None:
    if output.suffix != SUFFIX:
        raise UserError(f"--output {output} has to be named *{SUFFIX}: answers refer to prompt files by that name")
    if output.exists():
        raise UserError(f"{output} is there already; choose another --output or delete it")


def _open_journal(output: Path, chat: ChatFormat, settings: SynthesizeSettings) -> Journal:
    file = partial_file(output)
    facts = {name: value for name, value in chat.facts().items() if name != "name"}
    header: dict[str, Any] = {
        "target": facts,
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
    }

    def check(found: Row) -> None:
        for name, value in header.items():
            if found.get(name) != value:
                found_value = found.get(name)
                raise UserError(
                    f"{file} was begun with {name} = {found_value}, not {value}; choose another --output or delete it"
                )

    return Journal(file, header, check)


class _Collection:
    """Attempts so far and what they gave. `text` None: not usable. No text counts twice, an earlier kind has it first."""

    def __init__(self, quotas: dict[str, int], rows: Sequence[Row], file: Path) -> None:
        self.quotas = quotas
        self.results: dict[str, dict[int, str | None]] = {kind: {} for kind in quotas}
        self._rank = {kind: rank for rank, kind in enumerate(quotas)}
        self._owner: dict[str, str] = {}  # normalised text -> kind
        self._distinct = dict.fromkeys(quotas, 0)
        self._next = dict.fromkeys(quotas, 0)
        self._last = dict.fromkeys(quotas, -1)
        for number, row in enumerate(rows):
            kind, attempt, text = row.get("kind"), row.get("attempt"), row.get("text")
            if not isinstance(kind, str) or not isinstance(attempt, int) or not isinstance(text, str | None):
                raise UserError(f"{file}, line {number + 2} is no attempt; delete the file to start over")
            if kind in self.results:
                self.add(Attempt(kind, attempt), text)

    def add(self, attempt: Attempt, text: str | None) -> None:
        kind = attempt.kind
        self.results[kind][attempt.number] = text
        self._last[kind] = max(self._last[kind], attempt.number)
        if text is None:
            return
        owner = self._owner.get(normalised(text))
        if owner is None or self._rank[kind] < self._rank[owner]:
            self._owner[normalised(text)] = kind
            self._distinct[kind] += 1
            if owner is not None:
                self._distinct[owner] -= 1

    @property
    def count(self) -> int:
        return sum(min(self._distinct[kind], quota) for kind, quota in self.quotas.items())

    def next_attempt(self, running: dict[str, int]) -> Attempt | None:
        """The next one to start while `running` ones of each kind may still succeed; None if those may be enough."""
        for kind in sorted(self.quotas, key=lambda kind: (self._distinct[kind] + running[kind]) / max(1, self.quotas[kind])):
            while self._next[kind] in self.results[kind]:
                self._next[kind] += 1
            number, quota = self._next[kind], self.quotas[kind]
            # Attempts that a killed run had begun come first, wanted or not: `chosen` needs them without gaps.
            lost = number < self._last[kind]
            if lost or (self._distinct[kind] + running[kind] < quota and number < quota * ATTEMPTS_PER_PROMPT + 10):
                self._next[kind] += 1
                return Attempt(kind, number)
        return None

    def chosen(self) -> dict[str, list[str]]:
        """Each kind's first texts, up to its quota, none twice. They are the same however the attempts were interrupted."""
        seen: set[str] = set()
        chosen: dict[str, list[str]] = {}
        for kind, quota in self.quotas.items():
            chosen[kind] = []
            for number in sorted(self.results[kind]):
                text = self.results[kind][number]
                if text is not None and len(chosen[kind]) < quota and normalised(text) not in seen:
                    seen.add(normalised(text))
                    chosen[kind].append(text)
        return chosen


def _attempts(
    target: Target, chat: ChatFormat, state: _Collection, turns: dict[str, list[UserTurn]], settings: SynthesizeSettings
) -> Iterator[tuple[Attempt, str | None]]:
    """Let the target write until every kind has its prompts; (attempt, text or None) as they finish."""
    engine = Engine(target, max_rows=settings.rows)
    live: dict[int, tuple[Attempt, UserTurn, Request]] = {}
    running = dict.fromkeys(state.quotas, 0)

    def wanted() -> Iterator[Attempt]:
        while (attempt := state.next_attempt(running)) is not None:
            running[attempt.kind] += 1
            yield attempt

    while True:
        for attempt in islice(wanted(), settings.rows - len(live)):
            turn = turns[attempt.kind][attempt.number % len(turns[attempt.kind])]
            request = engine.submit(turn.prefix_ids, settings.params(attempt.seed(settings.seed), turn.stop))
            live[request.id] = (attempt, turn, request)
        if not live:
            return
        engine.step()
        for number, (attempt, turn, request) in list(live.items()):
            if turn.end_ids.intersection(request.output_ids[-STEP_TOKENS:]):
                engine.cancel(request)  # the template's own end of a user's turn need not be an end token
            if request.finish_reason is not None:
                del live[number]
                running[attempt.kind] -= 1
                yield attempt, usable_text(request, turn, chat)


def usable_text(request: Request, turn: UserTurn, chat: ChatFormat) -> str | None:
    """The user's text that a finished request holds, or None: unfinished, shorter than four words, or marked up."""
    ids = request.output_ids
    ends = [i for i, token in enumerate(ids) if token in turn.end_ids]
    if ends:
        ids = ids[: ends[0]]
    elif request.finish_reason != "stop_string":
        return None
    text = request.text.text if request.finish_reason == "stop_string" else str(chat.tokenizer.decode(ids))
    text = text.strip()
    marked_up = not chat.special_ids.isdisjoint(ids) or "<|" in text or "\ufffd" in text
    return None if marked_up or len(text.split()) < MIN_WORDS else text


def normalised(text: str) -> str:
    """What two prompts have in common when they are the same to a reader."""
    return " ".join(text.lower().split())
