"""Answers of the tiny target, and drafters with three layers for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspine.drafters.base import BlockDrafter
from dspine.evaluation.studies.answers import AnswerSource, collect_answers
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.results import BlockSettings
from dspine.targets.model import Target
from dspine.training.corpus import Answer

BLOCK_DRAFTERS = ("dflash", "dspine", "dflash2", "domino", "dspark")
Study = Callable[..., StudiedDrafter]


WritePrompts = Callable[..., Path]


@pytest.fixture(scope="session")
def write_prompts() -> WritePrompts:
    """`write_prompts(file, count, word="question")`: a file of unlike prompts."""

    def write(file: Path, count: int, word: str = "question") -> Path:
        lines = [json.dumps({"turns": [f"{word} {number} of {7 * number}"]}) + "\n" for number in range(count)]
        file.write_text("".join(lines), encoding="utf-8")
        return file

    return write


@pytest.fixture(scope="session")
def answers(tiny_target: Target, write_prompts: WritePrompts, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    folder = tmp_path_factory.mktemp("answers")
    source = AnswerSource(prompts=write_prompts(folder / "questions.jsonl", 12), max_new_tokens=30, rows=3)
    return collect_answers(source, tiny_target, folder)


@pytest.fixture(scope="session")
def long_answers(answers: list[Answer]) -> list[Answer]:
    """Those that blocks of 8 tokens fit into at four anchors or more."""
    return [answer for answer in answers if len(answer.ids) - answer.prompt_length >= 11]


@pytest.fixture(scope="session")
def answer(answers: list[Answer]) -> Answer:
    """One that several blocks fit into."""
    return max(answers, key=lambda answer: len(answer.ids) - answer.prompt_length)


@pytest.fixture(scope="session")
def study(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> Study:
    """`study("dspine", block_size=8)`: a tiny random drafter under study."""

    def make(kind: str = "dflash", **changes: Any) -> StudiedDrafter:
        shape = {"num_layers": 3, "block_size": 8, **changes}
        return StudiedDrafter(make_drafter(tiny_target, kind, **shape), tiny_target)

    return make


@pytest.fixture
def settings() -> BlockSettings:
    return BlockSettings(prompts="questions", max_new_tokens=30, blocks_per_answer=4)


@pytest.fixture(params=BLOCK_DRAFTERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every block drafter, one after the other."""
    return str(request.param)


@pytest.fixture
def anchors(answer: Answer) -> torch.Tensor:
    """Positions at which a block of 8 slots lies inside `answer`."""
    first = answer.prompt_length - 1
    return torch.tensor([first, first + 3, first + 8])
