"""Requests to a streaming server: what is timed and counted, and every way in which a server can fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dspine.decoding.sampling import SamplingParams
from dspine.errors import UserError
from dspine.evaluation import load_server
from dspine.evaluation.load import Answer
from dspine.evaluation.load_server import ServerWay, connected

from .stub_server import Behaviour, Handler, StubServer, answering, piece, refusing, streaming, usage

Serve = Callable[..., StubServer]
PROMPTS = ["one", "two", "three"]
PARAMS = SamplingParams(temperature=0.5, max_new_tokens=9, seed=40)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[StubServer] = []

    def start(*script: Behaviour, **options: Any) -> StubServer:
        server = StubServer(*script, **options)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: StubServer, order: tuple[int, ...] = (0,), concurrency: int = 1, **options: Any) -> list[Answer]:
    async def run() -> list[Answer]:
        async with await ServerWay.connect("stub", server.url, PROMPTS, PARAMS, **options) as way:
            return await way.decode(order, concurrency, PARAMS.max_new_tokens)

    return asyncio.run(run())


def test_a_request_is_a_streamed_chat_completion_that_asks_for_its_usage(serve: Serve) -> None:
    server = serve(answering("Hi you", tokens=7))
    (answer,) = ask(server, (2,), api_key="secret")
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "key": "Bearer secret",
            "model": "tiny",
            "messages": [{"role": "user", "content": "three"}],
            "max_tokens": 9,
            "temperature": 0.5,
            "seed": 42,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert (answer.tokens, answer.output, answer.failure, answer.refusals) == (7, "Hiyou", None, 0)


def test_tokens_are_the_servers_count_not_the_chunks(serve: Serve) -> None:
    """Seven tokens in two chunks: a round of speculative decoding sends several at once."""
    (answer,) = ask(serve(answering("Hi you", tokens=7)))
    assert answer.tokens == 7
    assert answer.tpot_s == pytest.approx((answer.elapsed_s - answer.ttft_s) / 6)


def test_a_slow_server_is_timed_from_text_to_text(serve: Serve) -> None:
    """The role alone is no token, and what comes after the finish is no part of the answer."""

    def behave(handler: Handler) -> None:
        handler.begin()
        for wait_s, data in ((0.0, piece(None, role="assistant")), (0.2, piece("a")), (0.1, piece("b", "stop")), (2.0, usage(2))):
            time.sleep(wait_s)
            handler.event(data)
        handler.event("[DONE]")
        handler.end()

    (answer,) = ask(serve(behave))
    assert answer.ttft_s >= 0.2
    assert 0.05 <= answer.elapsed_s - answer.ttft_s < 1.9


def test_thoughts_are_part_of_the_answer(serve: Serve) -> None:
    (answer,) = ask(serve(streaming(piece(None, reasoning_content="hm "), piece("yes"), piece(None, "stop"), usage(4))))
    assert answer.output == "hm yes"


def test_an_answer_without_text_is_one(serve: Serve) -> None:
    (answer,) = ask(serve(streaming(piece(None, "stop"), usage(1))))
    assert (answer.failure, answer.tokens, answer.output, answer.tpot_s) == (None, 1, "", None)
    assert answer.ttft_s == answer.elapsed_s > 0


def test_cached_prompt_tokens_are_noticed(serve: Serve) -> None:
    assert ask(serve(answering(cached=4)))[0].cached_tokens == 4
    assert ask(serve(answering()))[0].cached_tokens == 0


def test_so_many_requests_are_under_way_and_answers_keep_their_order(serve: Serve) -> None:
    server = serve(*(answering(word, before_s=0.05) for word in ("a", "b", "c", "d", "e")))
    heard: list[int] = []

    async def run() -> list[Answer]:
        async with connected({"stub": server.url}, PROMPTS, PARAMS) as (way,):
            return await way.decode((0, 1, 2, 0, 1), 2, 9, lambda: heard.append(1))

    answers = asyncio.run(run())
    assert server.most_under_way == 2
    assert len(heard) == 5
    contents = [request["messages"][0]["content"] for request in server.requests]
    assert sorted(contents) == ["one", "one", "three", "two", "two"]
    said = {index: "abcde"[index] for index in range(5)}  # the server answers in the order in which requests reach it
    first_two = {answers[0].output, answers[1].output}
    assert first_two == {said[0], said[1]}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (streaming(piece("a"), piece("b"), complete=False), "disconnected"),
        (lambda handler: handler.hang_up(), "disconnected"),
        (streaming(piece("a"), piece("b")), "cut off"),
        (streaming(piece("a"), '{"choices": [{"delta"'), "malformed chunk"),
        (streaming(piece("a"), '"text"'), "malformed chunk"),
        (streaming(piece("a"), {"choices": [{"delta": 3}]}), "malformed chunk"),
        (streaming(piece("a"), {"error": {"message": "out of memory"}}), "error in the stream"),
        (streaming(piece("a"), piece("", "stop")), "no token count"),
        (lambda handler: handler.reply(200, {"choices": []}), "no event stream"),
        (refusing(500), "HTTP 500"),
        (refusing(400), "HTTP 400"),
    ],
)
def test_a_failed_request_says_why_and_the_next_one_goes_on(behaviour: Behaviour, reason: str, serve: Serve) -> None:
    failed, good = ask(serve(behaviour, answering()), (0, 1))
    assert (failed.failure, failed.tokens) == (reason, 0)
    assert (good.failure, good.tokens) == (None, 7)


def test_a_server_that_falls_silent_is_given_up(serve: Serve) -> None:
    (answer,) = ask(serve(streaming(piece("a"), piece("b", "stop"), usage(2), between_s=3.0)), timeout_s=1.0)
    assert answer.failure == "timeout"


def test_a_busy_server_is_asked_again_when_it_says(serve: Serve) -> None:
    """The wait is part of what the user waited for."""
    server = serve(refusing(429, Retry_After="0.2"), refusing(503, Retry_After="0.1"), answering())
    started = time.perf_counter()
    (answer,) = ask(server)
    assert 0.3 <= answer.ttft_s <= time.perf_counter() - started
    assert (answer.failure, answer.refusals, len(server.requests)) == (None, 2, 3)


def test_a_server_that_stays_busy_is_a_failure(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    # The module's own view of asyncio: the HTTP client below it sleeps too, as the machine's load has it.
    monkeypatch.setattr(load_server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    (answer,) = ask(serve(refusing(429), refusing(429, Retry_After="soon"), refusing(429, Retry_After="9999")))
    assert (answer.failure, answer.refusals) == ("HTTP 429", load_server.TRIES)
    first = load_server.FIRST_WAIT_S
    assert waits == [first, 2 * first, load_server.LONGEST_WAIT_S]


def test_the_only_model_is_found_and_more_than_one_must_be_chosen(serve: Serve) -> None:
    server = serve(answering(), models=("a", "b"))
    with pytest.raises(UserError, match=r"serves a, b; choose one with --model"):
        ask(server)
    ask(server, model="b")
    assert server.requests[0]["model"] == "b"
    silent = serve(answering(), models_status=404)
    ask(silent, model="c")
    assert silent.requests[0]["model"] == "c"
    with pytest.raises(UserError, match="no model it names"):
        ask(serve(answering(), models=()))


def test_unreachable_servers_and_wrong_keys_are_told_at_once(serve: Serve) -> None:
    gone = StubServer(answering())
    gone.server_close()
    with pytest.raises(UserError, match=r"cannot reach http://127.0.0.1:\d+/v1/models .* is the server running\?"):
        ask(gone)
    with pytest.raises(UserError, match=r"refuses the key \(HTTP 401\); set OPENAI_API_KEY"):
        ask(serve(answering(), models_status=401))
    with pytest.raises(UserError, match="is no http address"):
        asyncio.run(ServerWay.connect("stub", "localhost", PROMPTS, PARAMS))
