"""One process trains several times, each time with its own precision."""

from __future__ import annotations

import pytest
import torch

from dspine.training.accelerator import new_accelerator

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "mixed"), [("auto", "no"), ("bfloat16", "bf16"), ("float32", "no")])
def test_precision_is_the_recipes(dtype: str, mixed: str) -> None:
    accelerator = new_accelerator(dtype, CPU)  # type: ignore[arg-type]
    assert (accelerator.mixed_precision, accelerator.device) == (mixed, CPU)


def test_a_second_run_may_have_another_precision() -> None:
    for dtype, compute in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        with new_accelerator(dtype, CPU).autocast():  # type: ignore[arg-type]
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == compute
