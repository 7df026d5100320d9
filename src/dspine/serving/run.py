"""Listening: the address first, since a taken port should be known before a model is loaded, then uvicorn."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack

import uvicorn
from fastapi import FastAPI

from dspine.errors import UserError
from dspine.serving.settings import ServerSettings

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening; port 0 takes a free one. Raises UserError."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            undo.pop_all()
            return bound
        except (OSError, OverflowError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port") from error


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, settings: ServerSettings, log_level: str = "info") -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level=log_level,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s),
        backlog=BACKLOG,
        server_header=False,
        ws="none",
        proxy_headers=False,  # nothing here depends on who the client is
    )
    return uvicorn.Server(config)


def serve(app: FastAPI, settings: ServerSettings, bound: socket.socket, log_level: str = "info") -> None:
    """Serve until SIGINT or SIGTERM; running and waiting requests are finished first, a second signal gives them up."""
    # uvicorn raises the signal again when it is done; a stop that was asked for is no failure.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    make_server(app, settings, log_level).run(sockets=[bound])
