"""From what the engine gave to OpenAI's replies, whole or in chunks: one writer per endpoint, one of them per request."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from dspine import __version__
from dspine.decoding.logprobs import TokenLogprobs
from dspine.serving.engine_thread import Update
from dspine.serving.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Finish,
    Piece,
    SpeculationDelta,
    TokenChance,
    TokenChances,
    Usage,
)
from dspine.serving.token_text import TokenText, named, shown


@dataclass
class Answer:
    """An answer put together from its updates. An end token is no text, so its log-probability is left out."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        end = len(update.token_ids) - (update.finish_reason == "stop")
        self.pieces += update.pieces
        self.token_ids += update.token_ids[:end]
        self.logprobs += update.logprobs[:end]
        if update.finish_reason is not None:
            self.finish = "length" if update.finish_reason == "length" else "stop"

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Writer(Protocol):
    """How one endpoint words its replies."""

    def opening(self, index: int) -> BaseModel | None:
        """A choice's chunk before its first text."""

    def chunk(self, index: int, update: Update) -> BaseModel:
        """What a round gave a choice."""

    def closing(self, usage: Usage) -> BaseModel:
        """The last chunk, for those who asked for usage."""

    def whole(self, answers: list[Answer], usage: Usage) -> BaseModel:
        """The reply that is not streamed."""


@dataclass
class _Base:
    model: str
    token_text: TokenText
    with_logprobs: bool
    with_speculation: bool
    _head: dict[str, Any] = field(init=False)

    def _begin(self, prefix: str) -> None:
        fingerprint = f"dspine-{__version__}"
        identity = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": identity, "created": int(time.time()), "model": self.model, "system_fingerprint": fingerprint}

    def _speculation(self, update: Update) -> SpeculationDelta | None:
        if not self.with_speculation:
            return None
        pairs = zip(update.pieces, update.accepted, strict=True)
        return SpeculationDelta(
            rounds=update.rounds,
            drafted_tokens=update.num_drafted_tokens,
            accepted_tokens=update.num_accepted_tokens,
            acceptance_length=update.acceptance_length,
            pieces=[Piece(text=text, accepted=accepted) for text, accepted in pairs],
        )

    def _chance(self, token: int, logprob: float) -> TokenChance:
        raw = self.token_text.of(token)
        return TokenChance(token=shown(raw), logprob=logprob, bytes=list(raw))


@dataclass
class ChatWriter(_Base):
    """chat.completion and its chunks."""

    def __post_init__(self) -> None:
        self._begin("chatcmpl")

    def opening(self, index: int) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))

    def chunk(self, index: int, update: Update) -> ChatChunk:
        answer = Answer()
        answer.add(update)
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=answer.text or None),
            logprobs=self._logprobs(answer),
            finish_reason=answer.finish,
            speculation=self._speculation(update),
        )
        return self._chunk(choice)

    def closing(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head, choices=[], usage=usage)

    def whole(self, answers: list[Answer], usage: Usage) -> ChatReply:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finish is not None
            message = AssistantMessage(content=answer.text)
            choices.append(ChatChoice(index=index, message=message, logprobs=self._logprobs(answer), finish_reason=answer.finish))
        return ChatReply(**self._head, choices=choices, usage=usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._head, choices=[choice])

    def _logprobs(self, answer: Answer) -> ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        content = []
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            chance = self._chance(token, entry.logprob)
            top = [self._chance(*alternative) for alternative in entry.alternatives]
            content.append(TokenChances(**chance.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)


@dataclass
class CompletionWriter(_Base):
    """text_completion; its chunks have the same shape."""

    _offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice so far

    def __post_init__(self) -> None:
        self._begin("cmpl")

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, update: Update) -> CompletionReply:
        answer = Answer()
        answer.add(update)
        return CompletionReply(**self._head, choices=[self._choice(index, answer, self._speculation(update))], usage=None)

    def closing(self, usage: Usage) -> CompletionReply:
        return CompletionReply(**self._head, choices=[], usage=usage)

    def whole(self, answers: list[Answer], usage: Usage) -> CompletionReply:
        choices = [self._choice(index, answer, None) for index, answer in enumerate(answers)]
        return CompletionReply(**self._head, choices=choices, usage=usage)

    def _choice(self, index: int, answer: Answer, speculation: SpeculationDelta | None) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=answer.text,
            logprobs=self._logprobs(index, answer) if self.with_logprobs else None,
            finish_reason=answer.finish,
            speculation=speculation,
        )

    def _logprobs(self, index: int, answer: Answer) -> CompletionLogprobs:
        offsets = [self._offsets.get(index, 0)]
        for piece in answer.pieces:
            offsets.append(offsets[-1] + len(piece))
        self._offsets[index] = offsets[-1]
        return CompletionLogprobs(
            tokens=[self._name(token) for token in answer.token_ids],
            token_logprobs=[entry.logprob for entry in answer.logprobs],
            top_logprobs=[{self._name(token): logprob for token, logprob in entry.alternatives} for entry in answer.logprobs],
            text_offset=offsets[: len(answer.token_ids)],
        )

    def _name(self, token: int) -> str:
        return named(self.token_text.of(token))
