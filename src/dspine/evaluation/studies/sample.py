"""The blocks of an answer that a study looks at, drafted once from the true context."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dspine.evaluation.studies.answers import block_anchors
from dspine.evaluation.studies.blocks import Drafted, StudiedDrafter, TrueAnswer
from dspine.evaluation.studies.results import BlockSettings
from dspine.training.anchors import block_tokens
from dspine.training.corpus import Answer


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks at the positions `anchors` [a] of an answer: the `true` tokens [a, M + 1], the anchors first, and the draft."""

    truth: TrueAnswer
    anchors: Tensor
    true: Tensor
    drafted: Drafted


def sample_blocks(studied: StudiedDrafter, answer: Answer, settings: BlockSettings) -> SampledBlocks | None:
    """Draft at the settings' random anchors; None for an answer too short for a block."""
    m = studied.num_draft_tokens
    anchors = block_anchors(answer, m, settings.blocks_per_answer, settings.seed)
    if not anchors.shape[0]:
        return None
    truth = studied.read(answer)
    true = block_tokens(truth.tokens.cpu(), anchors, m + 1).to(truth.tokens.device)
    return SampledBlocks(truth, anchors, true, studied.draft(true[:, 0], truth.context.until(anchors), m))
