"""Which answers are right: mathematical values in any notation, programs by their tests."""

from __future__ import annotations

import pytest

from dspine.evaluation.grading import code_of, is_right, program_of
from dspine.evaluation.references import MathAnswer, UnitTests

TWICE = UnitTests(
    tests="def check(f):\n    assert f(2) == 4\n    assert f(-3) == -6\ncheck(twice)\n",
    preamble='import math\n\ndef twice(x):\n    """Double x."""\n',
    entry_point="twice",
)


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("18", "So she makes $18 a day.", True),
        ("18", "First 17, no: \\boxed{18}", True),
        ("18", "18 at first, but then \\boxed{19}", False),
        ("1080", "\\boxed{1,080}", True),
        ("6", "The answer is 6.0.", True),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("\\text{Evelyn}", "\\boxed{Evelyn}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", True),
        ("x \\in [-2,7]", "\\boxed{[-2,7]}", True),
        ("x \\in [-2,7]", "\\boxed{(-2,7]}", False),
        ("18", "I do not know.", False),
        ("18", "", False),
        ("18", "<think>it could be 18</think> It is 20.", False),
        ("18", "<think>it could be 20</think> It is 18.", True),
    ],
)
def test_mathematical_answers(reference: str, answer: str, right: bool) -> None:
    assert is_right(MathAnswer(reference), answer) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef twice(x):\n    return 2 * x\n```\nIt doubles.", True),
        ("```\ndef twice(x):\n    return x + x\n```", True),
        ("def twice(x):\n    return 2 * x\n", True),
        ("    return 2 * x\n", True),  # the body alone
        ("```python\ntwice = lambda x: 2 * x\n```", True),
        ("```python\nprint(1)\n```\nand then\n```python\ndef twice(x):\n    return 2 * x\n```", True),
        ("```python\ndef twice(x):\n    return 2 * x", True),  # cut off at the token limit
        ("```python\ndef twice(x):\n    return x * x\n```", False),
        ("```bash\nrm file\n```", False),
        ("It cannot be done.", False),
        ("", False),
    ],
)
def test_programs(answer: str, right: bool) -> None:
    assert is_right(TWICE, answer) is right


def test_without_an_entry_point_the_code_stands_alone() -> None:
    tests = UnitTests("assert f(1) == 2", preamble="import math")
    assert program_of(tests, "```python\ndef f(x):\n    return x + 1\n```") == (
        "import math\ndef f(x):\n    return x + 1\n\nassert f(1) == 2\n"
    )


def test_code_is_taken_from_the_block_that_defines_the_function() -> None:
    answer = "```python\ndef g(): ...\n```\n```py\ndef f(): ...\n```"
    assert (code_of(answer, "f"), code_of(answer), code_of("x = 1")) == ("def f(): ...\n", "def g(): ...\n", "x = 1")
