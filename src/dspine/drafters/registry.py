"""The drafters by name. A new drafter is one file and one line here."""

from __future__ import annotations

from dataclasses import dataclass

from dspine.drafters.base import BlockDrafter
from dspine.drafters.dflash import DFlash
from dspine.drafters.dflash2 import DFlash2
from dspine.drafters.domino import Domino
from dspine.drafters.dspark import DSpark
from dspine.drafters.dspine import DSpine
from dspine.drafters.eagle3 import Eagle3
from dspine.errors import UserError


@dataclass(frozen=True)
class Entry:
    cls: type[BlockDrafter]
    paper: str


DRAFTERS = {
    "dflash": Entry(DFlash, "DFlash: block-parallel drafting on fused target features"),
    "dflash2": Entry(DFlash2, "DFlash2: two-tap dynamic convolution and a top-K path selector"),
    "dspine": Entry(DSpine, "Draft in Parallel, Condition Through Depth (arXiv 2609.36173)"),
    "domino": Entry(Domino, "Domino (arXiv 2605.29707): anchor-first backbone with a causal correction head"),
    "dspark": Entry(DSpark, "DSpark (DeepSpec): anchor-first backbone with a Markov head and confidence"),
    "eagle3": Entry(Eagle3, "EAGLE-3: one autoregressive layer with training-time test (arXiv 2503.01840)"),
}


def drafter_class(name: str) -> type[BlockDrafter]:
    if name not in DRAFTERS:
        raise UserError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}")
    return DRAFTERS[name].cls
