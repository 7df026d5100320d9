"""`dspine info` and `dspine drafters`: what a checkpoint is and fits, what ships, which drafters exist."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine.commands.console import print_json_line, stdout_console
from dspine.commands.options import loading
from dspine.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from dspine.drafters.config import DrafterConfig


def info(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="A draft checkpoint's folder or a shipped one's name; nothing: list what ships.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Load this model and say whether the checkpoint fits it.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what a draft checkpoint is, which target it fits and how big its parts are; the target is not loaded.

    Examples:

      dspine info

      dspine info smollm2-135m-dspine

      dspine info ./runs/dspine/checkpoint --target ./my-model
    """
    if checkpoint is None:
        if target is not None:
            raise UserError("--target needs a checkpoint to hold against it")
        _show_all(as_json)
        return
    folder = find_checkpoint(checkpoint)
    data = describe(folder)
    if target is not None:
        check_fit(folder, target)
        data["fits"] = target
    if as_json:
        print_json_line(data)
    else:
        _show(data)


def drafters() -> None:
    """List the kinds of drafters and where they come from.

    Example:

      dspine drafters
    """
    from dspine.drafters.registry import DRAFTERS

    table = _table("drafter", "paper")
    for name, entry in DRAFTERS.items():
        table.add_row(name, entry.paper)
    stdout_console().print(table)


def find_checkpoint(name: str) -> Path:
    """A checkpoint's folder, by path or by the name of a shipped one."""
    from dspine.drafters.checkpoint import shipped_folder

    if (shipped_folder() / name / "config.json").is_file() and not Path(name).is_dir():
        return shipped_folder() / name
    if Path(name).is_dir():
        return Path(name)
    have = ", ".join(folder.name for folder in shipped()) or "none yet"
    raise UserError(f"no draft checkpoint {name!r}; give a checkpoint's folder or the name of a shipped one: {have}")


def shipped() -> list[Path]:
    from dspine.drafters.checkpoint import shipped_folder

    return sorted(file.parent for file in shipped_folder().glob("*/config.json"))


def describe(folder: Path) -> dict[str, Any]:
    """A checkpoint's config, parameters by part and file sizes. UserError when it is damaged."""
    from dspine.drafters.checkpoint import parameters_by_part
    from dspine.drafters.config import DrafterConfig
    from dspine.drafters.registry import drafter_class

    config = DrafterConfig.read(folder)
    drafter_class(config.drafter)
    parts, dtype = parameters_by_part(folder)
    return {
        "folder": str(folder),
        "config": config.model_dump(mode="json"),
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "dtype": dtype,
        "file_bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()},
    }


def check_fit(folder: Path, target: str) -> None:
    """UserError naming the first convention in which the checkpoint and the target differ."""
    with loading(target):
        from dspine.drafters.checkpoint import load_drafter
        from dspine.targets.model import Target

        load_drafter(folder, Target.load(target))


def _show(data: dict[str, Any]) -> None:
    from dspine.drafters.config import DrafterConfig

    config = DrafterConfig.model_validate(data["config"])
    table = _table("checkpoint", data["folder"])
    for name, value in _facts(config).items():
        table.add_row(name, value)
    for part, count in data["parameters_by_part"].items():
        table.add_row(part, _millions(count))
    table.add_row("parameters", f"{_millions(data['parameters'])} ({data['dtype']})")
    table.add_row("files", ", ".join(f"{name} {_megabytes(size)}" for name, size in data["file_bytes"].items()))
    if "fits" in data:
        table.add_row("fits", data["fits"])
    stdout_console().print(table)


def _facts(config: DrafterConfig) -> dict[str, str]:
    target = config.target
    vocabulary = f"{config.draft_vocab_size} of {target.vocab_size} tokens" if config.draft_vocab_size else "all tokens"
    layers = f"{target.num_layers} layers of {target.hidden_size}"
    slots = f"{config.block_size} slots: the anchor and {config.num_draft_tokens} drafted tokens"
    facts = {
        "drafter": config.drafter,
        "target": f"{target.name} ({target.model_type}, {layers}, {target.vocab_size} tokens)",
        "block": f"{slots}, {config.attention} attention",
        "shape": f"{config.num_layers} layers, {config.num_heads} heads of {config.head_dim}, MLP {config.intermediate_size}",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
        "proposes": vocabulary,
        "conventions": f"mask token {config.mask_token_id}, slot t predicts the {config.alignment} position, "
        f"QK-norm {'on' if config.qk_norm else 'off'}, RoPE base {config.rope_theta:g}, norm epsilon {config.rms_norm_eps:g}",
        "chat template": target.chat_template_sha256 or "none",
    }
    if config.options:
        facts["options"] = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in config.options.items())
    if config.expected_acceptance:
        facts["held-out acceptance"] = ", ".join(f"{share:.0%}" for share in config.expected_acceptance)
    return facts


def _show_all(as_json: bool) -> None:
    """Shipped checkpoints, bundled targets and where they are kept."""
    from dspine.drafters.config import DrafterConfig
    from dspine.targets import bundled

    checkpoints = [(folder, DrafterConfig.read(folder)) for folder in shipped()]
    targets = {name: bundled.folder_of(name) for name in bundled.BUNDLED}
    ready = {name: (folder / "model.safetensors").is_file() for name, folder in targets.items()}
    if as_json:
        print_json_line(
            {
                "checkpoints": [
                    {"name": f.name, "drafter": c.drafter, "target": c.target.name, "folder": str(f)} for f, c in checkpoints
                ],
                "targets": [{"name": name, "folder": str(folder), "ready": ready[name]} for name, folder in targets.items()],
                "cache": str(bundled.cache_root()),
            }
        )
        return
    console = stdout_console()
    table = _table("shipped checkpoint", "drafter", "target", "size")
    for folder, config in checkpoints:
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        table.add_row(folder.name, config.drafter, config.target.name, _megabytes(size))
    console.print(table if checkpoints else "no checkpoints ship with this copy")
    table = _table("bundled target", "state", "folder")
    for name, folder in targets.items():
        table.add_row(name, "ready" if ready[name] else "fetched on first use", str(folder))
    console.print(table)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 10_000 else str(count)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
