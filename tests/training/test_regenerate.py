"""Answering prompts: the target's own greedy answers, in order, resumable after any interruption, or from a server."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dspine.endpoint import ChatEndpoint
from dspine.errors import UserError
from dspine.journal import partial_file
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.corpus import load_answers, read_answers
from dspine.training.prompts import Prompt, collect_prompts
from dspine.training.regenerate import (
    EndpointAnswerer,
    EngineAnswerer,
    Job,
    RegenerateSettings,
    Summary,
    regenerate,
)

SETTINGS = RegenerateSettings(max_new_tokens=12, rows=3)
TEXTS = ["Why?", "a longer one " * 5, "c", "Why?", "ünï", "last", "c"]  # two texts occur twice


class Stopping:
    """The engine, with Ctrl-C after `count` answers. It remembers the jobs it was given."""

    def __init__(self, target: Target, count: int) -> None:
        self.inner, self.count = EngineAnswerer(target), count
        self.source = self.inner.source
        self.jobs: list[Job] = []

    def seen(self, jobs: Iterator[Job]) -> Iterator[Job]:
        for job in jobs:
            self.jobs.append(job)
            yield job

    def answers(self, jobs: Iterator[Job], settings: RegenerateSettings) -> Iterator[tuple[Job, list[int] | None]]:
        for number, answer in enumerate(self.inner.answers(self.seen(jobs), settings)):
            if number == self.count:
                raise KeyboardInterrupt
            yield answer


class Idle:
    """Must not be asked for anything."""

    def __init__(self, target: Target) -> None:
        self.source = EngineAnswerer(target).source

    def answers(self, jobs: Iterator[Job], settings: RegenerateSettings) -> Iterator[tuple[Job, list[int] | None]]:
        assert list(jobs) == []
        return iter(())


@pytest.fixture
def chat(tiny_target: Target) -> ChatFormat:
    return ChatFormat.of(tiny_target)


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    return write_prompts(tmp_path / "set.jsonl", TEXTS)


def write_prompts(file: Path, texts: list[str]) -> list[Prompt]:
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return collect_prompts([file])


def answer(target: Target, prompts: list[Prompt], output: Path, settings: RegenerateSettings = SETTINGS) -> Summary:
    return regenerate(prompts, EngineAnswerer(target), ChatFormat.of(target), output, settings)


def test_answers_are_the_targets_own(
    tmp_path: Path, tiny_target: Target, prompts: list[Prompt], make_model: Callable[..., PreTrainedModel]
) -> None:
    summary = answer(tiny_target, prompts, tmp_path / "a.jsonl.gz")
    assert (summary.answered, summary.duplicates, summary.total, summary.kept, summary.too_long) == (5, 2, 5, 0, 0)
    assert summary.output_bytes == (tmp_path / "a.jsonl.gz").stat().st_size
    loaded = load_answers([tmp_path / "a.jsonl.gz"], [tmp_path], tiny_target)
    assert [a.ref[1] for a in loaded] == [0, 1, 2, 4, 5]
    model: Any = make_model("llama")
    cut = 0
    for item in loaded:
        expected = model.generate(
            torch.tensor([item.ids[: item.prompt_length]]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert item.ids == expected[0].tolist()
        cut += item.ids[-1] != 1
    assert summary.unfinished == cut
    assert not partial_file(tmp_path / "a.jsonl.gz").exists()


def test_header_tells_where_answers_come_from(tmp_path: Path, tiny_target: Target, prompts: list[Prompt]) -> None:
    answer(tiny_target, prompts, tmp_path / "a.jsonl")
    header, _ = read_answers(tmp_path / "a.jsonl")
    assert header.target["name"] == "tiny-llama"
    assert header.sampling == {"temperature": 0.0, "max_new_tokens": 12}
    assert header.source == {"kind": "engine", "dtype": "float32", "device": "cpu"}
    assert header.versions["torch"] == torch.__version__


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_interrupted_run_ends_in_the_same_file(
    tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt], count: int, temperature: float
) -> None:
    settings = RegenerateSettings(max_new_tokens=12, rows=3, temperature=temperature)
    answer(tiny_target, prompts, tmp_path / "whole.jsonl.gz", settings)
    output = tmp_path / "stopped.jsonl.gz"
    with pytest.raises(KeyboardInterrupt):
        regenerate(prompts, Stopping(tiny_target, count), chat, output, settings)
    assert not output.exists()
    partial = partial_file(output)
    assert len(partial.read_bytes().splitlines()) == 1 + count
    with partial.open("ab") as stream:
        stream.write(b'{"ref":["set",5],"prompt')  # torn
    summary = answer(tiny_target, prompts, output, settings)
    assert (summary.kept, summary.answered) == (count, 5 - count)
    assert output.read_bytes() == (tmp_path / "whole.jsonl.gz").read_bytes()
    assert not partial.exists()


def test_interrupted_before_the_first_answer_leaves_nothing(
    tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        regenerate(prompts, Stopping(tiny_target, 0), chat, tmp_path / "a.jsonl", SETTINGS)
    assert [file.name for file in tmp_path.iterdir()] == ["set.jsonl"]


def test_finished_run_is_not_repeated(tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt]) -> None:
    output = tmp_path / "a.jsonl.gz"
    answer(tiny_target, prompts, output)
    before = output.read_bytes()
    settled: list[int] = []
    summary = regenerate(prompts, Idle(tiny_target), chat, output, SETTINGS, settled.append)
    assert (summary.kept, summary.answered, sum(settled)) == (5, 0, len(prompts))
    assert output.read_bytes() == before


def test_more_prompts_are_added(tmp_path: Path, tiny_target: Target, prompts: list[Prompt]) -> None:
    output = tmp_path / "a.jsonl"
    answer(tiny_target, prompts[:3], output)
    assert answer(tiny_target, prompts, output).answered == 2
    answer(tiny_target, prompts, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    more = write_prompts(tmp_path / "more.jsonl", ["new", "Why?"])
    summary = answer(tiny_target, more, output)
    assert (summary.answered, summary.duplicates, summary.total) == (1, 1, 6)
    assert [record.ref for record in read_answers(output)[1]][-2:] == [("set", 5), ("more", 0)]


def test_progress_counts_every_prompt(tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt]) -> None:
    settled: list[int] = []
    regenerate(prompts, EngineAnswerer(tiny_target), chat, tmp_path / "a.jsonl", SETTINGS, settled.append)
    assert sum(settled) == len(prompts)


def test_long_prompts_are_left_out(tmp_path: Path, tiny_target: Target, prompts: list[Prompt]) -> None:
    settings = RegenerateSettings(max_new_tokens=4, max_prompt_tokens=40, rows=2)
    summary = answer(tiny_target, prompts, tmp_path / "a.jsonl", settings)
    assert (summary.answered, summary.too_long) == (4, 1)
    too_long = write_prompts(tmp_path / "long.jsonl", ["x" * 600])
    with pytest.raises(
        UserError, match=r"none of the 1 prompts could be answered \(1 too long, 0 refused\); nothing was written"
    ):
        answer(tiny_target, too_long, tmp_path / "b.jsonl")
    assert {file.name for file in tmp_path.iterdir()} == {"set.jsonl", "long.jsonl", "a.jsonl"}
    with pytest.raises(UserError, match="max_new_tokens=512 fills the 512 tokens that tiny-llama holds"):
        answer(tiny_target, prompts, tmp_path / "b.jsonl", RegenerateSettings(max_new_tokens=512))


def test_sampled_answers_do_not_depend_on_the_batch(tmp_path: Path, tiny_target: Target, prompts: list[Prompt]) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "many", "other")]
    for file, rows, seed in zip(files, (1, 5, 5), (0, 0, 1), strict=True):
        answer(tiny_target, prompts, file, RegenerateSettings(max_new_tokens=12, temperature=1.0, rows=rows, seed=seed))
    assert files[0].read_bytes() == files[1].read_bytes()
    one, other = ({r.ref: r.response for r in read_answers(file)[1]} for file in (files[1], files[2]))
    assert one != other
    assert read_answers(files[2])[0].sampling["seed"] == 1


def test_every_prompt_has_its_own_seed(tmp_path: Path, tiny_target: Target, chat: ChatFormat) -> None:
    prompts = write_prompts(tmp_path / "set.jsonl", ["a", "b"]) + write_prompts(tmp_path / "other.jsonl", ["c", "d"])
    seeds = []
    for seed, name in ((0, "x.jsonl"), (0, "y.jsonl"), (1, "z.jsonl")):
        answerer = Stopping(tiny_target, 99)
        settings = RegenerateSettings(max_new_tokens=2, temperature=1.0, seed=seed)
        regenerate(prompts, answerer, chat, tmp_path / name, settings)
        seeds.append([job.seed for job in answerer.jobs])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 8
    assert all(0 <= seed < 2**31 for seed in seeds[0])  # servers take no more


def test_changed_prompt_is_noticed_first(tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt]) -> None:
    output = tmp_path / "a.jsonl"
    answer(tiny_target, prompts[:3], output)
    before = output.read_bytes()
    changed = write_prompts(tmp_path / "set.jsonl", ["Why not?", *TEXTS[1:]])
    with pytest.raises(UserError, match=r"set.jsonl line 1 has changed since .*a.jsonl answered it"):
        regenerate(changed, Idle(tiny_target), chat, output, SETTINGS)
    assert output.read_bytes() == before


def test_other_settings_need_another_file(
    tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt], make_target: Callable[[str], Target]
) -> None:
    output = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(prompts, Stopping(tiny_target, 1), chat, output, SETTINGS)
    longer = RegenerateSettings(max_new_tokens=13)
    with pytest.raises(UserError, match=r"a.jsonl.partial was made with sampling max_new_tokens = 12, this run has 13"):
        answer(tiny_target, prompts, output, longer)
    answer(tiny_target, prompts, output)
    with pytest.raises(UserError, match=r"a.jsonl was made with sampling max_new_tokens = 12, this run has 13; choose another"):
        answer(tiny_target, prompts, output, longer)
    with pytest.raises(UserError, match="target model_type = llama, this run has qwen2"):
        answer(make_target("qwen2"), prompts, output)
    (tmp_path / "b.jsonl").write_text('{"turns": ["a"]}\n')
    with pytest.raises(UserError, match=r"b.jsonl does not start with a header line"):
        answer(tiny_target, prompts, tmp_path / "b.jsonl")


def test_impossible_settings() -> None:
    for options, sentence in (
        ({"rows": 0}, "0 prompts at once"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ({"max_prompt_tokens": -1}, "-1 prompt tokens"),
    ):
        with pytest.raises(UserError, match=sentence):
            RegenerateSettings(**options)


def test_disk_full_while_finishing(
    tmp_path: Path, tiny_target: Target, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "a.jsonl.gz"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*a.jsonl.gz: No space left on device; make room"):
            answer(tiny_target, prompts, output)
    assert {file.name for file in tmp_path.iterdir()} == {"set.jsonl", "a.jsonl.gz.partial"}
    summary = answer(tiny_target, prompts, output)
    assert (summary.kept, summary.answered, summary.total) == (5, 0, 5)


# -- a server answers --------------------------------------------------------------------------------------------------


class FakeHandler(BaseHTTPRequestHandler):
    """Answers a text with itself, upper-cased; fails as `failures` says, by text: statuses to send before it works."""

    failures: dict[str, list[int]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        waiting = self.failures.get(text, [])
        status = waiting.pop(0) if waiting else 200
        reason = "length" if text == "last" else "stop"
        data = json.dumps({"choices": [{"message": {"content": text.upper()}, "finish_reason": reason}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(FakeHandler, "failures", {}, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHandler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield http
        http.shutdown()


def client(server: ThreadingHTTPServer, chat: ChatFormat, **options: Any) -> EndpointAnswerer:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return EndpointAnswerer(ChatEndpoint(url=url, model="tiny", sleep=lambda seconds: None, **options), chat)


def test_server_answers_in_order(
    tmp_path: Path, tiny_target: Target, chat: ChatFormat, prompts: list[Prompt], server: ThreadingHTTPServer
) -> None:
    FakeHandler.failures = {"c": [503, 429], "ünï": [500, 500]}  # twice, then it works
    answerer = client(server, chat)
    summary = regenerate(prompts, answerer, chat, tmp_path / "a.jsonl", RegenerateSettings(max_new_tokens=100, rows=3))
    assert (summary.answered, summary.duplicates, summary.refused, summary.unfinished) == (5, 2, 0, 1)
    header, records = read_answers(tmp_path / "a.jsonl")
    assert header.source == {"kind": "endpoint", "model": "tiny", "url": answerer.endpoint.url}
    assert [record.ref[1] for record in records] == [0, 1, 2, 4, 5]
    for record in records:
        text = TEXTS[record.ref[1]]
        ended = [] if text == "last" else [1]
        assert record.response == chat.encode(text.upper()) + ended
    assert len(load_answers([tmp_path / "a.jsonl"], [tmp_path], tiny_target)) == 5


def test_server_that_goes_away_leaves_a_resumable_file(
    tmp_path: Path, chat: ChatFormat, prompts: list[Prompt], server: ThreadingHTTPServer
) -> None:
    settings = RegenerateSettings(max_new_tokens=100, rows=1)
    regenerate(prompts, client(server, chat), chat, tmp_path / "whole.jsonl", settings)
    FakeHandler.failures = {"ünï": [503] * 3}
    with pytest.raises(UserError, match="failed 3 times"):
        regenerate(prompts, client(server, chat, retries=2), chat, tmp_path / "a.jsonl", settings)
    assert not (tmp_path / "a.jsonl").exists()
    assert regenerate(prompts, client(server, chat), chat, tmp_path / "a.jsonl", settings).kept == 3
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_refused_prompts_are_left_out_and_tried_again(
    tmp_path: Path, chat: ChatFormat, prompts: list[Prompt], server: ThreadingHTTPServer
) -> None:
    settings = RegenerateSettings(max_new_tokens=100, rows=2)
    FakeHandler.failures = {"c": [400]}
    summary = regenerate(prompts, client(server, chat), chat, tmp_path / "a.jsonl", settings)
    assert (summary.answered, summary.refused) == (4, 1)
    summary = regenerate(prompts, client(server, chat), chat, tmp_path / "a.jsonl", settings)
    assert (summary.kept, summary.answered, summary.refused) == (4, 1, 0)
    assert [record.ref[1] for record in read_answers(tmp_path / "a.jsonl")[1]] == [0, 1, 2, 4, 5]


def test_server_that_refuses_everything(tmp_path: Path, chat: ChatFormat, server: ThreadingHTTPServer) -> None:
    texts = [f"prompt {i}" for i in range(50)]
    FakeHandler.failures = {text: [422] for text in texts}
    many = write_prompts(tmp_path / "many.jsonl", texts)
    with pytest.raises(UserError, match="8 prompts in a row"):
        regenerate(many, client(server, chat), chat, tmp_path / "a.jsonl", RegenerateSettings(rows=2))
    assert sum(not waiting for waiting in FakeHandler.failures.values()) <= 11  # it stopped early
    assert [file.name for file in tmp_path.iterdir()] == ["many.jsonl"]


def test_answers_over_the_limit_are_cut(
    tmp_path: Path, chat: ChatFormat, prompts: list[Prompt], server: ThreadingHTTPServer
) -> None:
    summary = regenerate(prompts, client(server, chat), chat, tmp_path / "a.jsonl", SETTINGS)
    lengths = [len(record.response) for record in read_answers(tmp_path / "a.jsonl")[1]]
    assert max(lengths) == 12
    assert summary.unfinished == 2  # the long one, and the one that the server cut
