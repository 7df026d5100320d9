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
        whole, inside = _cost_of_the_clock()
        rounds_s -= len(seconds) * whole
        products_s -= len(seconds) * inside
    return products_s / rounds_s if products_s > 0 else None


def _cost_of_the_clock(calls: int = 2000) -> tuple[float, float]:
    """Seconds that timing one call takes: altogether, and of these within what it reports. A round has hundreds of calls."""
    seconds: list[float] = []
    empty = _timed(lambda: None, seconds)
    started = time.perf_counter()
    for _ in range(calls):
        empty()
    return (time.perf_counter() - started) / calls, sum(seconds) / calls


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments, **options)
        seconds.append(time.perf_counter() - started)
        return result

    return wrapped


@contextmanager
def _timed_products() -> Iterator[list[float]]:
    """Collect the seconds of every product with weights (`PackedLinear`), attention and transition cache (`matmul`)."""
    seconds: list[float] = []

    calls = [(PackedLinear, "__call__"), (GatedLinear, "__call__")]
    places: list[tuple[Any, str]] = [*calls, (F, "scaled_dot_product_attention"), (torch, "matmul")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _timed(original, seconds))
    try:
        yield seconds
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
