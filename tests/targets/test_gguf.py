from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.errors import UserError
from dspine.targets.gguf import model_options
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
WriteGguf = Callable[..., Path]

TOKENS = torch.tensor([[5, 100, 7, 250, 66, 9]])


def logits(target: Target) -> torch.Tensor:
    return target.logits(target.forward(TOKENS, target.new_cache(1, 16)).hidden)


def round_weights(model: PreTrainedModel) -> None:
    """Replace the matrices by what is left of them after Q8_0."""
    kind = gguf.GGMLQuantizationType.Q8_0
    for parameter in model.parameters():
        if parameter.ndim == 2:
            blocks = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(
    quantised: bool, make_model: MakeModel, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    model = make_model("llama", intermediate_size=64)
    file = write_gguf(model, tmp_path / "tiny.gguf", quantised)
    if quantised:
        round_weights(model)
    with torch.inference_mode():
        expected = model(TOKENS).logits
    target = Target.load(str(file), device="cpu")
    assert target.is_lean
    torch.testing.assert_close(logits(target), expected, atol=1e-4, rtol=1e-4)


def test_a_gguf_file_brings_its_tokenizer_and_chat_template(
    make_model: MakeModel, write_gguf: WriteGguf, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target = Target.load(str(write_gguf(make_model("llama"), tmp_path / "tiny.gguf")), device="cpu")
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    assert target.encode_chat(messages) == tiny_tokenizer.encode("<|user|>What is 2 + 3?<eos><|assistant|>")
    assert 1 in target.eos_token_ids


def test_weights_are_asked_for_unpacked_where_transformers_could_keep_them_packed() -> None:
    options = model_options(Path("folder") / "tiny.gguf")
    assert options.pop("gguf_file") == "tiny.gguf"
    assert [config.dequantize for config in options.values()] == ([True] if hasattr(transformers, "GgufConfig") else [])


def test_a_missing_gguf_file_is_named() -> None:
    with pytest.raises(UserError, match=r"no such GGUF file: nowhere/model\.gguf"):
        Target.load("nowhere/model.gguf")


@pytest.mark.parametrize("keep", [0, 100, 4000])
def test_a_truncated_gguf_file_is_refused(keep: int, make_model: MakeModel, write_gguf: WriteGguf, tmp_path: Path) -> None:
    file = write_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot load target"):
        Target.load(str(file))
