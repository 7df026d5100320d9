"""Counters of a server's metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dspine.errors import UserError
from dspine.evaluation.spec_counters import SpecCounts, parse_counters, read_counters, settled_counters

from .counting_server import CountingServer, counting_server

Start = Callable[[str], CountingServer]
VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 60.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as servers:
        yield lambda dialect: servers.enter_context(counting_server(dialect))


def test_vllms_page() -> None:
    counts = parse_counters(VLLM)
    expected = SpecCounts(rounds=120, num_drafted_tokens=360, num_accepted_tokens=180, accepted_at=(100, 60, 20))
    assert counts == expected
    assert expected.acceptance_length == 2.5


def test_vllms_names_under_another_prefix() -> None:
    assert parse_counters(VLLM.replace("vllm:", "fork:")) == parse_counters(VLLM)


def test_dspines_page_is_read_as_the_server_writes_it() -> None:
    from dspine.decoding.stats import DecodeStats

    stats = DecodeStats()
    for accepted in (2, 0, 3):
        stats.record_round(3, accepted)
    page = f"dspine_rounds_total {stats.rounds}\n"
    for j in range(3):
        page += f'dspine_drafted_tokens_total{{position="{j + 1}"}} {stats.drafted_at[j]}\n'
        page += f'dspine_accepted_tokens_total{{position="{j + 1}"}} {stats.accepted_at[j]}\n'
    counts = parse_counters(page)
    assert counts is not None
    assert (counts.rounds, counts.num_drafted_tokens, counts.num_accepted_tokens) == (3, 9, 5)
    assert (list(counts.drafted_at), list(counts.accepted_at)) == (stats.drafted_at, stats.accepted_at)
    assert counts.acceptance_length == stats.acceptance_length


def test_pages_without_counters() -> None:
    assert parse_counters("") is None
    assert parse_counters("sglang:spec_accept_length 2.5\nvllm:num_requests_running 1\n") is None
    assert parse_counters("vllm:spec_decode_num_drafts_created 1.7e9\n") is None


def test_what_happened_between_two_readings() -> None:
    before = SpecCounts(rounds=5, num_drafted_tokens=15, num_accepted_tokens=4, accepted_at=(3, 1))
    after = SpecCounts(rounds=9, num_drafted_tokens=27, num_accepted_tokens=10, accepted_at=(6, 3, 1))
    assert after - before == SpecCounts(rounds=4, num_drafted_tokens=12, num_accepted_tokens=6, accepted_at=(3, 2, 1))
    assert (after - before) + before == after
    assert SpecCounts().acceptance_length == 0


def test_errors_are_one_sentence(start: Start) -> None:
    root = start("sglang").url.removesuffix("/v1")
    with pytest.raises(UserError, match=r"has no counters of accepted draft tokens: .*--sglang"):
        read_counters(root + "/metrics")
    with pytest.raises(UserError, match=r"cannot read .*/nothing \(HTTP Error 404.*; start the server with its metrics"):
        read_counters(root + "/nothing")
    with pytest.raises(UserError, match=r"cannot read http://127.0.0.1:9/metrics"):
        read_counters("http://127.0.0.1:9/metrics")


def test_counters_are_read_until_they_rest(start: Start) -> None:
    server = start("vllm")
    late = iter([1, 2])

    def work(seconds: float) -> None:
        server.answers = next(late, server.answers)

    assert settled_counters(server.url.removesuffix("/v1") + "/metrics", work).rounds == 4

    def never(seconds: float) -> None:
        server.answers += 1

    with pytest.raises(UserError, match="do not come to rest: something else is using the server"):
        settled_counters(server.url.removesuffix("/v1") + "/metrics", never)
