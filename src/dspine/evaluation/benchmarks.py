"""Prompt files, and how their conversations become token ids.

One JSON object a line: {"turns": ["first user text", "second user text", ...]}. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspine.errors import UserError
from dspine.targets.model import Target


@dataclass(frozen=True)
class Benchmark:
    """Conversations by their user turns; `name` is the file's without its ending."""

    name: str
    conversations: tuple[tuple[str, ...], ...]


def load_benchmark(file: Path, limit: int | None = None) -> Benchmark:
    """Read the first `limit` conversations (None = all). Raises UserError naming the first bad line."""
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit}: at least 1 prompt is needed")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"cannot read prompts from {file}: {error.strerror}") from error
    conversations: list[tuple[str, ...]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if limit is not None and len(conversations) == limit:
            break
        if line.strip():
            conversations.append(_turns(line, f"{file}, line {number}"))
    if not conversations:
        raise UserError(f'{file} holds no prompts; write one {{"turns": ["..."]}} per line')
    return Benchmark(file.stem, tuple(conversations))


def _turns(line: str, where: str) -> tuple[str, ...]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f'{where} is no JSON ({error.msg}); write one {{"turns": ["..."]}} per line') from error
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f'{where} has no "turns": a list of at least one text that is not empty')
    return tuple(turns)


def encode_conversation(target: Target, turns: Sequence[str], answers: Sequence[str], *, chat: bool) -> list[int]:
    """Token ids up to the answer to the last of `turns`; `answers` are those to all turns before it.

    Without a chat template (`chat=False`) turns and answers follow each other, a line break between them.
    """
    assert len(turns) == len(answers) + 1, f"{len(turns)} turns need {len(turns) - 1} answers before the last one"
    if not chat:
        parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
        return list(target.tokenizer("\n".join([*parts, turns[-1]]))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return target.encode_chat(messages)


def first_turns(benchmark: Benchmark, target: Target, *, chat: bool, max_new_tokens: int) -> tuple[list[list[int]], int]:
    """Token ids of every first turn whose answer fits the target's context, and how many do not.

    Raises UserError when none fits.
    """
    encoded = [encode_conversation(target, turns[:1], (), chat=chat) for turns in benchmark.conversations]
    fitting = [ids for ids in encoded if ids and len(ids) + max_new_tokens <= target.max_length]
    if not fitting:
        raise UserError(
            f"no prompt of {benchmark.name} leaves room for {max_new_tokens} new tokens in the {target.max_length} that "
            f"{target.name} holds; lower the number of new tokens or choose shorter prompts"
        )
    return fitting, len(encoded) - len(fitting)
