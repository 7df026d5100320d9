"""`dspine data`: make training data with the target itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, progress_bar, resumable, waiting
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.targets.chat import ChatFormat
    from dspine.targets.model import Target
    from dspine.training.regenerate import Answerer

app = typer.Typer(help="Make training data with the target itself.", no_args_is_help=True)

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="The model that writes: hub id, folder, .gguf file or smollm2-135m.")
]


@app.command()
def regenerate(
    prompts: Annotated[
        list[Path], typer.Option("--prompts", "-p", help='Prompts, one {"turns": ["..."]} per line; *.jsonl. Repeatable.')
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answer file, *.jsonl or *.jsonl.gz; continued if it is there.")],
    target: TargetOption = options.DEFAULT_TARGET,
    max_new_tokens: options.MaxNewTokensOption = 256,
    temperature: options.TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answers (when sampling).")] = 0,
    limit: Annotated[int, typer.Option("--limit", "-l", help="Use the first N prompts of each file; 0 = all.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(help="Leave longer prompts out; 0 = those without room for an answer.")] = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Prompts answered at once.")] = 32,
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible server that answers instead.", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="The target's name on that server.", show_default=False)] = "",
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Let the target answer prompts.

    The first turn of each prompt is answered, a text that occurs twice once. Answers are kept as token ids with references
    to the prompts, in the prompts' order. The same command continues an interrupted run.

    With --endpoint the target's weights are not loaded; a key is taken from the environment variable OPENAI_API_KEY.

    Examples:

      dspine data regenerate --prompts prompts.jsonl --output answers.jsonl.gz

      dspine data regenerate --prompts prompts.jsonl --output answers.jsonl.gz --target Qwen/Qwen3-8B --max-new-tokens 2048
      --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-8B
    """
    if model and not endpoint:
        raise UserError(
            f"--model {model} names a served model; give its server with --endpoint, or --target for the local engine"
        )
    with waiting(f"loading {target}"):
        from dspine.training.prompts import collect_prompts
        from dspine.training.regenerate import RegenerateSettings
        from dspine.training.regenerate import regenerate as run

        settings = RegenerateSettings(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            rows=batch,
        )
        collected = collect_prompts(prompts, options.parse_limit(limit))
        chat, answerer = _served(endpoint, model, target) if endpoint else _local(_load(target, device, dtype))
    with resumable(), progress_bar("answers", len(collected)) as advance:
        summary = run(collected, answerer, chat, output, settings, advance)
    note(
        f"left out: {summary.duplicates} duplicates, {summary.too_long} too long, {summary.refused} refused; "
        f"{summary.unfinished} of {summary.answered} new answers cut at {max_new_tokens} tokens"
    )
    typer.echo(f"{output}: {summary.total} answers ({summary.answered} new), {summary.output_bytes / 1e3:.1f} kB")


@app.command()
def synthesize(
    output: Annotated[Path, typer.Option("--output", "-o", help="Prompt file to write, *.jsonl.")],
    count: Annotated[int, typer.Option(help="Prompts to write.")] = 1000,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts, with shares unless they are equal.")] = "chat=4,code=3,math=1",
    target: TargetOption = options.DEFAULT_TARGET,
    temperature: Annotated[float, typer.Option("--temperature", "-T", help="Higher: more varied, less sensible.")] = 0.9,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest prompt, in tokens.")] = 120,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Prompts written at once.")] = 32,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Let the target write prompts, where there is no prompt set.

    It continues its chat template as the user would, steered to chat, code or mathematics. Unfinished, too short and
    repeated texts are dropped. The same command continues an interrupted run.

    Examples:

      dspine data synthesize --output prompts.jsonl --count 2000

      dspine data synthesize --output code.jsonl --count 500 --kinds code
    """
    with waiting(f"loading {target}"):
        from dspine.training.synthesize import SynthesizeSettings, count_prompts, parse_kinds
        from dspine.training.synthesize import synthesize as run

        settings = SynthesizeSettings(
            count=count,
            kinds=parse_kinds(kinds),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            rows=batch,
        )
        if count_prompts(output) == count:
            typer.echo(f"{output}: {count} prompts already; nothing to do")
            return
        loaded = _load(target, device, dtype)
    with resumable(), progress_bar("prompts", count) as advance:
        summary = run(loaded, output, settings, advance)
    parts = ", ".join(f"{number} {kind}" for kind, number in summary.by_kind.items())
    if summary.total < count:
        note(f"{count - summary.total} fewer than asked: {loaded.name} wrote no more usable ones in {summary.attempts} attempts")
    typer.echo(f"{output}: {summary.total} prompts ({parts}) of {summary.attempts} attempts, {summary.output_bytes / 1e3:.1f} kB")


def _load(target: str, device: str, dtype: str) -> Target:
    from dspine.targets.model import Target

    return Target.load(target, device=None if device == "auto" else device, dtype=dtype)


def _local(target: Target) -> tuple[ChatFormat, Answerer]:
    from dspine.targets.chat import ChatFormat
    from dspine.training.regenerate import EngineAnswerer

    return ChatFormat.of(target), EngineAnswerer(target)


def _served(url: str, model: str, target: str) -> tuple[ChatFormat, Answerer]:
    from dspine.endpoint import ChatEndpoint
    from dspine.targets.chat import ChatFormat
    from dspine.training.regenerate import EndpointAnswerer

    endpoint = ChatEndpoint(url=url, model=model, api_key=os.environ.get("OPENAI_API_KEY", ""))
    chat = ChatFormat.load(target)
    return chat, EndpointAnswerer(endpoint, chat)
