"""How fast could plain decoding of a batch be on this machine? The time that nothing can save, against transformers' time.

    python benchmarks/batch/limits.py --prompts gsm8k.jsonl --rows 32 --max-new-tokens 160 --output limits.json

Two things are needed whatever else is saved: the products with the weights, and one reading of every row's keys and
values per token. Both are timed alone, the products with the packed weights that the engine itself uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from dspine.commands import options
from dspine.evaluation.batch_speed import measure_batch
from dspine.evaluation.benchmarks import load_benchmark
from dspine.files import write_text
from dspine.kernels.linear import GatedLinear, PackedLinear
from dspine.modules.decoder import DecoderStack, LayerWeights
from dspine.targets.model import Target


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def products(target: Target, tokens: int, predicted: int) -> Callable[[], None]:
    """Every product with a weight of a forward over `tokens` tokens, `predicted` of which go through the head."""
    assert isinstance(target.stack, DecoderStack)
    hidden = torch.randn(tokens, target.hidden_size)
    inner = torch.randn(tokens, target.config.intermediate_size)

    def layer(weights: LayerWeights) -> None:
        products: list[PackedLinear | GatedLinear] = [weights.qkv, weights.output, weights.gate_up]
        for product in products:
            product(hidden)
        weights.down(inner)

    def run() -> None:
        for weights in target.stack.layers:  # type: ignore[union-attr]
            layer(weights)
        target.logits(hidden[:predicted])

    return run


@torch.inference_mode()
def main(
    prompts: options.PromptsOption, output: Annotated[Path, typer.Option("--output", "-o")], rows: int = 32,
    max_new_tokens: int = 160, repeats: int = 3,
) -> None:  # fmt: skip
    llm = options.load_llm("smollm2-135m", "none", "cpu", "float32", keep_model=True)
    target = llm.target
    encoded = options.encode_prompts(
        load_benchmark(prompts, rows), llm, chat=True, max_new_tokens=max_new_tokens
    )  # fmt: skip
    report = measure_batch(llm, target.model, encoded, max_new_tokens=max_new_tokens, repeats=repeats)
    lengths = [len(ids) for ids in encoded]
    mean_visible = sum(lengths) // rows + max_new_tokens // 2
    cache = target.new_cache(rows, mean_visible)
    prefill_s = sum(seconds(products(target, n, 1), 3) for n in lengths)
    step_products_s = seconds(products(target, rows, rows))
    step_reading_s = seconds(lambda: [data.sum() for data in cache.data])
    least_s = prefill_s + (max_new_tokens - 1) * (step_products_s + step_reading_s)
    transformers_s = report.tokens / report.transformers_tok_per_s
    measured = report.to_dict() | {
        "transformers_s": transformers_s,
        "dspine_s": report.tokens / report.plain_tok_per_s,
        "prompt_tokens": sum(lengths),
        "prefill_products_s": prefill_s,
        "step_products_ms": step_products_s * 1e3,
        "step_reading_ms": step_reading_s * 1e3,
        "least_s": least_s,
        "highest_possible_ratio": transformers_s / least_s,
    }
    write_text(output, json.dumps(measured, indent=2) + "\n")
    print(json.dumps(measured))


if __name__ == "__main__":
    typer.run(main)
