"""A closed loop of streamed chat completions against an OpenAI-compatible server (dspine's own, SGLang, vLLM).

    async with await ServerWay.connect("sglang", "http://localhost:30000/v1", prompts, params) as way:
        answers = await way.decode(range(len(prompts)), concurrency=8, max_new_tokens=160)

Tokens are counted by the server's `usage`: under speculative decoding a chunk holds a whole round's tokens, so counting
chunks would be wrong. All requests share one event loop and its connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from typing_extensions import Self

from dspine.decoding.sampling import SamplingParams
from dspine.endpoint import ChatEndpoint
from dspine.errors import UserError
from dspine.evaluation.load import Answer, WayFacts

try:
    import httpx2
except ImportError as error:
    raise UserError('measuring a server needs the extra: pip install -e ".[eval]"') from error

TRIES = 4  # of a request that is told to come again later
FIRST_WAIT_S = 0.5  # where it is not told when; doubled with every further try
LONGEST_WAIT_S = 30.0
TIMEOUT_S = 300.0  # without any news from the server
BUSY = frozenset((429, 503))


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(BaseModel):
    """What is read of a chat.completion.chunk, or of the error that a server may send in its place."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _FailedError(Exception):
    """A request that failed, with the reason it is counted under."""


class _BusyError(Exception):
    """The server asks to try again after `wait_s` (None: it does not say when)."""

    def __init__(self, status: int, wait_s: float | None) -> None:
        super().__init__(f"HTTP {status}")
        self.wait_s = wait_s


class ServerWay:
    """One server. `prompts` are first user turns. Build it with `connect`; leaving the context closes the connections."""

    def __init__(
        self, name: str, endpoint: ChatEndpoint, client: httpx2.AsyncClient, prompts: Sequence[str], params: SamplingParams
    ) -> None:
        self.facts = WayFacts(name=name, decoder=endpoint.url, model=endpoint.model)
        self.device = torch.device("cpu")
        self._url, self._model, self._client = endpoint.completions_url, endpoint.model, client
        self._prompts, self._params = prompts, params

    @classmethod
    async def connect(
        cls, name: str, url: str, prompts: Sequence[str], params: SamplingParams, *, model: str = "", api_key: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Self:  # fmt: skip
        """Reach the server and, where `model` is empty, take the only one it serves. Raises UserError."""
        endpoint = ChatEndpoint(url=url, model=model or "unknown", api_key=api_key)
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        try:
            served = await _served_models(client, endpoint.completions_url.removesuffix("/chat/completions") + "/models")
            if not model:
                if len(served) != 1:
                    raise UserError(f"{url} serves {', '.join(served) or 'no model it names'}; choose one with --model")
                endpoint = ChatEndpoint(url=url, model=served[0], api_key=api_key)
        except BaseException:
            await client.aclose()
            raise
        return cls(name, endpoint, client, prompts, params)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def decode(
        self,
        order: Sequence[int],
        concurrency: int,
        max_new_tokens: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        jobs = iter(enumerate(order))  # shared: each worker takes the next one

        async def work() -> None:
            for place, prompt in jobs:
                answers[place] = await self._answer(prompt, max_new_tokens)
                on_answer()

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return [answers[place] for place in range(len(order))]

    async def _answer(self, prompt: int, max_new_tokens: int) -> Answer:
        body = self._body(prompt, max_new_tokens)
        started, wait_s = time.perf_counter(), FIRST_WAIT_S
        for refusals in range(TRIES):
            try:
                return await self._stream(body, started, refusals)
            except _BusyError as busy:
                if refusals + 1 == TRIES:
                    return Answer(failure=str(busy), refusals=TRIES)
                await asyncio.sleep(min(wait_s if busy.wait_s is None else busy.wait_s, LONGEST_WAIT_S))
                wait_s *= 2
            except _FailedError as failed:
                return Answer(failure=str(failed), refusals=refusals)
            except httpx2.TimeoutException:
                return Answer(failure="timeout", refusals=refusals)
            except httpx2.SSEError:
                return Answer(failure="no event stream", refusals=refusals)
            except httpx2.TransportError:
                return Answer(failure="disconnected", refusals=refusals)
        raise AssertionError("the loop returns")

    def _body(self, prompt: int, max_new_tokens: int) -> dict[str, Any]:
        params = self._params
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._prompts[prompt]}],
            "max_tokens": max_new_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if params.seed is None else {**body, "seed": params.seed + prompt}

    async def _stream(self, body: dict[str, Any], started: float, refusals: int) -> Answer:
        """One try. The last moment that counts is that of the last text or of the finish, not of the usage after it."""
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code in BUSY:
                raise _BusyError(response.status_code, _retry_after_s(response))
            if response.status_code != 200:
                raise _FailedError(f"HTTP {response.status_code}")
            text: list[str] = []
            first_at = last_at = 0.0
            finished, usage = False, None
            async for event in httpx2.EventSource(response):
                if event.data == "[DONE]":
                    break
                now, chunk = time.perf_counter(), _parse(event.data)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finished = finished or choice.finish_reason is not None
                    piece = (choice.delta.reasoning_content or "") + (choice.delta.content or "")
                    if piece or choice.finish_reason is not None:
                        text.append(piece)
                        first_at, last_at = first_at or now, now
        if not finished:
            raise _FailedError("cut off")
        if usage is None:
            raise _FailedError("no token count")
        details = usage.prompt_tokens_details
        return Answer(
            tokens=usage.completion_tokens,
            output="".join(text),
            ttft_s=first_at - started,
            elapsed_s=last_at - started,
            refusals=refusals,
            cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        )


@asynccontextmanager
async def connected(
    servers: Mapping[str, str], prompts: Sequence[str], params: SamplingParams, *, model: str = "", api_key: str = ""
) -> AsyncIterator[list[ServerWay]]:
    """A way for each server, from names to addresses; all connections are closed on leaving."""
    async with AsyncExitStack() as stack:
        ways = []
        for name, url in servers.items():
            way = await ServerWay.connect(name, url, prompts, params, model=model, api_key=api_key)
            ways.append(await stack.enter_async_context(way))
        yield ways


def _parse(data: str) -> _Chunk:
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise _FailedError("malformed chunk") from error
    if chunk.error is not None:
        raise _FailedError("error in the stream")
    return chunk


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:  # absent, or a date
        return None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


async def _served_models(client: httpx2.AsyncClient, url: str) -> list[str]:
    """Names of the models at `url`; empty where the server lists none. Raises UserError where it cannot be reached."""
    try:
        response = await client.get(url)
    except httpx2.TransportError as error:
        raise UserError(f"cannot reach {url} ({error or type(error).__name__}); is the server running?") from error
    if response.status_code in (401, 403):
        raise UserError(f"{url} refuses the key (HTTP {response.status_code}); set OPENAI_API_KEY")
    try:
        return [model.id for model in _Models.model_validate_json(response.content).data]
    except ValidationError:
        return []
