"""A closed loop of requests: so many at once, the next one sent when one is answered. What every way of decoding offers to
`evaluation.throughput`, and the way through this process's own engine.

    way = EngineWay("dspine", target, drafter, prompts, SamplingParams(max_new_tokens=160))
    answers = await way.decode(range(len(prompts)), concurrency=8, max_new_tokens=160)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.decoding.width_policy import Width
from dspine.drafters.base import BlockDrafter
from dspine.targets.model import Target


@dataclass(frozen=True, kw_only=True)
class WayFacts:
    """How a way is told in results: `decoder` is "engine" or a server's address; `drafter` is "" where nobody can tell."""

    name: str
    decoder: str
    model: str
    drafter: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as its sender saw it. A failed one says why and counts for nothing else.

    `elapsed_s` runs from the first sending to the last token, `ttft_s` to the first; `refusals` counts replies that asked to
    try again later. `stats` are the engine's, where it is ours.
    """

    tokens: int = 0
    output: object = None  # token ids or text: equal where two answers are
    ttft_s: float = 0.0
    elapsed_s: float = 0.0
    failure: str | None = None
    refusals: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    stats: DecodeStats | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of a single token."""
        return (self.elapsed_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


class Way(Protocol):
    """A way of decoding that was given the prompts before."""

    @property
    def facts(self) -> WayFacts: ...

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        ...

    async def decode(
        self,
        order: Sequence[int],
        concurrency: int,
        max_new_tokens: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Answer the prompts numbered in `order`, `concurrency` at a time; the answers come in the same order."""
        ...


class EngineWay:
    """This process's engine. It is built anew for every concurrency, its rows as many."""

    def __init__(
        self, name: str, target: Target, drafter: BlockDrafter | None, prompts: Sequence[list[int]], params: SamplingParams,
        width: Width = "auto",
    ) -> None:  # fmt: skip
        self.facts = WayFacts(
            name=name, decoder="engine", model=target.name, drafter=drafter.config.drafter if drafter is not None else "none"
        )
        self.device = target.device
        self._target, self._prompts, self._params = target, prompts, params
        self._runner = drafter.runner(target) if drafter is not None else None
        self._width: Width = width if drafter is not None else "auto"
        self._engine: Engine | None = None

    async def decode(
        self,
        order: Sequence[int],
        concurrency: int,
        max_new_tokens: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        if self._engine is None or self._engine.max_rows != concurrency:
            self._engine = Engine(self._target, self._runner, max_rows=concurrency, width=self._width)
        engine, waiting = self._engine, deque(enumerate(order))
        params = replace(self._params, max_new_tokens=max_new_tokens)
        answers: dict[int, Answer] = {}
        live: dict[int, int] = {}  # request id -> place in `order`
        while waiting or live:
            while waiting and len(live) < concurrency:
                place, prompt = waiting.popleft()
                seed = None if params.seed is None else params.seed + prompt
                live[engine.submit(self._prompts[prompt], replace(params, seed=seed)).id] = place
            for progress in engine.step():
                request = progress.request
                if request.finish_reason is not None:
                    answers[live.pop(request.id)] = _answer(request)
                    on_answer()
        return [answers[place] for place in range(len(order))]


def engine_ways(
    target: Target, drafters: Mapping[str, BlockDrafter], prompts: Sequence[list[int]], params: SamplingParams,
    width: Width = "auto",
) -> list[EngineWay]:  # fmt: skip
    """Plain decoding, then one way for each drafter, by name."""
    plain = EngineWay("plain", target, None, prompts, params)
    return [plain, *(EngineWay(name, target, drafter, prompts, params, width) for name, drafter in drafters.items())]


def _answer(request: Request) -> Answer:
    assert request.first_token_at is not None and request.finished_at is not None
    return Answer(
        tokens=len(request.output_ids),
        output=tuple(request.output_ids),
        ttft_s=request.first_token_at - request.submitted_at,
        elapsed_s=request.finished_at - request.submitted_at,
        stats=request.stats,
    )
