"""A target's conversation format without its weights: template, tokenizer, end tokens.

Answers that another server generates are tokenised by this alone, so that the target need not fit this machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dspine.errors import UserError
from dspine.targets import bundled
from dspine.targets.model import Target

Message = dict[str, str]
SENTINEL = "QZCONTENTQZ"  # stands for a turn's text where a template is taken apart; a word no template holds


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How a target's conversations become tokens. Build it with `of` or `load`."""

    name: str
    tokenizer: Any
    model_type: str
    vocab_size: int
    max_length: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, target: Target) -> ChatFormat:
        return cls(
            target.name, target.tokenizer, target.config.model_type, target.vocab_size, target.max_length, target.eos_token_ids
        )

    @classmethod
    def load(cls, name: str) -> ChatFormat:
        """Read tokenizer and configs by any name that `Target.load` takes. Raises UserError for what cannot be read."""
        from transformers import AutoConfig, AutoTokenizer

        path: str | Path = bundled.ensure(name) if name in bundled.BUNDLED else name
        options: dict[str, Any] = {}
        if name.endswith(".gguf"):
            path, options = Path(name).parent, {"gguf_file": Path(name).name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            config = AutoConfig.from_pretrained(path, **options).get_text_config()
        except Exception as error:  # damaged files make the readers raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(
                f"cannot load the tokenizer and config of {name!r} ({reason}); give a hub id, a model folder or a .gguf file"
            ) from error
        length = int(config.to_dict().get("max_position_embeddings") or 1 << 20)
        return cls(name, tokenizer, config.model_type, config.vocab_size, length, _end_tokens(path, config, tokenizer))

    def facts(self) -> dict[str, Any]:
        """What answers depend on. The name is for people: one model may be loaded by several."""
        template = self.tokenizer.chat_template or ""
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return {
            "name": self.name,
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "chat_template_sha256": hashlib.sha256(text.encode()).hexdigest()[:16] if text else "",
        }

    def render(self, messages: list[Message], generation_prompt: bool = True, *, thinking: bool | None = None) -> str:
        """The template's text of a conversation, by default up to the assistant's turn; `thinking` as in `Target.encode_chat`."""
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.name} has no chat template, which training answers need; use an instruction-tuned model")
        switch = {} if thinking is None else {"enable_thinking": thinking}
        template = self.tokenizer.apply_chat_template
        return str(template(messages, tokenize=False, add_generation_prompt=generation_prompt, **switch))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text: the template has put the special tokens in already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_user(self, text: str) -> list[int]:
        """Prompt ids of one user turn, as `Target.encode_chat` gives them."""
        return self.encode(self.render([{"role": "user", "content": text}]))

    def response_ids(self, user_text: str, response: str, finished: bool) -> list[int]:
        """Token ids of an answer that came as text, with the end token if it is `finished`.

        Tokenised together with its prompt, since some tokenizers put a space in front of a text of its own.
        """
        prompt = self.render([{"role": "user", "content": user_text}])
        prompt_ids, ids = self.encode(prompt), self.encode(prompt + response)
        whole = ids[: len(prompt_ids)] == prompt_ids
        answer = ids[len(prompt_ids) :] if whole else self.encode(response)
        ends = [i for i, token in enumerate(answer) if token in self.eos_token_ids]
        if ends:
            return answer[: ends[0] + 1]
        return [*answer, self.end_of_turn] if finished and self.end_of_turn is not None else answer

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that mark up a conversation and are no text."""
        added = (token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special)
        return frozenset((*self.tokenizer.all_special_ids, *added))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token by which the assistant ends its turn; None for a model without one."""
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": SENTINEL}]
        closing = self.render(messages, generation_prompt=False).rpartition(SENTINEL)[2]
        ends = [token for token in self.encode(closing) if token in self.eos_token_ids]
        fallback = self.tokenizer.eos_token_id
        return ends[0] if ends else None if fallback is None else int(fallback)


def _end_tokens(path: str | Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """The end tokens of generation config (else the model's config) and tokenizer."""
    from transformers import GenerationConfig

    try:
        stated = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # not every model has one
        stated = config.to_dict().get("eos_token_id")
    found = stated if isinstance(stated, list | tuple) else [stated]
    return frozenset(int(i) for i in (*found, tokenizer.eos_token_id) if i is not None)
