"""SGLang beside dspine's own engine on the same prompts (dspine.integrations.side_by_side).

python -m dspine_sglang.comparison gsm8k.jsonl --drafter none --drafter dspine --limit 20
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang

from dspine.decoding.sampling import SamplingParams
from dspine.integrations.side_by_side import MAX_ROWS, Decoded, Prompts, run
from dspine.targets.model import Target
from dspine_sglang import ALGORITHM

MAX_CACHED_TOKENS = 16384


@contextmanager
def sglang_engine(model: Path, checkpoint: Path | None, **options: Any) -> Iterator[sglang.Engine]:
    """An SGLang engine in fp32, drafting with `checkpoint` where there is one, shut down at the end."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_running_requests": MAX_ROWS,
        "max_total_tokens": MAX_CACHED_TOKENS,
        "log_level": "error",
        **options,
    }
    if checkpoint is not None:
        settings.update(speculative_algorithm=ALGORITHM, speculative_draft_model_path=str(checkpoint))
    engine = sglang.Engine(model_path=str(model), **settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def decode_in_sglang(engine: sglang.Engine, prompts: Prompts, sampling: dict[str, Any]) -> Decoded:
    """Answers by SGLang under its own sampling parameters, and what it says of its rounds."""
    results = engine.generate(input_ids=[list(ids) for ids in prompts], sampling_params=sampling)
    facts = [result["meta_info"] for result in results]
    # By answer, how many rounds accepted 0, 1, 2 ... drafted tokens.
    histograms: list[list[int]] = [meta.get("spec_correct_drafts_histogram", []) for meta in facts]
    longest = max(map(len, histograms), default=0)
    return Decoded(
        outputs=[list(result["output_ids"]) for result in results],
        rounds=sum(meta.get("spec_verify_ct", 0) for meta in facts),
        accepted_at=tuple(sum(sum(counts[j:]) for counts in histograms) for j in range(1, longest)),
    )


def _decode(target: Target, model: Path, checkpoint: Path | None, prompts: Prompts, params: SamplingParams) -> Decoded:
    sampling = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens}
    with sglang_engine(model, checkpoint) as engine:
        return decode_in_sglang(engine, prompts, sampling)


if __name__ == "__main__":
    run("sglang", sglang.__version__, _decode, ["dspine"])
