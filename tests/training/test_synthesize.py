"""Prompts that the target writes itself: templates taken apart, filters, quotas, and the same file after any interruption."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.text import TextStream
from dspine.errors import UserError
from dspine.journal import Journal, partial_file
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.prompts import read_prompts
from dspine.training.synthesize import (
    TOPICS,
    Attempt,
    SynthesizeSettings,
    SynthesizeSummary,
    UserTurn,
    _Collection,
    count_prompts,
    parse_kinds,
    synthesize,
    usable_text,
    user_turn,
)

MakeModel = Callable[..., PreTrainedModel]
EOS, USER, ASSISTANT = 1, 2, 3
TOPIC = TOPICS["math"][0]
SETTINGS = SynthesizeSettings(count=16, max_new_tokens=40, rows=5)
CHATML = (
    "{% for m in messages %}[S]{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[S]assistant\n{% endif %}"
)


def make_writer(make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, letters: str, **bias: float) -> Target:
    """A random model whose head prefers a few letters and spaces, so that it writes words, and ends them now and then."""
    model: Any = make_model("phi")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        model.lm_head.bias.fill_(-30)
        model.lm_head.bias[torch.tensor(tokenizer(letters)["input_ids"])] = 0.0
        model.lm_head.bias[tokenizer(" ")["input_ids"][0]] = 1.5
        model.lm_head.bias[EOS] = bias.get("eos", -0.5)
        model.lm_head.bias[ASSISTANT] = bias.get("assistant", -3.5)
    return Target.wrap(model, tokenizer, "writer")


@pytest.fixture(scope="module")
def writer(make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return make_writer(make_model, tiny_tokenizer, "abcdefgh")


def with_template(chat: ChatFormat, template: str | None) -> ChatFormat:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chat.tokenizer.backend_tokenizer,
        eos_token="<eos>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=template,
    )
    return replace(chat, tokenizer=tokenizer)


# -- templates ---------------------------------------------------------------------------------------------------------

EXCHANGE = f"<|user|>{TOPIC}<|assistant|>Understood.<eos><|user|>"
TEMPLATES = {
    "chatml": (CHATML, f"[S]system\n{TOPIC}<eos>\n[S]user\n", {EOS}, ()),
    "header tokens, turn ended by a token that is no end token": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% endif %} {{ m.content }}{% endfor %}<|assistant|>",
        f" {TOPIC}<|user|> ",
        {EOS, ASSISTANT},
        (),
    ),
    "system text inside the user's turn": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }} [/INST]{% endif %}{% endfor %}",
        f"[INST] {TOPIC}\n\n",
        {EOS},
        ("[/INST]",),
    ),
    "plain words": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        f"SYSTEM: {TOPIC}\nUSER: ",
        {EOS},
        ("ASSISTANT:",),
    ),
    "plain words, then a token": (
        "{% for m in messages %}{{ m.content }}\n### End <eos>{% endfor %}",
        f"{TOPIC}\n### End <eos>",
        {EOS},
        ("### End",),
    ),
    "trimmed": (
        "{% for m in messages %}<|user|>{{ m.content | trim }}<eos>{% endfor %}",
        f"<|user|>{TOPIC}<eos><|user|>",
        {EOS},
        (),
    ),
    "nothing behind the user": ("{% for m in messages %}{{ m.content }} {% endfor %}", f"{TOPIC} ", {EOS}, ()),
    "refuses system turns": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
        "{% else %}<|assistant|>{{ m.content }}<eos>{% endif %}{% endfor %}<|assistant|>",
        EXCHANGE,
        {EOS, ASSISTANT},
        (),
    ),
    "passes system turns over": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<eos>{% endif %}{% endfor %}<|assistant|>",
        EXCHANGE,
        {EOS, ASSISTANT},
        (),
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_taken_apart(writer: Target, name: str) -> None:
    template, prefix, end_ids, stop = TEMPLATES[name]
    chat = with_template(ChatFormat.of(writer), template)
    turn = user_turn(chat, TOPIC)
    assert chat.tokenizer.decode(turn.prefix_ids) == prefix
    assert turn.prefix_ids == chat.encode(prefix)
    assert turn.end_ids == end_ids
    assert turn.stop == stop


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}<eos>{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}<eos>{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}<eos>{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}<eos>{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages + 1 }}",
    ],
)
def test_other_templates_are_refused(writer: Target, template: str) -> None:
    with pytest.raises(UserError, match="the chat template of writer does not show a user's turn as it is written"):
        user_turn(with_template(ChatFormat.of(writer), template), TOPIC)


def test_no_template(writer: Target) -> None:
    with pytest.raises(UserError, match="writer has no chat template"):
        user_turn(with_template(ChatFormat.of(writer), None), TOPIC)


# -- filters -----------------------------------------------------------------------------------------------------------


def finished(chat: ChatFormat, text: str, reason: str = "stop", stop: tuple[str, ...] = ()) -> Request:
    request = Request(1, [5], SamplingParams(temperature=0.9, stop=stop), TextStream(chat.tokenizer, stop), 100)
    for token in chat.encode(text):
        request.append(token, False, chat.eos_token_ids)
    request.finish_reason = reason  # type: ignore[assignment]
    return request


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is a prime?<eos>", "What is a prime?"),
        (" \nWhat is a prime? \n<eos>", "What is a prime?"),
        ("def f(x):\n    return one ünï<eos>", "def f(x):\n    return one ünï"),
        ("What is a prime?", None),  # unfinished
        ("What is this?<eos>", None),  # three words
        ("<eos>", None),
        ("What is a <|user|> prime?<eos>", None),
        ("What is a <|im_start|> prime?<eos>", None),  # spelled, not a token of this target
        ("What is a <pad> prime?<eos>", None),
        ("What is a prime?<|assistant|>", None),  # no end of the turn here
    ],
)
def test_filters(writer: Target, text: str, expected: str | None) -> None:
    chat = ChatFormat.of(writer)
    turn = UserTurn([5], chat.eos_token_ids, ())
    assert usable_text(finished(chat, text), turn, chat) == expected


def test_text_that_breaks_off_inside_a_character(writer: Target) -> None:
    chat = ChatFormat.of(writer)
    request = finished(chat, "What is a prime ü")
    del request.output_ids[-1]  # half of the ü
    request.append(EOS, False, chat.eos_token_ids)
    assert usable_text(request, UserTurn([5], chat.eos_token_ids, ()), chat) is None


def test_the_templates_own_end_ends_a_turn(writer: Target) -> None:
    chat = ChatFormat.of(writer)
    turn = UserTurn([5], frozenset((EOS, ASSISTANT)), ())
    assert usable_text(finished(chat, "What is a prime?<|assistant|>It", "cancelled"), turn, chat) == "What is a prime?"
    turn = UserTurn([5], chat.eos_token_ids, ("[/INST]",))
    request = finished(chat, "What is a prime? [/INST]", "stop_string", turn.stop)
    assert usable_text(request, turn, chat) == "What is a prime?"


# -- settings ----------------------------------------------------------------------------------------------------------


def test_kinds_and_quotas() -> None:
    assert parse_kinds("chat, code") == (("chat", 1.0), ("code", 1.0))
    assert parse_kinds("chat=4,code=3,math=1") == (("chat", 4.0), ("code", 3.0), ("math", 1.0))
    for count in range(1, 40):
        quotas = SynthesizeSettings(count=count).quotas()
        assert sum(quotas.values()) == count
        assert all(abs(quotas[kind] - count * share / 8) < 1 for kind, share in (("chat", 4), ("code", 3), ("math", 1)))
    assert SynthesizeSettings(count=800).quotas() == {"chat": 400, "code": 300, "math": 100}


@pytest.mark.parametrize("text", ["", "poems", "chat,chat", "chat=0", "chat=-1", "chat=x", "chat=nan", "chat=inf", "chat,"])
def test_impossible_kinds(text: str) -> None:
    with pytest.raises(UserError, match=r"unknown kind|named twice|no positive number"):
        parse_kinds(text)


@pytest.mark.parametrize(
    "options", [{"count": 0}, {"rows": 0}, {"temperature": 0.0}, {"temperature": -1.0}, {"max_new_tokens": 0}]
)
def test_impossible_settings(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"is not possible|again and again|out of range"):
        SynthesizeSettings(**{"count": 5, **options})


# -- collecting --------------------------------------------------------------------------------------------------------


def collect(quotas: dict[str, int], *results: tuple[str, int, str | None]) -> _Collection:
    rows = [{"kind": kind, "attempt": attempt, "text": text} for kind, attempt, text in results]
    return _Collection(quotas, rows, Path("work.partial"))


def test_the_first_attempts_win_in_whatever_order_they_finish() -> None:
    results = [("chat", 0, "one"), ("chat", 1, None), ("chat", 2, "ONE "), ("chat", 3, "two"), ("chat", 4, "three")]
    for order in (results, results[::-1], results[2:] + results[:2]):
        state = collect({"chat": 2}, *order)
        assert state.count == 2
        assert state.chosen() == {"chat": ["one", "two"]}


def test_no_text_in_two_kinds() -> None:
    state = collect({"chat": 2, "code": 2}, ("code", 0, "same"), ("code", 1, "own"))
    assert state.count == 2
    state.add(Attempt("chat", 0), "Same")
    assert state.count == 2  # chat has it now
    assert state.chosen() == {"chat": ["Same"], "code": ["own"]}


def test_attempts_lost_by_a_killed_run_come_first() -> None:
    state = collect({"chat": 2}, ("chat", 0, "one"), ("chat", 3, "two"))  # enough, but 1 and 2 were running
    running = {"chat": 0}
    assert [state.next_attempt(running) for _ in range(3)] == [Attempt("chat", 1), Attempt("chat", 2), None]


def test_kinds_are_started_evenly_and_not_without_end() -> None:
    state = collect({"chat": 4, "code": 2})
    running = {"chat": 0, "code": 0}
    started = []
    while (attempt := state.next_attempt(running)) is not None:
        running[attempt.kind] += 1
        started.append(attempt)
    assert Counter(attempt.kind for attempt in started) == {"chat": 4, "code": 2}
    assert {attempt.kind for attempt in started[:2]} == {"chat", "code"}
    unusable = 0
    while (attempt := state.next_attempt({"chat": 0, "code": 0})) is not None:
        state.add(attempt, None)
        unusable += 1
    assert len(started) + unusable == (4 + 2) * 10 + 20


# -- the whole ---------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Stands for a kill: raised inside a run."""


def run(target: Target, output: Path, settings: SynthesizeSettings = SETTINGS) -> SynthesizeSummary:
    return synthesize(target, output, settings)


@pytest.fixture(scope="module")
def whole(writer: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run writes."""
    output = tmp_path_factory.mktemp("whole") / "p.jsonl"
    run(writer, output)
    return output


def test_prompts_are_written(writer: Target, whole: Path, tmp_path: Path) -> None:
    progress: list[int] = []
    summary = synthesize(writer, tmp_path / "p.jsonl", SETTINGS, progress.append)
    assert (summary.total, summary.by_kind) == (16, {"chat": 8, "code": 6, "math": 2})
    assert summary.attempts > 16  # some are always dropped
    assert sum(progress) == 16
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert all(set(row) == {"kind", "turns"} for row in rows)
    assert Counter(row["kind"] for row in rows) == summary.by_kind
    assert len({row["kind"] for row in rows[:8]}) > 1  # shuffled
    texts = [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl")]
    assert len(set(texts)) == count_prompts(tmp_path / "p.jsonl") == 16
    assert all(len(text.split()) >= 4 and "<" not in text for text in texts)
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]
    assert (tmp_path / "p.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("rows", [2, 40])
def test_the_batch_does_not_matter(writer: Target, whole: Path, tmp_path: Path, rows: int) -> None:
    run(writer, tmp_path / "p.jsonl", replace(SETTINGS, rows=rows))
    assert (tmp_path / "p.jsonl").read_bytes() == whole.read_bytes()


def test_another_seed_writes_others(writer: Target, whole: Path, tmp_path: Path) -> None:
    run(writer, tmp_path / "p.jsonl", replace(SETTINGS, seed=1))
    texts = [{prompt.text for prompt in read_prompts(file)} for file in (whole, tmp_path / "p.jsonl")]
    assert len(texts[0] & texts[1]) < 4


@pytest.mark.parametrize("after", [1, 15, 30])
def test_interrupted_run_ends_in_the_same_file(
    writer: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    output = tmp_path / "p.jsonl"
    append = Journal.append
    count = 0

    def stop(self: Journal, row: dict[str, Any]) -> None:
        nonlocal count
        append(self, row)
        count += 1
        if count == after:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(Stopped):
            run(writer, output)
    assert not output.exists()
    with partial_file(output).open("ab") as stream:
        stream.write(b'{"kind":"chat","att')  # torn
    run(writer, output)
    assert output.read_bytes() == whole.read_bytes()
    assert not partial_file(output).exists()


def test_few_letters_mean_many_repetitions(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    writer = make_writer(make_model, tiny_tokenizer, "a", eos=0.5)
    summary = run(writer, tmp_path / "p.jsonl", replace(SETTINGS, count=20))
    texts = [" ".join(prompt.text.split()) for prompt in read_prompts(tmp_path / "p.jsonl")]
    assert len(set(texts)) == len(texts) == summary.total > 8


def test_a_model_that_never_ends(make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    writer = make_writer(make_model, tiny_tokenizer, "abc", eos=-30)
    with pytest.raises(UserError, match=r"writer wrote no usable prompt in 20 attempts; use an instruction-tuned model"):
        run(writer, tmp_path / "p.jsonl", SynthesizeSettings(count=1, kinds=(("chat", 1.0),), max_new_tokens=5))
    assert list(tmp_path.glob("*.jsonl")) == []


def test_turns_may_end_by_a_token_that_ends_no_request(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[list[int]] = []

    def spy(request: Request, turn: UserTurn, chat: ChatFormat) -> str | None:
        outputs.append(request.output_ids)
        return usable_text(request, turn, chat)

    monkeypatch.setattr("dspine.training.synthesize.usable_text", spy)
    writer = make_writer(make_model, tiny_tokenizer, "abcdefgh", eos=-30, assistant=-2.0)
    chat = with_template(ChatFormat.of(writer), "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>")
    writer.tokenizer = chat.tokenizer
    summary = run(writer, tmp_path / "p.jsonl", SynthesizeSettings(count=6, max_new_tokens=40, rows=3))
    assert summary.total == 6
    ended = [ids for ids in outputs if ASSISTANT in ids]
    assert len(ended) >= 6
    assert all(len(ids) - ids.index(ASSISTANT) <= 2 for ids in ended)  # nobody waits for the limit


def test_existing_output_and_foreign_journal(writer: Target, tmp_path: Path) -> None:
    output = tmp_path / "p.jsonl"
    with pytest.raises(UserError, match=r"has to be named \*.jsonl"):
        run(writer, tmp_path / "p.txt")
    journal = Journal(partial_file(output), {"target": {}, "temperature": 0.5}, lambda found: None)
    journal.append({"kind": "chat", "attempt": 0, "text": "a b c d"})
    journal.close()
    with pytest.raises(UserError, match=r"p.jsonl.partial was begun with target = {}, not "):
        run(writer, output)
    partial_file(output).unlink()
    output.write_text('{"turns": ["mine"]}\n')
    with pytest.raises(UserError, match=r"is there already; choose another --output or delete it"):
        run(writer, output)
    assert output.read_text() == '{"turns": ["mine"]}\n'


def test_damaged_journal(writer: Target) -> None:
    with pytest.raises(UserError, match=r"work.partial, line 2 is no attempt; delete the file"):
        _Collection({"chat": 1}, [{"kind": "chat", "attempt": "0", "text": None}], Path("work.partial"))


def test_disk_full(writer: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*p.jsonl: No space left on device"):
            run(writer, tmp_path / "p.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl.partial"]
    run(writer, tmp_path / "p.jsonl")
    assert (tmp_path / "p.jsonl").read_bytes() == whole.read_bytes()
