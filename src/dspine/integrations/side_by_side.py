"""Another engine beside dspine's own on the same prompts: the same greedy text, and as many tokens of each draft accepted.

Equal acceptance is what proves a drafter's context keys and values right in that engine: the text is the target's whatever is
drafted. The plugins call `run` with how their engine decodes:

    python -m dspine_sglang.comparison gsm8k.jsonl --drafter none --drafter dspine --limit 20
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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

MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The answers' token ids and the rounds they took; `accepted_at[j]` rounds accepted drafted token j + 1."""

    outputs: list[list[int]]
    rounds: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answers a round, their first ones, the prefill's, aside. Engines differ in whether what the last round
        accepted beyond an answer's end counts; here it does for neither."""
        return (sum(map(len, self.outputs)) - len(self.outputs)) / self.rounds if self.rounds else 1.0

    def facts(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "acceptance_length": self.acceptance_length, "accepted_at": list(self.accepted_at)}


Prompts = Sequence[Sequence[int]]
# How the other engine decodes: the target, the folder of its weights, a drafter's checkpoint or None for plain decoding.
Decode = Callable[[Target, Path, Path | None, Prompts, SamplingParams], Decoded]


def decode_in_dspine(llm: LLM, prompts: Prompts, params: SamplingParams) -> Decoded:
    """Answers by dspine's engine, with `llm`'s drafter where it has one."""
    engine, stats = llm.engine(), DecodeStats()
    requests = [engine.submit(list(ids), params) for ids in prompts]
    engine.run()
    for request in requests:
        stats.merge(request.stats)
    return Decoded(
        outputs=[request.output_ids for request in requests], rounds=stats.rounds, accepted_at=tuple(stats.accepted_at)
    )


def compare(
    engine: str, decode: Decode, target: Target, model: Path, checkpoint: Path | None, prompts: Prompts, params: SamplingParams
) -> dict[str, Any]:
    """Decode `prompts` in both engines, plainly where there is no checkpoint; both draft the whole block."""
    drafter = None if checkpoint is None else load_drafter(checkpoint, target)
    theirs = decode(target, model, checkpoint, prompts, params)
    width = 1 if drafter is None else drafter.config.max_width
    ours = decode_in_dspine(LLM(target, drafter, max_rows=MAX_ROWS, width=width), prompts, params)
    row: dict[str, Any] = {"drafter": "none" if drafter is None else drafter.config.drafter}
    if params.is_greedy:
        row["identical"] = sum(a == b for a, b in zip(theirs.outputs, ours.outputs, strict=True))
        row["tokens"] = sum(map(len, ours.outputs))
    if drafter is not None:
        row["num_draft_tokens"] = drafter.config.num_draft_tokens
        row[engine], row["dspine"] = theirs.facts(), ours.facts()
        row["acceptance_length_ratio"] = theirs.acceptance_length / ours.acceptance_length
    return row


def command(engine: str, version: str, decode: Decode, drafters: Sequence[str]) -> Callable[..., None]:
    """The command line of a comparison with `engine`, by default of plain decoding and `drafters`."""

    def main(
        prompts: Annotated[Path, typer.Argument(help='Prompts, one {"turns": ["..."]} per line.', show_default=False)],
        drafter: Annotated[
            list[str] | None,
            typer.Option("--drafter", "-d", help="A checkpoint's folder, a shipped drafter's name, or none; repeatable."),
        ] = None,
        limit: Annotated[int, typer.Option("--limit", "-l", help="Use the first N prompts.")] = 20,
        max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")] = 96,
        temperature: Annotated[float, typer.Option("--temperature", "-T", help="0 = greedy.")] = 0.0,
        seed: Annotated[int, typer.Option(help="When sampling, where the engine takes one.")] = 0,
        target: Annotated[str, typer.Option("--target", "-t", help="The target: a folder or smollm2-135m.")] = "smollm2-135m",
        output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON here.")] = None,
    ) -> None:
        params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        loaded = Target.load(target)
        model = bundled.ensure(target) if target in bundled.BUNDLED else Path(target)
        benchmark = load_benchmark(prompts, limit)
        encoded, _ = first_turns(benchmark, loaded, chat=True, max_new_tokens=max_new_tokens)
        checkpoints = [None if name == "none" else resolve(name, loaded) for name in drafter or ("none", *drafters)]
        rows = []
        for checkpoint in checkpoints:
            rows.append(compare(engine, decode, loaded, model, checkpoint, encoded, params))
            print(json.dumps(rows[-1]), flush=True)
        result = {
            "benchmark": benchmark.name,
            "prompts_sha256": benchmark.sha256,
            "prompts": len(encoded),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "target": target,
            "rows": rows,
            "machine": {**machine_facts(loaded.device), engine: version},
        }
        if output is not None:
            write_text(output, json.dumps(result, indent=2) + "\n")

    main.__doc__ = f"Decode prompts in {engine} and in dspine's engine, and say whether text and acceptance length are the same."
    return main


def run(engine: str, version: str, decode: Decode, drafters: Sequence[str]) -> None:
    """`command` as a program. Leaves with a sentence where the user is to do something else."""
    try:
        typer.run(command(engine, version, decode, drafters))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
