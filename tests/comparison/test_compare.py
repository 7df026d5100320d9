"""A whole comparison of tiny drafters on a tiny target: same data for all, resumable, one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.commands.main import run as run_command
from dspine.comparison import figures as figures_module
from dspine.comparison import run as run_module
from dspine.comparison.figures import draw_figures
from dspine.comparison.plan import Plan, load_plan, row_recipes
from dspine.comparison.run import checkpoint_of, run_comparison
from dspine.comparison.table import against_reference, gains, markdown, read_lines, write_tables
from dspine.errors import UserError
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.prompts import collect_prompts
from dspine.training.regenerate import EngineAnswerer, RegenerateSettings, regenerate

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a target, its answers, a shared recipe and two benchmarks."""
    folder = tmp_path_factory.mktemp("workshop")
    make_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    lines = [json.dumps({"turns": [f"question {number} about {number * 7}"]}) for number in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    target = Target.load(str(folder / "target"))
    settings = RegenerateSettings(max_new_tokens=12)
    questions = collect_prompts([folder / "prompts.jsonl"])
    regenerate(questions, EngineAnswerer(target), ChatFormat.of(target), folder / "answers.jsonl.gz", settings)
    model = {"num_layers": 2, "block_size": 4, "mask_token_id": 0, "qk_norm": False, "taps": 2, "draft_vocab_size": 40}
    recipe = {
        "target": str(folder / "target"),
        "drafter": "dspine",
        "model": {**model, "options": {"transfer_rank": 6, "message_width": 5, "num_candidates": 3}},
        "optimiser": {"epochs": 1, "sequences_per_step": 3, "anchors_per_sequence": 4},
        "data": {"answers": [str(folder / "answers.jsonl.gz")], "prompts": str(folder), "held_out": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for name in ("first", "second"):
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:3]) + "\n")
    return folder


def plan(folder: Path, **changes: Any) -> Plan:
    base: dict[str, Any] = {
        "recipe": str(folder / "recipe.yaml"),
        "set": {"seed": 5},
        "reference": "dspine",
        "rows": {
            "dflash": {"train": {"drafter": "dflash", "model": {"attention": "bidirectional"}}},
            "dspine": {},
            "one": {"trained_as": "dspine", "options": {"num_candidates": 1}},
            "narrow": {"trained_as": "dspine", "width": 2},
        },
        "decode": {"benchmarks": ["first", "second"], "limit": 2, "max_new_tokens": 6, "speed_prompts": 1},
    }
    return Plan.model_validate({**base, **changes})


def test_rows_share_everything_but_the_drafter(workshop: Path) -> None:
    recipes = row_recipes(plan(workshop))
    assert list(recipes) == ["dflash", "dspine"]
    assert recipes["dflash"].model.options == {}
    assert recipes["dspine"].model.options["transfer_rank"] == 6
    assert recipes["dflash"].seed == recipes["dspine"].seed == 5


def test_a_comparison_from_start_to_table(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, ours, told = tmp_path / "out", plan(workshop), list[str]()
    assert not run_comparison(ours, output, workshop, report=told.append, stop_after_s=0.0)
    assert not checkpoint_of(output, "dflash").exists()
    assert run_comparison(ours, output, workshop, only=("dflash",), report=told.append)
    assert [line.name for line in read_lines(ours, output)] == ["dflash"]
    assert run_comparison(ours, output, workshop, report=told.append)
    assert told.count("training dspine") == 1
    lines = write_tables(ours, output)
    assert [line.name for line in lines] == ["dflash", "dspine", "one", "narrow"]
    assert all(len(line.results) == 4 for line in lines)
    narrow = lines[3].results["first", 0.0]
    assert len(narrow.by_position) == 1
    assert 1 <= narrow.low <= narrow.acceptance_length <= narrow.high <= 2
    assert lines[1].parameters == lines[2].parameters > lines[0].parameters > 1000
    # Nothing is done twice, and what is there is not touched.
    monkeypatch.setattr(run_module, "run_training", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(run_module, "measure_acceptance", lambda *a, **k: pytest.fail("decoded again"))
    assert run_comparison(ours, output, workshop)
    table = json.loads((output / "table.json").read_text())
    rows = list(csv.reader((output / "table.csv").read_text().splitlines()))
    assert [row[0] for row in rows] == ["row", "dflash", "dspine", "one", "narrow"]
    dspine, dflash = (float(rows[n][rows[0].index("first T=0")]) for n in (2, 1))
    assert table["gains"][0] == {"benchmark": "first", "temperature": 0.0, "gain": dspine / dflash - 1, "rival": "dflash"}
    assert gains(ours, lines)["first", 0.0] == (dspine / dflash - 1, "dflash")
    assert (output / "table.md").read_text() == markdown(ours, lines)
    differences = against_reference(ours, lines)
    assert differences["dspine", 0.0] == differences["dspine", 1.0] == 0
    sums = [sum(line.results[name, 0.0].acceptance_length for name in ("first", "second")) for line in (lines[0], lines[1])]
    assert differences["dflash", 0.0] == pytest.approx(sums[0] / sums[1] - 1)
    curve = (output / "rows" / "dspine" / "training" / "curve.jsonl").read_text().splitlines()
    assert lines[1].held_out == pytest.approx(json.loads(curve[-1])["acceptance_length"], abs=1e-3)
    for line in lines:
        assert set(line.part_ms) == {"draft", "select", "verify"}
        assert 0 < line.part_ms["draft"] < line.speed["round_ms"] * 20
        assert line.part_ms["verify"] > 0
    assert lines[1].part_ms["select"] > 0
    few = draw_figures(ours, lines, output)
    assert {file.name for file in few} == {f"{kind}-T{t}.svg" for kind in ("acceptance", "positions") for t in (0, 1)}
    monkeypatch.setattr(figures_module, "MOST_COLOURS", 3)
    many = draw_figures(ours, lines, output)
    assert [file.name for file in many] == ["differences-T0.svg", "differences-T1.svg"]
    assert all(file.read_text().startswith("<?xml") for file in (*few, *many))
    with pytest.raises(UserError, match="holds a comparison with other decode; choose another folder"):
        run_comparison(plan(workshop, decode={"benchmarks": ["first"]}), output, workshop)


def test_equal_wall_clock_scales_the_epochs(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"dflash": 0.5, "dspine": 2.0}
    monkeypatch.setattr(run_module, "_step_seconds", lambda recipe, folder: seconds[recipe.drafter])
    ours = plan(workshop, equal="wall_clock")
    recipes = run_module.equal_time(row_recipes(ours), ours, tmp_path, lambda line: None)
    assert recipes["dspine"].optimiser.epochs == 1
    assert recipes["dflash"].optimiser.epochs == 4
    seconds["dflash"] = 7.0  # kept from the first call: a resumed comparison goes on with the same steps
    assert run_module.equal_time(row_recipes(ours), ours, tmp_path, lambda line: None) == recipes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": {"train": {"drafter": "medusa"}}}, "unknown drafter 'medusa'"),
        ({"x": {"train": {"seed": 1}}}, "row x changes seed, which all rows share"),
        ({"x": {"train": {"model": {"block_size": 5}}}}, "row x drafts 4 tokens, dspine 3"),
        ({"x": {"train": {"model": {"options": {"rank": 3}}}}}, "option rank: Extra inputs are not permitted"),
        ({"x": {"train": {"loss": {"alpha": 2}}}}, "recipe of row x: loss.alpha"),
        ({"x": {"trained_as": "dspine", "options": {"depth": 1}}}, "option depth: Extra inputs are not permitted"),
        ({"x": {"trained_as": "dspine", "width": 9}}, "row x verifies 9 tokens per round, but its drafter drafts 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_compare_is_refused_before_training(
    workshop: Path, tmp_path: Path, rows: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        run_comparison(plan(workshop, rows={"dspine": {}, **rows}), tmp_path / "out", workshop)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [", "is no valid YAML"),
        ("recipe: x", "reference: Field required"),
        ("{recipe: x, reference: a, rows: {b: {}, c: {}}, decode: {benchmarks: [g]}}", "reference 'a' is no row"),
        ("{recipe: x, reference: a, rows: {a: {}, b: {trained_as: c}}, decode: {benchmarks: [g]}}", "is no trained row"),
        ("{recipe: x, reference: a, rows: {a: {}, b: {options: {k: 1}}}, decode: {benchmarks: [g]}}", "need trained_as"),
        ("{recipe: x, reference: a, rows: {a: {}, b/c: {}}, decode: {benchmarks: [g]}}", "names become folders"),
    ],
    ids=["yaml", "missing", "reference", "weights", "options", "name"],
)
def test_bad_plans(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    assert run_command(["compare", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out"), "-b", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_of_something_else_is_refused(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no comparison"):
        run_comparison(plan(workshop), tmp_path, workshop)


def test_built_in_plans_are_comparable() -> None:
    for name in ("six-drafters", "six-drafters-gpu", "ablations"):
        assert row_recipes(load_plan(name))
    with pytest.raises(UserError, match="no comparison 'nine'; give a YAML file or one of: "):
        load_plan("nine")
