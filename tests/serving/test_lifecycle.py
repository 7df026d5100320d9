"""Queue, time-outs, cancellation, failures, keys, hosts, metrics, and an orderly end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspine.drafters.checkpoint import save_drafter
from dspine.errors import UserError
from dspine.serving.engine_thread import Update
from dspine.serving.run import bind, url_of
from dspine.serving.settings import ServerSettings, is_loopback

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
LONG: dict[str, Any] = {
    "model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 480, "extra_body": {"ignore_eos": True}
}  # fmt: skip


def get(server: Any, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


# --- queue and time-outs ---------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_a_time_to_come_back(serve: Any) -> None:
    with serve(max_rows=1, max_queue=1) as server, server.client() as client:
        streams = [client.completions.create(**LONG, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="too many requests are waiting") as caught:
            client.completions.create(**LONG)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.code == "queue_full"
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        assert client.completions.create(**{**LONG, "max_tokens": 4}).usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="one request may ask for 2 answers, not 3"):
            client.completions.create(**LONG, n=3)


def test_an_answer_that_takes_too_long_is_given_up(serve: Any) -> None:
    with serve(request_timeout_s=0.2) as server, server.client() as client:
        with pytest.raises(openai.APIStatusError, match=r"took longer than 0\.2 s") as caught:
            client.completions.create(**LONG)
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        with pytest.raises(openai.APIError, match=r"took longer than 0\.2 s"):
            list(client.completions.create(**LONG, stream=True))
        server.wait_until_idle()


def test_prompt_and_answer_stay_within_the_servers_context(serve: Any) -> None:
    with serve(max_context_tokens=40) as server, server.client() as client:
        reply = client.completions.create(**{**LONG, "prompt": "x" * 30})
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (10, "length")
        with pytest.raises(openai.BadRequestError, match="this server takes 40 with the answer"):
            client.completions.create(**{**LONG, "prompt": "x" * 40})
        assert client.models.retrieve(MODEL).model_extra == {"max_model_len": 40}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(server: Any, stream: bool) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 490, "ignore_eos": True, "stream": stream}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: server.engine.num_live)
    tokens_before = samples(server)["dspine_output_tokens_total"]
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    server.wait_until_idle()
    wait_for(lambda: samples(server)["dspine_answers_total", "cancelled"])
    assert samples(server)["dspine_output_tokens_total"] - tokens_before < 490


def test_a_failing_round_fails_its_requests_and_no_others(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(max_rows=1) as server, server.client() as client:
        real = server.engine.target.forward

        def break_once(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(server.engine.target, "forward", real)
            raise MemoryError("no more")

        monkeypatch.setattr(server.engine.target, "forward", break_once)
        with pytest.raises(openai.InternalServerError, match="log says why"):
            client.completions.create(**LONG)
        server.wait_until_idle()
        assert client.completions.create(**{**LONG, "max_tokens": 4}).usage.completion_tokens == 4
        assert samples(server)["dspine_answers_total", "error"] == 1


def test_an_answer_that_ended_just_before_a_failure_is_not_kept_waiting(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(max_rows=2) as server, server.client() as client:
        admit = server.engine._admit

        def admit_and_break() -> Any:
            progress = admit()
            if any(item.request.finish_reason is not None for item in progress):
                monkeypatch.setattr(server.engine, "_round", lambda: 1 // 0)
            return progress

        monkeypatch.setattr(server.engine, "_admit", admit_and_break)
        stream = client.completions.create(**LONG, stream=True)
        next(stream)
        with pytest.raises(openai.InternalServerError, match="log says why"):
            client.completions.create(**{**LONG, "max_tokens": 1})
        with pytest.raises(openai.APIError, match="log says why"):
            list(stream)
        server.wait_until_idle()


def test_a_reply_that_cannot_be_made_fails_its_requests_and_no_others(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(max_rows=2) as server, server.client() as client:
        real = Update.of

        def break_once(progress: Any) -> Update:
            monkeypatch.setattr(Update, "of", real)
            raise RuntimeError("cannot be told")

        monkeypatch.setattr(Update, "of", break_once)
        with pytest.raises(openai.InternalServerError, match="log says why"):
            client.completions.create(**LONG)
        server.wait_until_idle()
        assert client.completions.create(**{**LONG, "max_tokens": 4}).usage.completion_tokens == 4


# --- keys and hosts --------------------------------------------------------------------------------------------------


def test_without_the_key_only_page_and_health_answer(serve: Any) -> None:
    with serve(api_key="open sesame") as server:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            status, body = get(server, path)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        assert {get(server, path)[0] for path in ("/", "/health", "/page/chat.js", "/page/chat.css")} == {200}
        for wrong in ("", "open", "open sesame2", "\u00fcber"):
            assert get(server, "/v1/models", {"Authorization": f"Bearer {wrong}"})[0] == 401
        assert get(server, "/v1/models", {"Authorization": "Basic open sesame"})[0] == 401
        with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with server.client("open sesame") as client:
            assert [model.id for model in client.models.list()] == [MODEL]


def test_other_host_names_are_refused_where_names_are_given(serve: Any) -> None:
    with serve(allowed_hosts=frozenset({"localhost", "::1"})) as server:
        for host, status in (("localhost", 200), ("LOCALHOST:8000", 200), ("[::1]:8000", 200), ("evil.example", 403), ("", 403)):
            found, body = get(server, "/health", {"Host": host})
            assert found == status, host
            assert status == 200 or json.loads(body)["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"api_key": " "}, "the API key is empty"),
        ({"max_queue": -1}, "max_queue = -1"),
        ({"request_timeout_s": 0}, "request_timeout_s = 0"),
        ({"body_timeout_s": float("nan")}, "body_timeout_s = nan"),
        ({"max_context_tokens": 0}, "max_context_tokens = 0"),
        ({"model_name": ""}, "name is empty"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerSettings(**{"model_name": MODEL, **change})


def test_only_loopback_addresses_are_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.7", "example.org")] == [False] * 4


# --- metrics ---------------------------------------------------------------------------------------------------------


def samples(server: Any) -> dict[Any, float]:
    """Every sample by name, and by name and label where there is one."""
    status, body = get(server, "/metrics")
    assert status == 200
    found: dict[Any, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, *sample.labels.values()) if sample.labels else sample.name
            found[key] = sample.value
    return found


def test_metrics_count_what_the_engine_did(serve: Any, llm: Any) -> None:
    with serve() as server, server.client() as client:
        assert samples(server)["dspine_rounds_total"] == 0
        for _ in range(2):
            client.completions.create(**{**LONG, "max_tokens": 30})
        found = samples(server)
    result = llm.generate("hello", max_new_tokens=30, ignore_eos=True)
    stats = result.stats
    assert found["dspine_answers_total", "length"] == 2
    assert found["dspine_output_tokens_total"] == 60
    assert found["dspine_prompt_tokens_total"] == 2 * len(result.prompt_ids)
    assert found["dspine_rounds_total"] == 2 * stats.rounds
    assert found["dspine_acceptance_length"] == pytest.approx(stats.acceptance_length)
    for position, (drafted, accepted) in enumerate(zip(stats.drafted_at, stats.accepted_at, strict=True), 1):
        assert found["dspine_drafted_tokens_total", str(position)] == 2 * drafted
        assert found["dspine_accepted_tokens_total", str(position)] == 2 * accepted
        assert found["dspine_acceptance_ratio", str(position)] == pytest.approx(accepted / drafted)
    for name in ("ttft", "tpot", "latency"):
        assert found[f"dspine_{name}_seconds_count"] == 2
    assert 0 < found["dspine_ttft_seconds_sum"] < found["dspine_latency_seconds_sum"]
    assert found["dspine_ttft_seconds_sum"] + 29 * found["dspine_tpot_seconds_sum"] == pytest.approx(
        found["dspine_latency_seconds_sum"]
    )
    assert (found["dspine_running"], found["dspine_queue_length"]) == (0, 0)


def test_the_queue_is_seen_in_the_metrics(serve: Any) -> None:
    with serve(max_rows=1) as server, server.client() as client:
        streams = [client.completions.create(**LONG, stream=True) for _ in range(3)]
        wait_for(lambda: server.engine.num_live)
        found = samples(server)
        assert (found["dspine_running"], found["dspine_queue_length"]) == (1, 2)
        for stream in streams:
            stream.close()
        server.wait_until_idle()


# --- start and end ---------------------------------------------------------------------------------------------------


def test_a_taken_port_is_explained() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port} .*; choose another --host or --port"):
            bind("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot listen on no such host:1"):
        bind("no such host", 1)


@pytest.fixture
def model_options(tmp_path: Path, llm: Any, make_model: Any) -> list[str]:
    """The tiny target and its drafter in folders, as options of the command."""
    make_model("llama").save_pretrained(tmp_path / "target")
    llm.target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(llm.drafter, tmp_path / "drafter")
    return ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--width", "4"]


def test_a_stopped_server_finishes_what_is_running(model_options: list[str], tmp_path: Path) -> None:
    """The command itself: it says where it listens, answers, and on SIGTERM ends its answers before itself."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dspine.commands.main", "serve", *model_options, "--port", str(port), "--served-name", MODEL]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env={**os.environ, "PYTHONWARNINGS": ""})
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(is_up, 120)
        answer: dict[str, Any] = {}
        chunks = client.completions.create(**LONG, stream=True)
        next(iter(chunks))

        def read() -> None:
            answer["chunks"] = list(chunks)

        reader = threading.Thread(target=read)
        reader.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        reader.join(30)
        assert answer["chunks"][-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
        client.close()
    finally:
        process.kill()
    assert f"serving tiny at http://127.0.0.1:{port}" in log.read_text()
    assert "Traceback" not in log.read_text()
