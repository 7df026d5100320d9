"""The slots of the paper's blocks come out at 15 candidates; smaller blocks scale."""

from __future__ import annotations

import pytest

from dspine.errors import UserError
from dspine.evaluation.studies.slots import middle_anchor, receiver_slots, slot_groups


def test_the_papers_slots() -> None:
    assert slot_groups(15) == ((1, 4), (5, 8), (9, 15))
    assert middle_anchor(15) == 7
    assert receiver_slots(15) == (4, 8, 12)


def test_the_shipped_drafters_slots() -> None:
    assert slot_groups(7) == ((1, 2), (3, 4), (5, 7))
    assert middle_anchor(7) == 3
    assert receiver_slots(7) == (3, 4, 6)


@pytest.mark.parametrize("count", range(1, 20))
def test_groups_cover_every_slot_once(count: int) -> None:
    slots = [slot for first, last in slot_groups(count) for slot in range(first, last + 1)]
    assert slots == list(range(1, count + 1))


@pytest.mark.parametrize("count", range(4, 20))
def test_chosen_slots_lie_inside_the_block(count: int) -> None:
    assert 2 <= middle_anchor(count) < count
    slots = receiver_slots(count)
    assert slots == tuple(sorted(set(slots)))
    assert 3 <= slots[0] <= slots[-1] <= count


def test_short_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="drafts 3 tokens; the timing study needs at least 4"):
        middle_anchor(3)
    with pytest.raises(UserError, match="drafts 2 tokens; the predecessor study needs at least 3"):
        receiver_slots(2)
    assert receiver_slots(3) == (3,)
