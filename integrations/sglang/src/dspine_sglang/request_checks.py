"""Which requests are refused: those whose text would not be what plain decoding gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspine_sglang import ALGORITHM


def request_refusal(request: Any) -> str | None:
    """Why a request is refused, or None."""
    params = request.sampling_params
    # A penalty counts the tokens before a position; a block is verified at once, before any of its tokens is in the count.
    for name, value, neutral in (
        ("frequency_penalty", params.frequency_penalty, 0.0),
        ("presence_penalty", params.presence_penalty, 0.0),
        ("repetition_penalty", params.repetition_penalty, 1.0),
        ("min_new_tokens", params.min_new_tokens, 0),
    ):
        if value != neutral:
            return f"{ALGORITHM} does not support {name}={value}: a block's tokens are verified before they are counted"
    if request.return_sampling_mask:
        return f"{ALGORITHM} does not support return_sampling_mask"
    return None


def validate_request(original: Callable[..., str | None], request: Any, *arguments: Any, **options: Any) -> str | None:
    """Stands around SGLang's `validate_dflash_request`: the message that a request is aborted with, or None."""
    from sglang.srt.runtime_context import get_spec

    refusal = request_refusal(request) if get_spec().speculative_algorithm == ALGORITHM else None
    return refusal or original(request, *arguments, **options)
