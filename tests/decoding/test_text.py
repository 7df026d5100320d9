"""Incremental detokenisation: never taking a character back, and stop strings across tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dspine.decoding.text import TextStream


def stream(tokenizer: PreTrainedTokenizerFast, text: str, *stop: str) -> tuple[TextStream, list[str]]:
    """Push a text byte by byte; the stream and what each `take` gave."""
    out = TextStream(tokenizer, stop)
    pieces = []
    for token in tokenizer(text)["input_ids"]:
        out.push(token)
        pieces.append(out.take())
        if out.stopped:
            break
    pieces.append(out.take(final=True))
    return out, pieces


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "\n\ttabs \n", "e\u0301 combining"])
def test_pieces_add_up_to_the_text(text: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, text)
    assert "".join(pieces) == out.text == out.certain == text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_when_its_last_byte_does(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert stream(tiny_tokenizer, "é!")[1] == ["", "é", "!", ""]


def test_bytes_that_never_become_a_character_are_replaced_at_the_end(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tiny_tokenizer("a日")["input_ids"]
    out = TextStream(tiny_tokenizer)
    for token in ids[:-1]:
        out.push(token)
    assert out.take() == "a"
    assert out.take(final=True) == "\ufffd"
    assert out.text == "a\ufffd"


def test_invalid_bytes_do_not_hold_up_what_follows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    first = tiny_tokenizer("日")["input_ids"][0]
    out = TextStream(tiny_tokenizer)
    for token in [*[first] * 12, *tiny_tokenizer("ok")["input_ids"]]:
        out.push(token)
    assert out.take().endswith("ok")


def test_special_tokens_are_no_text(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out = TextStream(tiny_tokenizer)
    for token in [3, *tiny_tokenizer("hi")["input_ids"], 2]:
        out.push(token)
    assert out.take(final=True) == "hi"


def test_a_stop_string_ends_the_text_before_it(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, "one two three four", " three", "never")
    assert out.stopped
    assert "".join(pieces) == out.text == "one two"
    assert not any(" three".startswith(piece) for piece in pieces[4:] if piece.startswith(" t") and piece != " t")


def test_what_may_become_a_stop_string_is_held_until_it_cannot(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, "a##b###c", "###")
    assert pieces == ["a", "", "", "##b", "", "", "", ""]
    assert (out.stopped, out.text) == (True, "a##b")


def test_a_beginning_of_a_stop_string_comes_out_at_the_end(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, "wait for E", "END")
    assert pieces[-2:] == ["", "E"]
    assert (out.stopped, out.text) == (False, "wait for E")


def test_the_earliest_of_several_stop_strings_counts(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert stream(tiny_tokenizer, "abcdef", "def", "cdef")[0].text == "ab"


def test_a_stop_string_of_many_bytes(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, "はい。いいえ", "。い")
    assert (out.text, "".join(pieces), out.stopped) == ("はい", "はい", True)


@settings(deadline=None, max_examples=60)
@example(text="\ufffd", stop="\ufffd")
@given(text=st.text(max_size=20), stop=st.text(min_size=1, max_size=3))
def test_streaming_equals_cutting_the_whole_text(text: str, stop: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    out, pieces = stream(tiny_tokenizer, text, stop)
    expected = text[: text.index(stop)] if stop in text else text
    assert (out.text, "".join(pieces), out.stopped) == (expected, expected, stop in text)
