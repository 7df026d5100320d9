"""The numbers of docs/judging-a-drafter.md, recomputed by the code that measures."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, median

import pytest
import torch

from dspine.commands.main import app
from dspine.decoding.stats import DecodeStats
from dspine.evaluation.suite import SUITE

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = (DOCS / "judging-a-drafter.md").read_text(encoding="utf-8")
TEXT = " ".join(GUIDE.split())


def says(*lines: str) -> None:
    for line in lines:
        assert line in TEXT, line


def rounds(drafted: int, accepted: list[int]) -> DecodeStats:
    stats = DecodeStats()
    for count in accepted:
        stats.record_round(drafted, count)
    return stats


def tau_of(conditional: float, num_draft_tokens: int) -> float:
    """tau of a drafter that is right with the same probability at every position, all before it being right."""
    return sum(conditional**j for j in range(num_draft_tokens + 1))


def test_cost_of_a_round() -> None:
    says(f"gives 3.0 / 1.5 = {3.0 / 1.5:.2f}x", f"gives 3.3 / 1.8 = {3.3 / 1.8:.2f}x")


def test_the_bonus_token_and_three_acceptance_rates() -> None:
    stats = rounds(7, [3, 0, 2, 1])
    says(
        "Rounds that accepted 3, 0, 2 and 1 of 7 drafted tokens",
        f"(3 + 0 + 2 + 1) / 4 + 1 | {stats.acceptance_length:.2f} |",
        f"(3 + 0 + 2 + 1) / 4 | {stats.num_accepted_tokens / stats.rounds:.2f} |",
        f"{stats.num_accepted_tokens} / {stats.num_drafted_tokens} | {100 * stats.acceptance_rate:.1f} % |",
    )
    table = list(zip(stats.acceptance_by_position[:3], stats.conditional_acceptance[:3], strict=True))
    fractions = (("3/4", "3/4"), ("2/4", "2/3"), ("1/4", "1/2"))
    for position, ((reached, given), (left, right)) in enumerate(zip(table, fractions, strict=True), 1):
        says(f"| {position} | {left} = {reached:.1%} | {right} = {given:.1%} |".replace("%", " %"))
    terms = " + ".join(f"{share:.2f}" for share, _ in table)
    says(f"({terms} = {sum(share for share, _ in table):.2f})")
    assert sum(stats.acceptance_by_position) == pytest.approx(stats.acceptance_length - 1)
    plain = rounds(0, [0, 0])
    says(f"it is {plain.acceptance_length:.2f} by the first definition and {plain.num_accepted_tokens:.2f} by the second")


def test_over_rounds_or_over_requests() -> None:
    easy, hard = rounds(7, [3] * 30), rounds(7, [0, 1] * 40)
    assert [s.num_accepted_tokens + s.rounds for s in (easy, hard)] == [120, 120]
    says(f"(30 rounds, tau {easy.acceptance_length:.1f})", f"(80 rounds, tau {hard.acceptance_length:.1f})")
    over_requests = mean(s.acceptance_length for s in (easy, hard))
    easy.merge(hard)
    says(f"240 tokens / {easy.rounds} rounds | {easy.acceptance_length:.2f} |", f"(4.0 + 1.5) / 2 | {over_requests:.2f} |")


def test_tokens_divided_by_rounds() -> None:
    for count, tokens in ((100, 301), (1, 4)):
        stats = rounds(7, [2] * count)
        assert 1 + stats.rounds + stats.num_accepted_tokens == tokens, "the first token is the prefill's"
        says(f"{2 * count} / {count} + 1 = {stats.acceptance_length:.2f}", f"tokens / rounds {tokens / count:.2f}.")


def test_thinking() -> None:
    says(f"(900 x 3.0 + 100 x 5.0) / 1000 = {(900 * 3.0 + 100 * 5.0) / 1000:.2f}")


def test_temperature() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.4, 0.0])
    accepted = torch.minimum(p, q)
    says(f"probability {' + '.join(f'{x:.1f}' for x in accepted.tolist())} = {accepted.sum():.2f}")
    says(f"q = (1, 0, 0), with {torch.minimum(p, torch.tensor([1.0, 0, 0])).sum():.2f}.")


def test_width() -> None:
    for m in (3, 7, 15):
        tau = tau_of(0.8, m)
        says(f"| {m} | {tau:.2f} | {tau / (1 + 0.05 * m):.2f} |")
    says(f"1 + 0.95 + ... + 0.95^15 = {tau_of(0.95, 15):.2f}")


def test_clocks() -> None:
    speeds = [100 / 4, *[100 / 1] * 9]
    says(
        f"(25 + 9 x 100) / 10 = {mean(speeds):.1f} tokens/s", f"1000 / 13 = {1000 / 13:.1f}; the median is {median(speeds):.0f}."
    )
    says(f"1.5 / 1.0 = {(0.5 + 1.0) / 1.0:.2f}x")


def test_every_equation_of_the_guide_is_right() -> None:
    """What stands left of an "=" in plain arithmetic is what stands right of it."""
    found = re.findall(r"(?<![\w.^(])(\(?[\d.]+(?: [+x/] \(?[\d.]+\)?)+) = ([\d.]+\d)", TEXT)
    assert len(found) >= 7
    for left, right in found:
        if left.count("(") == left.count(")"):
            assert eval(left.replace("x", "*")) == pytest.approx(float(right), abs=0.006 if float(right) < 10 else 0.06), left


def test_commands_and_pins_of_the_documents_exist() -> None:
    from typer.testing import CliRunner

    commands = (DOCS / "commands.md").read_text(encoding="utf-8")
    for name, known in SUITE.items():
        assert f"| `{name}` | {known.repo} |" in commands
        assert f"| {known.revision[:8]} |" in commands
    lines = re.findall(r"^(?:    )?dspine (eval \w+) (.*)$", GUIDE + commands, re.MULTILINE)
    assert len(lines) >= 8
    for command, options in lines:
        result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == 0
        for option in re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", options):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", result.output), f"{option} is not an option of {command}"
