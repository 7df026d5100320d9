"""The public Python API: load a target with its drafter, generate, stream.

import dspine

llm = dspine.load("smollm2-135m")
result = llm.generate("Why is the sky blue?", chat=True, max_new_tokens=128)
print(result.text, result.stats.acceptance_length)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from dspine.decoding.calibration import load_calibration
from dspine.decoding.engine import Engine
from dspine.decoding.request import FinishReason, Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.decoding.width_policy import Width
from dspine.drafters.base import BlockDrafter, DraftRunner
from dspine.drafters.checkpoint import load_drafter, resolve, shipped_for
from dspine.errors import UserError
from dspine.targets.model import Target

Message = dict[str, str]
Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class GenerationResult:
    """One finished answer. `accepted[i]`: output token i was drafted and accepted (else it is the target's own)."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: FinishReason
    accepted: list[bool]
    stats: DecodeStats
    elapsed_s: float
    ttft_s: float

    @property
    def tok_per_s(self) -> float:
        """Output tokens per second of wall time, prefill included."""
        return len(self.token_ids) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @classmethod
    def of(cls, request: Request) -> GenerationResult:
        assert request.finish_reason is not None and request.finished_at is not None
        return cls(
            text=request.text.text,
            token_ids=request.output_ids,
            prompt_ids=request.prompt_ids,
            finish_reason=request.finish_reason,
            accepted=request.accepted,
            stats=request.stats,
            elapsed_s=request.finished_at - request.submitted_at,
            ttft_s=(request.first_token_at or request.finished_at) - request.submitted_at,
        )


@dataclass(frozen=True)
class StreamChunk:
    """What one round added; `text` may lag behind `token_ids`. The last chunk carries the whole `result`."""

    text: str
    token_ids: list[int]
    accepted: list[bool]
    result: GenerationResult | None = None


class LLM:
    """A target with its drafter and an engine for each way of decoding. Build it with `load` or `wrap`."""

    def __init__(self, target: Target, drafter: BlockDrafter | None = None, *, max_rows: int = 8, width: Width = "auto") -> None:
        self.target, self.drafter = target, drafter
        self._runner: DraftRunner | None = drafter.runner(target) if drafter is not None else None
        self.max_rows, self.width = max_rows, width
        self.calibration = load_calibration(drafter) if width == "confidence" and drafter is not None else None
        self._engines: dict[bool, Engine] = {}

    @classmethod
    def wrap(
        cls, model: nn.Module, tokenizer: Any, drafter: str | Path | None = "auto", *, max_rows: int = 8, width: Width = "auto"
    ) -> LLM:
        """Use a transformers model and tokenizer that the caller has already loaded (and keeps)."""
        target = Target.wrap(model, tokenizer)
        return cls(target, find_drafter(target, drafter), max_rows=max_rows, width=width)

    def engine(self, speculative: bool = True) -> Engine:
        """The engine that drafts and verifies, or the plain one (also where there is no drafter)."""
        key = speculative and self._runner is not None
        if key not in self._engines:
            self._engines[key] = Engine(
                self.target, self._runner if key else None, max_rows=self.max_rows, width=self.width if key else "auto",
                calibration=self.calibration,
            )  # fmt: skip
        return self._engines[key]

    def encode(self, prompt: Prompt, chat: bool = False) -> list[int]:
        """Token ids of a text, of a text as the user's turn (`chat`), or of a conversation (a list of messages)."""
        if not isinstance(prompt, str):
            return self.target.encode_chat(list(prompt))
        if not prompt.strip():
            raise UserError("the prompt is empty; give some text")
        if chat:
            return self.target.encode_chat([{"role": "user", "content": prompt}])
        return list(self.target.tokenizer(prompt)["input_ids"])

    @overload
    def generate(self, prompt: str, *, chat: bool = ..., speculative: bool = ..., **sampling: Any) -> GenerationResult: ...
    @overload
    def generate(
        self, prompt: Sequence[Message], *, chat: bool = ..., speculative: bool = ..., **sampling: Any
    ) -> GenerationResult: ...
    @overload
    def generate(
        self, prompt: list[str], *, chat: bool = ..., speculative: bool = ..., **sampling: Any
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Prompt | list[str], *, chat: bool = False, speculative: bool = True, **sampling: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Answer one prompt, one conversation, or a list of prompts (decoded together, results in order).

        `sampling` are the fields of `SamplingParams`. Raises UserError for impossible values and prompts.
        """
        params = _params(sampling)
        many = isinstance(prompt, list) and all(isinstance(p, str) for p in prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        encoded = [self.encode(p, chat) for p in prompts]
        engine = self.engine(speculative)
        requests: list[Request] = []
        try:
            for ids in encoded:
                requests.append(engine.submit(ids, params))  # those before a refused one are cancelled below
            while any(request.finish_reason is None for request in requests):
                engine.step()
        except BaseException:
            for request in requests:
                engine.cancel(request)
            raise
        results = [GenerationResult.of(request) for request in requests]
        return results if many else results[0]

    def stream(
        self, prompt: Prompt, *, chat: bool = False, speculative: bool = True, **sampling: Any
    ) -> Generator[StreamChunk, None, None]:
        """Answer one prompt round by round. Closing the iterator cancels the request."""
        engine = self.engine(speculative)
        request = engine.submit(self.encode(prompt, chat), _params(sampling))
        tokens = characters = 0
        try:
            while True:
                # Read from the request, not from `step`: other streams and `generate` may step this engine too.
                if tokens == len(request.output_ids) and request.finish_reason is None:
                    engine.step()
                    continue
                done = request.finish_reason is not None
                text = request.text.certain[characters:]
                ids, accepted = request.output_ids[tokens:], request.accepted[tokens:]
                tokens, characters = tokens + len(ids), characters + len(text)
                yield StreamChunk(text, ids, accepted, GenerationResult.of(request) if done else None)
                if done:
                    return
        finally:
            engine.cancel(request)


def load(
    name: str = "smollm2-135m",
    *,
    drafter: str | Path | None = "auto",
    device: str | None = None,
    dtype: str = "auto",
    max_rows: int = 8,
    width: Width = "auto",
) -> LLM:
    """Load a target and its drafter.

    `name`: hub id, local folder, .gguf file or "smollm2-135m". `drafter`: a checkpoint folder, the name of a shipped one,
    None for plain decoding, or "auto": the shipped DSpine drafter where there is one. `width`: slots per verification
    including the anchor, "auto" to let measured costs decide, or "confidence" to let them decide anew for every draft by how sure
    the drafter is of it (after `dspine calibrate`; without, the whole block is verified). Raises UserError with the remedy.
    """
    target = Target.load(name, device=device, dtype=dtype)
    return LLM(target, find_drafter(target, drafter), max_rows=max_rows, width=width)


def find_drafter(target: Target, drafter: str | Path | None) -> BlockDrafter | None:
    """Load the drafter that `load` describes."""
    if drafter is None:
        return None
    if str(drafter) == "auto":
        folder = shipped_for(target, "dspine")
        return load_drafter(folder, target) if folder is not None else None
    return load_drafter(resolve(str(drafter), target), target)


def _params(sampling: dict[str, Any]) -> SamplingParams:
    unknown = set(sampling) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise UserError(f"unknown sampling parameter {sorted(unknown)[0]!r}; choose from: {known}")
    return SamplingParams(**sampling)
