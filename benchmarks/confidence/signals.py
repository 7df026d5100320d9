"""Which confidence says most about acceptance? All that one drafter has, on the same rounds, each with maps of its own.

    python benchmarks/confidence/signals.py --drafter dspine --prompts prompts.jsonl --output signals-dspine.json

DSpine, DFlash2: top probability in the chosen row of the transition cache; the same times the candidates' share of the
vocabulary; top probability of the parallel prediction. DSpark: its head; its own top probability.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from dspine.commands import options
from dspine.commands.console import progress_bar, stdout_console
from dspine.decoding.calibration import Rounds, fit_map
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import Draft, DraftRunner
from dspine.drafters.dflash2 import DFlash2Runner
from dspine.drafters.dspark import DSparkRunner
from dspine.drafters.dspine import DSpineRunner
from dspine.errors import UserError
from dspine.evaluation.benchmarks import load_benchmark
from dspine.evaluation.calibration import HELD_OUT_EVERY, judge, observe, rounds_of
from dspine.evaluation.machine import machine_facts
from dspine.files import write_text

TABLE_SIGNALS = ("transition cache", "transition cache x share of the vocabulary", "parallel prediction")
SPARK_SIGNALS = ("head", "own top probability")


def all_signals(runner: DraftRunner) -> tuple[str, ...]:
    """Make drafts say all their confidences [b, m, s] instead of one; returns the s names."""
    if isinstance(runner, DSparkRunner):
        walk = runner.walk

        def walked(*arguments: Any) -> Draft:
            *rest, head = arguments
            draft = walk(*rest)
            return replace(draft, confidence=lambda: torch.stack((head(), _said(draft)), -1))

        runner.walk = walked  # type: ignore[method-assign]
        return SPARK_SIGNALS
    if not isinstance(runner, DSpineRunner | DFlash2Runner):
        raise UserError(f"a {runner.config.drafter} drafter has one confidence only: see `dspine calibrate`")
    head, propose = runner._head, runner.propose
    logits: list[Tensor] = []

    def kept(hidden: Tensor) -> Tensor:
        logits[:] = [head(hidden)]
        return logits[0]

    def proposed(*arguments: Any) -> Draft:
        draft = propose(*arguments)
        parallel = runner._draft_head.cap(logits[0]).float().softmax(-1)
        share = parallel.topk(min(16, parallel.shape[-1]), -1).values.sum(-1)
        return replace(
            draft, confidence=lambda: torch.stack((_said(draft), _said(draft) * share, parallel.amax(-1)), -1)
        )  # fmt: skip

    runner._head, runner.propose = kept, proposed  # type: ignore[assignment, method-assign]
    return TABLE_SIGNALS


def _said(draft: Draft) -> Tensor:
    assert draft.confidence is not None
    return draft.confidence()


def main(
    prompts: options.PromptsOption, drafter: options.DrafterOption = "auto", limit: options.LimitOption = 48,
    max_new_tokens: options.MaxNewTokensOption = 96, temperature: options.TemperatureOption = 0.0,
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:  # fmt: skip
    """Judge every confidence of a drafter on a quarter of the prompts, fitted on the rest."""
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    llm = options.load_llm(options.DEFAULT_TARGET, drafter, "auto", "auto", max_rows=8, need_drafter=True)
    assert llm.drafter is not None
    encoded = options.encode_prompts(benchmark, llm, chat=True, max_new_tokens=max_new_tokens)
    params = [SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=i) for i in range(len(encoded))]
    runner = llm.drafter.runner(llm.target)
    names = all_signals(runner)
    llm.drafter.runner = lambda target: runner  # type: ignore[method-assign]
    with progress_bar(f"decoding {benchmark.name}", len(encoded)) as advance:
        rows: list[tuple[int, Any]] = list(observe(llm, encoded, params, advance))

    def rounds(signal: int, chosen: Callable[[int], bool]) -> Rounds:
        return rounds_of([([slot[signal] for slot in row], accepted) for i, (row, accepted) in rows if chosen(i)])

    results = {}
    for signal, name in enumerate(names):
        fitted = fit_map(rounds(signal, lambda i: i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1), temperature)
        held_out = rounds(signal, lambda i: i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)
        before, after = judge(held_out, held_out.confidence), judge(held_out, fitted.acceptance(held_out.confidence))
        results[name] = {"before": before.to_dict(), "after": after.to_dict()}
        numbers = f"ECE {before.acceptance.ece:.3f} -> {after.acceptance.ece:.3f}, skill {after.acceptance.skill:.3f}"
        stdout_console().print(f"{name}: {numbers} (of survival {after.survival.skill:.3f})")
    if output is not None:
        facts = {"drafter": llm.drafter.config.drafter, "prompts": len(encoded), "temperature": temperature, "rounds": len(rows)}
        write_text(
            output, json.dumps({**facts, "signals": results, "machine": machine_facts(llm.target.device)}, indent=2) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
