"""Answer files: what is written comes back tokenised; whatever does not fit is refused in one sentence."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.errors import UserError
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.corpus import AnswerHeader, AnswerRecord, load_answers, read_answers, versions, write_answers
from dspine.training.prompts import prompt_sha256

TEXTS = ["Why?", "ünï", "third"]
RESPONSES = [[70, 71, 1], [80] * 40, [90, 1]]


@pytest.fixture
def header(tiny_target: Target) -> AnswerHeader:
    return AnswerHeader(
        target=ChatFormat.of(tiny_target).facts(),
        sampling={"temperature": 0.0, "max_new_tokens": 40},
        source={"kind": "engine", "dtype": "float32"},
        versions=versions(),
    )


def records() -> list[AnswerRecord]:
    return [AnswerRecord(("set", i), prompt_sha256(TEXTS[i]), RESPONSES[i]) for i in range(len(TEXTS))]


@pytest.fixture
def folder(tmp_path: Path, header: AnswerHeader) -> Path:
    """set.jsonl in prompts/, answers.jsonl.gz beside it."""
    (tmp_path / "prompts").mkdir()
    lines = "".join(json.dumps({"turns": [text, "next"]}) + "\n" for text in TEXTS)
    (tmp_path / "prompts" / "set.jsonl").write_text(lines)
    write_answers(tmp_path / "answers.jsonl.gz", header, records())
    return tmp_path


def load(folder: Path, target: Target, *names: str) -> list[Any]:
    return load_answers([folder / name for name in names or ("answers.jsonl.gz",)], [folder / "prompts"], target)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_round_trip(tmp_path: Path, header: AnswerHeader, name: str) -> None:
    write_answers(tmp_path / name, header, records())
    assert read_answers(tmp_path / name) == (header, records())
    data = (tmp_path / name).read_bytes()
    assert (data[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_format_is_the_documented_one(folder: Path) -> None:
    lines = gzip.decompress((folder / "answers.jsonl.gz").read_bytes()).decode().splitlines()
    first = json.loads(lines[0])["header"]
    assert first["format"] == 1
    assert set(first) == {"format", "target", "sampling", "source", "versions"}
    assert json.loads(lines[1]) == {"ref": ["set", 0], "prompt_sha256": prompt_sha256("Why?"), "response": [70, 71, 1]}
    assert "Why?" not in "".join(lines)  # prompts of others are not copied


def test_answers_come_back_with_their_prompts(folder: Path, tiny_target: Target) -> None:
    answers = load(folder, tiny_target)
    assert [answer.ref for answer in answers] == [("set", 0), ("set", 1), ("set", 2)]
    for answer, text, response in zip(answers, TEXTS, RESPONSES, strict=True):
        prompt = tiny_target.encode_chat([{"role": "user", "content": text}])
        assert answer.ids == prompt + response
        assert answer.prompt_length == len(prompt)


def test_prompt_file_may_stand_beside_the_answers(folder: Path, tiny_target: Target) -> None:
    (folder / "prompts" / "set.jsonl").rename(folder / "set.jsonl")
    assert len(load(folder, tiny_target)) == 3


def test_missing_prompt_file(folder: Path, tiny_target: Target) -> None:
    (folder / "prompts" / "set.jsonl").unlink()
    with pytest.raises(UserError, match=r"the prompt file set.jsonl, which is not in .*prompts, .*; put it there"):
        load(folder, tiny_target)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("Why?", "Why ?", "set.jsonl line 1, which has changed"),
        ('{"turns": ["third", "next"]}\n', "", "line 3, which is not there"),
    ],
)
def test_changed_prompt(folder: Path, tiny_target: Target, old: str, new: str, sentence: str) -> None:
    file = folder / "prompts" / "set.jsonl"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=sentence):
        load(folder, tiny_target)


def test_non_utf8_prompt_file(folder: Path, tiny_target: Target) -> None:
    (folder / "prompts" / "set.jsonl").write_bytes(b'{"turns": ["\xe9"]}\n')
    with pytest.raises(UserError, match=r"set.jsonl is not UTF-8"):
        load(folder, tiny_target)


def test_answered_twice(folder: Path, tiny_target: Target, header: AnswerHeader) -> None:
    write_answers(folder / "more.jsonl", header, records()[2:])
    with pytest.raises(UserError, match=r"more.jsonl answers set.jsonl line 3, which has an answer already"):
        load(folder, tiny_target, "answers.jsonl.gz", "more.jsonl")


def test_another_name_is_the_same_target(folder: Path, tiny_target: Target, header: AnswerHeader) -> None:
    write_answers(folder / "answers.jsonl.gz", replace(header, target={**header.target, "name": "a/b"}), records())
    assert len(load(folder, tiny_target)) == 3


@pytest.mark.parametrize("name", ["model_type", "vocab_size", "chat_template_sha256"])
def test_another_target_is_refused(folder: Path, tiny_target: Target, header: AnswerHeader, name: str) -> None:
    write_answers(folder / "answers.jsonl.gz", replace(header, target={**header.target, name: "x"}), records())
    with pytest.raises(UserError, match=rf"answers of tiny-llama with {name} = x, but tiny-llama has {name} = .*; regenerate"):
        load(folder, tiny_target)


def test_another_template_is_refused(
    folder: Path, make_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<eos>", chat_template="{{ messages[0].content }}"
    )
    with pytest.raises(UserError, match="with chat_template_sha256 = "):
        load(folder, Target.wrap(make_model("llama"), tokenizer, "other"))


@pytest.mark.parametrize("token", [-1, 260])
def test_impossible_token(folder: Path, tiny_target: Target, header: AnswerHeader, token: int) -> None:
    write_answers(folder / "answers.jsonl.gz", header, [replace(records()[0], response=[5, token])])
    with pytest.raises(UserError, match=f"token id {token} is not in the vocabulary of tiny-llama"):
        load(folder, tiny_target)


def test_damaged_answer_files(folder: Path, header: AnswerHeader) -> None:
    file = folder / "a.jsonl"
    good = json.dumps({"header": header.row()}) + "\n"
    for content, sentence in (
        ("", "is empty"),
        ('{"ref": ["set", 0]}\n', "does not start with a header"),
        ('{"header": {"format": 2}}\n', "has answer format 2, this version reads 1"),
        ('{"header": {"format": 1, "target": {}}}\n', "the header lacks 'sampling'"),
        (good + '{"ref": ["set", 0], "prompt_sha256": "", "resp', "line 2 is no JSON"),
        (good + '{"ref": ["set"], "prompt_sha256": "", "response": []}\n', "line 2 is no answer"),
        (good + '{"ref": ["set", true], "prompt_sha256": "", "response": []}\n', "line 2 is no answer"),
        (good + '{"ref": ["set", 0], "prompt_sha256": "", "response": [1.5]}\n', "line 2 is no answer"),
        (good + '{"ref": ["set", 0], "response": [1]}\n', "line 2 is no answer"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=sentence):
            read_answers(file)
    with pytest.raises(UserError, match="no such file"):
        read_answers(folder / "none.jsonl.gz")


def test_a_run_continues_only_its_own_file(header: AnswerHeader) -> None:
    file = Path("a.jsonl")
    header.check_continues(header, file)
    header.check_continues(replace(header, target={**header.target, "name": "x"}, versions={"dspine": "9"}), file)
    header.check_continues(replace(header, source={**header.source, "url": "http://other", "device": "cuda"}), file)
    for change, sentence in (
        (replace(header, target={**header.target, "vocab_size": 5}), "target vocab_size = 260, this run has 5"),
        (replace(header, sampling={**header.sampling, "max_new_tokens": 8}), "sampling max_new_tokens = 40, this run has 8"),
        (replace(header, sampling={**header.sampling, "seed": 3}), "sampling seed = None, this run has 3"),
        (replace(header, source={"kind": "endpoint", "model": "m"}), "source dtype = float32, this run has None"),
    ):
        with pytest.raises(UserError, match=sentence):
            header.check_continues(change, file)
