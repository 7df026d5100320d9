"""Answers from an OpenAI-compatible chat endpoint: one request, with retries, and many at once.

Only the standard library's client: a chat completion is one POST of a small JSON.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from dspine.errors import UserError

RETRIES = 6
FIRST_WAIT_S = 0.5  # doubled with every further attempt
LONGEST_WAIT_S = 60.0
TIMEOUT_S = 600.0
PASSING = frozenset((408, 409, 425, 429))  # and every 5xx: worth another attempt
REFUSALS = frozenset((400, 413, 422))  # of one prompt, not of the run

Job = TypeVar("Job")
Result = TypeVar("Result")


class RefusedError(UserError):
    """The endpoint would not answer this one prompt."""


@dataclass(frozen=True)
class Completion:
    """An answer as text; `finished` says that it ended by itself, not at the token limit.

    `tokens` is the answer's length as the server's `usage` has it, None where it tells none.
    """

    text: str
    finished: bool
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """`url`: the server's base URL ("http://localhost:8000/v1") or that of its chat completions."""

    url: str
    model: str
    api_key: str = ""
    timeout_s: float = TIMEOUT_S
    retries: int = RETRIES
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            fits = False
        if not fits:
            raise UserError(f"endpoint {self.url!r} is no http address; give for example http://localhost:8000/v1")
        if not self.model:
            raise UserError("an endpoint needs the name of the model that it serves; give --model")

    @property
    def completions_url(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/chat/completions") else url + "/chat/completions"

    def complete(self, user_text: str, *, temperature: float, max_tokens: int, seed: int | None = None) -> Completion:
        """Answer one user turn. Raises RefusedError for this prompt alone, UserError where going on makes no sense."""
        messages = [{"role": "user", "content": user_text}]
        return self.chat(messages, temperature=temperature, max_tokens=max_tokens, seed=seed)

    def chat(
        self, messages: list[dict[str, str]], *, temperature: float, max_tokens: int, seed: int | None = None, **more: Any
    ) -> Completion:
        """Answer a conversation, as `complete` does; `more` are fields of the request that not every server knows."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({} if seed is None else {"seed": seed}),
            **more,
        }
        return _completion(self.post(self.completions_url, body), self.completions_url)

    def post(self, url: str, body: dict[str, Any]) -> bytes:
        """The reply to one JSON request, tried again where that helps. Raises as `complete` does."""
        wait_s = FIRST_WAIT_S
        for attempt in range(self.retries + 1):
            try:
                return self._post(url, body)
            except _TryAgainError as error:
                if attempt == self.retries:
                    failed = f"{url} failed {attempt + 1} times ({error.reason})"
                    raise UserError(f"{failed}; check the server, then run the same command again") from error
                self.sleep(min(error.wait_s or wait_s, LONGEST_WAIT_S))
                wait_s *= 2
        raise AssertionError("the loop returns or raises")

    def _post(self, url: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {_detail(error)}"
            if error.code in PASSING or error.code >= 500:
                raise _TryAgainError(reason, _retry_after(error)) from error
            if error.code in REFUSALS:
                raise RefusedError(f"{url} refused a prompt ({reason})") from error
            raise UserError(f"{url} refused the request ({reason}); check --endpoint, --model and OPENAI_API_KEY") from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise _TryAgainError(str(getattr(error, "reason", "") or error or type(error).__name__)) from error


class _TryAgainError(Exception):
    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.wait_s = reason, wait_s


def _detail(error: urllib.error.HTTPError) -> str:
    """The first line of what the server says, short."""
    try:
        with error:
            text = error.read(2000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join((text or error.reason or "no reason given").split())[:200]


def _retry_after(error: urllib.error.HTTPError) -> float:
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:  # absent, or a date
        return 0.0


def _completion(data: bytes, url: str) -> Completion:
    try:
        reply = json.loads(data)
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{url} does not answer like an OpenAI chat endpoint ({data[:80]!r}); check --endpoint") from error
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise RefusedError(f"{url} gave no text for a prompt (finish_reason {reason!r})")
    usage = reply.get("usage")
    return Completion(text, reason == "stop", usage.get("completion_tokens") if isinstance(usage, dict) else None)


def in_threads(
    work: Callable[[Job], Result], jobs: Iterator[Job], concurrency: int
) -> Iterator[tuple[Job, Result | RefusedError]]:
    """(job, result) as they come, at most `concurrency` at once; RefusedError is a result, any other error ends the run.

    The threads are daemons: an interrupted program does not wait for a server's answers.
    """
    todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Result | BaseException]] = queue.SimpleQueue()

    def serve() -> None:
        while (job := todo.get()) is not None:
            try:
                done.put((job, work(job)))
            except BaseException as error:
                done.put((job, error))

    for _ in range(concurrency):
        threading.Thread(target=serve, daemon=True).start()
    pending = 0
    try:
        while True:
            for job in islice(jobs, concurrency - pending):
                todo.put(job)
                pending += 1
            if not pending:
                return
            job, result = done.get()
            pending -= 1
            if isinstance(result, BaseException) and not isinstance(result, RefusedError):
                raise result
            yield job, result
    finally:
        for _ in range(concurrency):
            todo.put(None)
