"""vLLM's DFlash proposer, walking the transition cache where the drafter is a DSpine (specification, section 6).

Greedy drafts take the best candidate after the one chosen before. For sampled requests vLLM has two ways, both exact:
`draft_sample_method` "greedy", its default, drafts them greedily too, and the rejection sampler takes q for one-hot: it accepts x
with p(x) and else draws from p without x; "probabilistic" draws the candidates along the walk and hands their sparse q over.

Shapes: b requests, M candidate slots, k candidates, d hidden, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker import gpu_model_runner

from dspine.modules.selection import walk_transitions
from dspine_vllm.dflash import CheckedDFlash
from dspine_vllm.dspine import DSpineForCausalLM
from dspine_vllm.target import VllmTarget

GREEDY_BELOW = 1e-5  # vLLM takes a smaller temperature for greedy


def install() -> None:
    """Have vLLM's model runner build this proposer for the method `dflash`; other drafters pass through it unchanged."""
    gpu_model_runner.DFlashProposer = DSpineProposer


class DSpineProposer(DFlashProposer):
    drafter: DSpineForCausalLM | None = None  # `model`, before vLLM may wrap it, where it is a DSpine

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if isinstance(self.model, CheckedDFlash):
            self.model.bind(VllmTarget.of(target_model, self.vllm_config.model_config))
        if isinstance(self.model, DSpineForCausalLM):
            self.drafter = self.model

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
        """Tokens [b * M] and, where they were drawn, their q [b * M, v]; hidden_states [b * M, d] are the slots'."""
        if self.drafter is None:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        slots = self.num_speculative_tokens
        u = hidden_states.view(-1, slots, hidden_states.shape[-1])
        anchors = self.input_ids[: u.shape[0] * (slots + 1)].view(-1, slots + 1)[:, 0]
        ids, first, transitions = self.drafter.transition_cache(u, anchors)
        greedy = sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs
        temperatures = draft_temperatures(sampling_metadata, u)
        uniforms = None if greedy else draft_uniforms(sampling_metadata, u.shape[:2], u.device)
        index, q = walk_transitions(first, transitions, temperatures, uniforms)
        tokens = ids.gather(2, index[..., None]).flatten()
        return tokens, None if q is None else dense(ids, q, self.vllm_config.model_config.get_vocab_size()).flatten(0, 1)


def draft_temperatures(sampling: SamplingMetadata, like: Tensor) -> Tensor:
    """Each request's temperature [b] for `like` [b, ...], 0 where it is greedy."""
    if sampling.temperature is None:
        return torch.zeros(like.shape[0], device=like.device)
    return torch.where(sampling.temperature < GREEDY_BELOW, 0.0, sampling.temperature)


def draft_uniforms(sampling: SamplingMetadata, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Random numbers [b, M] in [0, 1); a request with a seed takes them from its own generator."""
    uniforms = torch.rand(shape, device=device)
    for row, generator in sampling.generators.items():
        uniforms[row].uniform_(generator=generator)
    return uniforms


def dense(ids: Tensor, q: Tensor, vocab_size: int) -> Tensor:
    """q [b, M, k] on token ids [b, M, k], zero elsewhere, as vLLM's rejection sampler reads it: [b, M, v]."""
    return q.new_zeros(*ids.shape[:2], vocab_size).scatter_(2, ids, q)
