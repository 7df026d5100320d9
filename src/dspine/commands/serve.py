"""`dspine serve`: the target behind OpenAI's API, with a chat page."""

from __future__ import annotations

from typing import Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note
from dspine.errors import UserError


def serve(
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DSPINE_API_KEY", help="Clients must send it. Others can read an option: prefer the variable.",
                     show_default="none"),
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.", show_default="--target")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Answers decoded at once.")] = 8,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are refused (429).")] = 128,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer.", show_default="what the target holds")
    ] = None,
    default_max_tokens: Annotated[int, typer.Option(min=1, help="Length of chat answers whose request names none.")] = 1024,
    request_timeout: Annotated[float, typer.Option(help="Seconds from a request's arrival to its last token.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request.")] = 4 * 1024 * 1024,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for running requests after Ctrl-C or SIGTERM.")] = 120.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use. Repeatable.", show_default="loopback names on loopback, else any"),
    ] = None,
    width: options.WidthOption = "auto",
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:  # fmt: skip
    """Serve the target over OpenAI's API, and a chat page at /.

    Examples:

      dspine serve

      dspine serve --target Qwen/Qwen3-8B --drafter runs/qwen3-8b/checkpoint --max-rows 16

      DSPINE_API_KEY=secret dspine serve --host 0.0.0.0 --allowed-host chat.example.org

      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
        -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

    Ctrl-C finishes what is running, a second one gives it up.
    """
    try:
        from dspine.serving.run import bind, url_of
        from dspine.serving.run import serve as run_server
    except ImportError as error:
        raise UserError(f"serving needs the extra packages of dspine[serve] ({error}); pip install 'dspine[serve]'") from error
    from dspine.serving.settings import LOOPBACK_NAMES, ServerSettings, is_loopback

    local = is_loopback(host)
    hosts = frozenset(name.lower() for name in allowed_host or ()) | frozenset(LOOPBACK_NAMES)
    settings = ServerSettings(
        model_name=served_name or target, api_key=api_key, max_queue=max_queue, default_max_tokens=default_max_tokens,
        max_context_tokens=max_context, request_timeout_s=request_timeout, max_body_bytes=max_body_bytes,
        shutdown_timeout_s=shutdown_timeout, allowed_hosts=hosts if local or allowed_host else None,
    )  # fmt: skip
    bound = bind(host, port)
    llm = options.load_llm(target, drafter, device, dtype, width=options.parse_width(width), max_rows=max_rows)
    from dspine.serving.app import create_app

    if not local and api_key is None:
        note("warning: anyone who reaches this address can use the server; set DSPINE_API_KEY")
    note(f"serving {settings.model_name} at {url_of(bound)} (chat page) and {url_of(bound)}/v1 (OpenAI's API)")
    run_server(create_app(llm.engine(), settings), settings, bound)
