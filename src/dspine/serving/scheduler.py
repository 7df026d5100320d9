"""Who may decode and who must wait or come back later; groups of jobs that answer one HTTP request.

scheduler = Scheduler(engine, settings, metrics)       # in a running event loop
group = scheduler.admit(prompts, params)               # ApiError 429 beyond the limit
try:
    async for index, update in group.updates(): ...    # ApiError 504 after the time limit
finally:
    group.cancel()
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.serving.engine_thread import EngineThread, Event, Job, Update
from dspine.serving.errors import ApiError
from dspine.serving.metrics import Metrics
from dspine.serving.settings import ServerSettings

LONGEST_RETRY_S = 60
SMOOTHING = 0.1  # weight of the latest answer in the mean time of an answer


class Scheduler:
    """Admission on the event loop, decoding in the engine thread."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
        self._engine, self._settings, self._metrics = engine, settings, metrics
        self._unfinished: dict[Job, float] = {}  # with the time each was admitted
        self._mean_answer_s = 1.0
        self._thread = EngineThread(engine, asyncio.get_running_loop(), self._on_event)
        metrics.watch(running=lambda: engine.num_live, waiting=lambda: self.num_waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_waiting(self) -> int:
        return max(len(self._unfinished) - self._engine.num_live, 0)

    def room(self, prompt_ids: list[int]) -> int:
        """How many tokens may answer a prompt. Raises UserError or ApiError where it cannot be decoded."""
        room = self._engine.check_prompt(prompt_ids)
        limit = self._settings.max_context_tokens
        if limit is not None:
            room = min(room, limit - len(prompt_ids))
            if room < 1:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt_ids)} tokens, but this server takes {limit} with the answer; shorten it",
                    code="context_length_exceeded",
                )
        return room

    def admit(self, wanted: Sequence[tuple[list[int], SamplingParams]], arrived_at: float) -> Group:
        """Queue the jobs of one request. Raises ApiError 429 where too many wait already."""
        capacity = self._engine.max_rows + self._settings.max_queue
        if len(wanted) > capacity:
            raise ApiError(400, f"one request may ask for {capacity} answers, not {len(wanted)}", code="too_many_answers")
        if len(self._unfinished) + len(wanted) > capacity:
            self._metrics.refused.inc()
            raise ApiError(
                429, "too many requests are waiting; try again later", code="queue_full",
                headers={"Retry-After": str(self._retry_after_s())},
            )  # fmt: skip
        group = Group(self, wanted, arrived_at, self._settings.request_timeout_s)
        for job in group.jobs:
            self._unfinished[job] = arrived_at
            self._thread.submit(job)
        return group

    def cancel(self, job: Job) -> None:
        if job in self._unfinished:
            self._thread.cancel(job)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)

    def _retry_after_s(self) -> int:
        """About how long the queue takes to make room for one more."""
        turns = (self.num_waiting + 1) / self._engine.max_rows
        return min(max(math.ceil(turns * self._mean_answer_s), 1), LONGEST_RETRY_S)

    def _on_event(self, event: Event) -> None:
        job, content = event
        if isinstance(content, Update) and content.finish_reason is None:
            job.deliver(content)
            return
        arrived_at = self._unfinished.pop(job)
        if isinstance(content, Update):
            self._mean_answer_s += SMOOTHING * (time.perf_counter() - arrived_at - self._mean_answer_s)
        if job.request is not None:
            failed = isinstance(content, Exception)
            self._metrics.record(job.request, arrived_at, "error" if failed else job.request.finish_reason)
        if content is not None:
            job.deliver(content)


class Group:
    """The jobs that answer one request together: its prompts, each as often as it wants choices."""

    def __init__(
        self, scheduler: Scheduler, wanted: Sequence[tuple[list[int], SamplingParams]], arrived_at: float, timeout_s: float
    ) -> None:
        self._scheduler, self._timeout_s = scheduler, timeout_s
        self._deadline = arrived_at + timeout_s
        self._inbox: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self.jobs = [Job(prompt_ids, params, partial(self._receive, index)) for index, (prompt_ids, params) in enumerate(wanted)]

    def _receive(self, index: int, content: Update | Exception) -> None:
        self._inbox.put_nowait((index, content))

    @property
    def remaining_s(self) -> float:
        return self._deadline - time.perf_counter()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(index of the job, what it got), until all have ended. Raises ApiError when time is up or a round failed."""
        unfinished = len(self.jobs)
        while unfinished:
            try:
                index, content = await asyncio.wait_for(self._inbox.get(), max(self.remaining_s, 0))
            except asyncio.TimeoutError:
                message = f"the answer took longer than {self._timeout_s:g} s, the most this server allows"
                raise ApiError(504, message, code="request_timeout") from None
            if isinstance(content, Exception):
                raise ApiError(500, "decoding failed; the server's log says why", code="internal_error") from content
            unfinished -= content.finish_reason is not None
            yield index, content

    def cancel(self) -> None:
        """Give up what is unfinished; harmless where nothing is."""
        for job in self.jobs:
            self._scheduler.cancel(job)

    def stats(self) -> DecodeStats:
        """What decoding did for all jobs, once they have ended."""
        total = DecodeStats()
        for job in self.jobs:
            assert job.request is not None
            total.merge(job.request.stats)
        return total
