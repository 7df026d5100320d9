"""The training loop on a toy problem: it learns, resumes bit-exactly, and is the same step however it is worked off."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import BlockLosses
from dspine.errors import UserError
from dspine.training.curriculum import learning_rate_scale
from dspine.training.features import AnswerFeatures
from dspine.training.trainer import HeldOut, Trainer, held_out_result

from . import toy
from .toy import ToyAnswers, toy_answers, toy_recipe, toy_target, toy_trainer

KINDS = pytest.mark.parametrize("drafter", ["dspine", "dflash"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A single thread makes runs in two processes comparable bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}


def steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
    done: list[dict[str, float]] = []
    while len(done) < count:
        done.append(trainer.train_step(trainer.step))
        trainer.step += 1
    return done


def silent(trainer: Trainer) -> HeldOut:
    result = trainer.run(lambda *_: None, lambda *_: None)
    assert result is not None
    return result


# -- learning ---------------------------------------------------------------------------------------------------------


@KINDS
def test_it_learns(tmp_path: Path, drafter: str) -> None:
    trainer = toy_trainer(tmp_path, toy_recipe(drafter, optimiser={"epochs": 40, "anchors_per_sequence": 9}))
    before = trainer.evaluate()
    done = steps(trainer, trainer.total_steps)
    after = trainer.evaluate()
    assert trainer.total_steps == 120
    first, last = (sum(m["ce"] for m in part) / 5 for part in (done[:5], done[-5:]))
    assert first > 2.5
    assert last < 1.0
    assert before.acceptance_length < 1.5
    assert after.acceptance_length > 3.0
    assert done[-1]["correct_first"] > done[0]["correct_first"]


def test_every_parameter_moves(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    before = parameters(trainer)
    steps(trainer, 3)
    after = parameters(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_numbers_of_a_step(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    for step, metrics in enumerate(steps(trainer, 4)):
        assert metrics["learning_rate"] == pytest.approx(1e-2 * learning_rate_scale(step, trainer.total_steps, 0.04))
        assert metrics["anchors"] == 12
        assert metrics["gradient_norm"] > 0
        assert set(metrics) == {"anchors", "loss", "ce", "correct_first", "gradient_norm", "learning_rate"}


def test_learning_rate_and_clipping_reach_the_optimiser(tmp_path: Path) -> None:
    """A step moves no parameter by much more than the learning rate (Adam), and clipping rescales the gradient."""
    trainer = toy_trainer(tmp_path, toy_recipe(optimiser={"clip": 1e-3}))
    seen: list[float] = []
    step = trainer.optimiser.step

    def spy() -> None:
        total = sum(float(p.grad.square().sum()) for p in trainer.drafter.parameters() if p.grad is not None)
        seen.append(total**0.5)
        step()

    trainer.optimiser.step = spy
    before = parameters(trainer)
    metrics = steps(trainer, 1)[0]
    assert metrics["gradient_norm"] > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]
    largest = max(float((a - before[name]).abs().max()) for name, a in parameters(trainer).items())
    assert largest == pytest.approx(metrics["learning_rate"], rel=1e-2)


def test_mixed_precision_learns_and_is_measured_in_the_targets_precision(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, toy_recipe(dtype="bfloat16", optimiser={"epochs": 20}))
    done = steps(trainer, 40)
    assert done[-1]["ce"] < 0.5 * done[0]["ce"]
    dtypes: set[torch.dtype] = set()
    hook = trainer.drafter.backbone.fc.register_forward_hook(lambda _m, _i, out: dtypes.add(out.dtype))
    trainer.evaluate()
    assert dtypes == {torch.float32}
    steps(trainer, 1)
    assert dtypes == {torch.float32, torch.bfloat16}
    hook.remove()


# -- one step, worked off in parts ------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("shared", [False, True])
def test_micro_batches_are_one_batch(tmp_path: Path, drafter: str, shared: bool) -> None:
    """Values, gradients (through the parameters they lead to) and the CE factor, at every stage of the curriculum."""
    results = []
    for size in (0, 1, 3):
        trainer = toy_trainer(
            tmp_path, toy_recipe(drafter, optimiser={"micro_batch": size}, loss={"refined_shared_normaliser": shared})
        )
        results.append((steps(trainer, 5), parameters(trainer)))
    whole_metrics, whole = results[0]
    for metrics, split in results[1:]:
        for a, b in zip(metrics, whole_metrics, strict=True):
            assert a == {name: pytest.approx(value, rel=1e-4) for name, value in b.items()}
        for name, parameter in whole.items():
            torch.testing.assert_close(split[name], parameter, rtol=1e-3, atol=2e-5, msg=name)


def test_gradients_of_micro_batches(tmp_path: Path) -> None:
    gradients = []
    for size in (0, 1):
        trainer = toy_trainer(tmp_path, toy_recipe(optimiser={"micro_batch": size, "clip": 1e9}))
        trainer.step = 6  # after the warm-up: the alignment term counts
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.drafter.parameters():  # no longer the identity: every part has a gradient
                parameter.add_(0.2 * torch.randn_like(parameter))
        trainer.optimiser.step = lambda: None
        trainer.optimiser.zero_grad = lambda set_to_none: None
        trainer.train_step(trainer.step)
        gradients.append([p.grad for p in trainer.drafter.parameters()])
    for whole, split in zip(*gradients, strict=True):
        assert whole is not None
        assert whole.abs().max() > 0
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_processes_are_one(tmp_path: Path) -> None:
    port = str(free_port())
    workers = []
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
        workers.append(
            subprocess.Popen(
                [sys.executable, toy.__file__, str(tmp_path / "two"), "4", "0"],
                env={**os.environ, **ranks, **meeting},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert all(f"process {rank} of 2" in output for rank, output in enumerate(outputs))
    alone = toy_trainer(tmp_path / "one")
    for step, metrics in enumerate(steps(alone, 4)):
        for output in outputs:
            said = json.loads([line for line in output.splitlines() if line.startswith("{")][step])
            assert said == {name: pytest.approx(value, rel=1e-4) for name, value in metrics.items()}
    together = toy_trainer(tmp_path / "two")
    assert together.resume()
    assert together.step == 4
    for name, parameter in parameters(alone).items():
        torch.testing.assert_close(parameters(together)[name], parameter, rtol=1e-3, atol=2e-5, msg=name)


def test_answers_without_a_response_do_not_stop_a_step(tmp_path: Path) -> None:
    answers = ToyAnswers(AnswerFeatures(a.tokens, 999, a.features, a.teacher) for a in toy_answers(toy_target()))
    for size in (0, 1):
        trainer = toy_trainer(tmp_path, toy_recipe(optimiser={"micro_batch": size}), answers)
        before = parameters(trainer)
        assert steps(trainer, 1)[0]["loss"] == 0
        assert all(torch.equal(before[name], p) for name, p in parameters(trainer).items())
        assert trainer.evaluate() == HeldOut(1.0, (0.0,) * (toy.BLOCK - 1))


# -- data -------------------------------------------------------------------------------------------------------------


class Watched(ToyAnswers):
    """A source that remembers what was read."""

    def __init__(self, answers: ToyAnswers) -> None:
        super().__init__(answers)
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def test_held_out_answers_are_never_trained_on(tmp_path: Path) -> None:
    source = Watched(toy_answers(toy_target()))
    trainer = toy_trainer(tmp_path, answers=source)
    steps(trainer, 3)  # an epoch of 13 answers in steps of 4
    assert len(source.read) == len(set(source.read)) == 12
    assert not set(source.read) & set(trainer.held_out)
    source.read.clear()
    trainer.evaluate()
    assert sorted(source.read) == sorted(trainer.held_out)
    assert len(trainer.held_out) == 3


def test_too_few_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="6 answers are too few to hold out 3 and train in steps of 4"):
        toy_trainer(tmp_path, answers=toy_answers(toy_target(), 6))
    assert toy_trainer(tmp_path, toy_recipe(optimiser={"epochs": 2}), toy_answers(toy_target(), 7)).total_steps == 2


# -- held-out results -------------------------------------------------------------------------------------------------


def test_held_out_result_by_hand() -> None:
    correct = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]])
    supervised = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]])
    result = held_out_result(correct * supervised, supervised)
    # Slot 1: 3 of 4. Slot 2, where slot 1 was right: 2 of 3. Slot 3, where both were right and there is a label: 0 of 1.
    assert result.slot_accuracy == pytest.approx((3 / 4, 2 / 3, 0.0))
    assert result.acceptance_length == pytest.approx(1 + 3 / 4 + 3 / 4 * 2 / 3)


def test_an_answers_end_is_no_refusal() -> None:
    """Perfect drafts of blocks that reach past the answer: every label that exists counts, the rest does not."""
    supervised = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert held_out_result(supervised, supervised) == HeldOut(4.0, (1.0, 1.0, 1.0))


def test_nothing_supervised_gives_length_one() -> None:
    assert held_out_result(torch.zeros(2, 3), torch.zeros(2, 3)) == HeldOut(1.0, (0.0, 0.0, 0.0))


def test_evaluation_counts_every_held_out_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a drafter that is right on even tokens only, the result can be counted from the answers themselves."""
    trainer = toy_trainer(tmp_path)

    def right_on_even(batch: Any, _target: Any, _head: Any, settings: Any) -> BlockLosses:
        assert settings.forced_probability == 0  # the curriculum never acts in evaluation
        assert not trainer.drafter.training
        return BlockLosses((), batch.tokens[:, 1:] % 2 == 0)

    monkeypatch.setattr(trainer.drafter, "block_losses", right_on_even)
    result = trainer.evaluate()
    assert trainer.drafter.training
    answers = toy_answers(toy_target())
    hits, counts = [0] * 4, [0] * 4
    for index in trainer.held_out:
        answer = answers[index]
        tokens = answer.tokens.tolist()
        for anchor in range(answer.prompt_length - 1, len(tokens) - 1):  # at most 16: all of them
            for t in range(1, 5):
                if anchor + t >= len(tokens):
                    break
                counts[t - 1] += 1
                if tokens[anchor + t] % 2:
                    break
                hits[t - 1] += 1
    rates = [h / c if c else 0.0 for h, c in zip(hits, counts, strict=True)]
    assert result.slot_accuracy == pytest.approx(tuple(rates))
    assert 0 < rates[0] < 1


# -- stopping and going on --------------------------------------------------------------------------------------------


def test_resume_after_kill_is_bit_exact(tmp_path: Path) -> None:
    uninterrupted = toy_trainer(tmp_path / "whole")
    silent(uninterrupted)
    folder = tmp_path / "killed"
    command = [sys.executable, toy.__file__, str(folder), "5", "0", "forever"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line == "saved\n":  # it is now writing its state again: the kill comes in the middle of that
                worker.kill()
    assert worker.returncode == -signal.SIGKILL
    resumed = toy_trainer(folder)
    assert resumed.resume()
    assert resumed.step == 5
    silent(resumed)
    assert resumed.step == uninterrupted.step == uninterrupted.total_steps == 12
    for name, parameter in parameters(uninterrupted).items():
        assert torch.equal(parameters(resumed)[name], parameter), name
    ours, theirs = (torch.load(t.state_file, weights_only=True)["optimiser"]["state"] for t in (resumed, uninterrupted))
    assert ours.keys() == theirs.keys()
    for key, moments in theirs.items():
        assert all(torch.equal(ours[key][name], moment) for name, moment in moments.items())


def test_run_saves_reports_and_evaluates_on_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer(tmp_path)
    reported: list[int] = []
    evaluated: list[int] = []
    saved: list[int] = []
    save = trainer.save

    def spy() -> None:
        saved.append(trainer.step)
        save()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        assert metrics["step_s"] > 0
        reported.append(step)

    def on_eval(step: int, _: HeldOut) -> None:
        evaluated.append(step)

    monkeypatch.setattr(trainer, "save", spy)
    result = trainer.run(on_step, on_eval)
    assert reported == list(range(1, 13))
    assert evaluated == [5, 10, 12]
    assert saved == [2, 4, 6, 8, 10, 12]
    assert result == trainer.evaluate()
    finished = toy_trainer(tmp_path)
    assert finished.resume()
    assert silent(finished) == result


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert toy_trainer(tmp_path).resume() is False


def test_a_half_written_state_is_not_resumed(tmp_path: Path) -> None:
    """What a kill in the middle of saving leaves lies beside the last whole state."""
    trainer = toy_trainer(tmp_path)
    steps(trainer, 2)
    trainer.save()
    (tmp_path / "state.tmp").write_bytes(trainer.state_file.read_bytes()[:1000])
    again = toy_trainer(tmp_path)
    assert again.resume()
    assert again.step == 2
    again.save()
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": {"alpha": 0.4}}, "loss.alpha = 0.3, this run has 0.4"),
        ({"model": {"num_layers": 1}}, "model.num_layers = 2, this run has 1"),
        ({"optimiser": {"epochs": 5}}, "optimiser.epochs = 4.0, this run has 5.0"),
        ({"seed": 1}, "seed = 0, this run has 1"),
        ({"drafter": "dflash"}, "drafter = dspine, this run has dflash"),
    ],
)
def test_another_recipes_folder_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    toy_trainer(tmp_path).save()
    with pytest.raises(UserError) as error:
        toy_trainer(tmp_path, toy_recipe(**change)).resume()
    assert message in str(error.value)
    assert "choose another output folder" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_intervals_are_the_same_run(tmp_path: Path) -> None:
    toy_trainer(tmp_path).save()
    assert toy_trainer(tmp_path, toy_recipe(eval_every=7, save_every=9, optimiser={"micro_batch": 2})).resume()


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    """The held-out split follows from the number of answers: going on with more would train on what was held out."""
    toy_trainer(tmp_path).save()
    with pytest.raises(UserError, match="the number of answers = 16, this run has 17"):
        toy_trainer(tmp_path, answers=toy_answers(toy_target(), 17)).resume()


@pytest.mark.parametrize("keep", [0, 100, -10])
def test_damaged_state(tmp_path: Path, keep: int) -> None:
    trainer = toy_trainer(tmp_path)
    trainer.save()
    trainer.state_file.write_bytes(trainer.state_file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"state.pt is damaged; delete it to start again"):
        toy_trainer(tmp_path).resume()


def test_full_disk_keeps_the_last_state(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    trainer = toy_trainer(tmp_path)
    trainer.save()
    before = trainer.state_file.read_bytes()
    steps(trainer, 2)
    handler, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*state.pt"):
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert trainer.state_file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_stops_before_it_spoils_anything(tmp_path: Path, value: float) -> None:
    answers = toy_answers(toy_target())
    trainer = toy_trainer(tmp_path, answers=answers)
    steps(trainer, 1)
    before = parameters(trainer)
    for answer in answers:
        answer.features[2] = value
    with pytest.raises(UserError, match="training diverged at step 1: loss nan") as error:
        steps(trainer, 1)
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[name], p) for name, p in parameters(trainer).items())


def test_exploded_parameters_stop_training(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    with torch.no_grad():
        trainer.drafter.backbone.norm.weight.fill_(float("inf"))
    with pytest.raises(UserError, match="training diverged"):
        steps(trainer, 1)
