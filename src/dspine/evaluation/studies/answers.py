"""What the studies take for truth: the target's own greedy answers, generated once and kept, or made before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dspine.errors import UserError
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.anchors import sample_anchors
from dspine.training.batches import ANSWERS, step_generator
from dspine.training.corpus import Answer, load_answers, read_answers
from dspine.training.prompts import collect_prompts
from dspine.training.regenerate import EngineAnswerer, RegenerateSettings, regenerate


@dataclass(frozen=True, kw_only=True)
class AnswerSource:
    """Prompts, how many of them (None: all), and the longest answer in tokens; `answers` is a file of answers to them that
    `dspine data regenerate` has made, None to generate them."""

    prompts: Path
    max_new_tokens: int
    answers: Path | None = None
    limit: int | None = None
    rows: int = 16  # answered at once

    def count(self) -> int:
        """How many prompts there will be at most. Raises UserError for a file that cannot be read."""
        return len(collect_prompts([self.prompts], self.limit))


def collect_answers(
    source: AnswerSource, target: Target, folder: Path, on_prompt: Callable[[int], None] = lambda count: None
) -> list[Answer]:
    """The greedy answers to the source's prompts, in their order, none longer than `max_new_tokens`.

    Generated ones go to `folder`; a stopped call goes on where it was. Raises UserError for answers of another target, for
    sampled ones, and where there are none.
    """
    file = source.answers
    if file is None:
        file = folder / f"answers-{source.prompts.stem}.jsonl.gz"
        prompts = collect_prompts([source.prompts], source.limit)
        settings = RegenerateSettings(max_new_tokens=source.max_new_tokens, rows=source.rows)
        regenerate(prompts, EngineAnswerer(target), ChatFormat.of(target), file, settings, on_prompt)
    temperature = read_answers(file)[0].sampling.get("temperature")
    if temperature != 0:
        raise UserError(f"{file} holds answers sampled at temperature {temperature}; a study needs the target's greedy ones")
    found = sorted(load_answers([file], [source.prompts.parent], target), key=lambda answer: answer.ref)
    found = [answer for answer in found if answer.ref[0] == source.prompts.stem]
    if not found:
        raise UserError(f"{file} answers no prompt of {source.prompts}; give the prompt file that the answers were made for")
    return [_shortened(answer, source.max_new_tokens) for answer in found[: source.limit]]


def _shortened(answer: Answer, max_new_tokens: int) -> Answer:
    return replace(answer, ids=answer.ids[: answer.prompt_length + max_new_tokens])


def check_disjoint(fit: Sequence[Answer], test: Sequence[Answer]) -> None:
    """Raise UserError where a prompt is both fitted to and tested on."""
    tested = {tuple(answer.ids[: answer.prompt_length]) for answer in test}
    for answer in fit:
        if tuple(answer.ids[: answer.prompt_length]) in tested:
            stem, index = answer.ref
            raise UserError(f"{stem}.jsonl line {index + 1} is among the test prompts too; fit to other prompts")


def block_anchors(answer: Answer, num_draft_tokens: int, limit: int, seed: int) -> Tensor:
    """Up to `limit` random anchor positions [a], sorted, whose whole block lies inside the answer; the same for the same seed
    whatever else is studied."""
    inside = torch.arange(max(0, len(answer.ids) - num_draft_tokens + 1)) >= answer.prompt_length
    return sample_anchors(inside, limit, step_generator(seed, answer.ref[1], ANSWERS))
