"""Answer files: what a target answered, as prompt references and response token ids.

    answers = load_answers([Path("answers.jsonl.gz")], [Path("prompts")], target)

JSONL, gzipped if the name ends in .gz. The first line is {"header": {...}}: target, sampling, source and versions. Then one
line an answer: {"ref": [prompt file without .jsonl, line index], "prompt_sha256": 16 hex digits, "response": [ids, with the
end token if it was reached]}. Prompts are not copied: they are read from their own files, checked by their hash, and
tokenised through the target's chat template.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import dspine
from dspine.errors import UserError
from dspine.journal import Row, header_of, numbered_rows, write_rows
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.prompts import Prompt, Ref, find_prompts

FORMAT: Literal[1] = 1
FIT = ("model_type", "vocab_size", "chat_template_sha256")  # in what a target must agree; names may differ


@dataclass(frozen=True, kw_only=True)
class AnswerHeader:
    """Provenance of an answer file."""

    target: dict[str, Any]  # ChatFormat.facts
    sampling: dict[str, Any]  # temperature, max_new_tokens, seed where one is used
    source: dict[str, Any]  # kind: engine (with dtype) or endpoint (with model and url)
    versions: dict[str, str]
    format: Literal[1] = FORMAT

    @classmethod
    def read(cls, row: Row, file: Path) -> AnswerHeader:
        found = header_of(row, file)
        if found.get("format") != FORMAT:
            raise UserError(
                f"{file} has answer format {found.get('format')}, this version reads {FORMAT}; regenerate the answers"
            )
        for name in ("target", "sampling", "source", "versions"):
            if not isinstance(found.get(name), dict):
                raise UserError(f"{file}: the header lacks {name!r}; the file is damaged or of another kind")
        return cls(target=found["target"], sampling=found["sampling"], source=found["source"], versions=found["versions"])

    def row(self) -> Row:
        return asdict(self)

    def check_target(self, chat: ChatFormat, file: Path) -> None:
        """Raise UserError naming both values of the first property in which `chat` differs from the answers' target."""
        actual = chat.facts()
        for name in FIT:
            if self.target.get(name) != actual[name]:
                theirs = f"{self.target.get('name')} with {name} = {self.target.get(name)}"
                raise UserError(
                    f"{file} holds answers of {theirs}, but {chat.name} has {name} = {actual[name]}; "
                    "regenerate the answers with this target"
                )

    def check_continues(self, wanted: AnswerHeader, file: Path) -> None:
        """Raise UserError unless a run with the header `wanted` may add to `file`, whose header this is."""
        for part, ours, theirs in (
            ("target", self.target, wanted.target),
            ("sampling", self.sampling, wanted.sampling),
            ("source", self.source, wanted.source),
        ):
            free = {"target": {"name"}, "source": {"url", "device"}}.get(part, set())
            for name in sorted((ours.keys() | theirs.keys()) - free):
                if ours.get(name) != theirs.get(name):
                    raise UserError(
                        f"{file} was made with {part} {name} = {ours.get(name)}, this run has {theirs.get(name)}; "
                        "choose another --output or delete the file"
                    )


@dataclass(frozen=True)
class AnswerRecord:
    """One line of an answer file."""

    ref: Ref
    prompt_sha256: str
    response: list[int]

    def row(self) -> Row:
        return {"ref": list(self.ref), "prompt_sha256": self.prompt_sha256, "response": self.response}

    @classmethod
    def read(cls, row: Row, where: str) -> AnswerRecord:
        ref, sha, response = row.get("ref"), row.get("prompt_sha256"), row.get("response")
        good_ref = isinstance(ref, list) and [type(part) for part in ref] == [str, int]
        if (
            not good_ref
            or not isinstance(sha, str)
            or not isinstance(response, list)
            or not all(type(t) is int for t in response)
        ):
            raise UserError(f"{where} is no answer; the file is damaged or of another kind")
        assert isinstance(ref, list)
        return cls((ref[0], ref[1]), sha, response)


@dataclass(frozen=True)
class Answer:
    """An answered prompt: ids are prompt and response, the first `prompt_length` of them the prompt."""

    ref: Ref
    ids: list[int]
    prompt_length: int


def versions() -> dict[str, str]:
    """What the answers were made with."""
    others = {name: version(name) for name in ("torch", "transformers")}
    return {"dspine": dspine.__version__, "python": platform.python_version(), **others}


def read_answers(file: Path) -> tuple[AnswerHeader, list[AnswerRecord]]:
    """Header and records of a finished answer file. Raises UserError for a missing, damaged or foreign one."""
    rows = list(numbered_rows(file))
    if not rows:
        raise UserError(f"{file} is empty; run `dspine data regenerate` to make answers")
    header = AnswerHeader.read(rows[0][1], file)
    return header, [AnswerRecord.read(row, f"{file}, line {index + 1}") for index, row in rows[1:]]


def write_answers(file: Path, header: AnswerHeader, records: Iterable[AnswerRecord]) -> None:
    """Write a finished answer file by one rename."""
    write_rows(file, [{"header": header.row()}, *(record.row() for record in records)])


def load_answers(answer_files: Sequence[Path], prompt_folders: Sequence[Path], target: Target) -> list[Answer]:
    """The answers with their prompts, in the files' order; prompt files are looked for in the folders, then beside the answers.

    Raises UserError when a prompt file is missing, a prompt has changed, an answer occurs twice, or the answers are another
    target's.
    """
    chat = ChatFormat.of(target)
    answers: dict[Ref, Answer] = {}
    for file in answer_files:
        header, records = read_answers(file)
        header.check_target(chat, file)
        folders = list(dict.fromkeys((*prompt_folders, file.parent)))
        prompts = {stem: find_prompts(stem, folders) for stem in dict.fromkeys(r.ref[0] for r in records)}
        for record in records:
            if record.ref in answers:
                raise UserError(f"{file} answers {_show(record.ref)}, which has an answer already; leave one of them out")
            text = _prompt_text(record, prompts[record.ref[0]], file)
            answers[record.ref] = _answer(record, chat.encode_user(text), chat, file)
    return list(answers.values())


def _prompt_text(record: AnswerRecord, prompts: dict[Ref, Prompt], file: Path) -> str:
    prompt = prompts.get(record.ref)
    if prompt is None or prompt.sha256 != record.prompt_sha256:
        what = "is not there" if prompt is None else "has changed"
        raise UserError(
            f"{file} answers {_show(record.ref)}, which {what} in that prompt file; restore it or regenerate the answers"
        )
    return prompt.text


def _answer(record: AnswerRecord, prompt_ids: list[int], chat: ChatFormat, file: Path) -> Answer:
    bad = [token for token in record.response if not 0 <= token < chat.vocab_size]
    if bad:
        raise UserError(f"{file}: token id {bad[0]} is not in the vocabulary of {chat.name}; the file is damaged")
    return Answer(record.ref, prompt_ids + record.response, len(prompt_ids))


def _show(ref: Ref) -> str:
    return f"{ref[0]}.jsonl line {ref[1] + 1}"
