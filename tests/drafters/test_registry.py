"""Drafters by name."""

from __future__ import annotations

import pytest

from dspine.drafters.dflash import DFlash
from dspine.drafters.dspine import DSpine
from dspine.drafters.registry import DRAFTERS, drafter_class
from dspine.errors import UserError


def test_names() -> None:
    assert drafter_class("dspine") is DSpine
    assert drafter_class("dflash") is DFlash
    assert all(entry.paper for entry in DRAFTERS.values())


def test_unknown_name() -> None:
    with pytest.raises(UserError, match=r"unknown drafter 'spine'; choose one of: .*dspine"):
        drafter_class("spine")
