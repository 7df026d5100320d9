"""What clients get wrong: every error has OpenAI's shape, and the server goes on answering."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "tiny"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 3,
}
HEADERS = {"Content-Type": "application/json"}


def post(server: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, HEADERS if headers is None else headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def head_of(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def check_error(status: int, reply: dict[str, Any]) -> dict[str, Any]:
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert 400 <= status < 600
    return dict(error)


@pytest.fixture(autouse=True)
def lives_on(server: Any) -> Iterator[None]:
    yield
    status, reply = post(server, "/v1/chat/completions", CHAT)
    assert status == 200
    assert reply["usage"]["completion_tokens"] <= 3
    server.wait_until_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"[" * 100_000,
        b'{"model": ' + b"9" * 10_000 + b"}",
        b'{"temperature": NaN, "model": "tiny", "messages": []}',
    ],
    ids=["empty", "cut", "no-utf8", "null", "list", "number", "string", "deep", "digits", "nan"],
)
def test_malformed_bodies(server: Any, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, reply = post(server, path, body)
        assert status == 400
        check_error(status, reply)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"surprise": 1}, "surprise"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"model": 7}, "model"),
    ],
    ids=str,
)
def test_wrong_values_name_the_parameter(server: Any, change: dict[str, Any], param: str) -> None:
    status, reply = post(server, "/v1/chat/completions", {**CHAT, **change})
    error = check_error(status, reply)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")


def test_neutral_values_of_unsupported_parameters_are_taken(server: Any) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "user": "me",
    }
    nothing = {"n": None, "stop": None, "seed": None, "response_format": {"type": "text"}, "stream": None, "logprobs": None}
    assert post(server, "/v1/chat/completions", {**CHAT, **neutral, **nothing})[0] == 200


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here, only 'tiny'") as caught:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("x" * 600, "the prompt has 600 tokens, but tiny-llama holds 512"),
        ([1, 2, 10**6], "token id 1000000 is not in the vocabulary"),
    ],
    ids=["empty", "long", "ids"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_cannot_be_decoded(client: openai.OpenAI, prompt: Any, message: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=MODEL, prompt=prompt, stream=stream)


def test_a_prompt_of_ten_megabytes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="the body is larger than 1000000 bytes") as caught:
        client.completions.create(model=MODEL, prompt="x" * 10_000_000)
    assert caught.value.status_code == 413
    assert caught.value.code == "body_too_large"


def test_a_long_prompt_that_a_body_may_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="900000 tokens"):
        client.completions.create(model=MODEL, prompt="x" * 900_000)


def test_a_body_without_a_length_is_counted_on_its_way_in(server: Any) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"model": "'
        for _ in range(30):
            yield b"x" * 100_000
        yield b'"}'

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", chunks(), HEADERS, encode_chunked=True)
    response = connection.getresponse()
    error = check_error(response.status, json.loads(response.read()))
    connection.close()
    assert (response.status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/%2e%2e/app.py", 404),
    ],
)
def test_wrong_paths_and_methods(server: Any, method: str, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    assert response.status == status
    check_error(status, json.loads(response.read()))
    connection.close()


def test_other_content_types_are_refused(server: Any) -> None:
    """A form or plain text would let any web page send requests here without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, reply = post(server, "/v1/chat/completions", CHAT, {"Content-Type": kind})
        assert status == 400
        check_error(status, reply)


def test_slow_clients_are_cut_off_and_hold_nobody_up(serve: Any) -> None:
    with serve(body_timeout_s=0.5) as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(head_of("/v1/completions", 100) + b'{"model"')
        assert post(server, "/v1/chat/completions", CHAT)[0] == 200
        slow.settimeout(10)
        reply = b""
        while part := slow.recv(4096):
            reply += part
        slow.close()
        assert reply.startswith(b"HTTP/1.1 408")
        assert check_error(408, json.loads(reply.partition(b"\r\n\r\n")[2]))["code"] == "body_timeout"


@pytest.mark.parametrize("how", ["half-closed", "reset", "garbage", "no-body"])
def test_broken_connections(server: Any, how: str) -> None:
    body = json.dumps({**CHAT, "max_tokens": 400, "ignore_eos": True}).encode()
    length = len(body) + (50 if how == "no-body" else 0)
    head = head_of("/v1/chat/completions", length)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"\x16\x03\x01 not http at all\r\n\r\n" if how == "garbage" else head + body)
    if how == "half-closed":
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    server.wait_until_idle()
