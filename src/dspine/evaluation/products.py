"""How much of decoding is matrix products: what faster kernels could win, and what is overhead around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.kernels.linear import GatedLinear, PackedLinear


def product_share(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> float | None:
    """Share of the rounds' wall time spent in matrix products of target and drafter, heads and attention included.

    None where it cannot be told: on a GPU products run behind the clock's back, and an answer may end in the prefill.
    """
    if engine.target.device.type != "cpu":
        return None
    products_s = rounds_s = 0.0
    for prompt_ids in prompts:
        engine.submit(prompt_ids, params)
        engine.step()  # the prefill, and the first round with it
        with _timed_products() as seconds:
            started = time.perf_counter()
            engine.run()
            rounds_s += time.perf_counter() - started
        products_s += sum(seconds)
    return products_s / rounds_s if products_s else None


@contextmanager
def _timed_products() -> Iterator[list[float]]:
    """Collect the seconds of every product with weights (`PackedLinear`), attention and transition cache (`matmul`)."""
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **options)
            seconds.append(time.perf_counter() - started)
            return result

        return wrapped

    calls = [(PackedLinear, "__call__"), (GatedLinear, "__call__")]
    places: list[tuple[Any, str]] = [*calls, (F, "scaled_dot_product_attention"), (torch, "matmul")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, timed(original))
    try:
        yield seconds
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
