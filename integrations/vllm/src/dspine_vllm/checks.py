"""What the plugin refuses, each in one sentence, before any weight is loaded. Nothing here needs a running engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import Tensor
from vllm.config import VllmConfig

from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError
from dspine.integrations.vllm_export import SECTION, exported_shapes

SUPPORTED_RELEASES = ("0.32",)


def supports(version: str) -> bool:
    """Whether the plugin was made for and tested with this release of vLLM."""
    return version.startswith(tuple(f"{release}." for release in SUPPORTED_RELEASES))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How vLLM was started, as far as a drafter depends on it."""

    vllm_version: str
    method: str | None = "dflash"
    num_speculative_tokens: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    v2_model_runner: bool = False
    varies_num_speculative_tokens: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Launch:
        import vllm

        speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
        if speculative is None:
            raise UserError("a draft checkpoint is no model of its own; give it as --speculative-config's model")
        return cls(
            vllm_version=vllm.__version__,
            method=speculative.method,
            num_speculative_tokens=speculative.num_speculative_tokens,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            v2_model_runner=vllm_config.use_v2_model_runner,
            varies_num_speculative_tokens=speculative.uses_dynamic_speculative_decoding(),
        )


def read_config(hf_config: Any, drafter: str) -> DrafterConfig:
    """The drafter's own config inside an export's config.json; raises UserError where it is missing or another drafter's."""
    section = hf_config.to_dict().get(SECTION)
    if section is None:
        raise UserError("this draft checkpoint was not written by `dspine export --engine vllm`; export it again")
    try:
        config = DrafterConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "config"
        raise UserError(
            f"the draft checkpoint's config.json does not fit this release of dspine ({where}: {first['msg']}); export it again"
        ) from error
    if config.drafter != drafter:
        raise UserError(f"config.json names an architecture of {drafter} drafters, but describes a {config.drafter} drafter")
    return config


def check_launch(config: DrafterConfig, launch: Launch) -> None:
    """Raise UserError, with the remedy, where vLLM was started in a way that this drafter cannot be run."""
    if not supports(launch.vllm_version):
        raise UserError(
            f"dspine-vllm runs with vLLM {', '.join(SUPPORTED_RELEASES)}, not {launch.vllm_version}; install one of those"
        )
    if launch.method != "dflash":
        raise UserError(
            f'a {config.drafter} drafter was started with speculative method {launch.method!r}; use {{"method": "dflash"}}'
        )
    if launch.v2_model_runner:
        raise UserError("vLLM's V2 model runner drafts with code of its own that knows no dspine; set VLLM_USE_V2_MODEL_RUNNER=0")
    for name, size in (
        ("tensor", launch.tensor_parallel_size),
        ("pipeline", launch.pipeline_parallel_size),
    ):
        if size != 1:
            raise UserError(
                f"{name}_parallel_size = {size}: dspine's drafters run on one device; use 1, and --data-parallel-size for more"
            )
    if launch.varies_num_speculative_tokens:
        raise UserError("dspine's drafters draft a fixed number of tokens; leave num_speculative_tokens_per_batch_size away")
    _check_width(config, launch.num_speculative_tokens)


def _check_width(config: DrafterConfig, num_speculative_tokens: int) -> None:
    most = config.num_draft_tokens
    if config.attention == "bidirectional" and num_speculative_tokens != most:
        raise UserError(
            f"num_speculative_tokens = {num_speculative_tokens}: this drafter's slots see each other both ways, so it drafts "
            f"exactly {most} tokens"
        )
    if not 1 <= num_speculative_tokens <= most:
        raise UserError(f"num_speculative_tokens = {num_speculative_tokens}: this drafter drafts 1 to {most} tokens")


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the checkpoint holds exactly the drafter's tensors, each in its shape.

    vLLM's own loader would leave a missing one at random.
    """
    expected = exported_shapes(config)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        found = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which a {config.drafter} drafter has not"
        raise UserError(f"the draft checkpoint {found} ({len(missing)} tensors missing, {len(unknown)} unknown); export it again")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"the draft checkpoint's {name} has shape {tuple(tensors[name].shape)}, not {shape}; export it again")
