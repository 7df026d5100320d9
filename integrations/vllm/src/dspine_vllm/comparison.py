"""vLLM beside dspine's own engine on the same prompts: the same greedy text, and as many tokens of each draft accepted.

    python -m dspine_vllm.comparison gsm8k.jsonl --drafter none --drafter dflash --drafter dspine --limit 20

Equal acceptance is what proves a drafter's context keys and values right: the text is the target's whatever is drafted.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import vllm
from vllm import LLM as VllmEngine
from vllm import SamplingParams as VllmSamplingParams

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.drafters.checkpoint import load_drafter, resolve
from dspine.errors import UserError
from dspine.evaluation.benchmarks import first_turns, load_benchmark
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.spec_counters import SpecCounts
from dspine.files import write_text
from dspine.integrations.vllm_export import export_checkpoint
from dspine.targets import bundled
from dspine.targets.model import Target

MAX_ROWS = 8
_COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Decoded:
    """The answers' token ids, and what was drafted and accepted on the way."""

    outputs: list[list[int]]
    counts: SpecCounts


@contextmanager
def vllm_engine(model: Path, speculative_config: dict[str, Any] | None, **options: Any) -> Iterator[VllmEngine]:
    """A vLLM engine in fp32 on this machine, shut down at the end."""
    settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": MAX_ROWS, "disable_log_stats": False, **options}
    engine = VllmEngine(str(model), speculative_config=speculative_config, **settings)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def decode_in_vllm(engine: VllmEngine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Decoded:
    """Answers by vLLM, and what its counters gained."""
    before = _counters(engine)
    wanted = VllmSamplingParams(temperature=params.temperature, max_tokens=params.max_new_tokens, seed=params.seed)
    results = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], wanted, use_tqdm=False)
    return Decoded([list(result.outputs[0].token_ids) for result in results], _counters(engine) - before)


def decode_in_dspine(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Decoded:
    """Answers by dspine's engine, with `llm`'s drafter where it has one."""
    engine, stats = llm.engine(), DecodeStats()
    requests = [engine.submit(list(ids), params) for ids in prompts]
    engine.run()
    for request in requests:
        stats.merge(request.stats)
    counts = SpecCounts(
        rounds=stats.rounds,
        num_drafted_tokens=stats.num_drafted_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        drafted_at=tuple(stats.drafted_at),
        accepted_at=tuple(stats.accepted_at),
    )
    return Decoded([request.output_ids for request in requests], counts)


def _counters(engine: VllmEngine) -> SpecCounts:
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(_COUNTER):
            name = metric.name.removeprefix(_COUNTER)
            found[name] = metric.values if name.endswith("per_pos") else metric.value
    return SpecCounts(
        rounds=found.get("drafts", 0),
        num_drafted_tokens=found.get("draft_tokens", 0),
        num_accepted_tokens=found.get("accepted_tokens", 0),
        accepted_at=tuple(found.get("accepted_tokens_per_pos", ())),
    )


def compare(
    target: Target, model: Path, checkpoint: Path | None, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    """Decode `prompts` in both engines, plainly where there is no checkpoint; both draft the whole block."""
    if checkpoint is None:
        with vllm_engine(model, None, max_model_len=target.max_length) as engine:
            theirs = decode_in_vllm(engine, prompts, params)
        ours = decode_in_dspine(LLM(target, None, max_rows=MAX_ROWS), prompts, params)
        return {"drafter": "none", **_identity(theirs, ours, params)}
    drafter = load_drafter(checkpoint, target)
    with tempfile.TemporaryDirectory() as work:
        export = export_checkpoint(checkpoint, target, Path(work) / "draft")
        config = {**export.speculative_config, "draft_sample_method": "probabilistic" if params.temperature else "greedy"}
        with vllm_engine(model, config, max_model_len=target.max_length) as engine:
            theirs = decode_in_vllm(engine, prompts, params)
    ours = decode_in_dspine(LLM(target, drafter, max_rows=MAX_ROWS, width=drafter.config.max_width), prompts, params)
    a, b = theirs.counts, ours.counts
    return {
        "drafter": drafter.config.drafter,
        "architecture": export.architecture,
        "num_draft_tokens": export.num_speculative_tokens,
        **_identity(theirs, ours, params),
        "vllm": {"rounds": a.rounds, "acceptance_length": a.acceptance_length, "accepted_at": a.accepted_at},
        "dspine": {"rounds": b.rounds, "acceptance_length": b.acceptance_length, "accepted_at": b.accepted_at},
        "acceptance_length_ratio": a.acceptance_length / b.acceptance_length,
    }


def _identity(theirs: Decoded, ours: Decoded, params: SamplingParams) -> dict[str, Any]:
    if params.temperature:
        return {}
    same = sum(a == b for a, b in zip(theirs.outputs, ours.outputs, strict=True))
    return {"identical": same, "tokens": sum(map(len, ours.outputs))}


def main(
    prompts: Annotated[Path, typer.Argument(help='Prompts, one {"turns": ["..."]} per line.', show_default=False)],
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="A checkpoint's folder, a shipped drafter's name, or none; repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", help="Use the first N prompts.")] = 20,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", "-T", help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="When sampling.")] = 0,
    target: Annotated[str, typer.Option("--target", "-t", help="The target: a folder or smollm2-135m.")] = "smollm2-135m",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON here.")] = None,
) -> None:
    """Decode prompts in vLLM and in dspine's engine, and say whether text and acceptance length are the same."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else vLLM's CPU build takes nearly all memory for it
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    loaded = Target.load(target)
    model = bundled.ensure(target) if target in bundled.BUNDLED else Path(target)
    benchmark = load_benchmark(prompts, limit)
    encoded, _ = first_turns(benchmark, loaded, chat=True, max_new_tokens=max_new_tokens)
    names = drafter or ["none", "dflash", "dspine"]
    checkpoints = [None if name == "none" else resolve(name, loaded) for name in names]
    rows = []
    for checkpoint in checkpoints:
        rows.append(compare(loaded, model, checkpoint, encoded, params))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "benchmark": benchmark.name,
        "prompts_sha256": benchmark.sha256,
        "prompts": len(encoded),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "target": target,
        "rows": rows,
        "machine": {**machine_facts(loaded.device), "vllm": vllm.__version__},
    }
    if output is not None:
        write_text(output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
