"""The OpenAI-compatible client against a server on this machine: requests, retries, refusals, many at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dspine.endpoint import ChatEndpoint, Completion, RefusedError, in_threads
from dspine.errors import UserError


class FakeServer(ThreadingHTTPServer):
    """Answers by the script: a (status, body, headers) a request, the last one for all that follow."""

    daemon_threads = True

    def __init__(self, *script: tuple[int, bytes, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class FakeHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, FakeServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        script = self.server.script
        status, data, headers = script.pop(0) if len(script) > 1 else script[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def reply(text: object = "Hi", reason: str = "stop") -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": reason}]}).encode(), {}


def failure(status: int, text: str = "", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    return status, text.encode(), {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[FakeServer] = []

    def start(*script: tuple[int, bytes, dict[str, str]]) -> FakeServer:
        servers.append(FakeServer(*script))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def endpoint(server: FakeServer, waits: list[float] | None = None, **options: Any) -> ChatEndpoint:
    waits = [] if waits is None else waits
    return ChatEndpoint(url=server.url, model="tiny", sleep=waits.append, **options)


def ask(client: ChatEndpoint) -> Completion:
    return client.complete("Hello", temperature=0.0, max_tokens=8)


def test_request_and_answer(serve: Any) -> None:
    server = serve(reply("Hi"), reply("cut", "length"))
    client = endpoint(server, api_key="secret")
    assert ask(client) == Completion("Hi", finished=True)
    assert client.complete("ü", temperature=0.7, max_tokens=9, seed=5) == Completion("cut", finished=False)
    message = {"role": "user", "content": "Hello"}
    assert server.requests[0] == {
        "path": "/v1/chat/completions", "key": "Bearer secret", "model": "tiny", "messages": [message], "temperature": 0.0,
        "max_tokens": 8,
    }  # fmt: skip
    assert (server.requests[1]["temperature"], server.requests[1]["max_tokens"], server.requests[1]["seed"]) == (0.7, 9, 5)


def test_a_conversation_with_fields_of_its_own_and_the_servers_token_count(serve: Any) -> None:
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    server = serve((200, json.dumps(body).encode(), {}))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answer = endpoint(server).chat(turns, temperature=0.0, max_tokens=8, chat_template_kwargs={"enable_thinking": False})
    assert answer == Completion("Hi", finished=True, tokens=3)
    assert (server.requests[0]["messages"], server.requests[0]["chat_template_kwargs"]) == (turns, {"enable_thinking": False})


def test_no_key_no_header(serve: Any) -> None:
    server = serve(reply())
    ask(endpoint(server))
    assert server.requests[0]["key"] is None


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_fails_twice_then_works(serve: Any, status: int) -> None:
    server = serve(failure(status), failure(status), reply("Hi"))
    waits: list[float] = []
    assert ask(endpoint(server, waits)).text == "Hi"
    assert len(server.requests) == 3
    assert waits == [0.5, 1.0]


def test_server_says_how_long_to_wait(serve: Any) -> None:
    waits: list[float] = []
    retry_date = "Wed, 21 Oct 2065 07:28:00 GMT"
    script = [failure(429, Retry_After=value) for value in ("7", "9999", retry_date)]
    ask(endpoint(serve(*script, reply()), waits))
    assert waits == [7.0, 60.0, 2.0]


def test_gives_up_after_the_last_attempt(serve: Any) -> None:
    server = serve(failure(503, "over\nloaded"))
    with pytest.raises(UserError, match=r"failed 3 times \(HTTP 503: over loaded\); check the server, then run the same"):
        ask(endpoint(server, retries=2))
    assert len(server.requests) == 3


def test_nobody_listens(serve: Any) -> None:
    server = serve(reply())
    client = endpoint(server, retries=1)
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"failed 2 times \(.*refused\)"):
        ask(client)


def test_server_that_hangs(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(reply())
    monkeypatch.setattr(FakeHandler, "do_POST", lambda self: time.sleep(0.5))
    with pytest.raises(UserError, match=r"failed 1 times \(.*timed out\)"):
        ask(endpoint(server, retries=0, timeout_s=0.1))


def test_connection_that_breaks_off(serve: Any) -> None:
    broken = (200, b'{"choices"', {"Content-Length": "1000"})
    assert ask(endpoint(serve(broken, reply("Hi")))).text == "Hi"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_hopeless_requests_are_not_repeated(serve: Any, status: int) -> None:
    server = serve(failure(status, "no such model"))
    with pytest.raises(UserError, match=rf"refused the request \(HTTP {status}: no such model\); check") as caught:
        ask(endpoint(server))
    assert not isinstance(caught.value, RefusedError)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "script", [failure(400, "too long"), failure(422), reply(None), reply("Hi", "content_filter"), reply([1])]
)
def test_refusals_concern_one_prompt(serve: Any, script: tuple[int, bytes, dict[str, str]]) -> None:
    server = serve(script)
    with pytest.raises(RefusedError):
        ask(endpoint(server))
    assert len(server.requests) == 1


@pytest.mark.parametrize("data", [b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "Hi"}]}', b"\xff"])
def test_something_else_answers(serve: Any, data: bytes) -> None:
    with pytest.raises(UserError, match="does not answer like an OpenAI chat endpoint"):
        ask(endpoint(serve((200, data, {}))))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a/v1", "http://", "http://a:b/v1", "http://[/v1"])
def test_no_address(url: str) -> None:
    with pytest.raises(UserError, match="is no http address"):
        ChatEndpoint(url=url, model="m")


def test_addresses_and_models() -> None:
    for url in ("http://a/v1", "http://a/v1/", "http://a/v1/chat/completions"):
        assert ChatEndpoint(url=url, model="m").completions_url == "http://a/v1/chat/completions"
    with pytest.raises(UserError, match="give --model"):
        ChatEndpoint(url="http://a/v1", model="")


def test_threads_take_jobs_as_they_are_free() -> None:
    active, most, taken = 0, 0, 0
    lock = threading.Lock()

    def jobs() -> Iterator[int]:
        nonlocal taken
        for job in range(20):
            taken += 1
            yield job

    def work(job: int) -> int:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.005)
        with lock:
            active -= 1
        if job == 3:
            raise RefusedError("not this one")
        return job * job

    results = {}
    for job, result in in_threads(work, jobs(), 4):
        results[job] = result
        assert taken <= len(results) + 4  # a resumed run must not find prompts tokenised far ahead
    assert 1 < most <= 4
    assert isinstance(results.pop(3), RefusedError)
    assert results == {job: job * job for job in range(20) if job != 3}


def test_an_error_ends_all_threads() -> None:
    before = threading.active_count()

    def work(job: int) -> int:
        raise UserError("the server is gone")

    with pytest.raises(UserError, match="the server is gone"):
        list(in_threads(work, iter(range(100)), 4))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
