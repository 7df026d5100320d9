"""Reading GGUF files: weights through transformers, always dequantised; the bundled model's tokenizer on our own.

Releases of transformers build different tokenizers from the same file (some add tokens that the model has no embedding
for), so a prepared folder would depend on the release that prepared it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def model_options(file: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained(file.parent, ...)` for the model in `file`."""
    options: dict[str, Any] = {"gguf_file": file.name}
    # Releases with this class may otherwise keep packed weights; those without it always dequantise.
    config_class = getattr(transformers, "GgufConfig", None)
    if config_class is not None:
        options["quantization_config"] = config_class(dequantize=True)
    return options


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of `file`, with the splits that transformers gives to a GGUF file of its kind."""
    fields = {key.removeprefix("tokenizer."): field.contents() for key, field in GGUFReader(file).fields.items()}
    tokens: list[str] = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields.get("ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["ggml.token_type"], strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["chat_template"],
        clean_up_tokenization_spaces=False,
        **{name: tokens[fields[f"ggml.{key}"]] for name, key in named.items() if f"ggml.{key}" in fields},
    )
