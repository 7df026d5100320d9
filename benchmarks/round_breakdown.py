"""Where one round's time goes on a CPU: matrix products of target and drafter, attention, and everything else.

    python benchmarks/round_breakdown.py --prompts PROMPTS.jsonl --limit 8 --output benchmarks/results/NAME.json

Every matrix product of the engine passes `PackedLinear`, `scaled_dot_product_attention` or `matmul`; their calls are timed
from inside one process while it decodes. The timers themselves cost about 0.2 us a call and count as "everything else".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import dspine
from dspine.evaluation.machine import machine_facts
from dspine.kernels.linear import PackedLinear


class Stopwatch:
    """Adds up the wall time of wrapped calls, by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL, {"turns": [text, ...]} a line')
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--width", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    llm = dspine.load(drafter=options.drafter, max_rows=1, width=options.width if options.width == "auto" else int(options.width))
    prompts = [json.loads(line)["turns"][0] for line in options.prompts.read_text().splitlines()[: options.limit]]
    llm.generate(prompts[0], chat=True, max_new_tokens=32)  # warm-up: packs, tables, the width's cost table
    watch = Stopwatch()
    PackedLinear.__call__ = watch.wrap("linear", PackedLinear.__call__)  # type: ignore[method-assign]
    F.scaled_dot_product_attention = watch.wrap("attention", F.scaled_dot_product_attention)
    torch.matmul = watch.wrap("matmul", torch.matmul)
    rounds, draft_s, total_s, products = 0, 0.0, 0.0, dict.fromkeys(("linear", "attention", "matmul"), 0.0)
    for prompt in prompts:
        engine = llm.engine()
        request = engine.submit(llm.encode(prompt, chat=True), dspine.SamplingParams(max_new_tokens=options.max_new_tokens))
        engine.step()  # the prefill and a first round stay out
        before = dict(watch.seconds)
        start, rounds_before, draft_before = time.perf_counter(), request.stats.rounds, request.stats.draft_s
        engine.run()
        total_s += time.perf_counter() - start
        rounds += request.stats.rounds - rounds_before
        draft_s += request.stats.draft_s - draft_before
        for kind in products:
            products[kind] += watch.seconds.get(kind, 0.0) - before.get(kind, 0.0)
    result = {
        "rounds": rounds,
        "round_ms": 1e3 * total_s / rounds,
        "draft_and_selection_share": draft_s / total_s,
        **{f"{kind}_share": seconds / total_s for kind, seconds in products.items()},
        "not_a_matrix_product_share": 1 - sum(products.values()) / total_s,
        "machine": machine_facts(),
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
