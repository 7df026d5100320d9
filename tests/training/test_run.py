"""A whole run on a tiny target: answers regenerated, features cached or online, trained, exported, loaded, decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.api import LLM
from dspine.drafters.checkpoint import load_drafter
from dspine.drafters.registry import DRAFTERS
from dspine.errors import UserError
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.corpus import Answer, load_answers
from dspine.training.prompts import collect_prompts
from dspine.training.recipe import Recipe
from dspine.training.regenerate import EngineAnswerer, RegenerateSettings, regenerate
from dspine.training.run import TrainingRun, answer_agreement, evenly_spread, run_training, warn_of_misfit

from .toy import tiny_options

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def workshop(
    tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, Target]:
    """A folder with a target model, prompts and the target's answers to them."""
    folder = tmp_path_factory.mktemp("workshop")
    make_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    prompts = [json.dumps({"turns": [f"question {i} " * (1 + i % 3)]}) for i in range(14)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    target = Target.load(str(folder / "target"))
    settings = RegenerateSettings(max_new_tokens=24, rows=4)
    questions = collect_prompts([folder / "prompts.jsonl"])
    regenerate(questions, EngineAnswerer(target), ChatFormat.of(target), folder / "answers.jsonl.gz", settings)
    return folder, target


def recipe(folder: Path, drafter: str = "dspine", **data: object) -> Recipe:
    return Recipe.model_validate(
        {
            "target": str(folder / "target"),
            "drafter": drafter,
            "model": {
                "num_layers": 1 if drafter == "eagle3" else 2,
                "block_size": 4,
                "mask_token_id": 0,
                "qk_norm": False,
                "taps": 2,
                "options": tiny_options(drafter),
                "draft_vocab_size": 40,
                "start": "target_layers",
                "attention": "bidirectional" if drafter == "dflash" else "causal",
            },
            "loss": {"alpha": 1.0},
            "optimiser": {"epochs": 2, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 0.003},
            "data": {"answers": [str(folder / "answers.jsonl.gz")], "prompts": str(folder), "held_out": 2, **data},
            "eval_every": 3,
            "save_every": 2,
        }
    )


def finish(recipe: Recipe, folder: Path, **options: Any) -> TrainingRun:
    run = run_training(recipe, folder, **options)
    assert run is not None
    return run


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_run_ends_in_a_checkpoint_that_decodes_exactly(workshop: tuple[Path, Target], tmp_path: Path, drafter: str) -> None:
    folder, target = workshop
    run = finish(recipe(folder, drafter), tmp_path / "run", quiet=True)
    loaded = load_drafter(run.checkpoint, target)
    assert loaded.config.expected_acceptance == tuple(round(rate, 4) for rate in run.held_out.slot_accuracy)
    assert loaded.config.draft_vocab_size == loaded.draft_ids.shape[0] <= 40
    llm = LLM(target, loaded, width=4)
    drafted, plain = (llm.generate("question 3", chat=True, max_new_tokens=20, speculative=s) for s in (True, False))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_drafted_tokens > 0


def test_cached_and_online_features_train_the_same_drafter(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    """Up to the cache's float16."""
    folder, target = workshop
    online = finish(recipe(folder), tmp_path / "online", export_dtype=torch.float32, quiet=True)
    cached_recipe = recipe(folder, features="cache", cache=str(tmp_path / "features"))
    cached = finish(cached_recipe, tmp_path / "cached", export_dtype=torch.float32, quiet=True)
    one, other = (load_drafter(run.checkpoint, target).state_dict() for run in (online, cached))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=0.02, rtol=0.0)


def test_a_finished_run_is_not_trained_again(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = workshop
    first = finish(recipe(folder), tmp_path, quiet=True)
    state = (tmp_path / "state.pt").read_bytes()
    second = finish(recipe(folder), tmp_path, quiet=True)
    assert (tmp_path / "state.pt").read_bytes() == state
    assert second.held_out == first.held_out


def test_curves_are_written(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = workshop
    run = finish(recipe(folder), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({*range(3, run.steps + 1, 3), run.steps})
    assert rows[-1]["acceptance_length"] == pytest.approx(run.held_out.acceptance_length)
    assert any((tmp_path / "tensorboard").iterdir())


def test_answers_of_another_model_are_noticed(
    workshop: tuple[Path, Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = workshop
    answers = load_answers([folder / "answers.jsonl.gz"], [folder], target)
    assert answer_agreement(answers, target) == 1.0
    foreign = [type(a)(a.ref, a.ids[: a.prompt_length] + [5] * 20, a.prompt_length) for a in answers]
    warn_of_misfit(foreign, target, Console())
    assert "another model" in capsys.readouterr().out
    warn_of_misfit(answers, target, Console())
    assert capsys.readouterr().out == ""


def test_answers_that_are_all_too_long_are_refused(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = workshop
    with pytest.raises(UserError, match="no usable answers"):
        run_training(recipe(folder, max_length=8), tmp_path, quiet=True)


def test_a_limit_keeps_every_files_share() -> None:
    answers = [Answer((file, i), [1, 2, 3], 1) for file, count in (("a", 60), ("b", 30)) for i in range(count)]
    few = evenly_spread(answers, 9)
    assert [a.ref[0] for a in few] == ["a"] * 6 + ["b"] * 3
    assert len({a.ref for a in few}) == 9
    assert evenly_spread(answers, 500) == answers


def test_a_limited_run_caches_only_what_it_trains_on(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = workshop
    finish(recipe(folder, limit=6, features="cache", cache=str(tmp_path / "cache")), tmp_path / "run", quiet=True)
    assert len((tmp_path / "cache" / "index.jsonl").read_text().splitlines()) == 6


def test_a_run_stopped_by_its_time_goes_on(workshop: tuple[Path, Target], tmp_path: Path) -> None:
    folder, _ = workshop
    whole = finish(recipe(folder), tmp_path / "whole", quiet=True)
    assert run_training(recipe(folder), tmp_path / "parts", quiet=True, stop_after_s=0.0) is None
    assert not (tmp_path / "parts" / "checkpoint").exists()
    assert finish(recipe(folder), tmp_path / "parts", quiet=True).held_out == whole.held_out
