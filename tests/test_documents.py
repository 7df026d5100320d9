"""What README and CONTRIBUTING tell people to type exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspine.commands.main import app
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.registry import DRAFTERS
from dspine.targets.model import Target

ROOT = Path(__file__).parents[1]
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
COMMANDS = sorted(
    {line.strip() for line in re.findall(r"^    (?:\.venv/bin/)?(dspine .*)$", DOCUMENTS["README.md"], re.MULTILINE)}
)


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_has_the_options_shown(line: str) -> None:
    words = re.sub(r'"[^"]*"', "text", line).split()[1:]
    names = [word for word in words if re.fullmatch(r"[a-z]+", word)]
    command = names[: 2 if names and names[0] in {"bench", "data", "eval"} else 1]
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    for option in re.findall(r"--[a-z-]+", line):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", result.output), f"{option} is not an option of {' '.join(command)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_and_links_exist(document: str) -> None:
    text, makefile = DOCUMENTS[document], (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (?:\w+=\S+ )?(\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_every_dependency_is_explained() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    block = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    packages = re.findall(r'"([A-Za-z][\w-]*)[><=]', block)
    assert "torch" in packages
    for package in packages:
        assert re.search(rf"^\| [^|]*\b{re.escape(package)}\b", DOCUMENTS["CONTRIBUTING.md"], re.MULTILINE), package


def test_the_example_of_a_drafter_runs(tiny_target: Target, make_drafter: Any) -> None:
    """Trained for a few steps on the toy problem, and decoding exactly."""
    text = (ROOT / "docs" / "adding-a-drafter.md").read_text()
    code = text[text.index("```python\n") + len("```python\n") : text.index("\n```\n", text.index("```python"))]
    try:
        exec(compile(code, "adding-a-drafter.md", "exec"), {})
        torch.manual_seed(0)
        drafter = make_drafter(tiny_target, "leaky")
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        plain, spec = Engine(tiny_target), Engine(tiny_target, drafter.runner(tiny_target), width=4)
        outputs = []
        for engine in (plain, spec):
            request = engine.submit([5, 9, 77, 30], params)
            engine.run()
            outputs.append(request.output_ids)
        assert outputs[0] == outputs[1]
    finally:
        DRAFTERS.pop("leaky", None)
