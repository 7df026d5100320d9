"""/v1/chat/completions, /v1/completions and /v1/models through the official client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch

from dspine.api import LLM

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
FREE: dict[str, Any] = {"extra_body": {"ignore_eos": True}}  # answers of full length, whatever the random model says


@pytest.fixture
def expected(llm: LLM) -> str:
    return llm.generate(MESSAGES, max_new_tokens=20, speculative=False, ignore_eos=True).text


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_greedy_answer_is_the_targets_own(client: openai.OpenAI, expected: str) -> None:
    reply = client.chat.completions.create(**GREEDY, **FREE)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    assert (reply.object, reply.model, choice.index, choice.logprobs) == ("chat.completion", MODEL, 0, None)


def test_usage_counts_tokens_and_drafts(client: openai.OpenAI, llm: LLM) -> None:
    usage = client.chat.completions.create(**GREEDY, **FREE).usage
    result = llm.generate(MESSAGES, max_new_tokens=20, ignore_eos=True)
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(result.prompt_ids), 20)
    assert usage.total_tokens == usage.prompt_tokens + 20
    stats = result.stats
    assert usage.model_extra == {
        "speculation": {
            "rounds": stats.rounds,
            "drafted_tokens": stats.num_drafted_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
            "acceptance_length": pytest.approx(stats.acceptance_length),
        }
    }


def test_a_stream_adds_up_to_the_same_answer(client: openai.OpenAI, expected: str) -> None:
    chunks = list(client.chat.completions.create(**GREEDY, **FREE, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_where_it_is_asked_for(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, **FREE).usage
    chunks = list(client.chat.completions.create(**GREEDY, **FREE, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_says_which_text_was_drafted(client: openai.OpenAI, llm: LLM) -> None:
    options: Any = {"include_speculation": True}
    chunks = list(client.chat.completions.create(**GREEDY, **FREE, stream=True, stream_options=options))
    deltas = [(chunk.choices[0].model_extra or {}).get("speculation") for chunk in chunks]
    pieces = [piece for delta in deltas if delta for piece in delta["pieces"]]
    result = llm.generate(MESSAGES, max_new_tokens=20, ignore_eos=True)
    assert [piece["accepted"] for piece in pieces] == result.accepted
    assert "".join(piece["text"] for piece in pieces) == result.text
    assert deltas[-1] is not None
    assert deltas[-1]["acceptance_length"] == pytest.approx(result.stats.acceptance_length)


def test_an_end_token_stops_an_answer(client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = llm.generate(MESSAGES, max_new_tokens=20, ignore_eos=True).token_ids
    monkeypatch.setattr(llm.target, "eos_token_ids", frozenset([ids[7]]))
    first = ids.index(ids[7])
    reply = client.chat.completions.create(**GREEDY, logprobs=True)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == first + 1
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.content or []) == first, "the end token is no text"


def test_conversations_and_content_parts_go_through_the_template(client: openai.OpenAI, llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None},
        {"role": "user", "content": "d"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    reply = client.chat.completions.create(**{**GREEDY, "messages": messages}, **FREE)
    assert reply.choices[0].message.content == llm.generate(plain, max_new_tokens=20, ignore_eos=True).text


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, expected: str) -> None:
    for stop in (expected[5:7], [expected[9:12], expected[5:7]]):
        choice = client.chat.completions.create(**GREEDY, **FREE, stop=stop).choices[0]
        assert choice.message.content == expected[: expected.index(expected[5:7])]
        assert choice.finish_reason == "stop"


def test_max_completion_tokens_goes_before_max_tokens(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(**GREEDY, **FREE, max_completion_tokens=3).usage
    assert usage is not None
    assert usage.completion_tokens == 3


def test_without_a_limit_answers_have_the_servers(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **FREE).usage
    assert usage is not None
    assert usage.completion_tokens == 32


def test_a_huge_limit_is_cut_to_the_context(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "x" * (llm.target.max_length - 10)
    reply = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=10**9, **FREE)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 10
    assert reply.choices[0].finish_reason == "length"


# --- sampling --------------------------------------------------------------------------------------------------------


def test_every_sampling_parameter_reaches_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    own: dict[str, Any] = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0.9, top_p=0.9, seed=5, max_tokens=20, extra_body=own
    )
    result = llm.generate(MESSAGES, temperature=0.9, top_p=0.9, seed=5, max_new_tokens=20, **own)
    assert reply.choices[0].message.content == result.text


def test_choices_of_one_seed_differ_and_come_again(client: openai.OpenAI, llm: LLM) -> None:
    def texts() -> list[str | None]:
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=7, max_tokens=12, **FREE)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 36
        return [choice.message.content for choice in reply.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    assert first[1] == llm.generate(MESSAGES, temperature=1.0, seed=8, max_new_tokens=12, ignore_eos=True).text


def test_streamed_choices_keep_apart(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 12, **FREE}
    whole = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


# --- logprobs --------------------------------------------------------------------------------------------------------


def target_logprobs(llm: LLM, prompt_ids: list[int], output_ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([prompt_ids + output_ids])
    hidden = llm.target.forward(tokens, llm.target.new_cache(1, tokens.shape[1])).hidden
    return llm.target.logits(hidden)[0, len(prompt_ids) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_are_the_targets_own(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    result = llm.generate(MESSAGES, max_new_tokens=20, ignore_eos=True)
    expected = target_logprobs(llm, result.prompt_ids, result.token_ids)
    options: dict[str, Any] = {**GREEDY, **FREE, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        content = [entry for part in parts if part is not None for entry in part.content or []]
    else:
        logprobs = client.chat.completions.create(**options).choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
    assert len(content) == 20
    special = llm.target.tokenizer.all_special_tokens  # named there, but no part of the text
    raw = b"".join(bytes(entry.bytes or []) for entry in content if entry.token not in special)
    assert raw.decode("utf-8", "replace") == result.text
    for row, token, entry in zip(expected, result.token_ids, content, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values = [top.logprob for top in entry.top_logprobs]
        assert values == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert entry.top_logprobs[0].bytes == entry.bytes, "greedy tokens are the likeliest"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    result = llm.generate("once upon", max_new_tokens=12, ignore_eos=True)
    expected = target_logprobs(llm, result.prompt_ids, result.token_ids)
    options: dict[str, Any] = {"model": MODEL, "prompt": "once upon", "temperature": 0, "max_tokens": 12, "logprobs": 2, **FREE}
    replies = list(client.completions.create(**options, stream=True)) if stream else [client.completions.create(**options)]
    parts = [reply.choices[0].logprobs for reply in replies]
    values = [value for part in parts if part for value in part.token_logprobs or []]
    assert values == pytest.approx([float(row[t]) for row, t in zip(expected, result.token_ids, strict=True)], abs=1e-4)
    tokens = [token for part in parts if part for token in part.tokens or []]
    offsets = [offset for part in parts if part for offset in part.text_offset or []]
    assert len(tokens) == len(offsets) == 12
    for i, offset in enumerate(offsets):
        before = llm.target.tokenizer.decode(result.token_ids[:i], skip_special_tokens=True)
        if not before.endswith("\ufffd"):  # else a character is unfinished there
            assert offset == len(before)
    top = [entry for part in parts if part for entry in part.top_logprobs or []]
    for entry, token, value in zip(top, tokens, values, strict=True):
        assert len(entry) == 2
        assert entry[token] == max(entry.values()) == pytest.approx(value)
    assert all(math.isfinite(value) and value <= 0 for value in values)


# --- completions and models ------------------------------------------------------------------------------------------


def test_completions_take_texts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["first", "second one"]
    expected = [llm.generate(prompt, max_new_tokens=10, ignore_eos=True).text for prompt in prompts]
    ids = [llm.encode(prompt) for prompt in prompts]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 10, **FREE}
    for prompt in (prompts, ids):
        reply = client.completions.create(prompt=prompt, **options)
        assert [choice.text for choice in reply.choices] == expected
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == expected[0]
    assert client.completions.create(prompt=prompts[1], **options).choices[0].text == expected[1]


def test_a_prompt_with_several_choices_counts_once(client: openai.OpenAI, llm: LLM) -> None:
    reply = client.completions.create(model=MODEL, prompt=["aa", "bbb"], n=2, temperature=0, max_tokens=4, **FREE)
    assert len(reply.choices) == 4
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(llm.encode("aa")) + len(llm.encode("bbb"))
    assert reply.choices[0].text == reply.choices[1].text != reply.choices[2].text


def test_a_streamed_completion(client: openai.OpenAI, llm: LLM) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="first", temperature=0, max_tokens=10, stream=True, stream_options=options, **FREE
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == llm.generate("first", max_new_tokens=10, ignore_eos=True).text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_an_answer_may_end_in_the_round_it_joined(client: openai.OpenAI, llm: LLM, tokens: int, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "first", "temperature": 0, "max_tokens": tokens, **FREE}
    expected = llm.generate("first", max_new_tokens=tokens, ignore_eos=True).text
    if stream:
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    else:
        reply = client.completions.create(**options)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected, "length")
        assert reply.usage is not None
        assert reply.usage.completion_tokens == tokens


def test_completions_are_16_tokens_long_unless_asked(client: openai.OpenAI) -> None:
    usage = client.completions.create(model=MODEL, prompt="first", temperature=0, **FREE).usage
    assert usage is not None
    assert usage.completion_tokens == 16


def test_the_model_is_listed(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    assert model.model_extra == {"max_model_len": llm.target.max_length}
