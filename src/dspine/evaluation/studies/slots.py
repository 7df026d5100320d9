"""Which slots of a block the studies look at, whatever its length. Slots are counted from 1: slot t is draft candidate t.

The paper's blocks have M = 15 candidates after their anchor. The rules below give its choices there and scale with M.
"""

from __future__ import annotations

from itertools import pairwise

from dspine.errors import UserError

SlotRange = tuple[int, int]  # first and last slot, both included


def slot_groups(num_draft_tokens: int) -> tuple[SlotRange, ...]:
    """The first quarter of the slots, the second, and the second half; quarters end rounded up, empty groups are left out.

    M = 15: 1-4, 5-8, 9-15.   M = 7: 1-2, 3-4, 5-7.
    """
    ends = [0, _part(num_draft_tokens, 1), _part(num_draft_tokens, 2), num_draft_tokens]
    return tuple((start + 1, end) for start, end in pairwise(ends) if end > start)


def middle_anchor(num_draft_tokens: int) -> int:
    """The slot whose token becomes a new anchor in the timing study: the middle one, floor(M / 2).

    M = 15: 7, with slots 1-6 as the prefix and 8-15 measured.   M = 7: 3, with 1-2 and 4-7.
    Raises UserError where no slot would be left for a prefix.
    """
    if num_draft_tokens < 4:
        raise UserError(f"this drafter drafts {num_draft_tokens} tokens; the timing study needs at least 4")
    return num_draft_tokens // 2


def receiver_slots(num_draft_tokens: int) -> tuple[int, ...]:
    """The slots whose token the predecessor study asks for: the ends of the first three quarters, rounded up, from slot 3 on,
    since a slot needs a predecessor and that one a history.

    M = 15: 4, 8, 12.   M = 7: 3, 4, 6.   Raises UserError where a block is too short.
    """
    if num_draft_tokens < 3:
        raise UserError(f"this drafter drafts {num_draft_tokens} tokens; the predecessor study needs at least 3")
    return tuple(dict.fromkeys(max(3, _part(num_draft_tokens, quarters)) for quarters in (1, 2, 3)))


def _part(num_draft_tokens: int, quarters: int) -> int:
    return -(-num_draft_tokens * quarters // 4)
