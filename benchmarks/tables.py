"""The Markdown tables of README and model cards, from a folder of results that `benchmarks/shipped.sh` wrote.

python benchmarks/tables.py benchmarks/results/2026-11-30
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "mt-bench": "MT-Bench, two turns",
    "arena-hard-v2": "Arena-Hard v2",
}


def read(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def acceptance_table(folder: Path) -> list[str]:
    """tau with its 95 % interval over prompts, for both drafters and temperatures."""
    rows = ["| prompts | T | DFlash | DSpine | gain |", "| --- | --- | --- | --- | --- |"]
    for benchmark, title in BENCHMARKS.items():
        for temperature in (0, 1):
            dflash, dspine = (read(folder / name, f"{benchmark}-T{temperature}") for name in ("dflash", "dspine"))
            if dflash is None or dspine is None:
                continue
            cells = [
                f"{r['acceptance_length']:.2f} ({r['acceptance_length_ci95'][0]:.2f} to {r['acceptance_length_ci95'][1]:.2f})"
                for r in (dflash, dspine)
            ]
            gain = dspine["acceptance_length"] / dflash["acceptance_length"] - 1
            rows.append(f"| {title}, first {dspine['prompts']} | {temperature} | {cells[0]} | {cells[1]} | {gain:+.0%} |")
    return rows


def speed_table(folder: Path) -> list[str]:
    """Tokens per second of each way of decoding, greedy, and what a round consists of."""
    rows = [
        "| drafter, prompts | tau | plain tok/s | drafted tok/s | speed-up | identical | draft share |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("dspine", "dspine-width8", "dflash"):
        r = read(folder, f"speed-gsm8k-{name}")
        if r is not None:
            speeds = f"{r['plain_tok_per_s']:.1f} | {r['spec_tok_per_s']:.1f} | {r['speedup']:.2f}x"
            rows.append(
                f"| {name}, {r['prompts']} of GSM8K | {r['acceptance_length']:.2f} | {speeds} | "
                f"{'yes' if r['identical'] else 'no'} | {r['draft_share']:.0%} |"
            )
    return rows


def throughput_table(folder: Path) -> list[str]:
    """Tokens per second of every way of decoding by concurrency, and what DSpine gains over plain decoding."""
    result = read(folder, "throughput")
    if result is None:
        return []
    names = [way["name"] for way in result["ways"]]
    rows = [f"| requests at once | {' | '.join(f'{name}, tok/s' for name in names)} | DSpine over plain | over DFlash |"]
    rows.append("| --- " * (len(names) + 3) + "|")
    for level in result["levels"]:
        ways = {way["name"]: way for way in level["ways"]}
        over = ways["dspine"]["speedup_over"]
        speeds = " | ".join(f"{ways[name]['tok_per_s']:.1f}" for name in names)
        rows.append(f"| {level['concurrency']} | {speeds} | {over['plain']:.2f}x | {over['dflash']:.2f}x |")
    return rows


def quality_table(folder: Path) -> list[str]:
    """Texts and scores with and without the drafter."""
    rows = [
        "| benchmark | texts compared | identical | score without drafter | with drafter |",
        "| --- | --- | --- | --- | --- |",
    ]
    for benchmark, title in BENCHMARKS.items():
        r = read(folder, f"{benchmark}-T0")
        if r is not None:
            scores = [f"{r[name]:.1%}" if r["graded"] else "not scored" for name in ("plain_score", "spec_score")]
            rows.append(f"| {title} | {r['compared']} | {r['identical']} | {scores[0]} | {scores[1]} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    folder = parser.parse_args().results
    tables = (
        speed_table(folder),
        throughput_table(folder),
        acceptance_table(folder / "acceptance"),
        quality_table(folder / "quality"),
    )
    print("\n\n".join("\n".join(table) for table in tables))
    for name in ("speed-gsm8k-reference", "batch-32"):
        result = read(folder, name)
        if result is not None:
            print(f"\n{name}: {json.dumps(result)}")


if __name__ == "__main__":
    main()
