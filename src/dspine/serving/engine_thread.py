"""The one thread that steps the engine; asyncio hands it jobs and gets what every round gave them.

Commands go in through a thread-safe queue and are taken between rounds, so requests join and leave a running batch.
Events come out in one call to the event loop per round. Nothing else touches the engine.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dspine.decoding.engine import Engine
from dspine.decoding.logprobs import TokenLogprobs
from dspine.decoding.request import FinishReason, Progress, Request
from dspine.decoding.sampling import SamplingParams

log = logging.getLogger("dspine.serving")


@dataclass(frozen=True)
class Update:
    """What one round gave a job, and its counts so far: copies, for another thread to read at leisure."""

    token_ids: list[int]
    accepted: list[bool]
    pieces: list[str]  # text by token
    logprobs: list[TokenLogprobs]
    rounds: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    acceptance_length: float
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, progress: Progress) -> Update:
        stats = progress.request.stats
        return cls(
            progress.token_ids, progress.accepted, progress.pieces, progress.logprobs,
            stats.rounds, stats.num_drafted_tokens, stats.num_accepted_tokens, stats.acceptance_length,
            progress.request.finish_reason,
        )  # fmt: skip


@dataclass(eq=False)
class Job:
    """One answer to be decoded. `request` belongs to the engine thread until the job has ended."""

    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Update | Exception], None]  # called on the event loop
    request: Request | None = None


@dataclass(frozen=True)
class _Cancel:
    job: Job


Event = tuple[Job, Update | Exception | None]  # None: cancelled


class EngineThread:
    """Runs an engine until `close`. `on_event` is called on the event loop, in order, for everything that happens."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        self._engine, self._loop, self._on_event = engine, loop, on_event
        self._commands: queue.SimpleQueue[Job | _Cancel | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by request id
        self._thread = threading.Thread(target=self._run, name="dspine-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Decode a job whose prompt `Engine.check_prompt` has passed."""
        self._commands.put(job)

    def cancel(self, job: Job) -> None:
        """Give a submitted job up; it ends before the next round."""
        self._commands.put(_Cancel(job))

    def close(self) -> None:
        """Stop after the running round and wait for the thread; what is unfinished is cancelled."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_commands():
            if self._engine.has_work:
                self._post(self._step())
        for request in [job.request for job in self._jobs.values()]:
            assert request is not None
            self._engine.cancel(request)

    def _take_commands(self) -> bool:
        """Carry out what has been asked for since the last round, waiting for it where there is nothing else to do."""
        events: list[Event] = []
        try:
            command = self._commands.get(block=not self._engine.has_work)
            while command is not None:
                events += self._carry_out(command)
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            return True
        finally:
            self._post(events)

    def _carry_out(self, command: Job | _Cancel) -> list[Event]:
        if isinstance(command, Job):
            try:
                command.request = self._engine.submit(command.prompt_ids, command.params)
            except Exception as error:
                return [(command, error)]
            self._jobs[command.request.id] = command
            return []
        request = command.job.request
        if request is None or self._jobs.pop(request.id, None) is None:
            return []  # it has ended meanwhile
        self._engine.cancel(request)
        return [(command.job, None)]

    def _step(self) -> list[Event]:
        events: list[Event] = []
        try:
            for progress in self._engine.step():
                events.append(self._event(progress))
        except Exception as error:  # one round's failure must not end the server
            log.error("a decoding round failed; the requests in it are given up", exc_info=error)
            live = self._engine.live_requests
            requests = [job.request for job in self._jobs.values() if job.request is not None]
            # Those that ended before it failed have lost their last tokens with it.
            events += [self._give_up(r, error) for r in requests if r in live or r.finish_reason is not None]
        return events

    def _give_up(self, request: Request, error: Exception) -> Event:
        self._engine.cancel(request)
        return self._jobs.pop(request.id), error

    def _event(self, progress: Progress) -> Event:
        number, update = progress.request.id, Update.of(progress)
        job = self._jobs[number] if update.finish_reason is None else self._jobs.pop(number)
        return job, update

    def _post(self, events: list[Event]) -> None:
        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_over, events)

    def _hand_over(self, events: list[Event]) -> None:
        for event in events:
            self._on_event(event)
