"""Result files made from those in `results/`, real ones of an early release, which must stay readable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).parent / "results"
CHECKPOINTS = ROOT / "checkpoints"

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def committed() -> tuple[Path, Path]:
    """The folders of those results and of shipped checkpoints with their training curves."""
    return RESULTS, CHECKPOINTS


@pytest.fixture
def make_acceptance(tmp_path: Path) -> Make:
    """`make_acceptance("a.json", drafter="dflash", acceptance_length=2.0)`: a result file with some fields changed."""

    def make(name: str, **changes: Any) -> Path:
        data = json.loads((RESULTS / "acceptance-gsm8k-dspine-t0.json").read_text(encoding="utf-8"))
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**data, **changes}), encoding="utf-8")
        return file

    return make


@pytest.fixture
def comparison(make_acceptance: Make, tmp_path: Path) -> Path:
    """The folder of a comparison: two rows with weights of their own, one that decodes DSpine's differently."""
    folder = tmp_path / "six"
    for row, drafter, tau in (("dflash", "dflash", 2.0), ("dspine", "dspine", 3.0), ("dspine-k4", "dspine", 2.5)):
        make_acceptance(f"six/rows/{row}/gsm8k-T0.json", drafter=drafter, acceptance_length=tau)
    curve = folder / "rows" / "dspine" / "training" / "curve.jsonl"
    curve.parent.mkdir()
    curve.write_text('{"step": 10, "acceptance_length": 1.5, "slot_accuracy": [0.5, 0.25]}\n', encoding="utf-8")
    (folder / "plan.json").write_text("{}", encoding="utf-8")
    heads = {"gsm8k T=0": 3.0, "gsm8k T=0 low": 2.9, "gsm8k T=0 high": 3.1}
    rows = [
        {"row": "dspine", "drafter": "dspine", "parameters (M)": 9.5, **heads, "tok/s": 61.5, "draft share": 0.15},
        {
            "row": "eagle3",
            "drafter": "eagle3",
            "parameters (M)": 4.25,
            **dict.fromkeys(heads),
            "tok/s": None,
            "draft share": None,
        },
    ]
    gains = [{"benchmark": "gsm8k", "temperature": 0.0, "gain": 0.5, "rival": "dflash"}]
    (folder / "table.json").write_text(json.dumps({"rows": rows, "gains": gains}), encoding="utf-8")
    return folder
