"""Two ways of waiting for an answer that end when the client goes away: an event stream, and one reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspine.serving.errors import ApiError, unexpected
from dspine.serving.replies import Usage
from dspine.serving.scheduler import Group
from dspine.serving.writers import Writer

SLOW_READER_S = 30.0  # beyond the request's own time limit, for a client to read what has been written

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody is there to read the reply."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled (and ClientGone raised) when the client closes its connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of a group. Whatever ends the response, the group's unfinished jobs are cancelled."""

    def __init__(self, group: Group, writer: Writer, usage: bool) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter: nginx must not collect them
        super().__init__(_events(group, writer, usage), media_type="text/event-stream", headers=headers)
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.move_on_after(self._group.remaining_s + SLOW_READER_S):
                await super().__call__(scope, receive, send)
        finally:
            self._group.cancel()


async def _events(group: Group, writer: Writer, usage: bool) -> AsyncIterator[str]:
    """Chunks as they come, then [DONE]; after an error, the error instead of it."""
    try:
        for index in range(len(group.jobs)):
            opening = writer.opening(index)
            if opening is not None:
                yield _event(opening)
        async for index, update in group.updates():
            yield _event(writer.chunk(index, update))
        if usage:
            yield _event(writer.closing(usage_of(group)))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.reply())
    except Exception as error:
        yield _event(unexpected(error).reply())


def _event(data: BaseModel) -> str:
    return f"data: {data.model_dump_json()}\n\n"


def usage_of(group: Group) -> Usage:
    """Token counts of a group that has ended. A prompt counts once, however many choices it has."""
    stats = group.stats()
    prompts = {id(job.prompt_ids): len(job.prompt_ids) for job in group.jobs}
    prompt_tokens = sum(prompts.values())
    return Usage.model_validate(
        {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": stats.tokens,
            "total_tokens": prompt_tokens + stats.tokens,
            "speculation": {
                "rounds": stats.rounds,
                "drafted_tokens": stats.num_drafted_tokens,
                "accepted_tokens": stats.num_accepted_tokens,
                "acceptance_length": stats.acceptance_length,
            },
        }
    )
