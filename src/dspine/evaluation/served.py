"""Acceptance measured through a running server: one conversation after the other, each with its own counts.

    meter = ServerMeter(OpenAIServer(ChatEndpoint(url="http://localhost:8000/v1", model="Qwen/Qwen3-8B")), drafter="dspine")
    measure(meter, benchmark, SamplingParams(temperature=0.0, max_new_tokens=1024))

Conversations are not sent at once: what a server has counted belongs to no request, so only one at a time has counts of its
own, and an interval over prompts needs those. The acceptance length does not depend on how many run together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dspine.decoding.sampling import SamplingParams
from dspine.endpoint import ChatEndpoint, RefusedError
from dspine.errors import UserError
from dspine.evaluation.acceptance import ConversationResult
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.conversations import Conversation, conversations_of, turn_seed
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.settings import RunSettings, thinking_word
from dspine.evaluation.spec_counters import SpecCounts, read_counters, settled_counters
from dspine.targets.chat import ChatFormat

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ServedAnswer:
    """One answer, its length in tokens, and what was counted while the server wrote it."""

    text: str
    tokens: int
    counts: SpecCounts


class Server(Protocol):
    """A server that answers a conversation and tells what it drafted and accepted for it."""

    @property
    def endpoint(self) -> ChatEndpoint: ...

    def answer(self, messages: Messages, params: SamplingParams, seed: int | None, thinking: bool | None) -> ServedAnswer: ...

    def chat_template_sha256(self) -> str:
        """Digest of the template that prompts are rendered with; "" where the server does it out of sight."""


@dataclass(frozen=True)
class OpenAIServer:
    """Any OpenAI-compatible server whose Prometheus page counts drafts: vLLM, dspine's own."""

    endpoint: ChatEndpoint

    @property
    def metrics_url(self) -> str:
        return _root(self.endpoint) + "/metrics"

    def answer(self, messages: Messages, params: SamplingParams, seed: int | None, thinking: bool | None) -> ServedAnswer:
        before = read_counters(self.metrics_url)
        more = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        completion = self.endpoint.chat(
            messages, temperature=params.temperature, max_tokens=params.max_new_tokens, seed=seed, top_p=params.top_p, **more
        )
        counts = settled_counters(self.metrics_url) - before
        if completion.tokens is None:
            raise UserError(f"{self.endpoint.url} tells no usage.completion_tokens, so its counters cannot be checked")
        _check_alone(counts, completion.tokens, self.metrics_url)
        return ServedAnswer(completion.text, completion.tokens, counts)

    def chat_template_sha256(self) -> str:
        return ""


@dataclass(frozen=True)
class SGLangServer:
    """SGLang's own `/generate`, whose replies carry the counts of their request; `chat` renders the prompts."""

    endpoint: ChatEndpoint
    chat: ChatFormat

    def answer(self, messages: Messages, params: SamplingParams, seed: int | None, thinking: bool | None) -> ServedAnswer:
        sampling = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens, "top_p": params.top_p}
        body = {"input_ids": self.chat.encode(self.chat.render(messages, thinking=thinking)), "sampling_params": sampling}
        if seed is not None:
            sampling["sampling_seed"] = seed
        url = _root(self.endpoint) + "/generate"
        reply = self.endpoint.post(url, body)
        try:
            data = json.loads(reply)
            return ServedAnswer(str(data["text"]), int(data["meta_info"]["completion_tokens"]), sglang_counts(data["meta_info"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{url} does not answer like SGLang while it drafts ({reply[:80]!r})") from error

    def chat_template_sha256(self) -> str:
        return str(self.chat.facts()["chat_template_sha256"])


def sglang_counts(meta: dict[str, Any]) -> SpecCounts:
    """The counts in a reply's `meta_info`. Releases differ in their names; without any, the answer's length tells them.

    A request's first token comes from its prefill, and each round adds what it accepted and one token: accepted =
    completion_tokens - 1 - rounds, less what the last round accepted beyond the answer's end. KeyError for a server that
    does not draft.
    """
    rounds = int(meta["spec_verify_ct"])
    accepted = meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num"))
    if accepted is None:
        accepted = max(int(meta["completion_tokens"]) - 1 - rounds, 0)
    drafted = meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num", 0))
    return SpecCounts(rounds=rounds, num_drafted_tokens=int(drafted), num_accepted_tokens=int(accepted))


def _root(endpoint: ChatEndpoint) -> str:
    return endpoint.completions_url.removesuffix("/chat/completions").removesuffix("/v1")


def _check_alone(counts: SpecCounts, tokens: int, url: str) -> None:
    """A round yields what it accepted and one token; only the last one may go beyond the answer's end."""
    longest = counts.num_drafted_tokens / counts.rounds + 1 if counts.rounds else 0
    if min(counts.rounds, counts.num_accepted_tokens) < 0 or counts.rounds + counts.num_accepted_tokens > tokens + longest:
        raise UserError(
            f"{url} counted {counts.rounds} rounds and {counts.num_accepted_tokens} accepted tokens during an answer of {tokens} "
            "tokens: something else is using the server (or it was restarted); measure it alone"
        )


@dataclass(frozen=True)
class ServerMeter:
    """A server as `evaluation.acceptance` measures it. `drafter` is a name for the results: a server does not tell its own."""

    server: Server
    drafter: str
    thinking: bool | None = None

    def settings(self, benchmark: Benchmark, params: SamplingParams) -> RunSettings:
        endpoint = self.server.endpoint
        return RunSettings(
            benchmark=benchmark.name,
            target=endpoint.model,
            drafter=self.drafter,
            width="server",
            chat=True,
            temperature=params.temperature,
            max_new_tokens=params.max_new_tokens,
            seed=params.seed,
            prompts=len(benchmark.conversations),
            source=benchmark.source,
            prompts_sha256=benchmark.sha256,
            decoder=f"{type(self.server).__name__} {endpoint.url}",
            thinking=thinking_word(self.thinking),
            chat_template_sha256=self.server.chat_template_sha256(),
        )

    def results(self, benchmark: Benchmark, params: SamplingParams, skip: Iterable[int]) -> Iterator[ConversationResult]:
        for conversation in conversations_of(benchmark, skip):
            yield self._result(conversation, params)

    def machine(self) -> dict[str, str | int]:
        """The client's: what the server runs on is not known here."""
        return machine_facts(torch.device("cpu"))

    def _result(self, conversation: Conversation, params: SamplingParams) -> ConversationResult:
        messages: Messages = []
        counts, tokens = SpecCounts(), 0
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            try:
                answer = self.server.answer(messages, params, turn_seed(params, conversation), self.thinking)
            except RefusedError:  # too long for the server, as a turn that leaves no room in the engine's context
                conversation.skipped_turns = len(conversation.turns) - len(conversation.answers)
                break
            messages.append({"role": "assistant", "content": answer.text})
            conversation.answers.append(answer.text)
            counts, tokens = counts + answer.counts, tokens + answer.tokens
        accepted_at = counts.accepted_at
        drafted_at = counts.drafted_at or (counts.rounds,) * len(accepted_at)
        return ConversationResult(
            index=conversation.index,
            turns=len(conversation.answers),
            skipped_turns=conversation.skipped_turns,
            tokens=tokens,
            rounds=counts.rounds,
            acceptance_length=counts.acceptance_length,
            num_drafted_tokens=counts.num_drafted_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            # Where the width is the same in every round, as on most servers: a position is drafted in all of them, and reached
            # in those that accepted the one before.
            drafted_at=drafted_at,
            reached_at=(drafted_at[0], *accepted_at[:-1]) if accepted_at else (),
            accepted_at=accepted_at,
        )
