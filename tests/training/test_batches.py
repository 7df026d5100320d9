"""Batches: what each block sees, is taught and is judged by."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dspine.training.batches import ANSWERS, HELD_OUT, ORDER, build_batch, held_out_split, step_generator, step_order, to_device
from dspine.training.features import AnswerFeatures


def answer(n: int, prompt_length: int, base: int, extra_tokens: int = 1) -> AnswerFeatures:
    """Tokens base, base + 1, ...; features and teacher of position i are base + i, so that every row can be recognised."""
    rows = torch.arange(base, base + n).float()[:, None]
    return AnswerFeatures(torch.arange(base, base + n + extra_tokens), prompt_length, rows.repeat(1, 4), rows.repeat(1, 2))


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [step_generator(seed, 0, ANSWERS + j) for j in range(count)]


def test_every_block_is_in_its_place() -> None:
    answers = [answer(12, 4, 100), answer(7, 3, 200), answer(15, 9, 300)]
    batch = build_batch(answers, 5, 6, generators(3))
    context = batch.context
    # Token values and feature values name the answer and the position, so the packing can be read off them.
    assert torch.equal(
        context.features[:, 0], torch.cat([torch.arange(100, 112), torch.arange(200, 207), torch.arange(300, 315)]).float()
    )
    assert context.sequences.tolist() == [0] * 12 + [1] * 7 + [2] * 15
    assert context.positions.tolist() == [*range(12), *range(7), *range(15)]
    assert batch.tokens.shape[0] == 6 + 5 + 6  # the second answer has five tokens with a response token after them
    for a, anchor in enumerate(context.anchors.tolist()):
        token = int(context.features[anchor, 0])
        assert int(batch.tokens[a, 0]) == token
        number = token // 100 - 1
        n, prompt_length, position = answers[number].features.shape[0], answers[number].prompt_length, token % 100
        for t in range(1, 5):
            supervised = prompt_length <= position + t <= n
            assert bool(batch.supervised[a, t - 1]) == supervised
            if supervised:
                assert int(batch.tokens[a, t]) == token + t
                # The state that predicts a token is the one before it.
                assert batch.teacher[a, t - 1].tolist() == [token + t - 1] * 2
    assert batch.draws.shape == (17,)
    assert ((batch.draws >= 0) & (batch.draws < 1)).all()


def test_tokens_without_a_state_are_cut() -> None:
    """Answers may hold more tokens than features: n states teach n + 1 tokens."""
    long, short = (build_batch([answer(6, 2, 100, extra)], 4, 99, generators(1)) for extra in (5, 1))
    assert torch.equal(long.tokens, short.tokens)
    assert torch.equal(long.supervised, short.supervised)
    assert int(long.tokens.max()) == 106
    none_left = build_batch([answer(6, 2, 100, 0)], 4, 99, generators(1))
    assert int(none_left.tokens.max()) == 105


def test_an_answers_anchors_do_not_depend_on_its_company() -> None:
    answers = [answer(20, 4, 100), answer(20, 3, 200), answer(20, 9, 300)]
    together = build_batch(answers, 5, 3, generators(3))
    for j in range(3):
        alone = build_batch([answers[j]], 5, 3, [generators(3)[j]])
        assert torch.equal(alone.tokens, together.tokens[3 * j : 3 * j + 3])
        assert torch.equal(alone.draws, together.draws[3 * j : 3 * j + 3])


def test_answers_without_an_anchor() -> None:
    empty = answer(5, 9, 100)
    batch = build_batch([empty, answer(8, 3, 200)], 4, 99, generators(2))
    assert (batch.tokens[:, 0] >= 200).all()
    alone = build_batch([empty], 4, 99, generators(1))
    assert alone.tokens.shape == (1, 4)
    assert alone.supervised.sum() == 0
    # A response whose first token has no context before its anchor is not supervised by accident.
    assert build_batch([answer(1, 1, 100)], 4, 99, generators(1)).supervised.sum() == 0


def test_an_epoch_is_a_permutation() -> None:
    for per_step in (1, 4, 5):
        steps = 22 // per_step
        epochs = [[i for step in range(e * steps, (e + 1) * steps) for i in step_order(22, per_step, 7, step)] for e in range(2)]
        for seen in epochs:
            assert max(Counter(seen).values()) == 1
            assert len(seen) == steps * per_step
        assert epochs[0] != epochs[1]


def test_a_grown_corpus_holds_out_nothing_it_trained_on() -> None:
    prompts = [[i, 7 * i % 11, 3] for i in range(60)]
    held_out, training = held_out_split(prompts[:40], 6)
    assert sorted(held_out + training) == list(range(40))
    assert len(held_out) == 6
    grown, _ = held_out_split(prompts, 6)
    assert not set(grown) & set(training)
    assert held_out_split(prompts[::-1], 6)[0] == sorted(59 - i for i in grown)  # whatever the order


def test_order_depends_on_seed_and_step_only() -> None:
    torch.manual_seed(1)
    first = step_order(30, 4, 3, 5)
    torch.manual_seed(2)
    assert step_order(30, 4, 3, 5) == first
    assert step_order(30, 4, 4, 5) != first


def test_streams_do_not_repeat_each_other() -> None:
    draws = {
        (seed, step, stream): float(torch.rand(1, generator=step_generator(seed, step, stream)))
        for seed in (0, 1, 12345)
        for step in (0, 1, 99999)
        for stream in (ORDER, HELD_OUT, ANSWERS, ANSWERS + 1, ANSWERS + 111)
    }
    assert len(set(draws.values())) == len(draws)
    step_generator(10**15, 10**9, ANSWERS)  # no overflow


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_to_device_moves_everything(device: str) -> None:
    batch = to_device(build_batch([answer(8, 3, 100)], 4, 2, generators(1)), torch.device(device))
    tensors = [*vars(batch).values(), *vars(batch.context).values()]
    moved = [t.device.type for t in tensors if isinstance(t, torch.Tensor)]
    assert moved == [device] * 9
