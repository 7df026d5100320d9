"""From answered prompts to a `TrainingBatch`: packing, anchors, labels, teacher states. Deterministic in (seed, step)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from dspine.drafters.backbone import ContextBatch
from dspine.drafters.base import TrainingBatch
from dspine.training.anchors import block_tokens, sample_anchors, supervised_prefix
from dspine.training.features import AnswerFeatures

ORDER, HELD_OUT, ANSWERS = 0, 2, 16  # streams of random numbers; the j-th answer of a step has ANSWERS + j


def step_generator(seed: int, step: int, stream: int) -> torch.Generator:
    """The random numbers of one step's `stream`, independent of every other step: what makes a resumed run bit-exact."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + step) * 65_536 + stream) % 2**63)


def held_out_split(prompts: Sequence[Sequence[int]], count: int) -> tuple[list[int], list[int]]:
    """Indices to hold out and to train on. Held out are the `count` prompts (token ids) of the smallest hashes, whatever else
    there is: a prompt trained on does not become held out when the corpus grows, so a longer run may start from a shorter."""
    order = sorted(range(len(prompts)), key=lambda i: hashlib.sha256(array("q", prompts[i]).tobytes()).digest())
    return sorted(order[:count]), sorted(order[count:])


def step_order(num_sequences: int, sequences_per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the sequences of `step`: each epoch is its own permutation, its incomplete last step dropped."""
    per_epoch = max(1, num_sequences // sequences_per_step)
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(num_sequences, generator=step_generator(seed, epoch, ORDER))
    start = position * sequences_per_step
    return order[start : start + sequences_per_step].tolist()


def build_batch(
    answers: Sequence[AnswerFeatures], block_size: int, anchors_per_sequence: int, generators: Sequence[torch.Generator]
) -> TrainingBatch:
    """Pack answers and sample their anchors, each answer's from its own generator, whatever it is packed with.

    The teacher of the token at position i is the target's state at i - 1, so slots are supervised only where it exists.
    Where no answer has an anchor the batch is one block that supervises nothing.
    """
    masks = [(torch.arange(_usable(answer)) >= answer.prompt_length).long() for answer in answers]
    chosen = [sample_anchors(mask, anchors_per_sequence, g) for mask, g in zip(masks, generators, strict=True)]
    draws = [torch.rand(anchors.shape[0], generator=g) for anchors, g in zip(chosen, generators, strict=True)]
    if not any(anchors.shape[0] for anchors in chosen):
        masks[0], chosen[0], draws[0] = torch.zeros_like(masks[0]), torch.zeros(1, dtype=torch.long), torch.ones(1)
    tokens, supervised, teachers, anchors = [], [], [], []
    offset = 0
    for answer, mask, own in zip(answers, masks, chosen, strict=True):
        n = answer.features.shape[0]
        slots = own[:, None] + torch.arange(block_size - 1)
        tokens.append(block_tokens(answer.tokens[: _usable(answer)], own, block_size))
        supervised.append(supervised_prefix(mask, own, block_size))
        teachers.append(answer.teacher[slots.clamp(max=n - 1).to(answer.teacher.device)])
        anchors.append(own + offset)
        offset += n
    lengths = [answer.features.shape[0] for answer in answers]
    context = ContextBatch(
        features=torch.cat([answer.features for answer in answers]),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        sequences=torch.arange(len(answers)).repeat_interleave(torch.tensor(lengths)),
        next_tokens=torch.cat([_next_tokens(answer) for answer in answers]),
        anchors=torch.cat(anchors),
    )
    return TrainingBatch(
        context=context,
        tokens=torch.cat(tokens),
        supervised=torch.cat(supervised).float(),
        teacher=torch.cat(teachers),
        draws=torch.cat(draws),
    )


def _next_tokens(answer: AnswerFeatures) -> Tensor:
    """The token after each feature's; past the end the last one repeats (no block reads that far)."""
    n = answer.features.shape[0]
    return answer.tokens[torch.arange(1, n + 1).clamp(max=answer.tokens.shape[0] - 1)]


def _usable(answer: AnswerFeatures) -> int:
    """Tokens that have a teacher, and the ones before them: n features teach n + 1 tokens."""
    return min(answer.tokens.shape[0], answer.features.shape[0] + 1)


def to_device(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    c = batch.context
    return TrainingBatch(
        context=ContextBatch(
            features=c.features.to(device),
            positions=c.positions.to(device),
            sequences=c.sequences.to(device),
            next_tokens=c.next_tokens.to(device),
            anchors=c.anchors.to(device),
        ),
        tokens=batch.tokens.to(device),
        supervised=batch.supervised.to(device),
        teacher=batch.teacher.to(device),
        draws=batch.draws.to(device),
    )
