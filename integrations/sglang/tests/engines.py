"""What the tests that start engines share."""

from __future__ import annotations

from pathlib import Path

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.checkpoint import load_drafter
from dspine.integrations.side_by_side import Decoded, decode_in_dspine
from dspine.targets.model import Target

QUESTIONS = (
    "A shop sells 14 pens a day at 3 dollars each. How much does it take in a week? Reason step by step.",
    "What is 17 times 6? Reason step by step.",
    "Write a short poem about the sea.",
    "Name three uses of copper.",
    "A train covers 180 miles in 3 hours. How far does it go in 5 hours at the same speed? Reason step by step.",
    "Write a Python function that returns the larger of two numbers.",
    "Tom has 24 marbles and gives a third of them to Ann. How many are left? Reason step by step.",
    "Why do leaves fall in autumn?",
)
MAX_NEW_TOKENS = 96
GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}


def in_dspine(target: Target, checkpoint: Path | None, prompts: list[list[int]], width: int) -> Decoded:
    drafter = None if checkpoint is None else load_drafter(checkpoint, target)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    return decode_in_dspine(LLM(target, drafter, max_rows=len(prompts), width=width), prompts, params)
