"""accelerate's `Accelerator` for one training run."""

from __future__ import annotations

from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs


def new_accelerator(dtype: Literal["auto", "float32", "bfloat16"], device: torch.device) -> Accelerator:
    """An accelerator for `device`; "auto" trains in bfloat16 on a GPU and in float32 on a CPU.

    accelerate keeps device and precision once per process and refuses other ones, but a comparison or a notebook trains
    one drafter after another: each run starts from a fresh state. A process group that exists is kept and used again.
    """
    mixed = "bf16" if dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda") else "no"
    AcceleratorState._reset_state(reset_partial_state=True)
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    return Accelerator(mixed_precision=mixed, cpu=device.type == "cpu", kwargs_handlers=[ddp])
