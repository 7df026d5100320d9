"""Refusals, each by the argument that it names, as SGLang's own argument resolution runs into them: no engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dspine_sglang import server_args as checks
from dspine_sglang.server_args import check_server_args, chosen_width, draft_checkpoint
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

from dspine.errors import UserError

REPLAY = {
    "enable_linear_replayssm_spec": True,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_ssm_dtype": "float32",
    "linear_attn_backend": "triton",
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, "--tp-size 2"),
    ({"pp_size": 2}, "--pp-size 2"),
    ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4"),
    ({"kv_cache_dtype": "fp4_mx_block16"}, "--kv-cache-dtype fp4_mx_block16"),
    ({"speculative_accept_threshold_single": 0.9}, "acceptance thresholds"),
    ({"speculative_accept_threshold_acc": 0.9}, "acceptance thresholds"),
    ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
    ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
    ({"speculative_draft_model_quantization": "fp8"}, "unquantized"),
    ({"speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens 9"),
    ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1"),
    ({"speculative_num_draft_tokens": 4, "speculative_dflash_block_size": 8}, "differ"),
    ({"speculative_draft_model_path": None}, "needs --speculative-draft-model-path"),
    ({**REPLAY, "pp_size": 2}, "--pp-size 2"),
    ({**REPLAY, "enable_unified_memory": True}, "separate Mamba pool"),
    ({**REPLAY, "disable_radix_cache": True}, "extra_buffer, not none"),
    ({**REPLAY, "mamba_radix_cache_strategy": "no_buffer"}, "extra_buffer, not no_buffer"),
    ({**REPLAY, "mamba_radix_cache_strategy": "auto"}, "extra_buffer, not auto"),
    ({**REPLAY, "mamba_ssm_dtype": "bfloat16"}, "--mamba-ssm-dtype float32, not bfloat16"),
    ({**REPLAY, "linear_attn_decode_backend": "flashinfer"}, "--linear-attn-decode-backend triton, not flashinfer"),
    ({**REPLAY, "linear_attn_prefill_backend": "cutedsl"}, "--linear-attn-prefill-backend triton, not cutedsl"),
    ({**REPLAY, "linear_attn_backend": "flashinfer"}, "triton, not flashinfer"),
    ({**REPLAY, "enable_linear_replayssm": True}, "exclude each other"),
]


def arguments(target: Path, draft: Path | None, **changed: Any) -> ServerArgs:
    """Unresolved arguments of a server."""
    fields: dict[str, Any] = {"speculative_algorithm": "DSPINE", "speculative_draft_model_path": draft and str(draft)}
    return ServerArgs(model_path=str(target), **{**fields, **changed})


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(changed: dict[str, Any], message: str, target_folder: Path, dspine_checkpoint: Path) -> None:
    with pytest.raises(UserError) as error:
        check_server_args(arguments(target_folder, dspine_checkpoint, **changed))
    assert message in str(error.value)


@pytest.mark.parametrize("changed", [{}, {"speculative_num_draft_tokens": 4}, REPLAY, {"kv_cache_dtype": "fp8_e4m3"}])
def test_what_is_not(changed: dict[str, Any], target_folder: Path, dspine_checkpoint: Path) -> None:
    check_server_args(arguments(target_folder, dspine_checkpoint, **changed))


def test_no_cuda(monkeypatch: pytest.MonkeyPatch, target_folder: Path, dspine_checkpoint: Path) -> None:
    from sglang.srt.platforms.cpu import CpuSRTPlatform

    monkeypatch.setattr(checks, "current_platform", CpuSRTPlatform())
    with pytest.raises(UserError, match="CUDA only"):
        check_server_args(arguments(target_folder, dspine_checkpoint))


def test_a_dflash_checkpoint_is_no_dspine_checkpoint(target_folder: Path, dflash_checkpoint: Path) -> None:
    with pytest.raises(UserError, match="holds a dflash drafter"):
        check_server_args(arguments(target_folder, dflash_checkpoint))


def test_nor_is_one_of_another_program(tmp_path: Path, target_folder: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}')
    with pytest.raises(UserError, match="is no DSpine checkpoint"):
        check_server_args(arguments(target_folder, tmp_path))


def test_bidirectional_blocks_have_one_width(target_folder: Path, tmp_path: Path, dspine_checkpoint: Path) -> None:
    config = (dspine_checkpoint / "config.json").read_text().replace('"causal"', '"bidirectional"')
    (tmp_path / "config.json").write_text(config)
    check_server_args(arguments(target_folder, tmp_path))
    with pytest.raises(UserError, match="always 8 slots wide"):
        check_server_args(arguments(target_folder, tmp_path, speculative_num_draft_tokens=4))


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "dflash", "NGRAM"])
def test_sglang_refuses_a_dspine_checkpoint_under_another_algorithm(
    algorithm: str, target_folder: Path, dspine_checkpoint: Path
) -> None:
    """Through SGLang's own resolution: it is the hook that is tested."""
    given = arguments(target_folder, dspine_checkpoint, speculative_algorithm=algorithm)
    with pytest.raises(UserError, match="start it with --speculative-algorithm DSPINE"):
        resolve(given)


def test_sglang_resolves_what_the_checkpoint_says(target_folder: Path, dspine_checkpoint: Path) -> None:
    view = resolve(arguments(target_folder, dspine_checkpoint))
    assert view.speculative_algorithm == "DSPINE"
    assert view.speculative_num_draft_tokens == 8
    assert (view.speculative_num_steps, view.speculative_eagle_topk) == (1, 1)
    assert view.max_running_requests == checks.DEFAULT_MAX_RUNNING_REQUESTS


def test_sglang_runs_into_the_refusals(target_folder: Path, dspine_checkpoint: Path) -> None:
    with pytest.raises(UserError, match="--speculative-draft-window-size"):
        resolve(arguments(target_folder, dspine_checkpoint, speculative_draft_window_size=64))


def test_the_width_is_as_asked_for(target_folder: Path, dspine_checkpoint: Path) -> None:
    asked = arguments(target_folder, dspine_checkpoint, speculative_num_draft_tokens=5)
    assert chosen_width(asked, draft_checkpoint(asked)) == 5
    by_block = arguments(target_folder, dspine_checkpoint, speculative_dflash_block_size=6)
    assert chosen_width(by_block, draft_checkpoint(by_block)) == 6


def resolve(given: ServerArgs) -> Any:
    """Arguments after the whole of SGLang's resolution, as a server's are before anything is loaded."""
    given.resolve_once()
    return resolving_view(given)
