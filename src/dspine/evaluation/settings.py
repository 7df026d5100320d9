"""What two measurements must share to be the same one: prompts, target, drafter and how they were decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.checkpoint import drafter_sha256
from dspine.drafters.config import TargetFacts
from dspine.errors import UserError
from dspine.evaluation.benchmarks import Benchmark

Thinking = Literal["on", "off", ""]  # "": as the chat template has it by itself


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The beginning of every result file. What has a default was not recorded before it had one.

    `prompts` counts conversations; `drafter` is the drafter's kind, `drafter_sha256` a digest of its config and weights;
    `decoder` is "dspine", or a server's address with its model's name; digests are the first 16 hex digits.
    """

    benchmark: str
    target: str
    drafter: str
    width: str
    chat: bool
    temperature: float
    max_new_tokens: int
    seed: int | None
    prompts: int
    source: str = ""
    prompts_sha256: str = ""
    references_sha256: str = ""
    drafter_sha256: str = ""
    decoder: str = "dspine"
    thinking: Thinking = ""
    chat_template_sha256: str = ""

    def check_same(self, found: Mapping[str, Any], file: Path) -> None:
        """Raise UserError naming the first setting in which `found`, read from `file`, is another measurement's.

        Where prompts were read from does not count: their digest does.
        """
        for field in fields(RunSettings):
            ours, theirs = getattr(self, field.name), found.get(field.name, field.default)
            if field.name != "source" and ours != theirs:
                raise UserError(
                    f"{file} was measured with {field.name} = {theirs!r}, this one has {ours!r}; choose another output, or "
                    "remove that file"
                )


def engine_settings(llm: LLM, benchmark: Benchmark, params: SamplingParams, *, chat: bool, thinking: bool | None) -> RunSettings:
    """The settings of a measurement by dspine's engine. Raises UserError where `llm` has no drafter."""
    if llm.drafter is None:
        raise UserError(f"{llm.target.name} has no drafter here; name a draft checkpoint to measure")
    return RunSettings(
        benchmark=benchmark.name,
        target=llm.target.name,
        drafter=llm.drafter.config.drafter,
        width=str(llm.width),
        chat=chat,
        temperature=params.temperature,
        max_new_tokens=params.max_new_tokens,
        seed=params.seed,
        prompts=len(benchmark.conversations),
        source=benchmark.source,
        prompts_sha256=benchmark.sha256,
        drafter_sha256=drafter_sha256(llm.drafter),
        thinking=thinking_word(thinking),
        chat_template_sha256=TargetFacts.of(llm.target).chat_template_sha256 if chat else "",
    )


def thinking_word(thinking: bool | None) -> Thinking:
    return "" if thinking is None else "on" if thinking else "off"
