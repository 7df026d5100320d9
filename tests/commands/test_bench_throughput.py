"""`dspine bench throughput`: the table, the notes, the file that goes on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dspine.evaluation import load_server
from dspine.evaluation.load import Answer, WayFacts

SHORT = ("--max-new-tokens", "6", "--limit", "2", "--requests", "2", "--repeats", "1")


def test_the_engine_is_measured_with_each_drafter_and_goes_on(cli: Any, folders: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    drafters = ["--drafter", f"dspine={folders.dspine}", "--drafter", f"flash={folders.dflash}", "--width", "4"]
    command = [
        "bench",
        "throughput",
        "--prompts",
        folders.prompts,
        "--target",
        folders.target,
        *drafters,
        *SHORT,
        "--output",
        file,
    ]
    outcome = cli(*command, "--concurrency", "2")
    assert (outcome.code, outcome.err) == (0, "")
    data = outcome.data
    assert json.loads(file.read_text()) == data
    assert [way["name"] for way in data["ways"]] == ["plain", "dspine", "flash"]
    (level,) = data["levels"]
    assert (level["concurrency"], level["requests"]) == (2, 2)
    for way in level["ways"]:
        assert (way["requests"], way["failures"], way["tokens"] > 0) == (2, {}, True)
        assert way["ttft_s"]["p50"] <= way["ttft_s"]["p99"] <= way["latency_s"]["p99"]
    assert [way["identical_share"] for way in level["ways"]] == [None, 1.0, 1.0]
    assert set(level["ways"][1]["speedup_over"]) == {"plain", "flash"}
    assert "over plain" in outcome.out
    again = cli(*command, "--concurrency", "1,2").data
    assert [level["concurrency"] for level in again["levels"]] == [1, 2]
    assert again["levels"][1] == level, "a finished level is not measured again"
    refused = cli(*command, "--temperature", "1")
    assert refused.error.startswith(f"{file} was measured with temperature = 0.0, this one has 1.0")


class ServedWay:
    """Stands for a server: one of two requests fails, the other waited and found its prompt computed before."""

    device = torch.device("cpu")

    def __init__(self, name: str, url: str) -> None:
        self.facts = WayFacts(name=name, decoder=url, model="m")

    async def decode(
        self, order: Sequence[int], concurrency: int, max_new_tokens: int, on_answer: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        good = Answer(tokens=5, output="text", ttft_s=0.1, elapsed_s=0.5, refusals=3, cached_tokens=2)
        return [Answer(failure="timeout") if place % 2 else good for place in range(len(order))]


def test_servers_are_measured_by_name_and_what_disturbs_is_told(cli: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    @asynccontextmanager
    async def connected(
        servers: Mapping[str, str], prompts: Sequence[str], params: Any, *, model: str, api_key: str
    ) -> AsyncIterator[list[ServedWay]]:
        seen.update(servers=dict(servers), prompts=list(prompts), model=model, api_key=api_key)
        yield [ServedWay(name, url) for name, url in servers.items()]

    monkeypatch.setattr(load_server, "connected", connected)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    servers = ["--server", "plain=http://localhost:1/v1", "--server", "fast=http://localhost:2/v1?a=b"]
    outcome = cli("bench", "throughput", "--prompts", folders.prompts, *servers, "--model", "m", *SHORT, "--concurrency", "1")
    assert seen == {
        "servers": {"plain": "http://localhost:1/v1", "fast": "http://localhost:2/v1?a=b"},
        "prompts": ["first question", "second question"],
        "model": "m",
        "api_key": "secret",
    }
    assert "secret" not in outcome.out + outcome.err
    assert [way["decoder"] for way in outcome.data["ways"]] == ["http://localhost:1/v1", "http://localhost:2/v1?a=b"]
    assert "│ 1/2 │" in outcome.out.replace("  ", " ").replace("  ", " ")
    assert "100/100/100" in outcome.out
    assert outcome.err.splitlines()[:3] == [
        "plain at 1: 1 of 2 requests failed (timeout)",
        "plain at 1: the server asked 3 times to come again later",
        "plain at 1: 2 prompt tokens came out of the server's prefix cache, so TTFT is too good",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,two"], "concurrency '1,two' is no list of whole numbers from 1; give for example 1,2,4"),
        (["--concurrency", "0"], "concurrency '0' is no list"),
        (["--repeats", "0"], "repeats = 0: at least 1 is needed"),
        (["--requests", "-1"], "requests = -1: give the number of requests of a level"),
        (["--output", "no/such/folder/t.json"], "cannot write no/such/folder/t.json"),
        (["--server", "a=http://localhost:9", "--no-chat"], "servers are measured as they run"),
        (["--server", "http://localhost:9"], "--server http://localhost:9 has no name to tell it by; give --server NAME="),
        (["--server", "a=http://localhost:9", "--server", "a=x"], "two are called a; give them names: --server NAME=x"),
        (["--server", "a=nonsense"], "endpoint 'nonsense' is no http address"),
        (["--drafter", "none"], "no drafter ships for"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any) -> None:
    outcome = cli("bench", "throughput", "--prompts", folders.prompts, "--target", folders.target, *arguments)
    assert outcome.code == 2
    assert outcome.error.startswith(message)
