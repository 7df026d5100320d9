"""The frozen model that is sped up: any decoder-only causal LM that transformers loads.

    target = Target.load("smollm2-135m")
    cache = target.new_cache(rows=1, capacity=256)
    out = target.forward(tokens, cache, taps=(1, 8, 14, 20, 26))

`forward` never moves a row's length: the caller commits what it keeps with `cache.lengths += ...`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspine.errors import UserError
from dspine.kernels.linear import PackedLinear
from dspine.modules.decoder import DecoderStack
from dspine.modules.kv_cache import KVCache
from dspine.targets import bundled
from dspine.targets.families import build_lean_stack
from dspine.targets.generic import GenericStack
from dspine.targets.gguf import model_options as gguf_options


@dataclass(frozen=True)
class TargetOutput:
    """`hidden` [b, n, d]: after the final norm. `features` [b, n, taps * d]: the tapped layers' outputs, or None."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A causal LM with feature taps and a rollback-friendly cache. Build it with `load` or `wrap`."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str, *, owned: bool = False) -> None:
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.model: Any = None if owned else model
        if owned:
            model.eval().requires_grad_(False)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise UserError(f"{name}: this model has no LM head, so it is no causal language model")
        self._embedding_module = embedding
        self.embedding: Tensor = embedding.weight.detach()  # [v, d]
        self.head_weight: Tensor = head.weight.detach()  # [v, d]
        self.hidden_size: int = self.embedding.shape[1]
        self.vocab_size: int = self.head_weight.shape[0]
        self.num_layers: int = config.num_hidden_layers
        # Gemma scales embeddings inside its decoder; the factor is rounded to the weights' dtype there too.
        self._embed_scale = (
            torch.tensor(self.hidden_size**0.5, dtype=self.embedding.dtype).item()
            if config.model_type.startswith("gemma")
            else 1.0
        )
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._head = PackedLinear(self.head_weight, getattr(head, "bias", None))
        lean = build_lean_stack(model, config, release=owned)
        self._final_norm: Callable[[Tensor], Tensor] | None
        self.stack: DecoderStack | GenericStack
        if lean is not None:
            self.stack, self._final_norm = lean
        else:
            self._use_fallback(model)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)

    def _use_fallback(self, model: Any) -> None:
        """Run the model's own decoder, after seeing that its logits come out right: a family may scale them, or keep a state
        that is no key/value cache."""
        family = self.config.model_type
        try:
            self.stack, self._final_norm = GenericStack(model, self.config), None
            error = self._fallback_error(model)
        except UserError:
            raise
        except Exception as cause:  # the model's code is not ours: anything may come out of it
            raise UserError(f"{self.name}: models of type {family} are not supported ({_first_line(cause)})") from cause
        if error > (1e-3 if self.dtype == torch.float32 else 0.1):
            raise UserError(f"{self.name}: models of type {family} are not supported (their logits differ here by {error:.1%})")

    @torch.inference_mode()
    def _fallback_error(self, model: Any) -> float:
        """Largest difference of our logits, in two cached steps of rows that advance differently, from the model's own,
        relative to the largest of those."""
        tokens = torch.arange(1, 21, device=self.device).view(2, 10) * 7 % self.vocab_size
        expected = model(tokens).logits
        cache = self.new_cache(2, 10)
        self.forward(tokens[:, :5], cache)
        cache.lengths += torch.tensor((5, 3))  # the second row refuses two tokens
        columns = torch.tensor((5, 3))[:, None] + torch.arange(5)
        rows = torch.arange(2)[:, None]
        difference = self.logits(self.forward(tokens[rows, columns], cache).hidden) - expected[rows, columns]
        return float(difference.abs().max() / expected.abs().max())

    @classmethod
    def load(cls, name: str, *, device: str | None = None, dtype: str = "auto", keep_model: bool = False) -> Target:
        """Load by hub id, local folder, GGUF file or bundled name.

        dtype "auto" is float32 on a CPU and bfloat16 on an accelerator. `keep_model` keeps the transformers model as
        `.model` beside the packed weights (a warm start reads it). Raises UserError for anything unloadable.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch_dtype = _resolve_dtype(dtype, device)
        path: str | Path = name
        tokenizer_options: dict[str, Any] = {}
        model_options: dict[str, Any] = {}
        if name in bundled.BUNDLED:
            path = bundled.ensure(name)
        elif name.endswith(".gguf"):
            file = Path(name)
            if not file.is_file():
                raise UserError(f"no such GGUF file: {name}")
            path, tokenizer_options, model_options = file.parent, {"gguf_file": file.name}, gguf_options(file)
        level = logging.getLogger("transformers").level
        logging.getLogger("transformers").setLevel(logging.ERROR)
        # Files that are here load in a moment; only a download is worth transformers' progress bars.
        hide_bars = Path(path).exists() and transformers_logging.is_progress_bar_enabled()
        if hide_bars:
            transformers_logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **tokenizer_options)
            model, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch_dtype, output_loading_info=True, **model_options
            )
            model.to(device)
        except Exception as error:  # damaged files make the readers raise anything, struct.error among them
            remedy = f"give a hub id, a local model folder, a .gguf file, or one of: {', '.join(bundled.BUNDLED)}"
            if name in bundled.BUNDLED:
                remedy = f"delete {path} and try again"
            raise UserError(f"cannot load target {name!r} ({_first_line(error)}); {remedy}") from error
        finally:
            logging.getLogger("transformers").setLevel(level)
            if hide_bars:
                transformers_logging.enable_progress_bar()
        if report["missing_keys"]:  # transformers would go on with random numbers there
            missing = sorted(report["missing_keys"])
            raise UserError(f"cannot load target {name!r}: its files lack {len(missing)} tensors, the first is {missing[0]}")
        return cls(model, tokenizer, name, owned=not keep_model)

    @classmethod
    def wrap(cls, model: nn.Module, tokenizer: Any, name: str | None = None) -> Target:
        """Use a transformers model that the caller has loaded and keeps."""
        return cls(model, tokenizer, name or str(getattr(model, "name_or_path", "") or type(model).__name__))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_lean(self) -> bool:
        """Whether the lean decoder covers this model's family."""
        return isinstance(self.stack, DecoderStack)

    @property
    def max_length(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 0) or 1 << 20)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self.stack.new_cache(rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., d] of tokens [...], scaled where the model scales them."""
        x = self.embedding[tokens]
        return x * self._embed_scale if self._embed_scale != 1.0 else x

    def logits(self, hidden: Tensor) -> Tensor:
        """LM-head logits [..., v] of final-normed states [..., d], soft-capped where the model does."""
        logits = self._head(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, taps: tuple[int, ...] = ()) -> TargetOutput:
        """Run tokens [b, n] as the next n tokens of rows 0..b-1 of `cache`.

        `taps` are layer indices; the output of layer i is what transformers calls hidden_states[i + 1].
        """
        tapped: dict[int, Tensor] = {}

        def keep(layer: int, x: Tensor) -> Tensor:
            if layer in taps:
                tapped[layer] = x
            return x

        # Releases of transformers differ in whether the embedding module or the decoder scales; here it is always one of them.
        x = self.embed(tokens) if self.is_lean else self._embedding_module(tokens)
        hidden = self.stack.run(x, cache, keep if taps else None)
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        return TargetOutput(hidden, torch.cat([tapped[i] for i in taps], -1) if taps else None)

    @property
    def has_thinking_mode(self) -> bool:
        """Whether the chat template reads `enable_thinking`, the switch that Qwen3 introduced and others took over."""
        return "enable_thinking" in str(self.tokenizer.chat_template)

    def encode_chat(self, messages: list[dict[str, str]], *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to the assistant's turn.

        `thinking` turns the template's thinking mode on or off (None: as the template has it by itself). Raises UserError for a
        model without a template, and for one whose template has no such switch.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"{self.name} has no chat template; pass plain text (without --chat)")
        if thinking is not None and not self.has_thinking_mode:
            raise UserError(f"the chat template of {self.name} has no thinking mode to turn on or off; leave the option away")
        switch = {} if thinking is None else {"enable_thinking": thinking}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset(int(i) for i in found)


def _resolve_dtype(dtype: str, device: str) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in names:
        raise UserError(f"unknown dtype {dtype!r}; choose one of auto, {', '.join(names)}")
    return names[dtype]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
