"""dspine inside transformers' own `generate`.

    from dspine.integrations.transformers import Speculative

    speculative = Speculative(tokenizer, "path/to/draft-checkpoint")
    output = model.generate(**inputs, max_new_tokens=128, custom_generate=speculative)

Greedy and sampling work as the generation config says, with the same distribution as without dspine. What the exact
engine cannot do (beams, custom logits processors, scores, ...) raises UserError instead of being left out in silence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspine.api import find_drafter
from dspine.decoding.calibration import load_calibration
from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.width_policy import Width
from dspine.drafters.base import BlockDrafter
from dspine.errors import UserError
from dspine.targets.model import Target

_PROCESSORS = (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
)
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


class Speculative:
    """A decoding method for `model.generate(..., custom_generate=...)`.

    `drafter`: a checkpoint folder, a shipped drafter's name, a loaded drafter, or "auto" (shipped for this model). The
    first call packs the model's weights for decoding; make a new object after changing them. Rows of a batch may have
    different lengths, padded on the left.
    """

    def __init__(
        self, tokenizer: Any, drafter: str | Path | BlockDrafter = "auto", *, max_rows: int = 8, width: Width = "auto"
    ) -> None:
        self._tokenizer, self._drafter, self._max_rows, self._width = tokenizer, drafter, max_rows, width
        self._model: Any = None
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate` with everything prepared. Returns ids [b, n + new], as `generate` does.

        Parameters beyond those of transformers' own methods would be taken for options of the caller, hence model_kwargs.
        """
        mask = model_kwargs.get("attention_mask")  # None where nothing is padded
        masks = torch.ones_like(input_ids) if mask is None else mask
        check_supported(generation_config, logits_processor, stopping_criteria, masks, model_kwargs)
        if streamer is not None and len(input_ids) > 1:
            raise UserError(f"a streamer takes one prompt, not {len(input_ids)}")
        engine = self._engine_for(model)
        eos = end_tokens(stopping_criteria)
        engine.target.eos_token_ids = frozenset(eos)
        params = sampling_params(generation_config, logits_processor, stopping_criteria, input_ids.shape[1])
        prompts = [_unpadded(row, mask) for row, mask in zip(input_ids, masks, strict=True)]
        answers = _decode(engine, prompts, _seeded(params, len(prompts)), streamer)
        # transformers pads with the end token where no pad token is set.
        pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else (eos or [0])[0]
        sequences = _with_answers(input_ids, answers, int(pad))
        return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences

    def _engine_for(self, model: Any) -> Engine:
        """The engine on this model's packed weights, built once."""
        if self._engine is None or self._model is not model:
            target = Target.wrap(model, self._tokenizer)
            drafter = self._drafter if isinstance(self._drafter, BlockDrafter) else find_drafter(target, self._drafter)
            if drafter is None:
                raise UserError(f"no drafter ships for {target.name}; name a draft checkpoint")
            if isinstance(self._drafter, BlockDrafter):
                drafter.config.target.check(target)
            calibration = load_calibration(drafter) if self._width == "confidence" else None
            self._engine = Engine(
                target, drafter.runner(target), max_rows=self._max_rows, width=self._width, calibration=calibration
            )
            self._model = model
        return self._engine


def _decode(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], streamer: Any) -> list[list[int]]:
    """The answers' token ids; nothing stays in the engine when this fails."""
    requests: list[Request] = []
    try:
        for prompt, own in zip(prompts, params, strict=True):
            requests.append(engine.submit(prompt, own))  # those before a refused one are cancelled below
        while engine.has_work:
            for progress in engine.step():
                if streamer is not None:
                    for token in progress.token_ids:
                        streamer.put(torch.tensor([token]))
    except BaseException:
        for request in requests:
            engine.cancel(request)
        raise
    if streamer is not None:
        streamer.end()
    return [request.output_ids for request in requests]


def check_supported(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    masks: Tensor,
    model_kwargs: dict[str, Any],
) -> None:
    """UserError naming the first thing asked for that this decoding method cannot do."""
    wrong: str | None = None
    if (config.num_beams or 1) > 1:
        wrong = f"num_beams={config.num_beams}"
    elif model_kwargs.get("inputs_embeds") is not None:
        wrong = "inputs_embeds"
    elif model_kwargs.get("assistant_model") is not None:
        wrong = "assistant_model"
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            wrong = wrong or f"{name}=True"
    kinds = [type(processor) for processor in processors]
    for processor, kind in zip(processors, kinds, strict=True):
        if kind not in _PROCESSORS or kinds.count(kind) > 1 or _is_special(processor, masks):
            wrong = wrong or f"the logits processor {kind.__name__}, as set here,"
    for criterion in criteria:
        if type(criterion) not in _CRITERIA:
            wrong = wrong or f"the stopping criterion {type(criterion).__name__}"
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        wrong = wrong or "a cache that already holds tokens"
    if wrong is not None:
        raise UserError(f"{wrong} is not supported by dspine's decoding; leave it out, or call generate without custom_generate")


def _is_special(processor: Any, masks: Tensor) -> bool:
    """Whether a known processor carries a setting that `SamplingParams` has no word for."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        # `generate` lets the penalty ignore the padding; the engine never sees any.
        return ignored is not None and not bool((torch.as_tensor(ignored) == (masks == 0).sum(1)).all())
    return isinstance(processor, TopPLogitsWarper | MinPLogitsWarper) and processor.min_tokens_to_keep != 1


def sampling_params(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList, prompt_length: int
) -> SamplingParams:
    """What `generate` prepared, read from the processors themselves: the caller may have given some of them."""
    values: dict[str, Any] = {}
    for processor in processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            values["repetition_penalty"] = float(processor.penalty)
        elif not config.do_sample:  # a warper never changes which token is the likeliest
            continue
        elif isinstance(processor, TemperatureLogitsWarper):
            values["temperature"] = float(processor.temperature)
        elif isinstance(processor, TopKLogitsWarper):
            values["top_k"] = int(processor.top_k)
        elif isinstance(processor, TopPLogitsWarper):
            values["top_p"] = float(processor.top_p)
        elif isinstance(processor, MinPLogitsWarper):
            values["min_p"] = float(processor.min_p)
    if config.do_sample:
        values.setdefault("temperature", 1.0)
    longest = min(criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria))
    return SamplingParams(max_new_tokens=longest - prompt_length, **values)


def end_tokens(criteria: StoppingCriteriaList) -> list[int]:
    """The token ids that end an answer, in order."""
    return [int(token) for criterion in criteria if isinstance(criterion, EosTokenCriteria) for token in criterion.eos_token_id]


def _seeded(params: SamplingParams, rows: int) -> list[SamplingParams]:
    """Seeds from torch's global generator, so that torch.manual_seed governs the output as it does in transformers."""
    if params.is_greedy:
        return [params] * rows
    return [replace(params, seed=int(seed)) for seed in torch.randint(2**62, (rows,))]


def _unpadded(row: Tensor, mask: Tensor) -> list[int]:
    """The prompt without its padding, which must be on the left."""
    real = mask.bool()
    start = int(real.int().argmax())
    if not bool(real[start:].all()) or not bool(real[-1]):
        raise UserError("the attention mask has gaps or padding on the right; pad on the left (tokenizer.padding_side = 'left')")
    return row[start:].tolist()


def _with_answers(input_ids: Tensor, answers: list[list[int]], pad: int) -> Tensor:
    longest = max(map(len, answers))
    rows = [answer + [pad] * (longest - len(answer)) for answer in answers]
    return torch.cat((input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)), 1)
