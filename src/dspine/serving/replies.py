"""Replies of OpenAI's API. `speculation` is ours: what drafting did for the answer, beside its usage and its pieces."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Finish = Literal["stop", "length"]


def _is_none(value: object) -> bool:
    return value is None


class Speculation(BaseModel):
    """Counts as `DecodeStats` defines them; acceptance_length (tau) includes the target's own token of every round."""

    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: Speculation


class Piece(BaseModel):
    """The text of one token; `accepted`: it was drafted, else the target wrote it itself."""

    text: str
    accepted: bool


class SpeculationDelta(Speculation):
    """The counts so far, and the pieces that this chunk's text consists of."""

    pieces: list[Piece]


class TokenChance(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenChances(TokenChance):
    top_logprobs: list[TokenChance]


class ChatLogprobs(BaseModel):
    content: list[TokenChances]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Reply(BaseModel):
    """What every reply and every chunk of one begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatReply(Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = Field(None, exclude_if=_is_none)
    content: str | None = Field(None, exclude_if=_is_none)


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    speculation: SpeculationDelta | None = Field(None, exclude_if=_is_none)


class ChatChunk(Reply):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    speculation: SpeculationDelta | None = Field(None, exclude_if=_is_none)


class CompletionReply(Reply):
    """Chunks of a streamed completion look the same; `usage` then comes with the last."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dspine"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
