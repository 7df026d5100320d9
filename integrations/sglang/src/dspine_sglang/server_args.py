"""What a server may be started with: refusals, each saying what to change, and the arguments that follow from the checkpoint.

`args` is SGLang's ServerArgs or the stand-in that it gives to plugins: fields are read and assigned by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.platforms import current_platform

from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError
from dspine_sglang import ALGORITHM
from dspine_sglang.draft_config import drafter_kind

DEFAULT_MAX_RUNNING_REQUESTS = 48  # SGLang's own for its speculative algorithms
FP4_CACHES = ("nvfp4", "fp4_mx_block16")
Refusal = tuple[bool, str]  # whether it applies, and what is said


def refuse(refusals: Iterator[Refusal]) -> None:
    for applies, message in refusals:
        if applies:
            raise UserError(f"{ALGORITHM}: {message}")


def check_server_args(args: Any) -> None:
    """Refuse what DSPINE cannot do exactly or has never been run with. Raises UserError."""
    refuse(_server_refusals(args))
    if args.enable_linear_replayssm_spec:
        refuse(_replay_refusals(args))
    refuse(_width_refusals(args, draft_checkpoint(args)))


def check_other_algorithm(args: Any) -> None:
    """Refuse a DSpine checkpoint under another algorithm, which would run it as something that it is not."""
    path, algorithm = args.speculative_draft_model_path, args.speculative_algorithm
    if path is not None and algorithm is not None and algorithm.upper() != ALGORITHM and drafter_kind(path) == "dspine":
        raise UserError(f"{path} is a DSpine checkpoint; start it with --speculative-algorithm {ALGORITHM}, not {algorithm}")


def complete_server_args(args: Any) -> None:
    """Fill in what the checkpoint says, and what SGLang's accounting of a chain asks for."""
    args.speculative_num_draft_tokens = chosen_width(args, draft_checkpoint(args))
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def draft_checkpoint(args: Any) -> DrafterConfig:
    """The config of the server's draft checkpoint. Raises UserError where it is no local DSpine checkpoint."""
    path = args.speculative_draft_model_path
    if path is None:
        raise UserError(f"{ALGORITHM} needs --speculative-draft-model-path, the folder of a DSpine checkpoint")
    kind = drafter_kind(path)
    if kind is None:
        raise UserError(
            f"{path} is no DSpine checkpoint, which is a local folder with dspine's config.json and model.safetensors; "
            "other drafters, plain DFlash among them, are started with their own --speculative-algorithm"
        )
    if kind != "dspine":
        raise UserError(f"{path} holds a {kind} drafter; --speculative-algorithm {ALGORITHM} runs DSpine drafters only")
    return DrafterConfig.read(Path(path))


def chosen_width(args: Any, config: DrafterConfig) -> int:
    """Slots of a block, the anchor first: as asked for, else the checkpoint's."""
    asked = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    return int(asked or config.max_width)


def _has_device() -> bool:
    if current_platform.is_out_of_tree():
        return bool(current_platform.supports_speculative_algorithm(ALGORITHM))
    return bool(current_platform.is_cuda())


def _server_refusals(args: Any) -> Iterator[Refusal]:
    yield not _has_device(), "it runs on CUDA only"
    yield args.tp_size != 1, f"--tp-size {args.tp_size}: the drafter is not sharded; use 1, and --dp-size for more GPUs"
    yield args.pp_size != 1, f"--pp-size {args.pp_size}: drafted blocks do not cross pipeline stages; use 1"
    yield (
        args.speculative_draft_window_size is not None,
        "--speculative-draft-window-size: DSpine drafters are trained with the whole context; leave it away",
    )
    yield (
        args.disaggregation_mode != "null",
        f"--disaggregation-mode {args.disaggregation_mode}: the drafter's context is not transferred; leave it away",
    )
    yield (
        args.kv_cache_dtype in FP4_CACHES,
        f"--kv-cache-dtype {args.kv_cache_dtype}: the accepted part of a block cannot be written to a 4-bit cache; "
        "use auto, bfloat16 or an fp8 type",
    )
    thresholds = (args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc)
    yield thresholds != (1.0, 1.0), f"acceptance thresholds {thresholds} would change what is sampled; leave them at 1.0"
    yield (
        args.enable_deterministic_inference,
        "--enable-deterministic-inference: verification does not draw from per-request seeds; leave it away",
    )
    yield (
        args.skip_tokenizer_init,
        "--skip-tokenizer-init: the drafter is checked against the target's chat template; leave it away",
    )
    quantization = args.speculative_draft_model_quantization
    yield quantization not in (None, "unquant"), f"the drafter runs unquantized, not in {quantization}; leave it away"


def _replay_refusals(args: Any) -> Iterator[Refusal]:
    """Of --enable-linear-replayssm-spec, for targets with linear attention (pp_size is refused for every target)."""
    flag = "--enable-linear-replayssm-spec"
    yield args.enable_unified_memory, f"{flag} needs the separate Mamba pool; leave --enable-unified-memory away"
    yield (
        args.disable_radix_cache or args.mamba_radix_cache_strategy != "extra_buffer",
        f"{flag} needs the radix cache with --mamba-radix-cache-strategy extra_buffer, "
        f"not {'none' if args.disable_radix_cache else args.mamba_radix_cache_strategy}",
    )
    yield (
        args.mamba_ssm_dtype not in (None, "float32"),  # without one, replay sets float32 itself
        f"{flag} needs --mamba-ssm-dtype float32, not {args.mamba_ssm_dtype}",
    )
    for option, backend in (
        ("decode", args.linear_attn_decode_backend or args.linear_attn_backend),
        ("prefill", args.linear_attn_prefill_backend or args.linear_attn_backend),
    ):
        yield backend != "triton", f"{flag} needs --linear-attn-{option}-backend triton, not {backend}"
    yield args.enable_linear_replayssm, f"{flag} and --enable-linear-replayssm exclude each other; leave one away"


def _width_refusals(args: Any, config: DrafterConfig) -> Iterator[Refusal]:
    width = chosen_width(args, config)
    block = args.speculative_dflash_block_size
    yield block not in (None, width), f"--speculative-dflash-block-size {block} and --speculative-num-draft-tokens {width} differ"
    yield (
        not 2 <= width <= config.max_width,
        f"--speculative-num-draft-tokens {width}: this drafter's blocks have 2 to {config.max_width} slots, the anchor included",
    )
    yield (
        config.attention == "bidirectional" and width != config.block_size,
        f"--speculative-num-draft-tokens {width}: bidirectional blocks are always {config.block_size} slots wide",
    )
