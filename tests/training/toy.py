"""A training problem that fits in a page, and a process that works on it: `python toy.py FOLDER STEPS MICRO_BATCH [forever]`.

The "target" is a head, an embedding and a language in which each token follows from the one before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from dspine.drafters.registry import drafter_class
from dspine.targets.model import Target
from dspine.training.features import AnswerFeatures
from dspine.training.recipe import Recipe
from dspine.training.trainer import Trainer
from dspine.training.warm_start import new_drafter

VOCAB, HIDDEN, TAPS, BLOCK = 16, 16, 2, 5
MASK = 1


def toy_target() -> Target:
    """What training needs of a target."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    config = SimpleNamespace(
        model_type="toy",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 100.0},
    )
    stub = SimpleNamespace(
        name="toy", config=config, tokenizer=None, hidden_size=HIDDEN, num_layers=6, vocab_size=VOCAB, head_weight=embedding,
        softcap=None, device=torch.device("cpu"), dtype=torch.float32, model=None, embed=lambda tokens: embedding[tokens],
    )  # fmt: skip
    return cast(Target, stub)


class ToyAnswers(list[AnswerFeatures]):
    """Answers that say what was asked, as a trainer's source does."""

    def prompt(self, index: int) -> list[int]:
        answer = list.__getitem__(self, index)
        return [index, *answer.tokens[: answer.prompt_length].tolist()]


def toy_answers(target: Target, count: int = 16) -> ToyAnswers:
    """Sequences of unlike lengths; the teacher's state at a token points at its successor."""
    answers = ToyAnswers()
    for number in range(count):
        n, prompt_length = 9 + (5 * number) % 11, 3 + number % 3
        ids = [2 + number % (VOCAB - 2)]
        while len(ids) <= n:
            ids.append(2 + (ids[-1] - 2 + 3) % (VOCAB - 2))
        tokens = torch.tensor(ids)
        features = target.embed(tokens[:n]).repeat(1, TAPS)
        answers.append(AnswerFeatures(tokens, prompt_length, features, target.embed(tokens[1:])))
    return answers


def tiny_options(drafter: str) -> dict[str, int | str]:
    """A drafter's own options at a size for tests."""
    tiny: dict[str, int | str] = {
        "transfer_rank": 6,
        "message_width": 4,
        "num_candidates": 4,
        "gru_width": 6,
        "correction_rank": 4,
        "markov_rank": 4,
        "conv_groups_of": 4,
        "selector_rank": 5,
    }
    return {name: tiny[name] for name in drafter_class(drafter).Options.model_fields if name in tiny}


def toy_recipe(drafter: str = "dspine", **sections: dict[str, Any] | str | int) -> Recipe:
    defaults: dict[str, Any] = {
        "model": {
            "num_layers": 1 if drafter == "eagle3" else 2,
            "block_size": BLOCK,
            "taps": TAPS,
            "mask_token_id": MASK,
            "options": tiny_options(drafter),
            "attention": "bidirectional" if drafter == "dflash" else "causal",
        },
        "loss": {"alpha": 0.3, "beta": 0.2, "curriculum_hold": 0.5, "curriculum_end": 0.9},
        "optimiser": {"sequences_per_step": 4, "anchors_per_sequence": 3, "epochs": 4, "learning_rate": 1e-2},
        "data": {"answers": ["toy"], "held_out": 3},
        "dtype": "float32",
        "eval_every": 5,
        "save_every": 2,
    }
    for name, section in sections.items():
        defaults[name] = {**defaults[name], **section} if isinstance(section, dict) else section
    return Recipe.model_validate({"target": "toy", "drafter": drafter, **defaults})


def toy_trainer(folder: Path, recipe: Recipe | None = None, answers: ToyAnswers | None = None) -> Trainer:
    recipe, target = recipe or toy_recipe(), toy_target()
    return Trainer(recipe, target, new_drafter(recipe, target, None), answers or toy_answers(target), folder)


def main() -> None:
    """Train, printing each step's numbers, and save, once or until killed; with accelerate's environment variables set, as
    one of several processes."""
    torch.set_num_threads(1)
    trainer = toy_trainer(Path(sys.argv[1]), toy_recipe(optimiser={"micro_batch": int(sys.argv[3])}))
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}", flush=True)
    while trainer.step < int(sys.argv[2]):
        print(json.dumps(trainer.train_step(trainer.step)), flush=True)
        trainer.step += 1
    trainer.save()
    while "forever" in sys.argv:
        print("saved", flush=True)
        trainer.save()


if __name__ == "__main__":
    main()
