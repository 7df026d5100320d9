"""The draft model by itself, built in SGLang's own layers in this process: a block without context, against dspine's runner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHANGES, Change, changed_checkpoint
from dspine_sglang.draft_config import read_draft_config
from dspine_sglang.models.dspine import DSpineDraftModel
from safetensors.torch import load_file
from sglang.srt import runtime_context
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_worker_v2 import _selector_lattice, _SelectorDraftSampler
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.checkpoint import load_drafter
from dspine.drafters.dspine import DSpineRunner
from dspine.errors import UserError
from dspine.targets.model import Target

ANCHORS = torch.tensor([260, 5012, 77])
WIDTH = 8


class BlockAttention(nn.Module):
    """RadixAttention of blocks that have no context: q [b * w, h * e], k and v [b * w, kv * e]."""

    def __init__(self, head_dim: int, causal: bool) -> None:
        super().__init__()
        self.head_dim, self.causal = head_dim, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any) -> Tensor:
        q, k, v = (x.reshape(-1, WIDTH, x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, out.shape[1] * self.head_dim)


@pytest.fixture(scope="module")
def runtime(target_folder: Path, dspine_checkpoint: Path) -> None:
    """What SGLang's layers ask about the process: its arguments, and groups of one."""
    arguments = ServerArgs(
        model_path=str(target_folder), speculative_algorithm="DSPINE", speculative_draft_model_path=str(dspine_checkpoint)
    )  # fmt: skip
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29771")
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")


@pytest.fixture(params=[None, *CHANGES], ids=lambda change: change.__name__ if change else "shipped")
def checkpoint(request: pytest.FixtureRequest, dspine_checkpoint: Path, tmp_path: Path) -> Path:
    change: Change | None = request.param
    return dspine_checkpoint if change is None else changed_checkpoint(dspine_checkpoint, tmp_path, change)


@pytest.fixture
def model(runtime: None, checkpoint: Path, target: Target) -> DSpineDraftModel:
    config = read_draft_config(checkpoint)
    config.context_len = 64
    built = DSpineDraftModel(config)
    built.load_weights(iter(load_file(checkpoint / "model.safetensors").items()))
    built.bind(target.embedding, target.head_weight)
    for layer in built.layers:
        layer.self_attn.attn = BlockAttention(config.head_dim, config.is_causal)
    return built


@pytest.fixture
def runner(checkpoint: Path, target: Target) -> DSpineRunner:
    found = load_drafter(checkpoint, target).runner(target)
    assert isinstance(found, DSpineRunner)
    return found


@pytest.fixture
def input_ids(runner: DSpineRunner) -> Tensor:
    blocks = torch.full((ANCHORS.shape[0], WIDTH), runner.config.mask_token_id)
    blocks[:, 0] = ANCHORS
    return blocks.flatten()


@torch.inference_mode()
def test_a_block_is_drafted_as_by_dspine(model: DSpineDraftModel, runner: DSpineRunner, input_ids: Tensor) -> None:
    positions = torch.arange(WIDTH).repeat(ANCHORS.shape[0])
    hidden = model.forward(input_ids, positions, None).hidden_states.view(-1, WIDTH, 2 * 576 + 128)
    ids, scores = _selector_lattice(model, hidden[:, 1:], ANCHORS)
    cache = runner.new_cache(ANCHORS.shape[0], 16)
    rows, first, transitions = runner.transition_cache(ANCHORS, cache, WIDTH - 1)
    torch.testing.assert_close(scores[:, 0, 0], first, atol=1e-3, rtol=1e-4)
    assert torch.equal(ids, runner._draft_head.token_of(rows))
    torch.testing.assert_close(scores[:, 1:], transitions, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("checkpoint", [None], indirect=True, ids=["shipped"])
def test_the_sampler_that_a_graph_captures_drafts_the_same(
    model: DSpineDraftModel, runner: DSpineRunner, input_ids: Tensor
) -> None:
    """Two rows are greedy, the middle one samples: its q is that of the transition cache along its own chain."""
    sampler = _SelectorDraftSampler(draft_model=model, block_size=WIDTH, max_bs=4, device="cpu", sampling_enabled=True)
    temperatures = torch.tensor([0.0, 0.8, 0.0])
    sampler.temperatures[:3] = temperatures.clamp_min(1e-5)
    sampler.greedy_mask[:3] = temperatures == 0
    hidden = model.forward(input_ids, torch.arange(WIDTH).repeat(3), None).hidden_states
    sampler(hidden, input_ids)
    drafted = sampler.out[: 3 * (WIDTH - 1)].view(3, WIDTH - 1)
    cache = runner.new_cache(3, 16)
    greedy = runner.propose(ANCHORS, cache, WIDTH - 1, torch.zeros(3), None).tokens
    assert torch.equal(drafted[::2], greedy[::2])
    sampled = runner.propose(ANCHORS, cache, WIDTH - 1, temperatures, sampler.uniforms[:3])
    assert sampled.q_probs is not None
    assert torch.equal(drafted[1], sampled.tokens[1])
    torch.testing.assert_close(sampler.q_out[1], sampled.q_probs[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("checkpoint", [None], indirect=True, ids=["shipped"])
def test_other_weights_are_refused_once_it_runs(model: DSpineDraftModel, checkpoint: Path) -> None:
    with pytest.raises(UserError, match="cannot be given other weights"):
        model.load_weights(iter(load_file(checkpoint / "model.safetensors").items()))
