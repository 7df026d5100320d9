"""What a right answer is: a benchmark's own reference beside each of its prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MathAnswer:
    """The final answer, a number or LaTeX without delimiters ("18", "\\frac{1}{2}")."""

    answer: str


@dataclass(frozen=True)
class UnitTests:
    """A program that ends without an exception exactly where the answer's code is right.

    It is `preamble`, the answer's code, then `tests`. Where `entry_point` is given and the code does not define it, the code
    is taken for the body that `preamble` (then a function's head and docstring) waits for.
    """

    tests: str
    preamble: str = ""
    entry_point: str = ""


Reference = MathAnswer | UnitTests
