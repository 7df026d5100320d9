"""SGLang without a drafter, and with one that has what the shipped one has not: an engine each."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import changed_checkpoint, with_norms_and_whole_vocabulary
from dspine_sglang.comparison import decode_in_sglang, sglang_engine
from engines import GREEDY, in_dspine

from dspine.targets.model import Target

pytestmark = pytest.mark.engine


def test_sglang_alone_writes_what_dspine_does(target_folder: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    with sglang_engine(target_folder, None) as alone:
        assert decode_in_sglang(alone, prompts, GREEDY).outputs == plain


def test_another_drafter_and_another_width(
    dspine_checkpoint: Path, tmp_path: Path, target_folder: Path, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    other_checkpoint = changed_checkpoint(dspine_checkpoint, tmp_path, with_norms_and_whole_vocabulary)
    with sglang_engine(target_folder, other_checkpoint, speculative_num_draft_tokens=5) as started:
        theirs = decode_in_sglang(started, prompts, GREEDY)
    ours = in_dspine(target, other_checkpoint, prompts, width=5)
    assert theirs.outputs == ours.outputs == plain
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    assert theirs.acceptance_length > 1.1
