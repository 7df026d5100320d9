"""Stages: exclusive times without gaps, nothing recorded where nobody listens, each clock read as it must be."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dspine.stages import CudaClock, HostClock, StageRecorder, stage


class Ticks:
    """A clock that is wound by hand."""

    name = "ticks"

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waits += 1

    def seconds(self, start: float, end: float) -> float:
        return end - start


def test_an_inner_stage_interrupts_the_outer_one() -> None:
    clock = Ticks()
    recorder = StageRecorder(clock)
    for _ in range(2):
        with recorder.round():
            clock.now += 1
            with stage("draft_backbone"):
                clock.now += 10
                for _ in range(2):
                    with stage("injection"):
                        clock.now += 100
                clock.now += 20
            clock.now += 2
    assert recorder.stage_s == {"bookkeeping": 6, "draft_backbone": 60, "injection": 400}
    assert recorder.rounds == 2
    assert clock.waits == 4, "the device is waited for on both ends of a round"


def test_outside_a_round_nothing_is_recorded() -> None:
    recorder = StageRecorder(Ticks())
    with stage("head"):
        pass
    with recorder.round():
        pass
    with stage("head"):
        pass
    assert set(recorder.stage_s) == {"bookkeeping"}


def test_other_threads_are_not_recorded() -> None:
    recorder = StageRecorder(HostClock())

    def work() -> None:
        with stage("verification"):
            pass

    with recorder.round():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(recorder.stage_s) == {"bookkeeping"}


def test_a_round_that_fails_leaves_nothing_behind() -> None:
    clock = Ticks()
    recorder = StageRecorder(clock)
    with pytest.raises(ZeroDivisionError), recorder.round(), stage("head"):
        raise ZeroDivisionError
    with recorder.round():
        clock.now += 3
    assert (recorder.stage_s, recorder.rounds) == ({"bookkeeping": 3.0}, 1)
    with stage("head"):
        clock.now += 1
    assert "head" not in recorder.stage_s


def test_the_rounds_time_is_that_of_another_clock() -> None:
    recorder = StageRecorder(Ticks())
    with recorder.round():
        time.sleep(0.01)
    assert recorder.round_s >= 0.01
    assert recorder.stage_s == {"bookkeeping": 0.0}


def test_the_clock_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(StageRecorder.on(torch.device("cpu")).clock, HostClock)
    assert isinstance(StageRecorder.on(torch.device("cuda", 0)).clock, CudaClock)


def test_a_gpus_clock_reads_events_of_its_own_queue_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the events are stand-ins: each is 250 ms after the one before."""
    device = torch.device("cuda", 1)
    recorded: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, queue: object) -> None:
            recorded.append(queue)
            self.time_ms = 250.0 * len(recorded)

        def elapsed_time(self, later: Event) -> float:
            return later.time_ms - self.time_ms

    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: ("queue", of))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    recorder = StageRecorder(CudaClock(device))
    with recorder.round(), stage("verification"):
        pass
    assert recorder.stage_s == {"bookkeeping": 0.5, "verification": 0.25}
    assert recorded == [("queue", device)] * 4
    assert waited == [device, device]
