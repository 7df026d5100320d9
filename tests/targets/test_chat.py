"""A target's conversation format: the same ids as the target's own, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.errors import UserError
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target

EOS = 1


@pytest.fixture(scope="module")
def chat(tiny_target: Target) -> ChatFormat:
    return ChatFormat.of(tiny_target)


def with_template(chat: ChatFormat, template: str | None) -> ChatFormat:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chat.tokenizer.backend_tokenizer, eos_token="<eos>", chat_template=template
    )
    return replace(chat, tokenizer=tokenizer)


def test_user_turn_is_encoded_as_the_target_does(chat: ChatFormat, tiny_target: Target) -> None:
    for text in ("Hello", " ü <eos> \n", "<|assistant|>"):
        assert chat.encode_user(text) == tiny_target.encode_chat([{"role": "user", "content": text}])


def test_loaded_without_weights_it_is_the_same(
    tmp_path: Path, chat: ChatFormat, make_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    loaded = ChatFormat.load(str(tmp_path))
    assert {**loaded.facts(), "name": ""} == {**chat.facts(), "name": ""}
    assert loaded.max_length == chat.max_length == 512
    assert loaded.eos_token_ids == chat.eos_token_ids == {EOS}
    assert loaded.encode_user("Hello") == chat.encode_user("Hello")


def test_end_tokens_come_from_the_model_config_where_there_is_no_generation_config(
    tmp_path: Path, make_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    make_model("llama", eos_token_id=[3, 7]).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert ChatFormat.load(str(tmp_path)).eos_token_ids == {EOS, 3, 7}


def test_unknown_and_damaged_targets(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "none.gguf")):
        with pytest.raises(UserError, match=r"cannot load the tokenizer and config of .*; give a hub id"):
            ChatFormat.load(name)


def test_a_template_is_needed(chat: ChatFormat) -> None:
    without = with_template(chat, None)
    assert without.facts()["chat_template_sha256"] == ""
    with pytest.raises(UserError, match="has no chat template"):
        without.encode_user("Hello")


def test_text_answers_become_ids(chat: ChatFormat) -> None:
    hi = chat.encode("Hi")
    assert chat.response_ids("Hello", "Hi", finished=True) == [*hi, EOS]
    assert chat.response_ids("Hello", "Hi", finished=False) == hi
    assert chat.response_ids("Hello", "", finished=True) == [EOS]
    assert chat.response_ids("Hello", "Hi<eos>more", finished=True) == [*hi, EOS]  # nothing stands behind an end token


def test_answers_are_tokenised_behind_their_prompt(chat: ChatFormat) -> None:
    """A tokenizer that puts a space in front of every text must not put one in front of an answer."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer.from_str(chat.tokenizer.backend_tokenizer.to_str())
    inner.normalizer = tokenizers.normalizers.Prepend(" ")
    spacing = replace(
        chat,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=chat.tokenizer.chat_template),
    )
    template = "{% for m in messages %}U:{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    spacing.tokenizer.chat_template = template
    assert spacing.encode("Hi")[0] == spacing.encode(" ")[0]  # the fixture does what it is for
    assert spacing.tokenizer.decode(spacing.response_ids("Hello", "Hi", finished=False)) == "Hi"


def test_end_of_turn(chat: ChatFormat) -> None:
    assert chat.end_of_turn == EOS
    two_ends = replace(chat, eos_token_ids=frozenset((EOS, 3)))
    template = "{% for m in messages %}{{ m.content }}<|assistant|>{% endfor %}"
    assert with_template(two_ends, template).end_of_turn == 3
    assert with_template(two_ends, "{% for m in messages %}{{ m.content }}{% endfor %}").end_of_turn == EOS


def test_special_ids_hold_added_tokens(chat: ChatFormat) -> None:
    assert chat.special_ids == {0, 1, 2, 3}
