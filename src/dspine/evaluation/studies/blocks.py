"""A frozen block drafter under study: contexts that never change, drafts from them, and what its layers said meanwhile.

    studied = StudiedDrafter(drafter, target)
    truth = studied.read(answer)
    drafted = studied.draft(anchor_tokens, truth.context.until(anchors), num_draft_tokens=7)

Drafting runs the drafter's own runner, so that what is studied is what decodes.

Shapes: b rows (blocks), n tokens, m drafted tokens, k key/value heads, e head_dim, d hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspine.drafters.backbone import Backbone
from dspine.drafters.base import BlockDrafter
from dspine.drafters.runner import BackboneRunner
from dspine.errors import UserError
from dspine.modules.decoder import AfterLayer, DecoderStack
from dspine.modules.kv_cache import CacheIndex, KVCache
from dspine.targets.model import Target
from dspine.training.corpus import Answer


@dataclass(frozen=True)
class Context:
    """Keys and values of every layer, [1 or b, 2 k, n, e], of which row i sees the first `lengths`[i] [b]. Nothing is ever
    written into them: a forward works on a copy."""

    layers: tuple[Tensor, ...]
    lengths: Tensor

    def until(self, lengths: Tensor) -> Context:
        """The same entries seen up to `lengths` [b]."""
        return replace(self, lengths=lengths.cpu())

    def with_layers(self, other: Context, layers: Collection[int]) -> Context:
        """This context with `layers` (counted from 1) taken from another one of the same lengths."""
        assert torch.equal(self.lengths, other.lengths), "two prefixes of one length"
        pairs = enumerate(zip(self.layers, other.layers, strict=True), 1)
        return replace(self, layers=tuple(theirs if number in layers else mine for number, (mine, theirs) in pairs))

    def copy_into(self, cache: KVCache) -> KVCache:
        """Fill an empty cache of as many rows as there are lengths."""
        longest = int(self.lengths.max())
        for mine, theirs in zip(cache.data, self.layers, strict=True):
            mine[:, :, :longest] = theirs[:, :, :longest]
        cache.lengths.copy_(self.lengths)
        return cache


@dataclass(frozen=True)
class TrueAnswer:
    """The target's and the drafter's reading of an answer with tokens [n]. The contexts hold its first n - 1 tokens."""

    tokens: Tensor
    context: Context  # the drafter's
    target_context: Context


@dataclass(frozen=True)
class Drafted:
    """Tokens [b, m], the output of every layer at their slots [L, b, m, d], and the anchor slot's keys and values in every layer,
    [b, 2 k, e] each."""

    tokens: Tensor
    states: Tensor
    anchor_kv: tuple[Tensor, ...]


class StudiedDrafter:
    """A block drafter beside its target. Raises UserError for a drafter without the block backbone."""

    def __init__(self, drafter: BlockDrafter, target: Target) -> None:
        config = drafter.config
        if not isinstance(drafter.backbone, Backbone):
            raise UserError(
                f"{config.drafter} drafts token by token on a backbone of its own; the studies look into block drafters, "
                "such as dflash or dspine"
            )
        runner = drafter.runner(target)
        assert isinstance(runner, BackboneRunner), "a drafter with the block backbone runs on its runner"
        self._stack = RecordingStack(runner.stack)
        runner.stack = self._stack
        self._runner = runner
        self.drafter, self.target, self.config = drafter, target, config
        self.num_draft_tokens, self.num_layers = config.num_draft_tokens, config.num_layers

    @torch.no_grad()
    def read(self, answer: Answer) -> TrueAnswer:
        """Run the target over an answer, and its features into the drafter."""
        tokens = torch.tensor(answer.ids, device=self.target.device)
        cache = self.target.new_cache(1, len(answer.ids))
        features = self.features(tokens[None, :-1], cache)
        target_context = Context(tuple(cache.data), torch.tensor([len(answer.ids) - 1]))
        empty = Context(tuple(data[:, :, :0] for data in self._runner.new_cache(1, 1).data), torch.zeros(1, dtype=torch.long))
        return TrueAnswer(tokens, self.extended(empty, features, tokens[None, 1:]), target_context)

    def features(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """The target's features [b, n, taps * d] of the next tokens [b, n]."""
        features = self.target.forward(tokens, cache, self.config.target_layer_ids).features
        assert features is not None, "a block drafter taps at least one layer"
        return features.clone()  # out of inference mode

    @torch.no_grad()
    def continued(self, truth: TrueAnswer, anchors: Tensor, tokens: Tensor, following: Tensor) -> Context:
        """The drafter's context where the answer goes on with other `tokens` [b, n] after the positions `anchors` [b], as the
        target reads them; `following` [b] is the token after those. Its lengths are anchors + 1 + n."""
        before = anchors.cpu() + 1
        if tokens.shape[1] == 0:
            return truth.context.until(before)
        cache = self.target.new_cache(before.shape[0], int(before.max()) + tokens.shape[1])
        features = self.features(tokens, truth.target_context.until(before).copy_into(cache))
        return self.extended(truth.context.until(before), features, torch.cat((tokens[:, 1:], following[:, None]), 1))

    @torch.no_grad()
    def extended(self, context: Context, features: Tensor, next_tokens: Tensor) -> Context:
        """The context with the features [b, n, taps * d] of n more tokens, each followed by one of next_tokens [b, n]."""
        n = features.shape[1]
        cache = self._runner.new_cache(features.shape[0], int(context.lengths.max()) + n)
        self._runner.extend(features, next_tokens, context.copy_into(cache))
        return Context(tuple(cache.data), context.lengths + n)

    @torch.no_grad()
    def draft(
        self, anchors: Tensor, context: Context, num_draft_tokens: int, anchor_kv: Mapping[int, Tensor] | None = None
    ) -> Drafted:
        """Draft greedily after anchor tokens [b], each on its row of the context.

        `anchor_kv` puts keys and values [b, 2 k, e] of another token in the place of the anchor's, by layer counted from 1: what
        the other slots see of it there.
        """
        runner, b = self._runner, anchors.shape[0]
        cache = runner.new_cache(b, int(context.lengths.max()) + self.config.block_size)
        context.copy_into(cache)
        if anchor_kv:
            cache = AnchorCache(cache, anchor_kv)
        tokens = runner.propose(anchors, cache, num_draft_tokens, torch.zeros(b, device=anchors.device), None).tokens
        rows, positions = torch.arange(b), context.lengths
        own = tuple(data[rows, :, positions].clone() for data in cache.data)
        return Drafted(tokens, self._candidate_states(num_draft_tokens), own)

    def _candidate_states(self, num_draft_tokens: int) -> Tensor:
        """Every layer's output [L, b, m, d] at the slots that draft. A layer may have dropped the anchor's slot already."""
        given = 1 if self.config.alignment == "same" else 0
        starts = [given - (self._stack.width - states.shape[1]) for states in self._stack.states]
        return torch.stack(
            [states[:, i : i + num_draft_tokens] for i, states in zip(starts, self._stack.states, strict=True)]
        ).clone()


class RecordingStack(DecoderStack):
    """A stack that remembers its last run: the width and the `states` [b, w, d] that each layer passed on."""

    def __init__(self, stack: DecoderStack) -> None:
        super().__init__(stack.spec, stack.rope, stack.layers)
        self.width = 0
        self.states: Sequence[Tensor] = ()

    def run(self, x: Tensor, cache: KVCache, after_layer: AfterLayer | None = None) -> Tensor:
        states: list[Tensor] = []

        def keep(layer: int, output: Tensor) -> Tensor:
            states.append(output if after_layer is None else after_layer(layer, output))
            return states[-1]

        self.width, self.states = x.shape[1], states
        return super().run(x, cache, keep)


class AnchorCache(KVCache):
    """A cache whose block's first slot shows other keys and values [b, 2 k, e] in some layers, counted from 1."""

    def __init__(self, cache: KVCache, anchor_kv: Mapping[int, Tensor]) -> None:
        data = cache.data
        super().__init__(data.shape[0], cache.rows, cache.kv_heads, data.shape[-1], 0, data.device, data.dtype)
        self.data, self.capacity, self.lengths = cache.data, cache.capacity, cache.lengths
        self._anchor_kv = anchor_kv

    def store(self, layer: int, kv: Tensor, index: CacheIndex) -> tuple[Tensor, Tensor]:
        if layer + 1 in self._anchor_kv:
            kv = torch.cat((self._anchor_kv[layer + 1][:, None], kv[:, 1:]), 1)
        return super().store(layer, kv, index)
