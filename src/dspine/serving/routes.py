"""The endpoints: check a request, admit it, answer it whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jinja2
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from dspine.decoding.sampling import SamplingParams
from dspine.serving.errors import ApiError, ErrorReply
from dspine.serving.metrics import Metrics
from dspine.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from dspine.serving.replies import ChatReply, CompletionReply, Health, ModelCard, ModelList
from dspine.serving.scheduler import Group, Scheduler
from dspine.serving.settings import ServerSettings
from dspine.serving.streaming import ClientGone, EventStream, unless_gone, usage_of
from dspine.serving.token_text import TokenText
from dspine.serving.writers import Answer, ChatWriter, CompletionWriter, Writer
from dspine.targets.model import Target

CLIENT_GONE = 499  # nginx's number for it; nobody reads it but access logs


@dataclass(eq=False)
class Service:
    """What the endpoints share. The scheduler exists while the server runs."""

    target: Target
    settings: ServerSettings
    metrics: Metrics
    token_text: TokenText
    # One thread: long prompts then take turns, and the tokenizer is no object to share while it works.
    tokenizing: ThreadPoolExecutor
    scheduler: Scheduler | None = None
    started_at: int = 0

    def running(self) -> Scheduler:
        if self.scheduler is None or not self.scheduler.is_alive:
            raise ApiError(503, "the server does not decode", code="not_ready")
        return self.scheduler

    def check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            served = self.settings.model_name
            raise ApiError(404, f"there is no model {name!r} here, only {served!r}", code="model_not_found", param="model")

    async def encode(self, prompt: str | list[int] | list[dict[str, str]]) -> list[int]:
        """Token ids of a text, of token ids, or of a conversation; a long text does not hold the event loop up."""
        if isinstance(prompt, str):
            return await self._tokenize(lambda: list(self.target.tokenizer(prompt)["input_ids"]))
        return await self._tokenize(lambda: self._ids(prompt))

    def _ids(self, prompt: list[int] | list[dict[str, str]]) -> list[int]:
        messages = [turn for turn in prompt if isinstance(turn, dict)]
        if not messages:
            return [token for token in prompt if isinstance(token, int)]
        try:
            return self.target.encode_chat(messages)
        except jinja2.TemplateError as error:  # templates refuse what they do not foresee, such as two user turns in a row
            raise ApiError(400, f"the model's chat template refuses these messages: {error}", param="messages") from error

    async def _tokenize(self, work: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, work)


def build_router(service: Service) -> APIRouter:
    """All endpoints but the page."""
    router = APIRouter(responses={"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}})
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}

    @router.post("/v1/chat/completions", response_model=ChatReply, responses=stream)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        arrived_at = time.perf_counter()
        service.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
        prompt_ids = await service.encode([message.for_template() for message in body.messages])
        room = service.running().room(prompt_ids)
        limit = min(body.token_limit or service.settings.default_max_tokens, room)
        wanted = [(prompt_ids, body.sampling_params(limit, body.num_logprobs, i)) for i in range(body.num_choices)]
        name = service.settings.model_name
        writer = ChatWriter(name, service.token_text, body.num_logprobs is not None, body.include_speculation)
        return await _answer(service, request, body, wanted, writer, arrived_at)

    @router.post("/v1/completions", response_model=CompletionReply, responses=stream)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with one or several texts."""
        arrived_at = time.perf_counter()
        service.check_model(body.model)
        wanted = []
        for prompt in body.prompts:
            prompt_ids = await service.encode(prompt)
            limit = min(body.token_limit, service.running().room(prompt_ids))
            wanted += [(prompt_ids, body.sampling_params(limit, body.logprobs, i)) for i in range(body.num_choices)]
        name = service.settings.model_name
        writer = CompletionWriter(name, service.token_text, body.logprobs is not None, body.include_speculation)
        return await _answer(service, request, body, wanted, writer, arrived_at)

    def card() -> ModelCard:
        length = service.settings.max_context_tokens or service.target.max_length
        return ModelCard(id=service.settings.model_name, created=service.started_at, max_model_len=length)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[card()])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """The same by its name."""
        service.check_model(model)
        return card()

    @router.get("/health")
    async def health() -> Health:
        """200 while requests are answered."""
        service.running()
        return Health()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    wanted: list[tuple[list[int], SamplingParams]],
    writer: Writer,
    arrived_at: float,
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", code="invalid_value", param="stream_options")
    group = service.running().admit(wanted, arrived_at)
    if body.stream:
        return EventStream(group, writer, body.include_usage)
    try:
        answers = await unless_gone(request, _collect(group))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        group.cancel()
    return JSONResponse(writer.whole(answers, usage_of(group)).model_dump())


async def _collect(group: Group) -> list[Answer]:
    answers = [Answer() for _ in group.jobs]
    async for index, update in group.updates():
        answers[index].add(update)
    return answers
