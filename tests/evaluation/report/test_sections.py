"""Studies and round breakdowns on the page, written by the classes that measure them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from dspine.evaluation.breakdown import BreakdownReport, StageTime
from dspine.evaluation.load import WayFacts
from dspine.evaluation.quality import QualityReport
from dspine.evaluation.report.page import Drawing, Section
from dspine.evaluation.report.results import Results, read_results
from dspine.evaluation.report.sections.breakdown import breakdown_section
from dspine.evaluation.report.sections.predecessor import predecessor_section
from dspine.evaluation.report.sections.quality import quality_section
from dspine.evaluation.report.sections.readout import readout_section
from dspine.evaluation.report.sections.throughput import throughput_section
from dspine.evaluation.report.sections.timing import timing_section
from dspine.evaluation.studies.predecessor import CONTENTS, ConditionResult, PredecessorResult, SlotResult
from dspine.evaluation.studies.probe import FitSettings
from dspine.evaluation.studies.readout import LayerResult, ReadoutResult
from dspine.evaluation.studies.results import BlockSettings, Share, Subject
from dspine.evaluation.studies.timing import ScheduleResult, TimingResult, schedules
from dspine.evaluation.throughput_report import Level, Percentiles, ThroughputReport, WayResult
from dspine.files import write_text

MACHINE: dict[str, str | int] = {"device": "cpu", "cpu": "Chip", "threads": 1, "command": "dspine it", "revision": "abc"}
SETTINGS = BlockSettings(prompts="gsm8k", max_new_tokens=160)
NOTHING = Share(None, None, 0)


def share(value: float, total: int = 400) -> Share:
    return Share(value, (value - 0.03, value + 0.04), total)


def subject(drafter: str) -> Subject:
    return Subject(
        target="smollm2-135m", drafter=drafter, weights_sha256=f"{drafter}0123456789"[:16], num_layers=3, block_size=8,
        num_draft_tokens=7, attention="causal",
    )  # fmt: skip


def write_readout(file: Path, drafter: str = "dspine") -> None:
    def layer(number: int, accuracy: float) -> LayerResult:
        groups = (share(accuracy), share(accuracy / 2), share(accuracy / 4))
        slots = tuple(share(accuracy / slot) for slot in range(1, 8))
        return LayerResult(layer=number, groups=groups, slots=slots, epoch=number or None, selection_accuracy=accuracy)

    ReadoutResult(
        study="readout", subject=subject(drafter), settings=SETTINGS, answers=100, blocks=400, machine=MACHINE, fit=FitSettings(),
        fit_prompts="train", fit_answers=500, selection_answers=100, slot_groups=((1, 2), (3, 4), (5, 7)),
        layers=(layer(1, 0.2), layer(2, 0.35), layer(3, 0.55)), draft=layer(0, 0.6),
    ).write(file)  # fmt: skip


def write_timing(file: Path, drafter: str = "dspine") -> None:
    found = [
        ScheduleResult(
            schedule=one, correct_tokens=1.5 - 0.1 * n, gain=share(0.07 - 0.02 * n), changed_gain=share(0.2 - 0.05 * n)
        )
        for n, one in enumerate(schedules(3))
    ]
    TimingResult(
        study="timing", subject=subject(drafter), settings=SETTINGS, answers=100, blocks=400, machine=MACHINE, anchor_slot=3,
        measured_slots=(4, 7), changed_blocks=220, baseline_correct_tokens=1.25, schedules=tuple(found),
    ).write(file)  # fmt: skip


def write_predecessor(file: Path, drafter: str = "dspine") -> None:
    def condition(name: str, accuracy: float) -> ConditionResult:
        nothing = name == "truth"
        changed = NOTHING if nothing else share(accuracy / 2, 90)
        return ConditionResult(
            name=name, accuracy=share(accuracy), accuracy_changed=changed, truth_changed=NOTHING if nothing else share(0.8, 90)
        )

    slots = tuple(
        SlotResult(
            slot=slot,
            content=tuple(condition(name, 0.7 - 0.1 * n) for n, name in enumerate(CONTENTS)),
            timing=tuple(condition(name, 0.4 + 0.1 * n) for n, name in enumerate(("3", "2 + 3", "1 + 2 + 3"))),
        )
        for slot in (3, 4, 6)
    )
    PredecessorResult(
        study="predecessor", subject=subject(drafter), settings=SETTINGS, answers=100, blocks=400, machine=MACHINE, slots=slots
    ).write(file)


def write_breakdown(file: Path, drafter: str, stages: dict[str, float]) -> None:
    whole = sum(stages.values())
    times = tuple(
        StageTime(stage=name, round_ms=ms, token_ms=ms / 2, share=ms / whole)  # type: ignore[arg-type]
        for name, ms in stages.items()
    )
    BreakdownReport(
        target="smollm2-135m", drafter=drafter, width="8", temperature=0.0, max_new_tokens=160, seed=0, prompts=10, batch=1,
        rounds=500, tokens=1000, acceptance_length=2.0, clock="processor", stages=times, round_ms=whole * 1.01,
        token_ms=whole / 2, residual_share=0.01, recording_share=0.002, machine=MACHINE,
    ).write(file)  # fmt: skip


def write_throughput(file: Path, names: tuple[str, ...] = ("plain", "dspine", "dflash")) -> None:
    def way(name: str, concurrency: int) -> WayResult:
        speeds = {"plain": 30.0, "dflash": 50.0, "dspine": 60.0 - concurrency}
        times = Percentiles(p50=0.1, p95=0.2, p99=0.3)
        return WayResult(
            name=name, requests=8, failures={}, refusals=0, tokens=800, cached_tokens=0, elapsed_s=10.0, tok_per_s=speeds[name],
            ttft_s=times, tpot_s=None, latency_s=times, identical_share=None if name == "plain" else 1.0, acceptance_length=2.5,
            speedup_over={other: speeds[name] / speeds[other] for other in names if other != name},
        )  # fmt: skip

    facts = [WayFacts(name=name, decoder="engine", model="m", drafter="none" if name == "plain" else name) for name in names]
    levels = [Level(concurrency=c, requests=8, ways=tuple(way(name, c) for name in names)) for c in (1, 4, 16)]
    report = ThroughputReport(
        benchmark="gsm8k", prompts=8, prompts_sha256="0", requests=0, repeats=3, max_new_tokens=64, temperature=0.0, seed=0,
        chat=True, width="auto", machine=MACHINE, ways=tuple(facts), levels=tuple(levels),
    )  # fmt: skip
    write_text(file, json.dumps(report.to_dict()))


def texts(section: Section | None) -> list[list[str]]:
    assert section is not None
    return [[cell.text for cell in row] for block in section.blocks for table in block.tables for row in table.rows]


def bars(drawing: Drawing) -> list[tuple[float, float, float]]:
    """(left, right, middle) of every horizontal bar of a figure."""
    (axes,) = drawing.figure.axes
    found = []
    for bar in axes.patches:
        assert isinstance(bar, Rectangle)
        left, middle = bar.get_x(), bar.get_y() + bar.get_height() / 2
        found.append((round(left, 6), round(left + bar.get_width(), 6), round(middle, 6)))
    return found


def test_the_readout_panel(tmp_path: Path) -> None:
    write_readout(tmp_path / "readout.json")
    section = readout_section(read_results([tmp_path]))
    rows = texts(section)
    assert ["3", "55.0%", "27.5%", "13.8%", "3", "55.0%"] in rows
    assert ["the draft itself", "60.0%", "30.0%", "15.0%", "", ""] in rows
    assert section is not None
    (drawing,) = section.drawings
    assert "slots 1-2: 55.0% (52.0% to 59.0%) in layer 3" in drawing.description
    (axes,) = drawing.figure.axes
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [0.2, 0.35, 0.55]
    assert section.blocks[0].tables[0].caption.startswith("DSpine on GSM8K, smollm2-135m: 400 blocks of 100 answers")


def test_the_timing_panel(tmp_path: Path) -> None:
    write_timing(tmp_path / "timing.json")
    section = timing_section(read_results([tmp_path]))
    rows = texts(section)
    assert rows[0] == ["no layer", "1.250", "", ""]
    assert rows[1] == ["layers from 1", "1.500", "+7.0%", "+20.0%"]
    assert rows[-1][0] == "layers 2 + 3"
    assert section is not None
    assert [drawing.name.rpartition("-")[2] for drawing in section.drawings] == ["from", "pair"]
    assert [round(right - left, 3) for left, right, _ in bars(section.drawings[0])] == [0.07, 0.05, 0.03, 0.2, 0.15, 0.1]


def test_the_predecessor_panels(tmp_path: Path) -> None:
    write_predecessor(tmp_path / "predecessor.json")
    section = predecessor_section(read_results([tmp_path]))
    rows = texts(section)
    assert len(rows) == 3 * (4 + 3)
    assert ["4", "predicted: predecessor", "60.0%", "30.0%", "80.0%", "90 of 400"] in rows
    assert ["3", "predicted: truth", "70.0%", "\N{EN DASH}", "\N{EN DASH}", "0 of 400"] in rows
    assert ["6", "true in layers 2 + 3", "50.0%", "25.0%", "80.0%", "90 of 400"] in rows
    assert section is not None
    content, timing = section.drawings
    assert "slot 3: predecessor wrong: 30.0%" in content.description
    assert len(bars(content)) == len(bars(timing)) == 12


def test_the_parts_of_a_round_are_stacked(tmp_path: Path) -> None:
    write_breakdown(tmp_path / "a.json", "dflash", {"draft_backbone": 4.0, "head": 1.0, "verification": 30.0, "bookkeeping": 0.5})
    write_breakdown(
        tmp_path / "b.json", "dspine", {"draft_backbone": 4.0, "injection": 0.5, "verification": 30.0, "acceptance": 0.2}
    )
    section = breakdown_section(read_results([tmp_path]))
    assert section is not None
    heads = [cell.text for cell in section.blocks[0].tables[0].heads]
    assert heads == ["drafter", "draft backbone", "injection", "head", "verification", "acceptance", "bookkeeping", "sum"]
    rows = texts(section)
    assert rows[1] == ["DSpine", "4.000", "0.500", "\N{EN DASH}", "30.000", "0.200", "\N{EN DASH}", "34.70"]
    second = [(left, right) for left, right, place in bars(section.drawings[0]) if place == 1 and right > left]
    assert second == [(0.0, 4.0), (4.0, 4.5), (4.5, 34.5), (34.5, 34.7)], "each part begins where the one before it ends"


def test_throughput_gains_stand_over_dflash(tmp_path: Path) -> None:
    write_throughput(tmp_path / "throughput.json")
    section = throughput_section(read_results([tmp_path]))
    rows = texts(section)
    assert rows[1][:5] == ["1", "DSpine", "59.0", "+18.0%", "1.97x"]
    assert rows[8][:5] == ["16", "DFlash", "50.0", "+0.0%", "1.67x"]
    assert rows[9][:5] == ["1", "plain", "100.0", "200.0", "300.0"]
    assert section is not None
    lines = {
        line.get_label(): np.asarray(line.get_ydata()).round(6).tolist() for line in section.drawings[0].figure.axes[0].lines
    }
    assert lines == {"plain": [-0.4, -0.4, -0.4], "DSpine": [0.18, 0.12, -0.12], "DFlash = 0": [0.0, 0.0, 0.0]}


def test_without_dflash_the_first_way_is_the_zero_line(tmp_path: Path) -> None:
    write_throughput(tmp_path / "throughput.json", ("plain", "dspine"))
    section = throughput_section(read_results([tmp_path]))
    assert section is not None
    assert section.drawings[0].title == "Throughput gain over plain"
    assert [row[3] for row in texts(section)[:2]] == ["+0.0%", "+96.7%"]


def test_bench_speed_gives_three_parts(committed: tuple[Path, Path]) -> None:
    section = breakdown_section(read_results([committed[0]]))
    assert section is not None
    (block,) = section.blocks
    dspine = block.tables[0].rows[1]
    assert [cell.text for cell in dspine] == ["DSpine", "6.907", "38.665", "0.139", "45.71"]


def test_scores_with_and_without_the_drafter(tmp_path: Path) -> None:
    QualityReport(
        benchmark="gsm8k", target="m", drafter="dspine", width="8", chat=True, temperature=1.0, max_new_tokens=64, seed=0,
        prompts=9, skipped_turns=0, compared=9, identical=2, graded=8, plain_score=0.25, spec_score=0.375, sandboxed_offline=True,
        score_difference_ci95=(-0.1, 0.3), conversations=(), machine=MACHINE,
    ).write(tmp_path / "quality.json")  # fmt: skip
    (row,) = texts(quality_section(read_results([tmp_path])))
    assert row == ["GSM8K", "DSpine", "1", "9", "2", "8", "25.0%", "37.5%", "+12.5%"]


@pytest.mark.parametrize(
    "make", [quality_section, readout_section, timing_section, predecessor_section, breakdown_section, throughput_section]
)
def test_no_result_no_section(make: object) -> None:
    assert callable(make)
    assert make(Results((), ())) is None
