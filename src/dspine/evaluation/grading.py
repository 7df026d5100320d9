"""Whether an answer is right: the final result of a mathematical one, the unit tests of a program.

    is_right(MathAnswer("18"), "so \\\\boxed{18} dollars")  # True

Mathematical answers are compared by `math-verify`: it takes the boxed result, else the last expression, and compares by value
(1/2 and 0.5 are the same, \\text{Evelyn} and Evelyn too). Programs are taken from the answer's code block and run in
`evaluation.sandbox`.
"""

from __future__ import annotations

import re

from dspine.errors import UserError
from dspine.evaluation.references import MathAnswer, Reference, UnitTests
from dspine.evaluation.sandbox import DEFAULT_LIMITS, Limits, Outcome, run_program

# An answer that stops at the token limit leaves its last block open.
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"\A.*</think>", re.DOTALL)


def is_right(reference: Reference, answer: str, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Grade one answer; what it thought before </think> does not count."""
    said = _THOUGHT.sub("", answer)
    if isinstance(reference, MathAnswer):
        return same_result(reference.answer, said)
    return run_program(program_of(reference, said), limits) is Outcome.PASSED


def same_result(reference: str, answer: str) -> bool:
    """Whether `answer` ends in the value of `reference`. Raises UserError where math-verify is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError('grading mathematical answers needs the extra: pip install -e ".[eval]"') from error
    return bool(verify(parse(f"\\boxed{{{reference}}}"), parse(answer)))


def program_of(reference: UnitTests, answer: str) -> str:
    """The program that decides (see `UnitTests`)."""
    code = code_of(answer, reference.entry_point)
    name = re.escape(reference.entry_point)
    is_body = bool(name) and not re.search(rf"^(async\s+)?def\s+{name}\b|^{name}\s*=", code, re.MULTILINE)
    joint = "" if is_body else "\n"  # a body goes on right below the function's head
    return f"{reference.preamble}{joint}{code}\n{reference.tests}\n"


def code_of(answer: str, entry_point: str = "") -> str:
    """The code in an answer: the first block (Python, or unnamed) that defines `entry_point`, else the first, else all of it."""
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in ("", "python", "python3", "py")]
    defining = [code for code in blocks if entry_point and re.search(rf"\bdef\s+{re.escape(entry_point)}\b", code)]
    return (defining or blocks or [answer])[0]
