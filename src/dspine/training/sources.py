"""Where a trainer's features come from: computed as they are needed, or read from a disk cache filled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine.targets.model import Target
from dspine.training.corpus import Answer
from dspine.training.features import AnswerFeatures, FeatureStore


@dataclass(frozen=True)
class OnlineFeatures:
    """One target forward per use: nothing on disk, for targets whose features would not fit there."""

    answers: Sequence[Answer]
    target: Target
    layer_ids: tuple[int, ...]
    max_length: int

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> AnswerFeatures:
        answer = self.answers[index]
        ids = torch.tensor(answer.ids[: self.max_length])
        features, hidden = target_states(self.target, ids[:-1], self.layer_ids)
        return AnswerFeatures(ids, answer.prompt_length, features, hidden)

    def prompt(self, index: int) -> Sequence[int]:
        return self.answers[index].ids[: self.answers[index].prompt_length]


def target_states(target: Target, ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tapped features [n, taps * d] and final-normed states [n, d] of one sequence of token ids [n]."""
    cache = target.new_cache(1, ids.shape[0])
    out = target.forward(ids[None].to(target.device), cache, layer_ids)
    assert out.features is not None
    # Out of inference mode: a trainer's autograd may not save inference tensors.
    return out.features[0].clone(), out.hidden[0].clone()


def fill_store(
    store: FeatureStore, answers: Sequence[Answer], target: Target, layer_ids: tuple[int, ...], max_length: int,
    on_answer: Callable[[], None],
) -> None:  # fmt: skip
    """Compute what the store lacks, in the answers' order; a killed fill goes on where it was."""
    have = {tuple(entry["ref"]) for entry in store.entries}
    for answer in answers:
        if answer.ref not in have:
            ids = answer.ids[:max_length]
            features, hidden = target_states(target, torch.tensor(ids[:-1]), layer_ids)
            store.append({"ref": list(answer.ref), "p": answer.prompt_length, "ids": ids}, features, hidden)
        on_answer()


class StoredFeatures:
    """The answers' features from a filled store, in the answers' order (a store may hold more than one run needs)."""

    def __init__(self, store: FeatureStore, answers: Sequence[Answer]) -> None:
        self.store = store
        places = {tuple(entry["ref"]): i for i, entry in enumerate(store.entries)}
        self.places = [places[answer.ref] for answer in answers]
        self.answers = answers

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> AnswerFeatures:
        return self.store[self.places[index]]

    def prompt(self, index: int) -> Sequence[int]:
        return self.answers[index].ids[: self.answers[index].prompt_length]
