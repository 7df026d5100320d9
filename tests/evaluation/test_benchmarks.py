"""Prompt files and their token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine.errors import UserError
from dspine.evaluation.benchmarks import Benchmark, encode_conversation, first_turns, load_benchmark
from dspine.targets.model import Target


def test_conversations_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"turns": ["a", "b\u2028c"], "id": 3}\n\n{"turns": ["é"]}\n{"turns": ["d"]}\n', encoding="utf-8")
    assert load_benchmark(file) == Benchmark("chat", (("a", "b\u2028c"), ("é",), ("d",)))
    assert load_benchmark(file, 2).conversations == (("a", "b\u2028c"), ("é",))


def test_lines_beyond_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}\nbroken\n', encoding="utf-8")
    assert len(load_benchmark(tmp_path / "p.jsonl", 1).conversations) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts; write one"),
        (b"\n \n", "holds no prompts"),
        (b'{"turns": ["a"]}\n{"turns": [', r"p.jsonl, line 2 is no JSON \(Expecting value\)"),
        (b'["a"]\n', 'line 1 has no "turns"'),
        (b'{"prompt": "a"}\n', 'line 1 has no "turns"'),
        (b'{"turns": []}\n', 'line 1 has no "turns"'),
        (b'{"turns": ["a", " "]}\n', 'line 1 has no "turns"'),
        (b'{"turns": "a"}\n', 'line 1 has no "turns"'),
        (b'{"turns": ["caf\xe9"]}\n', r"p.jsonl is not UTF-8 text \(byte 15\)"),
    ],
)
def test_bad_files_are_explained(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_benchmark(file)


def test_a_missing_file_a_folder_and_an_impossible_limit_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read prompts from .*none\.jsonl: No such file"):
        load_benchmark(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"cannot read prompts from .*: Is a directory"):
        load_benchmark(tmp_path)
    with pytest.raises(UserError, match="limit = 0"):
        load_benchmark(tmp_path / "none.jsonl", 0)


def test_conversations_go_through_the_chat_template(tiny_target: Target) -> None:
    decode = tiny_target.tokenizer.decode
    assert decode(encode_conversation(tiny_target, ["a"], [], chat=True)) == "<|user|>a<eos><|assistant|>"
    ids = encode_conversation(tiny_target, ["a", "b"], ["x"], chat=True)
    assert decode(ids) == "<|user|>a<eos><|assistant|>x<eos><|user|>b<eos><|assistant|>"


def test_without_a_template_turns_and_answers_follow_each_other(tiny_target: Target) -> None:
    ids = encode_conversation(tiny_target, ["a", "b", "c"], ["x", "y"], chat=False)
    assert tiny_target.tokenizer.decode(ids) == "a\nx\nb\ny\nc"


def test_prompts_without_room_for_the_answer_are_left_out(tiny_target: Target) -> None:
    benchmark = Benchmark("b", (("short", "later"), ("x" * 500,), ("also",)))
    prompts, skipped = first_turns(benchmark, tiny_target, chat=False, max_new_tokens=20)
    assert [tiny_target.tokenizer.decode(ids) for ids in prompts] == ["short", "also"]
    assert skipped == 1
    with pytest.raises(UserError, match="no prompt of b leaves room for 511 new tokens in the 512 that tiny-llama holds"):
        first_turns(benchmark, tiny_target, chat=False, max_new_tokens=511)


def test_thinking_is_the_templates_own_switch(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the chat template of tiny-llama has no thinking mode to turn on or off"):
        encode_conversation(tiny_target, ["a"], [], chat=True, thinking=True)
    template = tiny_target.tokenizer.chat_template + "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", template)
    texts = {
        thinking: tiny_target.tokenizer.decode(encode_conversation(tiny_target, ["a"], [], chat=True, thinking=thinking))
        for thinking in (None, True, False)
    }
    plain = "<|user|>a<eos><|assistant|>"
    assert texts == {None: plain, True: plain, False: plain + "-"}
