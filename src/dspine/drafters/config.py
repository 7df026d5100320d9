"""What a draft checkpoint says about itself: its shape and every convention that silently ruins acceptance when it differs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from dspine.errors import UserError


class DescribedTarget(Protocol):
    """What a drafter must know of its target to be checked against it: dspine's own `Target`, or an engine's model."""

    name: str
    config: Any  # the text model's transformers config
    tokenizer: Any
    hidden_size: int
    num_layers: int
    vocab_size: int
    head_weight: Tensor  # [v, d]


class TargetFacts(BaseModel):
    """The properties of a target that a drafter depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    chat_template_sha256: str = Field(description="first 16 hex digits; empty when the target has no template")
    head_norms: list[float] = Field(description="norms of eight LM-head rows: a fingerprint that survives a change of dtype")

    @classmethod
    def of(cls, target: DescribedTarget) -> TargetFacts:
        config = target.config
        template = getattr(target.tokenizer, "chat_template", None) or ""
        rows = torch.linspace(0, target.vocab_size - 1, 8).long()
        return cls(
            name=target.name,
            model_type=config.model_type,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            rope_theta=_rope_theta(config),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 0.0) or getattr(config, "layer_norm_eps", 0.0)),
            chat_template_sha256=hashlib.sha256(template.encode()).hexdigest()[:16] if template else "",
            head_norms=[round(float(n), 5) for n in target.head_weight[rows.to(target.head_weight.device)].float().norm(dim=-1)],
        )

    def mismatch(self, target: DescribedTarget) -> tuple[str, object, object] | None:
        """The first property in which `target` differs, with our value and its; None where it fits."""
        actual = TargetFacts.of(target)
        for field in type(self).model_fields:
            ours, theirs = getattr(self, field), getattr(actual, field)
            if field == "name" or ours == theirs:
                continue
            if field == "head_norms" and torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=0.02):
                continue
            if isinstance(ours, float) and abs(ours - theirs) <= 1e-6 * abs(ours):
                continue
            return field, ours, theirs
        return None

    def check(self, target: DescribedTarget) -> None:
        """Raise UserError naming both values of the first property in which `target` differs."""
        found = self.mismatch(target)
        if found is not None:
            field, ours, theirs = found
            raise UserError(
                f"this drafter was trained for {self.name} with {field} = {ours}, but {target.name} has {field} = {theirs}; "
                "use the drafter's own target, or train a drafter for this one"
            )


class DrafterConfig(BaseModel):
    """Shape and conventions of a block drafter (specification, sections 2-6). Defaults are the paper's at Qwen3-8B."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: str
    format_version: Literal[1] = 1
    target: TargetFacts
    target_layer_ids: tuple[int, ...] = Field(description="tapped layers; the output of layer i is hidden_states[i + 1]")
    block_size: int = Field(16, ge=2, description="input slots B of one draft, the anchor first")
    mask_token_id: int
    attention: Literal["causal", "bidirectional"] = "causal"
    alignment: Literal["same", "next"] = Field("same", description="slot t predicts the token at slot t, or at t + 1")
    num_layers: int = Field(5, ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: int = Field(ge=1)
    rms_norm_eps: float = Field(ge=0)
    rope_theta: float = Field(gt=0)
    qk_norm: bool = True
    options: dict[str, int | float | bool | str] = Field({}, description="what only this kind of drafter has (its `Options`)")
    draft_vocab_size: int = Field(0, ge=0, description="tokens the drafter may propose; 0 = the whole vocabulary")
    thinking: bool = Field(False, description="whether the training answers were produced in a thinking mode")
    expected_acceptance: tuple[float, ...] = Field(
        (), description="held-out P(candidate t accepted | all before it), by slot: where width 'auto' starts from"
    )

    @classmethod
    def read(cls, folder: Path) -> DrafterConfig:
        """Read `folder`/config.json; raises UserError when it is missing or not ours."""
        file = folder / "config.json"
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"{folder} is no draft checkpoint: it has no config.json") from error
        except (ValidationError, UnicodeDecodeError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "not UTF-8"}
            where = ".".join(map(str, first["loc"])) or "file"
            raise UserError(f"{file} is no draft checkpoint config ({where}: {first['msg']})") from error

    @model_validator(mode="after")
    def _check_shape(self) -> DrafterConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}")
        return self

    def check(self, target: DescribedTarget) -> None:
        """Raise UserError, naming both values, where this drafter cannot run beside `target`."""
        self.target.check(target)
        for field, value, limit, what in (
            ("the deepest of target_layer_ids", max(self.target_layer_ids, default=-1), target.num_layers - 1, "last layer"),
            ("mask_token_id", self.mask_token_id, target.vocab_size - 1, "last token id"),
            ("draft_vocab_size", self.draft_vocab_size, target.vocab_size, "vocabulary size"),
        ):
            if value > limit:
                raise UserError(
                    f"this drafter has {field} = {value}, but {target.name}'s {what} is {limit}; they do not belong together"
                )
        if self.hidden_size != target.hidden_size:
            raise UserError(f"this drafter has hidden_size = {self.hidden_size}, but {target.name} has {target.hidden_size}")
        if not self.target_layer_ids or min(*self.target_layer_ids, self.mask_token_id) < 0:
            raise UserError(
                f"target_layer_ids = {self.target_layer_ids}, mask_token_id = {self.mask_token_id}: they are indices from 0"
            )

    @property
    def num_draft_tokens(self) -> int:
        """M: a slot predicts its own token (the anchor is given: B - 1), or the next one (B)."""
        return self.block_size - 1 if self.alignment == "same" else self.block_size

    @property
    def max_width(self) -> int:
        """Tokens of one verification: the anchor and M candidates."""
        return self.num_draft_tokens + 1

    @property
    def vocabulary(self) -> int:
        """Tokens to draft from."""
        return self.draft_vocab_size or self.target.vocab_size


def default_layer_ids(num_target_layers: int, taps: int = 5) -> tuple[int, ...]:
    """ids = round(1 + k (N - 4) / (L - 1)), k = 0..L-1 (specification, section 2)."""
    if taps == 1:
        return (num_target_layers - 3,)
    return tuple(round(1 + k * (num_target_layers - 4) / (taps - 1)) for k in range(taps))


def _rope_theta(config: object) -> float:
    rope = getattr(config, "rope_parameters", None)
    return float(rope["rope_theta"]) if rope and "rope_theta" in rope else float(getattr(config, "rope_theta", 0.0))
