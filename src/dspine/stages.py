"""Which part of a round is running: engine and drafters say it, and a recorder, where one listens, takes the time.

    with stage("injection"):            # in the code that is timed; costs next to nothing while nobody records
        ...

    recorder = StageRecorder.on(device)
    with recorder.round():              # around engine.step(); what is in no stage is bookkeeping
        engine.step()
    recorder.stage_s["injection"], recorder.round_s

Times are exclusive: a stage inside another interrupts it. They are taken where one stage gives way to the next, so there is
no gap between them. (torch.profiler would time every operator; a round is hundreds of small ones, and it changes what it
measures.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, Protocol, get_args

import torch

Stage = Literal[
    "draft_backbone",  # the drafter's layers and its context's keys and values
    "injection",
    "head",  # logits of the drafted slots, with what corrects them, and their candidates
    "transition_cache",
    "selection",  # drafted tokens and q from those scores
    "verification",  # the target's forward and head
    "acceptance",
    "bookkeeping",  # the rest: width, caches' lengths, text
]
STAGES: tuple[Stage, ...] = get_args(Stage)

Mark = Any  # a point in the work, as a clock marks it


def stage(name: Stage) -> AbstractContextManager[None]:
    """The time inside belongs to `name`."""
    recorder = _recorder.get()
    return _NOT_RECORDED if recorder is None else recorder.enter(name)


class Clock(Protocol):
    """Marks points in the work and tells the seconds between two of them once the work is done."""

    name: str

    def mark(self) -> Mark: ...

    def wait(self) -> None:
        """Return when all work before the last mark is done."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float: ...


class HostClock:
    """For a CPU, where a call returns when its work is done."""

    name = "perf_counter"

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events in the device's own queue: calls return before their work has begun, so the host's clock would not see it."""

    name = "cuda_event"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000


class StageRecorder:
    """Adds up the exclusive seconds of each stage, and beside them the rounds' wall time by a clock of its own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stage_s: dict[Stage, float] = {}
        self.round_s = 0.0
        self.rounds = 0
        self._open: list[Stage] = []
        self._laps: list[tuple[Stage, Mark]] = []  # a stage, and the mark where its lap begins

    @classmethod
    def on(cls, device: torch.device) -> StageRecorder:
        """A recorder by the clock that suits `device`."""
        return cls(CudaClock(device) if device.type == "cuda" else HostClock())

    @contextmanager
    def round(self) -> Iterator[None]:
        """Record what this thread does inside as one round."""
        self.clock.wait()
        started = time.perf_counter()
        token = _recorder.set(self)
        try:
            with self.enter("bookkeeping"):
                yield
            end = self.clock.mark()
            self.clock.wait()
            self.round_s += time.perf_counter() - started
            self.rounds += 1
            self._add_up(end)
        finally:
            _recorder.reset(token)
            self._laps.clear()

    @contextmanager
    def enter(self, name: Stage) -> Iterator[None]:
        """Inside is `name`'s; afterwards the stage around it goes on."""
        self._open.append(name)
        self._laps.append((name, self.clock.mark()))
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                self._laps.append((self._open[-1], self.clock.mark()))

    def _add_up(self, end: Mark) -> None:
        ends = [mark for _, mark in self._laps[1:]] + [end]
        for (name, start), stop in zip(self._laps, ends, strict=True):
            self.stage_s[name] = self.stage_s.get(name, 0.0) + self.clock.seconds(start, stop)


_recorder: ContextVar[StageRecorder | None] = ContextVar("recorder", default=None)
_NOT_RECORDED = nullcontext()
