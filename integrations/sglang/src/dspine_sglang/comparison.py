"""SGLang beside dspine's own engine on the same prompts: the same greedy text, and as many tokens of each draft accepted.

    python -m dspine_sglang.comparison gsm8k.jsonl --drafter none --drafter dspine --limit 20

Equal acceptance is what proves a drafter's context keys and values right: the text is the target's whatever is drafted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import sglang
import typer

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.drafters.checkpoint import load_drafter, resolve
from dspine.errors import UserError
from dspine.evaluation.benchmarks import first_turns, load_benchmark
from dspine.evaluation.machine import machine_facts
from dspine.files import write_text
from dspine.targets import bundled
from dspine.targets.model import Target
from dspine_sglang import ALGORITHM

MAX_ROWS = 8
MAX_CACHED_TOKENS = 16384


@dataclass(frozen=True)
class Decoded:
    """The answers' token ids and the rounds that they took; at index j, how many rounds accepted j drafted tokens."""

    outputs: list[list[int]]
    rounds: int
    rounds_by_num_accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answers a round, their first ones, the prefill's, aside. Engines differ in whether what the last round
        accepted beyond an answer's end counts; here it does for neither."""
        return (sum(map(len, self.outputs)) - len(self.outputs)) / self.rounds if self.rounds else 1.0


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


def decode_in_sglang(engine: sglang.Engine, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> Decoded:
    """Answers by SGLang under its own sampling parameters, and what it says of its rounds."""
    results = engine.generate(input_ids=[list(ids) for ids in prompts], sampling_params=sampling)
    facts = [result["meta_info"] for result in results]
    histograms = [meta.get("spec_correct_drafts_histogram", []) for meta in facts]
    return Decoded(
        outputs=[list(result["output_ids"]) for result in results],
        rounds=sum(meta.get("spec_verify_ct", 0) for meta in facts),
        rounds_by_num_accepted=[sum(counts) for counts in zip(*_padded(histograms), strict=True)],
    )


def decode_in_dspine(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Decoded:
    """Answers by dspine's engine, with `llm`'s drafter where it has one."""
    engine, stats = llm.engine(), DecodeStats()
    requests = [engine.submit(list(ids), params) for ids in prompts]
    engine.run()
    for request in requests:
        stats.merge(request.stats)
    at_least = [stats.rounds, *stats.accepted_at, 0]
    by_number = [a - b for a, b in itertools.pairwise(at_least)]
    return Decoded([request.output_ids for request in requests], stats.rounds, by_number)


def _padded(rows: list[list[int]]) -> list[list[int]]:
    length = max(map(len, rows), default=0)
    return [row + [0] * (length - len(row)) for row in rows]


def compare(
    target: Target, model: Path, checkpoint: Path | None, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    """Decode `prompts` in both engines, plainly where there is no checkpoint; both draft the whole block."""
    sampling = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens}
    with sglang_engine(model, checkpoint) as engine:
        theirs = decode_in_sglang(engine, prompts, sampling)
    drafter = None if checkpoint is None else load_drafter(checkpoint, target)
    width = 1 if drafter is None else drafter.config.max_width
    ours = decode_in_dspine(LLM(target, drafter, max_rows=MAX_ROWS, width=width), prompts, params)
    row: dict[str, Any] = {"drafter": "none" if drafter is None else drafter.config.drafter}
    if not params.temperature:
        row["identical"] = sum(a == b for a, b in zip(theirs.outputs, ours.outputs, strict=True))
        row["tokens"] = sum(map(len, ours.outputs))
    if drafter is not None:
        row["num_draft_tokens"] = drafter.config.num_draft_tokens
        row["sglang"], row["dspine"] = _facts(theirs), _facts(ours)
        row["acceptance_length_ratio"] = theirs.acceptance_length / ours.acceptance_length
    return row


def _facts(decoded: Decoded) -> dict[str, Any]:
    return {
        "rounds": decoded.rounds,
        "acceptance_length": decoded.acceptance_length,
        "rounds_by_num_accepted": decoded.rounds_by_num_accepted,
    }


def main(
    prompts: Annotated[Path, typer.Argument(help='Prompts, one {"turns": ["..."]} per line.', show_default=False)],
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="A DSpine checkpoint's folder, dspine for the shipped one, or none; repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", help="Use the first N prompts.")] = 20,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", "-T", help="0 = greedy.")] = 0.0,
    target: Annotated[str, typer.Option("--target", "-t", help="The target: a folder or smollm2-135m.")] = "smollm2-135m",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON here.")] = None,
) -> None:
    """Decode prompts in SGLang and in dspine's engine, and say whether text and acceptance length are the same."""
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=0)
    loaded = Target.load(target)
    model = bundled.ensure(target) if target in bundled.BUNDLED else Path(target)
    benchmark = load_benchmark(prompts, limit)
    encoded, _ = first_turns(benchmark, loaded, chat=True, max_new_tokens=max_new_tokens)
    rows = []
    for name in drafter or ["none", "dspine"]:
        rows.append(compare(loaded, model, None if name == "none" else resolve(name, loaded), encoded, params))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "benchmark": benchmark.name,
        "prompts_sha256": benchmark.sha256,
        "prompts": len(encoded),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "target": target,
        "rows": rows,
        "machine": {**machine_facts(loaded.device), "sglang": sglang.__version__},
    }
    if output is not None:
        write_text(output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
