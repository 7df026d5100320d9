"""DSPINE as SGLang's scheduler sees it: an algorithm of the DFLASH family with a worker of its own.

A registered algorithm answers the questions that the scheduler puts to its built-in ones. CustomSpecAlgo answers most of
them with "no", and three not at all (`create_future_map`, `need_topk`, `carries_draft_hidden_states`); this one answers all
of them as DFLASH does, whose scheduling it shares.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from dspine_sglang.server_args import complete_server_args

_LIKE = SpeculativeAlgorithm.DFLASH


class DSpineAlgorithm(CustomSpecAlgo):
    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return _LIKE.supports_target_verify_for_draft()

    def supports_prefill_shared_read_done(self) -> bool:
        return _LIKE.supports_prefill_shared_read_done()

    def supports_mixed_chunk(self) -> bool:
        return _LIKE.supports_mixed_chunk()

    def supports_grammar_overlap(self) -> bool:
        return _LIKE.supports_grammar_overlap()

    def carries_draft_hidden_states(self) -> bool:
        return _LIKE.carries_draft_hidden_states()

    def need_topk(self) -> bool:
        return _LIKE.need_topk()

    def create_future_map(self, *arguments: Any, **options: Any) -> Any:
        return _LIKE.create_future_map(*arguments, **options)

    def handle_server_args(self, server_args: Any) -> None:
        complete_server_args(server_args)
