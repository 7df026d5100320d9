"""Acceptance through a server that only tells counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dspine.commands.main import run
from dspine.decoding.sampling import SamplingParams
from dspine.endpoint import ChatEndpoint
from dspine.errors import UserError
from dspine.evaluation.acceptance import AcceptanceReport, measure
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.served import OpenAIServer, ServerMeter, SGLangServer, sglang_counts
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target

from .counting_server import CountingServer, counting_server

Start = Callable[[str], CountingServer]
BENCHMARK = Benchmark("little", (("one", "two"), ("three",)))
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8, seed=0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as servers:
        yield lambda dialect: servers.enter_context(counting_server(dialect))


def endpoint(server: CountingServer) -> ChatEndpoint:
    return ChatEndpoint(url=server.url, model="tiny", retries=0)


def check_counts(report: AcceptanceReport) -> None:
    assert (report.rounds, report.tokens, report.acceptance_length) == (6, 18, 2.5)
    assert report.acceptance_length_ci95 == (2.5, 2.5)
    assert [(c.turns, c.rounds, c.num_accepted_tokens, c.num_drafted_tokens) for c in report.conversations] == [
        (2, 4, 6, 12),
        (1, 2, 3, 6),
    ]


@pytest.mark.parametrize("dialect", ["vllm", "dspine"])
def test_counters_before_and_after_every_answer(start: Start, dialect: str) -> None:
    server = start(dialect)
    report = measure(ServerMeter(OpenAIServer(endpoint(server)), "mine", thinking=False), BENCHMARK, PARAMS)
    check_counts(report)
    assert report.acceptance_by_position == (1.0, 0.5, 0.0)
    assert report.conditional_acceptance == (1.0, 0.5, 0.0)
    assert (report.target, report.drafter, report.thinking) == ("tiny", "mine", "off")
    assert report.decoder == f"OpenAIServer {server.url}"
    first, second, third = server.requests
    assert second["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    ]
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert [r["seed"] for r in (first, second, third)] == [0, 1, 64], "the seeds that the engine would use"


def test_sglang_tells_counts_in_its_replies(start: Start, tiny_target: Target) -> None:
    server, chat = start("sglang"), ChatFormat.of(tiny_target)
    report = measure(ServerMeter(SGLangServer(endpoint(server), chat), "mine"), BENCHMARK, PARAMS)
    check_counts(report)
    assert report.acceptance_by_position == (), "not told, so not invented"
    assert report.chat_template_sha256 == chat.facts()["chat_template_sha256"] != ""
    assert server.requests[0]["path"] == "/generate"
    assert chat.tokenizer.decode(server.requests[0]["input_ids"]) == "<|user|>one<eos><|assistant|>"


def test_sglangs_names_differ_between_releases() -> None:
    old = sglang_counts({"spec_verify_ct": 2, "completion_tokens": 6})
    named = sglang_counts({"spec_verify_ct": 2, "completion_tokens": 6, "spec_accept_token_num": 3, "spec_draft_token_num": 6})
    new = sglang_counts({"spec_verify_ct": 2, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6})
    assert old.acceptance_length == named.acceptance_length == new.acceptance_length == 2.5
    assert (named.num_drafted_tokens, new.num_drafted_tokens) == (6, 6)


def test_a_server_that_does_not_draft_is_refused(start: Start, tiny_target: Target) -> None:
    server = start("sglang")
    del server.meta_info["spec_verify_ct"]
    with pytest.raises(UserError, match="does not answer like SGLang while it drafts"):
        measure(ServerMeter(SGLangServer(endpoint(server), ChatFormat.of(tiny_target)), "m"), BENCHMARK, PARAMS)


def test_other_clients_are_noticed(start: Start) -> None:
    server = start("vllm")
    server.foreign_rounds = 50
    with pytest.raises(UserError, match="counted 52 rounds and 3 accepted tokens during an answer of 6 tokens: something else"):
        measure(ServerMeter(OpenAIServer(endpoint(server)), "m"), BENCHMARK, PARAMS)
    server.usage = None
    with pytest.raises(UserError, match=r"tells no usage\.completion_tokens"):
        measure(ServerMeter(OpenAIServer(endpoint(server)), "m"), BENCHMARK, PARAMS)


def test_an_interrupted_measurement_asks_only_for_the_rest(start: Start, tmp_path: Path) -> None:
    server, file = start("vllm"), tmp_path / "r.json"
    meter = ServerMeter(OpenAIServer(endpoint(server)), "m")

    def stop(result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(meter, BENCHMARK, PARAMS, file=file, on_result=stop)
    assert [f.name for f in tmp_path.iterdir()] == ["r.json.partial"]
    asked = len(server.requests)
    check_counts(measure(meter, BENCHMARK, PARAMS, file=file))
    assert [r["messages"][0]["content"] for r in server.requests[asked:]] == ["three"]
    check_counts(measure(meter, BENCHMARK, PARAMS, file=file))
    assert len(server.requests) == 3, "a finished result is read"
    assert [f.name for f in tmp_path.iterdir()] == ["r.json"]


def test_the_command_measures_a_server(
    start: Start, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["b", "c"]}\n')
    tiny_target.config.save_pretrained(tmp_path / "target")
    tiny_target.tokenizer.save_pretrained(tmp_path / "target")
    command = ["eval", "acceptance", "--prompts", str(tmp_path / "prompts.jsonl"), "--model", "tiny", "--endpoint"]
    assert run([*command, start("vllm").url, "--drafter", "eagle3"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (data["acceptance_length"], data["drafter"], data["target"], data["rounds"]) == (2.5, "eagle3", "tiny", 6)
    assert run([*command, start("sglang").url, "--sglang", "--target", str(tmp_path / "target")]) == 0
    out = capsys.readouterr().out
    assert "the server does not tell positions" in out
    data = json.loads(out.splitlines()[-1])
    assert (data["acceptance_length"], data["drafter"], len(data["chat_template_sha256"])) == (2.5, "server", 16)
