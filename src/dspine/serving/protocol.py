"""Requests of OpenAI's API, as far as a target with a drafter can answer them.

What would change an answer and is not supported is refused unless it has its neutral value; nothing is silently ignored
but what never touches the text (`user`, `metadata`, `store`). Besides OpenAI's own: `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, and `stream_options.include_speculation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dspine.decoding.logprobs import MAX_ALTERNATIVES
from dspine.decoding.sampling import SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # OpenAI's default length of a plain completion


def _check_unicode(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no character and which no tokenizer takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text is no Unicode: it holds half a surrogate pair")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
StopString = Annotated[Text, Field(min_length=1, max_length=512)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="accepted and ignored")
    include_speculation: bool | None = Field(None, description="say of every piece of text whether its token was drafted")


class GenerationRequest(RequestModel):
    """What chat and plain completions have in common. null means the default everywhere."""

    model: str
    max_tokens: int | None = Field(None, ge=1, description="longest answer in tokens; cut to what the target's context holds")
    temperature: float | None = Field(None, ge=0, le=2, description="0 = greedy; 1 if not given")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 or -1 = off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="choice i of n uses seed + i")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    presence_penalty: float | None = Field(None, ge=0, le=0, description="not supported")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="not supported")
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="not supported")
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_speculation(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_speculation)

    def sampling_params(self, max_new_tokens: int, logprobs: int | None, choice: int) -> SamplingParams:
        """The engine's parameters of the n-th choice."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class TextPart(RequestModel):
    type: Literal["text"]
    text: Text


class ChatMessage(RequestModel):
    """One turn. The last fields are those that clients send back with an answer; they must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(RequestModel):
    type: Literal["text"]


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="goes before max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES, description="needs logprobs")

    response_format: TextFormat | None = Field(None, description="text only")
    tools: list[Any] | None = Field(None, max_length=0, description="not supported")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)

    echo: Literal[False] | None = Field(None, description="not supported")
    best_of: int | None = Field(None, ge=1, le=1, description="not supported")
    suffix: None = Field(None, description="not supported")

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]

    @property
    def token_limit(self) -> int:
        return self.max_tokens or COMPLETION_TOKENS


# The rest of an error's place names the types that a value was tried as.
FIELD_NAMES = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, ChatMessage, TextPart, TextFormat, StreamOptions)
    for name in model.model_fields
)
