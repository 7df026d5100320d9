"""The drafters by name. A new drafter is one file and one line here."""

from __future__ import annotations

from dataclasses import dataclass

from dspine.drafters.base import BlockDrafter
from dspine.drafters.dflash import DFlash
from dspine.drafters.dspine import DSpine
from dspine.errors import UserError


@dataclass(frozen=True)
class Entry:
    cls: type[BlockDrafter]
    paper: str


DRAFTERS = {
    "dflash": Entry(DFlash, "DFlash: block-parallel drafting on fused target features"),
    "dspine": Entry(DSpine, "Draft in Parallel, Condition Through Depth (arXiv 2609.36173)"),
}


def drafter_class(name: str) -> type[BlockDrafter]:
    if name not in DRAFTERS:
        raise UserError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}")
    return DRAFTERS[name].cls
