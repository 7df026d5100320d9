"""DFlash's worker with a DSpine drafter: bound to the target before the first round, sampled blocks verified exactly.

The rest is DFlash's: a block is drafted in one forward, verified in one, and the context keys and values of what was accepted
are written into the drafter's cache from the target's own features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor, nn

from dspine.decoding.verify import SparseQ
from dspine.errors import UserError
from dspine.integrations.engine_model import EngineTarget
from dspine_sglang import ALGORITHM
from dspine_sglang.models.dspine import DSpineDraftModel
from dspine_sglang.plugin import check_hooks
from dspine_sglang.verification import Cuts, accept_block


@dataclass(kw_only=True)
class SGLangTarget(EngineTarget):
    """SGLang's target, with the embedding that the drafter's slots begin with."""

    embedding: Tensor  # [v, d]

    @classmethod
    def of(cls, worker: Any) -> SGLangTarget:
        """The target of a TpModelWorker. Raises UserError for one whose head or embedding DSPINE cannot use."""
        model_config = worker.model_runner.model_config
        config = model_config.hf_text_config
        name = Path(model_config.model_path).name
        model = worker.model_runner.model
        head = _rows(name, "LM head", model.lm_head)[: model_config.vocab_size]
        embedding = _rows(name, "embedding", model.get_input_embeddings())[: model_config.vocab_size]
        if config.model_type.startswith("gemma"):
            raise UserError(f"{name}: Gemma scales its embeddings, which {ALGORITHM} does not do for its drafter")
        return cls(
            name=name,
            config=config,
            tokenizer=worker.tokenizer,
            hidden_size=model_config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=model_config.vocab_size,
            head_weight=head,
            embedding=embedding,
        )


def _rows(name: str, what: str, module: nn.Module) -> Tensor:
    """The weight [v', d] of a target's head or embedding, padding included."""
    weight = dict(unwrap_lora_layer(module).named_parameters(recurse=False)).get("weight")
    if weight is None or not is_dense_head_weight(weight):
        raise UserError(f"{name}: its {what} is quantized, but {ALGORITHM} reads single rows of it; keep it unquantized")
    return weight.detach()


class DSpineWorker(DFlashWorkerV2):
    draft_model: DSpineDraftModel

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        check_hooks()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        target = SGLangTarget.of(target_worker)
        self.draft_model.drafter_config.check(target)
        self.draft_model.bind(target.embedding, target.head_weight)

    def _selector_sampling_accept(
        self, *, candidates: Tensor, next_token_logits: Tensor, candidate_ids: Tensor, q_rows: Tensor, sampling_info: Any,
        draft_input: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """num_accepted int32 [b] and next token int64 [b]: candidates [b, w] with the anchor first, logits [b * w, v], and the
        q of every drafted slot as candidate_ids and q_rows [b, m, k]."""
        b, w = candidates.shape
        num_accepted, next_token = accept_block(
            next_token_logits.view(b, w, -1), candidates[:, 1:], SparseQ(candidate_ids, q_rows), batch_cuts(sampling_info)
        )
        return num_accepted.int(), next_token.long()


def batch_cuts(sampling_info: Any) -> Cuts:
    """The cuts of a SamplingBatchInfo, in the order of the engine's sampling backend."""
    in_turn = get_exec().kernel.sampling_backend == "flashinfer" and sampling_info.need_min_p_sampling
    return Cuts(
        temperatures=sampling_info.temperatures.view(-1),
        top_ks=sampling_info.top_ks.view(-1),
        top_ps=sampling_info.top_ps.view(-1),
        min_ps=sampling_info.min_ps.view(-1),
        need_top_k=sampling_info.need_top_k_sampling,
        need_top_p=sampling_info.need_top_p_sampling,
        need_min_p=sampling_info.need_min_p_sampling,
        renormalise=in_turn,
    )
