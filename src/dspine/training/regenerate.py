"""The target answers prompts: training data in the target's own words (specification, section 7).

Answers go to a journal beside the output in the order they finish; at the end the output is written in the prompts' order.
A run that was stopped, or one with more prompts, continues from both files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.endpoint import ChatEndpoint, RefusedError, in_threads
from dspine.errors import UserError
from dspine.journal import Journal, Row, partial_file
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.corpus import AnswerHeader, AnswerRecord, read_answers, versions, write_answers
from dspine.training.prompts import Prompt, Ref

REFUSALS_IN_A_ROW = 8  # then it is not the prompts


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings:
    """How prompts are answered. `max_prompt_tokens` 0: whatever leaves room for a whole answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    max_prompt_tokens: int = 0
    rows: int = 32

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"{self.rows} prompts at once is not possible; give a number from 1")
        if self.max_prompt_tokens < 0:
            raise UserError(f"{self.max_prompt_tokens} prompt tokens is not possible; give a number from 1, or 0 for no limit")
        self.params(None)

    def params(self, seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=seed)

    def sampling(self) -> dict[str, Any]:
        """What the answers depend on, for the header."""
        facts: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        return facts if self.params(None).is_greedy else {**facts, "seed": self.seed}


@dataclass(frozen=True)
class Job:
    """One prompt to answer. `seed` depends on the run's seed and the ref alone, not on when it is answered."""

    prompt: Prompt
    ids: list[int]
    seed: int


@dataclass
class Summary:
    """What became of the prompts."""

    answered: int = 0  # in this run
    kept: int = 0  # answers that were there before
    duplicates: int = 0
    too_long: int = 0
    refused: int = 0
    unfinished: int = 0  # of this run's answers: cut at the token limit
    total: int = 0  # answers in the output
    output_bytes: int = 0


class Answerer(Protocol):
    """Turns prompts into response token ids, in any order; None for a prompt that gets no answer."""

    @property
    def source(self) -> dict[str, Any]: ...

    def answers(self, jobs: Iterator[Job], settings: RegenerateSettings) -> Iterator[tuple[Job, list[int] | None]]: ...


class EngineAnswerer:
    """The local engine, without a drafter: full batches gain nothing from one."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "engine", "dtype": str(self.target.dtype).removeprefix("torch."), "device": self.target.device.type}

    def answers(self, jobs: Iterator[Job], settings: RegenerateSettings) -> Iterator[tuple[Job, list[int] | None]]:
        engine = Engine(self.target, max_rows=settings.rows)
        live: dict[int, tuple[Job, Request]] = {}
        while True:
            for job in islice(jobs, settings.rows - len(live)):
                request = engine.submit(job.ids, settings.params(job.seed))
                live[request.id] = (job, request)
            if not live:
                return
            engine.step()
            for number in [n for n, (_, request) in live.items() if request.finish_reason is not None]:
                job, request = live.pop(number)
                yield job, request.output_ids


class EndpointAnswerer:
    """An OpenAI-compatible server; its text is tokenised with the target's tokenizer."""

    def __init__(self, endpoint: ChatEndpoint, chat: ChatFormat) -> None:
        self.endpoint, self.chat = endpoint, chat

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "endpoint", "model": self.endpoint.model, "url": self.endpoint.url}

    def answers(self, jobs: Iterator[Job], settings: RegenerateSettings) -> Iterator[tuple[Job, list[int] | None]]:
        greedy = settings.params(None).is_greedy

        def work(job: Job) -> list[int]:
            completion = self.endpoint.complete(
                job.prompt.text,
                temperature=settings.temperature,
                max_tokens=settings.max_new_tokens,
                seed=None if greedy else job.seed,
            )
            ids = self.chat.response_ids(job.prompt.text, completion.text, completion.finished)
            return ids[: settings.max_new_tokens]

        refused = 0
        for job, result in in_threads(work, jobs, settings.rows):
            if not isinstance(result, RefusedError):
                refused = 0
                yield job, result
                continue
            refused += 1
            if refused == REFUSALS_IN_A_ROW:
                raise UserError(f"{result}; {refused} prompts in a row, so check --model and --max-new-tokens")
            yield job, None


def regenerate(
    prompts: Sequence[Prompt],
    answerer: Answerer,
    chat: ChatFormat,
    output: Path,
    settings: RegenerateSettings,
    on_prompt: Callable[[int], None] = lambda count: None,
) -> Summary:
    """Answer the prompts that `output` does not answer yet and write it; `on_prompt` hears of each one settled.

    Output order: answers to other prompts that were there before, then the given prompts in order. A text that occurs
    twice is answered once. Raises UserError when `output` or its journal belongs to a different run.
    """
    header = AnswerHeader(target=chat.facts(), sampling=settings.sampling(), source=answerer.source, versions=versions())
    done: dict[Ref, AnswerRecord] = {}
    if output.exists():
        found, records = read_answers(output)
        found.check_continues(header, output)
        header, done = found, {record.ref: record for record in records}
    journal = _open_journal(output, header)
    try:
        resumed = [AnswerRecord.read(row, f"{journal.file}, line {i + 2}") for i, row in enumerate(journal.rows)]
        done.update((record.ref, record) for record in sorted(resumed, key=lambda record: record.ref))
        _check_unchanged(prompts, done, output)
        summary = Summary(kept=len(done))
        jobs = _jobs(prompts, dict(done), chat, settings, summary, on_prompt)
        for job, response in answerer.answers(jobs, settings):
            if response is None:
                summary.refused += 1
            else:
                record = AnswerRecord(job.prompt.ref, job.prompt.sha256, response)
                journal.append(record.row())
                done[record.ref] = record
                summary.answered += 1
                summary.unfinished += not response or response[-1] not in chat.eos_token_ids
            on_prompt(1)
        if not done:
            raise UserError(f"none of the {len(prompts)} prompts could be answered ({_losses(summary)}); nothing was written")
        _finish(output, AnswerHeader.read({"header": journal.header}, journal.file), prompts, done)
        journal.delete()
    finally:
        journal.close()
    summary.total, summary.output_bytes = len(done), output.stat().st_size
    return summary


def _open_journal(output: Path, header: AnswerHeader) -> Journal:
    file = partial_file(output)

    def check(found: Row) -> None:
        AnswerHeader.read({"header": found}, file).check_continues(header, file)

    return Journal(file, header.row(), check)


def _check_unchanged(prompts: Sequence[Prompt], done: dict[Ref, AnswerRecord], output: Path) -> None:
    for prompt in prompts:
        if prompt.ref in done and done[prompt.ref].prompt_sha256 != prompt.sha256:
            where = f"{prompt.ref[0]}.jsonl line {prompt.ref[1] + 1}"
            raise UserError(f"{where} has changed since {output} answered it; choose another --output or restore the prompt file")


def _jobs(
    prompts: Sequence[Prompt],
    done: dict[Ref, AnswerRecord],
    chat: ChatFormat,
    settings: RegenerateSettings,
    summary: Summary,
    on_prompt: Callable[[int], None],
) -> Iterator[Job]:
    """The prompts that are still to be answered, encoded when their turn comes."""
    room = chat.max_length - settings.max_new_tokens
    if room < 1:
        raise UserError(
            f"max_new_tokens={settings.max_new_tokens} fills the {chat.max_length} tokens that {chat.name} holds; give less"
        )
    longest = min(room, settings.max_prompt_tokens or room)
    seen = {record.prompt_sha256 for record in done.values()}
    for prompt in prompts:
        if prompt.ref not in done and prompt.sha256 in seen:
            summary.duplicates += 1
        elif prompt.ref not in done:
            seen.add(prompt.sha256)
            ids = chat.encode_user(prompt.text)
            if len(ids) <= longest:
                yield Job(prompt, ids, _seed(settings.seed, prompt.ref))
                continue
            summary.too_long += 1
        on_prompt(1)


def _seed(seed: int, ref: Ref) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {ref[0]} {ref[1]}".encode()).digest()[:4], "big") >> 1


def _finish(output: Path, header: AnswerHeader, prompts: Sequence[Prompt], done: dict[Ref, AnswerRecord]) -> None:
    given = {prompt.ref for prompt in prompts}
    others = [record for ref, record in done.items() if ref not in given]
    write_answers(output, header, [*others, *(done[prompt.ref] for prompt in prompts if prompt.ref in done)])


def _losses(summary: Summary) -> str:
    return f"{summary.too_long} too long, {summary.refused} refused"
