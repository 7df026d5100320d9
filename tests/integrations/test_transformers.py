"""`model.generate(..., custom_generate=...)` returns what `generate` returns, and refuses what it cannot do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import save_drafter
from dspine.errors import UserError
from dspine.integrations.transformers import Speculative
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeDrafter = Callable[..., BlockDrafter]
PROMPTS = ["The quick brown fox", "jumps"]


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def speculative(tiny_tokenizer: PreTrainedTokenizerFast, tiny_target: Target, make_drafter: MakeDrafter) -> Speculative:
    return Speculative(tiny_tokenizer, make_drafter(tiny_target), width=4)


def inputs(tokenizer: PreTrainedTokenizerFast, *prompts: str) -> dict[str, torch.Tensor]:
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3}, {"eos_token_id": [7, 60, 120]}, {"num_return_sequences": 1}]
)
def test_greedy_output_is_that_of_generate(
    prompts: list[str],
    options: dict[str, Any],
    model: PreTrainedModel,
    speculative: Speculative,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    given = {**inputs(tiny_tokenizer, *prompts), "max_new_tokens": 24, "do_sample": False, **options}
    ours, theirs = model.generate(**given, custom_generate=speculative), model.generate(**given)
    assert ours.dtype == theirs.dtype
    assert ours.tolist() == theirs.tolist()


def test_the_engine_really_drafts(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model.generate(**inputs(tiny_tokenizer, PROMPTS[0]), max_new_tokens=4, custom_generate=speculative)
    assert speculative._engine is not None
    assert speculative._engine.drafter is not None
    built = speculative._engine
    model.generate(**inputs(tiny_tokenizer, PROMPTS[1]), max_new_tokens=4, custom_generate=speculative)
    assert speculative._engine is built, "weights are packed once"


def test_a_checkpoint_folder_works_too(
    tmp_path: Path,
    model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_target: Target,
    make_drafter: MakeDrafter,
) -> None:
    save_drafter(make_drafter(tiny_target, "dflash"), tmp_path / "drafter")
    given = {**inputs(tiny_tokenizer, PROMPTS[0]), "max_new_tokens": 10}
    ours = model.generate(**given, custom_generate=Speculative(tiny_tokenizer, tmp_path / "drafter"))
    assert ours.tolist() == model.generate(**given).tolist()


def test_sampling_follows_the_generation_config_and_torchs_seed(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {**inputs(tiny_tokenizer, PROMPTS[0]), "max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 40}

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return model.generate(**given, custom_generate=speculative).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_top_k_one_is_greedy_and_several_sequences_come_back(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {**inputs(tiny_tokenizer, PROMPTS[0]), "max_new_tokens": 12}
    sampled = model.generate(**given, do_sample=True, top_k=1, num_return_sequences=3, custom_generate=speculative)
    assert sampled.tolist() == model.generate(**given, do_sample=False).tolist() * 3


def test_warpers_given_by_the_caller_count(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {**inputs(tiny_tokenizer, PROMPTS[0]), "max_new_tokens": 12}
    only_best = LogitsProcessorList([TopKLogitsWarper(1)])
    ours = model.generate(**given, do_sample=True, top_k=0, logits_processor=only_best, custom_generate=speculative)
    assert ours.tolist() == model.generate(**given, do_sample=False).tolist()


def test_sampled_first_tokens_have_the_targets_frequencies(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {**inputs(tiny_tokenizer, PROMPTS[1]), "max_new_tokens": 1, "do_sample": True, "top_k": 2, "temperature": 2.0}
    torch.manual_seed(0)
    counts = Counter(model.generate(**given, num_return_sequences=300, custom_generate=speculative)[:, -1].tolist())
    with torch.no_grad():
        logits = model(given["input_ids"]).logits[0, -1] / 2.0
    values, ids = logits.topk(2)
    for token, share in zip(ids.tolist(), values.softmax(0).tolist(), strict=True):
        assert counts[token] / 300 == pytest.approx(share, abs=4 * (share * (1 - share) / 300) ** 0.5)
    assert sum(counts.values()) == counts[int(ids[0])] + counts[int(ids[1])]


def test_a_dictionary_is_returned_on_request(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {**inputs(tiny_tokenizer, PROMPTS[0]), "max_new_tokens": 5, "return_dict_in_generate": True}
    assert model.generate(**given, custom_generate=speculative).sequences.tolist() == model.generate(**given).sequences.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True is not supported"),
        ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor, as set here, is not supported"),
        ({"do_sample": True, "typical_p": 0.5}, "the logits processor TypicalLogitsWarper"),
        (
            {
                "do_sample": True,
                "top_p": 0.9,
                "logits_processor": LogitsProcessorList([TopPLogitsWarper(0.5, min_tokens_to_keep=3)]),
            },
            "the logits processor TopPLogitsWarper, as set here,",
        ),
        ({"min_new_tokens": 3}, "the logits processor MinLengthLogitsProcessor"),
        (
            {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)])},
            "the logits processor RepetitionPenaltyLogitsProcessor, as set here,",
        ),
        ({"max_time": 5.0}, "the stopping criterion MaxTimeCriteria is not supported"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])}, "the stopping criterion MaxTimeCriteria"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: dict[str, Any],
    message: str,
    model: PreTrainedModel,
    speculative: Speculative,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(UserError, match=message):
        model.generate(**inputs(tiny_tokenizer, PROMPTS[0]), max_new_tokens=5, custom_generate=speculative, **options)


def test_embeddings_instead_of_tokens_are_refused(
    model: PreTrainedModel, speculative: Speculative, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    embeddings = model.get_input_embeddings()(inputs(tiny_tokenizer, PROMPTS[0])["input_ids"])
    with pytest.raises(UserError, match="inputs_embeds is not supported"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=5, custom_generate=speculative)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1]])
def test_padding_on_the_right_and_gaps_are_refused(mask: list[int], model: PreTrainedModel, speculative: Speculative) -> None:
    tokens = torch.tensor([[10, 11, 12, 13]])
    with pytest.raises(UserError, match="the attention mask has gaps or padding on the right; pad on the left"):
        model.generate(tokens, attention_mask=torch.tensor([mask]), max_new_tokens=5, custom_generate=speculative)


def test_a_drafter_for_another_model_is_refused(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tiny_target: Target, make_drafter: MakeDrafter
) -> None:
    speculative = Speculative(tiny_tokenizer, make_drafter(tiny_target))
    with pytest.raises(UserError, match="has head_norms ="):
        make_model("llama", seed=4).generate(torch.tensor([[10, 11]]), max_new_tokens=5, custom_generate=speculative)


def test_an_over_long_prompt_is_refused_and_leaves_nothing_behind(model: PreTrainedModel, speculative: Speculative) -> None:
    tokens = torch.full((2, 513), 10)
    mask = torch.ones_like(tokens)
    mask[0, :500] = 0  # the first row fits
    with pytest.raises(UserError, match="the prompt has 513 tokens"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=5, custom_generate=speculative)
    assert speculative._engine is not None
    assert not speculative._engine.has_work


def test_without_a_shipped_drafter_one_must_be_named(model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no drafter ships for LlamaForCausalLM; name a draft checkpoint"):
        model.generate(torch.tensor([[10, 11]]), max_new_tokens=5, custom_generate=Speculative(tiny_tokenizer))


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_that_generate_hands_on_is_served(speculative: Speculative, model: PreTrainedModel) -> None:
    """transformers 5.24 keeps the streamer to itself for callables; other releases pass it."""
    streamer, criteria = Collector(), StoppingCriteriaList()
    tokens = torch.tensor([[10, 11, 12]])
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    criteria += [MaxLengthCriteria(9), EosTokenCriteria(1)]
    output = speculative(model, tokens, LogitsProcessorList(), criteria, model.generation_config, streamer=streamer)
    assert isinstance(output, torch.Tensor)
    assert output.tolist() == expected.tolist()
    assert streamer.tokens == output[0, 3:].tolist()
    assert streamer.ended
    with pytest.raises(UserError, match="a streamer takes one prompt, not 2"):
        speculative(model, tokens.repeat(2, 1), LogitsProcessorList(), criteria, model.generation_config, streamer=streamer)
