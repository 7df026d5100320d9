"""The seven benchmarks that drafters are judged by: where each lies on the Hugging Face hub, and how a row becomes a prompt.

    SUITE["gsm8k"].read_row({"question": "...", "answer": "... #### 18"})  # Problem(turns=(...), reference=MathAnswer("18"))

The prompts are those that published acceptance lengths of block drafters were measured with: the mathematical ones ask
for a boxed answer, HumanEval is asked for in words, MBPP is the bare task. A revision is a commit of the data set's
repository: a branch may move, a commit does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspine.errors import UserError
from dspine.evaluation.references import MathAnswer, Reference, UnitTests

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """One conversation's user turns and, where the benchmark has one, what a right answer is."""

    turns: tuple[str, ...]
    reference: Reference | None = None


@dataclass(frozen=True, kw_only=True)
class HubBenchmark:
    """`files` of data set `repo` at commit `revision`, in order; together they are `split` of `config`.

    `fields` names what every row must have; `to_problem` maps a row to its prompt for acceptance, and `to_graded`, where it is
    another one, to the prompt whose answer can be scored.
    """

    repo: str
    revision: str
    config: str
    split: str
    files: tuple[str, ...]
    fields: tuple[str, ...]
    to_problem: Callable[[Row], Problem]
    to_graded: Callable[[Row], Problem] | None = None

    def read_row(self, row: Row, where: str = "row", *, graded: bool = False) -> Problem:
        """Map one row; raises UserError naming the field it lacks."""
        for field in self.fields:
            if field not in row:
                raise UserError(f"{where} of {self.repo} has no field {field!r}; it has {', '.join(sorted(row)) or 'none'}")
        return (self.to_graded if graded and self.to_graded else self.to_problem)(row)


def _boxed(question: str) -> tuple[str, ...]:
    return (f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",)


def _gsm8k(row: Row) -> Problem:
    # The reference solution ends in "#### 1,234".
    return Problem(_boxed(row["question"]), MathAnswer(row["answer"].rpartition("####")[2].strip().replace(",", "")))


def _math500(row: Row) -> Problem:
    return Problem(_boxed(row["problem"]), MathAnswer(row["answer"]))


def _humaneval(row: Row) -> Problem:
    asked = f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{row['prompt']}\n```"
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return Problem((asked,), UnitTests(tests, preamble=row["prompt"], entry_point=row["entry_point"]))


def _mbpp(row: Row) -> Problem:
    return Problem((row["prompt"],))


def _mbpp_graded(row: Row) -> Problem:
    """The bare task names no function, so nothing could call the answer: its tests are shown, as the benchmark's authors did."""
    tests = "\n".join(row["test_list"])
    asked = f"{row['prompt']}\nYour code should pass these tests:\n```python\n{tests}\n```"
    return Problem((asked,), UnitTests(tests, preamble="\n".join(row["test_imports"])))


def _livecodebench(row: Row) -> Problem:
    """The benchmark's generic prompt; some problems come with code to start from, the others read from standard input."""
    starter = row["starter_code"]
    layout = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    asked = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
        f"for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {layout}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )
    return Problem((asked,))


def _mt_bench(row: Row) -> Problem:
    return Problem(tuple(row["prompt"]))


def _arena_hard(row: Row) -> Problem:
    return Problem((row["prompt"],))


SUITE: dict[str, HubBenchmark] = {
    "gsm8k": HubBenchmark(
        repo="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        config="main",
        split="test",
        files=("main/test-00000-of-00001.parquet",),
        fields=("question", "answer"),
        to_problem=_gsm8k,
    ),
    "math500": HubBenchmark(
        repo="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        config="default",
        split="test",
        files=("test.jsonl",),
        fields=("problem", "answer"),
        to_problem=_math500,
    ),
    "humaneval": HubBenchmark(
        repo="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        config="openai_humaneval",
        split="test",
        files=("openai_humaneval/test-00000-of-00001.parquet",),
        fields=("prompt", "test", "entry_point"),
        to_problem=_humaneval,
    ),
    "mbpp": HubBenchmark(
        repo="google-research-datasets/mbpp",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        config="sanitized",
        split="test",
        files=("sanitized/test-00000-of-00001.parquet",),
        fields=("prompt", "test_list", "test_imports"),
        to_problem=_mbpp,
        to_graded=_mbpp_graded,
    ),
    "livecodebench": HubBenchmark(
        repo="livecodebench/code_generation_lite",
        revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        config="release_v6",
        split="test",
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
        fields=("question_content", "starter_code"),
        to_problem=_livecodebench,
    ),
    "mt-bench": HubBenchmark(
        repo="HuggingFaceH4/mt_bench_prompts",
        revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
        config="default",
        split="train",
        files=("raw/question.jsonl",),
        fields=("prompt",),
        to_problem=_mt_bench,
    ),
    "arena-hard-v2": HubBenchmark(
        repo="lmarena-ai/arena-hard-auto",
        revision="15f3746e21432264ce9b453999bde4f3c946d2e6",
        config="arena-hard-v2.0",
        split="train",
        files=("data/arena-hard-v2.0/question.jsonl",),
        fields=("prompt",),
        to_problem=_arena_hard,
    ),
}
