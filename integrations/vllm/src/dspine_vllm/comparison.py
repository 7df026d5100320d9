"""vLLM beside dspine's own engine on the same prompts (dspine.integrations.side_by_side).

python -m dspine_vllm.comparison gsm8k.jsonl --drafter none --drafter dflash --drafter dspine --limit 20
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM as VllmEngine
from vllm import SamplingParams as VllmSamplingParams

from dspine.decoding.sampling import SamplingParams
from dspine.evaluation.spec_counters import SpecCounts
from dspine.integrations.side_by_side import MAX_ROWS, Decoded, Prompts, run
from dspine.integrations.vllm_export import export_checkpoint
from dspine.targets.model import Target

_COUNTER = "vllm:spec_decode_num_"


@contextmanager
def vllm_engine(model: Path, speculative_config: dict[str, Any] | None, **options: Any) -> Iterator[VllmEngine]:
    """A vLLM engine in fp32 on this machine, shut down at the end."""
    settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": MAX_ROWS, "disable_log_stats": False, **options}
    engine = VllmEngine(str(model), speculative_config=speculative_config, **settings)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def decode_in_vllm(engine: VllmEngine, prompts: Prompts, params: SamplingParams) -> Decoded:
    """Answers by vLLM, and what its counters gained."""
    before = _counters(engine)
    wanted = VllmSamplingParams(temperature=params.temperature, max_tokens=params.max_new_tokens, seed=params.seed)
    results = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], wanted, use_tqdm=False)
    gained = _counters(engine) - before
    outputs = [list(result.outputs[0].token_ids) for result in results]
    return Decoded(outputs=outputs, rounds=gained.rounds, accepted_at=gained.accepted_at)


def _counters(engine: VllmEngine) -> SpecCounts:
    found = {metric.name.removeprefix(_COUNTER): metric for metric in engine.get_metrics() if metric.name.startswith(_COUNTER)}
    rounds, accepted_at = found.get("drafts"), found.get("accepted_tokens_per_pos")
    return SpecCounts(
        rounds=0 if rounds is None else rounds.value, accepted_at=() if accepted_at is None else tuple(accepted_at.values)
    )


def _decode(target: Target, model: Path, checkpoint: Path | None, prompts: Prompts, params: SamplingParams) -> Decoded:
    if checkpoint is None:
        with vllm_engine(model, None, max_model_len=target.max_length) as engine:
            return decode_in_vllm(engine, prompts, params)
    with tempfile.TemporaryDirectory() as work:
        export = export_checkpoint(checkpoint, target, Path(work) / "draft")
        config = {**export.speculative_config, "draft_sample_method": "greedy" if params.is_greedy else "probabilistic"}
        with vllm_engine(model, config, max_model_len=target.max_length) as engine:
            return decode_in_vllm(engine, prompts, params)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else vLLM's CPU build takes nearly all memory for it
    run("vllm", vllm.__version__, _decode, ["dflash", "dspine"])
