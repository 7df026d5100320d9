"""What SGLang runs in every one of its processes: DSPINE registered, and four of its functions hooked.

SGLang logs a plugin's errors instead of raising them, and goes on without the hooks that failed. `check_hooks` is therefore
asked again where the algorithm is used: when the server's arguments are checked, and when the worker is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dspine.errors import UserError
from dspine_sglang import ALGORITHM

_DRAFT_CONFIG = "sglang.srt.utils.hf_transformers.config.get_config"
_OTHER_ALGORITHMS = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
_REQUESTS = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
_HIDDEN_STATES = "sglang.srt.speculative.spec_utils.spec_need_hidden_states"
HOOKED = (_DRAFT_CONFIG, _OTHER_ALGORITHMS, _REQUESTS, _HIDDEN_STATES)


def register() -> None:
    """The `sglang.srt.plugins` entry point."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dspine_sglang.algorithm import DSpineAlgorithm
    from dspine_sglang.draft_config import get_config
    from dspine_sglang.request_checks import validate_request

    SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=_validate_server_args, spec_class=DSpineAlgorithm
    )(_worker_class)
    HookRegistry.register(_DRAFT_CONFIG, get_config, HookType.AROUND)
    HookRegistry.register(_OTHER_ALGORITHMS, _before_speculative_arguments, HookType.BEFORE)
    HookRegistry.register(_REQUESTS, validate_request, HookType.AROUND)
    HookRegistry.register(_HIDDEN_STATES, _needs_hidden_states, HookType.AROUND)


def check_hooks() -> None:
    """Raise UserError where SGLang did not apply one of the hooks."""
    missing = [name for name in HOOKED if name not in HookRegistry._patched]
    if missing:
        raise UserError(
            f"{ALGORITHM}: SGLang did not let the plugin hook {', '.join(missing)} (its log says why); "
            "use a release that dspine-sglang supports"
        )


def _validate_server_args(server_args: Any) -> None:
    from dspine_sglang.server_args import check_server_args

    check_hooks()
    check_server_args(server_args)


def _before_speculative_arguments(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    from dspine_sglang.server_args import check_other_algorithm

    check_other_algorithm(resolving_view(server_args))


def _needs_hidden_states(original: Callable[[], bool]) -> bool:
    """Whether a round hands hidden states to the next: SGLang knows by name which algorithms do not, DFLASH among them."""
    from sglang.srt.runtime_context import get_spec

    return False if get_spec().speculative_algorithm == ALGORITHM else original()


def _worker_class(server_args: Any) -> type:
    from sglang.srt.models.registry import ModelRegistry

    from dspine_sglang.draft_config import ARCHITECTURE
    from dspine_sglang.worker import DSpineWorker

    if not ModelRegistry.is_arch_supported(ARCHITECTURE):
        ModelRegistry.register("dspine_sglang.models", strict=True)
    return DSpineWorker
