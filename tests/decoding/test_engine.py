"""The engine on tiny random models: exact greedy output whatever is drafted, and requests that come, go and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dspine.decoding import engine as engine_module
from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter, Draft, DraftRunner
from dspine.drafters.registry import DRAFTERS
from dspine.errors import UserError
from dspine.modules.kv_cache import KVCache
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[[str], Target]
MakeDrafter = Callable[..., BlockDrafter]

BLOCK = 6
KINDS = (*DRAFTERS, "oracle")
# Of different lengths, so that rows of a batch never stand at the same position.
PROMPTS = [[(7 * i + 11 * j) % 250 + 5 for j in range(2 + i)] for i in range(9)]


class Oracle:
    """A drafter that knows the answers and is wrong now and then, on the caches of a real one.

    Untrained drafters hardly ever guess right; this one makes every number of accepted tokens happen.
    """

    def __init__(self, runner: DraftRunner, target: Target, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.config, self._runner, self._v = runner.config, runner, target.vocab_size
        engine = Engine(target)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        engine.run()
        texts = [request.prompt_ids + request.output_ids for request in requests]
        self._next = {(i, text[i]): text[i + 1 :] for text in texts for i in range(len(text))}

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self._runner.new_cache(rows, capacity)

    def extend(self, features: Tensor, next_tokens: Tensor, cache: KVCache) -> None:
        self._runner.extend(features, next_tokens, cache)

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        rows = []
        for anchor, length in zip(anchors.tolist(), cache.lengths.tolist(), strict=False):
            known = [*self._next.get((length, anchor), []), *[0] * num_draft_tokens][:num_draft_tokens]
            rows.append([t if (length + i) % 4 or i == 0 else (t + 1) % self._v for i, t in enumerate(known)])
        tokens = torch.tensor(rows)
        return Draft(tokens, tokens[..., None], torch.ones(*tokens.shape, 1))


@pytest.fixture(scope="module")
def runner(tiny_target: Target, make_drafter: MakeDrafter) -> Callable[[str], DraftRunner]:
    """`runner("oracle")` or, by its name, any drafter's for the tiny Llama."""
    real = {name: make_drafter(tiny_target, name).runner(tiny_target) for name in DRAFTERS}
    oracle = Oracle(real["dspine"], tiny_target, PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
    return lambda kind: oracle if kind == "oracle" else real[kind]


@pytest.fixture(scope="module")
def plain(tiny_target: Target) -> Callable[..., list[int]]:
    """`plain(prompt, **params)`: the output of plain decoding, alone."""

    def decode(prompt: list[int], **params: Any) -> list[int]:
        engine = Engine(tiny_target, max_rows=1)
        request = engine.submit(prompt, SamplingParams(**params))
        engine.run()
        return request.output_ids

    return decode


@pytest.fixture
def with_eos(tiny_target: Target) -> Iterator[Callable[[int], None]]:
    """`with_eos(token)` makes a token end answers for one test."""
    before = tiny_target.eos_token_ids

    def change(token: int) -> None:
        tiny_target.eos_token_ids = frozenset([token])

    yield change
    tiny_target.eos_token_ids = before


def run_all(engine: Engine, prompts: Sequence[list[int]], **params: Any) -> list[Request]:
    requests = [engine.submit(prompt, SamplingParams(**params)) for prompt in prompts]
    engine.run()
    return requests


# --- exact output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral+window", "phi", "gpt2"])
def test_plain_decoding_of_a_mixed_batch_is_transformers_generate(
    name: str, make_target: MakeTarget, make_model: MakeModel
) -> None:
    requests = run_all(Engine(make_target(name), max_rows=3), PROMPTS[:4], max_new_tokens=12, ignore_eos=True)
    model = make_model(name)
    model.generation_config.eos_token_id = None
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(prompt, do_sample=False, max_new_tokens=12)
        assert request.output_ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("width", [2, 4, BLOCK])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_equals_plain_decoding_while_rows_join_and_leave(
    kind: str, width: int, tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    engine = Engine(tiny_target, runner(kind), max_rows=4, width=width)
    limits = [5 + 4 * (i % 4) for i in range(len(PROMPTS))]
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=n, ignore_eos=True))
        for prompt, n in zip(PROMPTS, limits, strict=True)
    ]
    engine.run()
    for request, limit in zip(requests, limits, strict=True):
        assert request.output_ids == plain(request.prompt_ids, max_new_tokens=limit, ignore_eos=True)
        assert (request.finish_reason, len(request.accepted), request.stats.tokens) == ("length", limit, limit)
    if kind == "oracle":
        assert sum(request.stats.num_accepted_tokens for request in requests) > len(PROMPTS)


@pytest.mark.parametrize("family", ["mistral+window", "gemma2", "qwen2"])
def test_refused_tokens_leave_no_trace_in_other_families(family: str, make_target: MakeTarget, make_drafter: MakeDrafter) -> None:
    target = make_target(family)
    params: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    oracle = Oracle(make_drafter(target, block_size=BLOCK).runner(target), target, PROMPTS[:5], SamplingParams(**params))
    requests = run_all(Engine(target, oracle, max_rows=3, width=BLOCK), PROMPTS[:5], **params)
    expected = run_all(Engine(target, max_rows=5), PROMPTS[:5], **params)
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert sum(r.stats.num_accepted_tokens for r in requests) > 20


def test_oracle_makes_every_number_of_accepted_tokens_happen(tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    requests = run_all(Engine(tiny_target, runner("oracle"), width=BLOCK), PROMPTS, max_new_tokens=40, ignore_eos=True)
    accepted = [0] * BLOCK
    for request in requests:
        for length in block_lengths(request):
            accepted[length] += 1
    assert all(accepted[1:4]), accepted


def block_lengths(request: Request) -> list[int]:
    """num_accepted of each round, from the flags: an accepted run ends with one token of the target's own."""
    lengths, run = [], 0
    for flag in request.accepted[1:]:
        run += flag
        if not flag:
            lengths.append(run)
            run = 0
    return lengths


def test_caches_after_many_rounds_are_those_of_a_fresh_prefill(tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    """Rolled back, moved between rows, extended round by round: what is committed is what one forward would store."""
    engine = Engine(tiny_target, runner("oracle"), max_rows=3, width=BLOCK)
    requests = [
        engine.submit(p, SamplingParams(max_new_tokens=n, ignore_eos=True))
        for p, n in zip(PROMPTS, (9, 40, 12, 40, 40), strict=False)
    ]
    for _ in range(9):
        engine.step()
    live = [request for request in requests if request.finish_reason is None and request.output_ids]
    assert len(live) == engine.num_live == 3
    assert engine._cache is not None
    assert engine._draft_cache is not None
    for row, request in enumerate(engine._live):
        committed = [*request.prompt_ids, *request.output_ids[:-1]]
        assert int(engine._cache.lengths[row]) == int(engine._draft_cache.lengths[row]) == len(committed)
        fresh, fresh_draft = tiny_target.new_cache(1, 64), runner("dspine").new_cache(1, 64)
        features = tiny_target.forward(torch.tensor([committed]), fresh, runner("dspine").config.target_layer_ids).features
        assert features is not None
        following = torch.tensor([[*committed[1:], request.output_ids[-1]]])
        runner("dspine").extend(features, following, fresh_draft)
        for ours, theirs in ((engine._cache, fresh), (engine._draft_cache, fresh_draft)):
            for mine, other in zip(ours.data, theirs.data, strict=True):
                torch.testing.assert_close(mine[row, :, : len(committed)], other[0, :, : len(committed)], rtol=1e-4, atol=1e-4)


def test_long_prompts_are_prefilled_in_chunks(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    prompt = [t for p in PROMPTS for t in p]
    expected = plain(prompt, max_new_tokens=10, ignore_eos=True)
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 7)
    assert (
        run_all(Engine(tiny_target, runner("dspine"), width=4), [prompt], max_new_tokens=10, ignore_eos=True)[0].output_ids
        == expected
    )


@pytest.mark.parametrize("kind", KINDS)
def test_repetition_penalty_is_that_of_transformers(
    kind: str, tiny_target: Target, runner: Callable[[str], DraftRunner], make_model: MakeModel
) -> None:
    prompt = PROMPTS[3]
    expected = make_model("llama").generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30, repetition_penalty=1.3)
    request = run_all(Engine(tiny_target, runner(kind), width=5), [prompt], max_new_tokens=30, repetition_penalty=1.3)[0]
    assert request.output_ids == expected[0, len(prompt) :].tolist()


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_same_seed_same_text(kind: str, tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    drafter = None if kind == "none" else runner(kind)
    params = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    again = [run_all(Engine(tiny_target, drafter), PROMPTS[:2], seed=5, **params) for _ in range(2)]
    other = run_all(Engine(tiny_target, drafter), PROMPTS[:2], seed=6, **params)
    free = run_all(Engine(tiny_target, drafter), [PROMPTS[0]] * 2, **params)
    assert [r.output_ids for r in again[0]] == [r.output_ids for r in again[1]]
    assert all(a.output_ids != b.output_ids for a, b in zip(again[0], other, strict=True))
    assert free[0].output_ids != free[1].output_ids


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_nothing(
    kind: str, tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    """Greedy, sampled and penalised requests in one batch are each what they are alone."""
    several: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"repetition_penalty": 1.2},
        {"temperature": 1.2, "top_k": 20, "seed": 2},
        {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.1, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "seed": 4},
    ]
    params = [SamplingParams(max_new_tokens=16, ignore_eos=True, **own) for own in several]
    engine = Engine(tiny_target, runner(kind), max_rows=4, width=5)
    together = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
    engine.run()
    for request in together:
        alone = Engine(tiny_target, runner(kind), max_rows=1, width=5)
        expected = alone.submit(request.prompt_ids, request.params)
        alone.run()
        assert request.output_ids == expected.output_ids
    assert together[0].output_ids == plain(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert together[2].output_ids == plain(PROMPTS[2], max_new_tokens=16, ignore_eos=True, repetition_penalty=1.2)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(1, 12))
def test_an_end_token_ends_wherever_it_falls_in_a_block(
    position: int,
    tiny_target: Target,
    runner: Callable[[str], DraftRunner],
    plain: Callable[..., list[int]],
    with_eos: Callable[[int], None],
) -> None:
    output = plain(PROMPTS[1], max_new_tokens=14, ignore_eos=True)
    with_eos(output[position])
    expected = output[: output.index(output[position]) + 1]
    stopped, ignoring = (
        run_all(Engine(tiny_target, runner("oracle"), width=BLOCK), [PROMPTS[1]], max_new_tokens=14, ignore_eos=ignore)[0]
        for ignore in (False, True)
    )
    assert (stopped.output_ids, stopped.finish_reason) == (expected, "stop")
    assert (ignoring.output_ids, ignoring.finish_reason) == (output, "length")


@pytest.mark.parametrize("kind", ["none", "oracle"])
def test_stop_strings_cut_the_text_before_them(
    kind: str, tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    full = tiny_target.tokenizer.decode(plain(PROMPTS[4], max_new_tokens=40, ignore_eos=True), skip_special_tokens=True)
    stop = full[5:8]
    engine = Engine(tiny_target, None if kind == "none" else runner(kind))
    request = run_all(engine, [PROMPTS[4]], max_new_tokens=40, ignore_eos=True, stop=(stop, "never written"))[0]
    assert request.finish_reason == "stop_string"
    assert request.text.text == full[: full.index(stop)]
    assert len(request.output_ids) < 40


def test_the_context_of_the_target_ends_an_answer(tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    prompt = [5 + i % 200 for i in range(tiny_target.max_length - 6)]
    request = run_all(
        Engine(tiny_target, runner("dspine"), max_rows=1, width=BLOCK), [prompt], max_new_tokens=100, ignore_eos=True
    )[0]
    assert (len(request.output_ids), request.finish_reason) == (6, "length")


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_and_the_others_go_on(
    tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    engine = Engine(tiny_target, runner("oracle"), max_rows=2, width=4)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    live, other, waiting, last = (engine.submit(prompt, params) for prompt in PROMPTS[:4])
    for _ in range(2):
        engine.step()
    assert (engine.num_live, engine.num_waiting) == (2, 2)
    had = list(live.output_ids)
    engine.cancel(live)
    engine.cancel(waiting)
    assert (engine.num_live, engine.num_waiting) == (1, 1)
    engine.run()
    assert (live.finish_reason, live.output_ids) == ("cancelled", had)
    assert (waiting.finish_reason, waiting.output_ids) == ("cancelled", [])
    for request in (other, last):
        assert request.output_ids == plain(request.prompt_ids, max_new_tokens=30, ignore_eos=True)
    engine.cancel(other)
    assert other.finish_reason == "length", "cancelling what is finished changes nothing"


def test_progress_adds_up_to_the_answers(tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    engine = Engine(tiny_target, runner("oracle"), max_rows=3, width=BLOCK)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=25, ignore_eos=True)) for prompt in PROMPTS[:5]]
    ids: dict[int, list[int]] = {request.id: [] for request in requests}
    accepted: dict[int, list[bool]] = {request.id: [] for request in requests}
    text = {request.id: "" for request in requests}
    while engine.has_work:
        for progress in engine.step():
            assert len(progress.token_ids) == len(progress.accepted) == len(progress.pieces) > 0
            assert progress.logprobs == [], "nobody asked for them"
            ids[progress.request.id] += progress.token_ids
            accepted[progress.request.id] += progress.accepted
            text[progress.request.id] += progress.text
    for request in requests:
        assert ids[request.id] == request.output_ids
        assert accepted[request.id] == request.accepted
        assert text[request.id] == request.text.text == tiny_target.tokenizer.decode(request.output_ids, skip_special_tokens=True)
        assert not request.accepted[0], "the first token comes from the prefill"


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_step_reports_an_answer_that_joins_and_ends_in_it_once(
    tokens: int, tiny_target: Target, runner: Callable[[str], DraftRunner]
) -> None:
    engine = Engine(tiny_target, runner("oracle"), max_rows=3, width=BLOCK)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, logprobs=1)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS[:3]]
    progress = engine.step()
    assert [p.request for p in progress] == requests
    for p in progress:
        assert p.request.finish_reason == "length"
        assert len(p.token_ids) == len(p.accepted) == len(p.pieces) == len(p.logprobs) == tokens
        assert p.token_ids == p.request.output_ids


def test_statistics_count_rounds_and_time(tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    started = time.perf_counter()
    requests = run_all(
        Engine(tiny_target, runner("oracle"), max_rows=3, width=BLOCK), PROMPTS[:5], max_new_tokens=25, ignore_eos=True
    )
    elapsed = time.perf_counter() - started
    for request in requests:
        stats = request.stats
        # The last round may have been cut by the limit: what it accepted beyond counts in the rounds, not in the output.
        assert 0 <= 1 + stats.rounds + stats.num_accepted_tokens - stats.tokens < BLOCK
        assert stats.rounds - stats.drafted_at[0] in (0, 1), "where one token is missing, nothing is drafted"
        assert min(stats.draft_s, stats.verify_s, stats.other_s, stats.prefill_s) > 0
    assert sum(r.stats.decode_s + r.stats.prefill_s for r in requests) <= elapsed


def test_the_first_look_at_costs_does_not_count_as_drafting(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, runner: Callable[[str], DraftRunner]
) -> None:
    """It once did, and width "auto" never drafted again."""

    def slow(engine: Engine, tokens: int) -> float:
        time.sleep(0.1)
        return 0.01 + 1e-4 * tokens

    monkeypatch.setattr(Engine, "_time_forward", slow)
    request = run_all(Engine(tiny_target, runner("oracle"), max_rows=1), [PROMPTS[5]], max_new_tokens=30, ignore_eos=True)[0]
    assert request.stats.decode_s < 0.5
    assert request.stats.num_drafted_tokens > request.stats.rounds


def test_width_auto_gives_the_same_text(
    tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    requests = run_all(Engine(tiny_target, runner("oracle"), max_rows=2), PROMPTS[:3], max_new_tokens=30, ignore_eos=True)
    assert [r.output_ids for r in requests] == [plain(p, max_new_tokens=30, ignore_eos=True) for p in PROMPTS[:3]]


def test_sampled_requests_draft_the_whole_block_whatever_it_costs(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, runner: Callable[[str], DraftRunner]
) -> None:
    monkeypatch.setattr(Engine, "_time_forward", lambda engine, tokens: float(tokens))
    engine = Engine(tiny_target, runner("dspine"), max_rows=1)
    request = run_all(engine, [PROMPTS[0]], max_new_tokens=8, temperature=1.0, seed=0, ignore_eos=True)[0]
    assert request.stats.drafted_at == [request.stats.rounds] * (BLOCK - 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5] * 512, "the prompt has 512 tokens, but tiny-llama holds 512 with the answer; shorten it"),
        ([5, 260], r"token id 260 is not in the vocabulary of tiny-llama \(0 to 259\)"),
        ([-1], "token id -1 is not"),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], message: str, tiny_target: Target) -> None:
    engine = Engine(tiny_target)
    with pytest.raises(UserError, match=message):
        engine.submit(prompt, SamplingParams())
    assert not engine.has_work


@pytest.mark.parametrize("width", [0, BLOCK + 1, "wide", 2.5])
def test_impossible_widths_are_refused(width: Any, tiny_target: Target, runner: Callable[[str], DraftRunner]) -> None:
    with pytest.raises(UserError, match=r"width = .*: give 'auto', 'confidence' or a whole number from 1 \(plain\) to 6"):
        Engine(tiny_target, runner("dspine"), width=width)


def test_an_engine_needs_a_row(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="max_rows = 0"):
        Engine(tiny_target, max_rows=0)


def test_a_failing_round_can_be_cleaned_up(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, runner: Callable[[str], DraftRunner], plain: Callable[..., list[int]]
) -> None:
    """Ctrl-C or a full memory in the middle of a step: cancel, and the engine serves the next request as if new."""
    drafter = runner("oracle")
    engine = Engine(tiny_target, drafter, max_rows=2, width=4)
    broken = [engine.submit(prompt, SamplingParams(max_new_tokens=20)) for prompt in PROMPTS[:3]]
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(drafter, "propose", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    for request in broken:
        engine.cancel(request)
    assert not engine.has_work
    assert run_all(engine, [PROMPTS[6]], max_new_tokens=20, ignore_eos=True)[0].output_ids == plain(
        PROMPTS[6], max_new_tokens=20, ignore_eos=True
    )
