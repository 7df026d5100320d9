"""`dspine export`: a draft checkpoint in the layout that another engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line
from dspine.commands.info import find_checkpoint


def export(
    checkpoint: Annotated[str, typer.Argument(help="A draft checkpoint's folder or a shipped one's name.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; an earlier export there is replaced.", show_default=False)
    ],
    engine: Annotated[Literal["vllm"], typer.Option("--engine", "-e", help="The engine that is to run it.")] = "vllm",
    target: options.TargetOption = options.DEFAULT_TARGET,
) -> None:
    """Write a draft checkpoint as another engine loads it, and say how to start that engine with it.

    The target is loaded to check that the two belong together. What the engine cannot express is refused here, in one sentence.
    The last line of stdout is one JSON object: `speculative_config` is the value of vLLM's option of that name.

    Examples:

      dspine export smollm2-135m-dspine --output draft

      dspine export runs/qwen3-8b/checkpoint --target Qwen/Qwen3-8B --output qwen3-8b-draft

      vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "dflash", "model": "qwen3-8b-draft"}'
    """
    folder = find_checkpoint(checkpoint)
    with options.loading(target):
        from dspine.integrations.vllm_export import export_checkpoint
        from dspine.targets.model import Target

        written = export_checkpoint(folder, Target.load(target), output)
    plugin = "with the plugin dspine-vllm (integrations/vllm)" if written.needs_plugin else "by itself"
    note(f"wrote {output}; {engine} runs it {plugin}")
    note(f"vllm serve TARGET --speculative-config '{json.dumps(written.speculative_config)}'")
    print_json_line(
        {
            "engine": engine,
            "architecture": written.architecture,
            "needs_plugin": written.needs_plugin,
            "speculative_config": written.speculative_config,
        }
    )
