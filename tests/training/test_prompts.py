"""Prompt files: refs, and one clear sentence for everything that is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine.errors import UserError
from dspine.training.prompts import collect_prompts, find_prompts, prompt_sha256, read_prompts


def write(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_refs_are_file_name_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, "some.set.jsonl", '{"turns": ["a", "b"], "kind": "chat"}', "", '{"turns": ["ünï\\u2028code"]}')
    prompts = read_prompts(file)
    assert [p.ref for p in prompts] == [("some.set", 0), ("some.set", 2)]  # a blank line keeps its number
    assert [p.text for p in prompts] == ["a", "ünï\u2028code"]
    assert [p.num_turns for p in prompts] == [2, 1]
    assert prompts[0].sha256 == "ca978112ca1bbdca"  # sha256 of "a"


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}\r\n')
    assert [p.text for p in read_prompts(file)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"turn": ["a"]}', 'line 2 has no "turns"'),
        ('{"turns": []}', 'line 2 has no "turns"'),
        ('{"turns": "a"}', 'line 2 has no "turns"'),
        ('{"turns": ["a", 1]}', 'line 2 has no "turns"'),
        ('{"turns": [" \\n"]}', "line 2 has an empty first turn"),
        ('{"turns": ["\\ud800"]}', "line 2 holds half a character"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = write(tmp_path, "bad.jsonl", '{"turns": ["a"]}', line)
    with pytest.raises(UserError, match=sentence):
        read_prompts(file)


def test_bad_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"turns": ["é"]}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.jsonl is not UTF-8 \(byte 12\)"):
        read_prompts(latin)
    with pytest.raises(UserError, match=r"no such file: .*none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is not named"):
        read_prompts(write(tmp_path, "prompts.txt", "a"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*folder.jsonl: Is a directory"):
        read_prompts(tmp_path / "folder.jsonl")


def test_collect_takes_the_first_of_each_file(tmp_path: Path) -> None:
    a = write(tmp_path, "a.jsonl", *(f'{{"turns": ["a{i}"]}}' for i in range(3)))
    b = write(tmp_path, "b.jsonl", '{"turns": ["b0"]}')
    assert [p.text for p in collect_prompts([b, a], limit=2)] == ["b0", "a0", "a1"]
    assert len(collect_prompts([a, b])) == 4


def test_collect_refuses_ambiguous_and_empty_input(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    a, other = write(tmp_path, "a.jsonl", '{"turns": ["a"]}'), write(tmp_path / "other", "a.jsonl", '{"turns": ["b"]}')
    with pytest.raises(UserError, match="have the same name"):
        collect_prompts([a, other])
    with pytest.raises(UserError, match=r"no prompts in .*empty.jsonl"):
        collect_prompts([write(tmp_path, "empty.jsonl")])
    with pytest.raises(UserError, match="no prompt files"):
        collect_prompts([])


def test_find_looks_in_folders_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write(second, "a.jsonl", '{"turns": ["second"]}')
    assert find_prompts("a", [first, second])[("a", 0)].text == "second"
    write(first, "a.jsonl", '{"turns": ["first"]}')
    assert find_prompts("a", [first, second])[("a", 0)].text == "first"
    with pytest.raises(UserError, match=r"the prompt file b.jsonl, which is not in .*first, .*second"):
        find_prompts("b", [first, second])


def test_hash_is_of_the_exact_text() -> None:
    assert prompt_sha256("a") != prompt_sha256("a ")
    assert len(prompt_sha256("ü")) == 16
