"""What a server allows, each default written once."""

from __future__ import annotations

from dataclasses import dataclass

from dspine.errors import UserError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and secrets of one server. Raises UserError for impossible values."""

    model_name: str
    api_key: str | None = None
    max_queue: int = 128  # answers that may wait beyond those being decoded
    default_max_tokens: int = 1024  # of a chat answer whose request names no limit
    max_context_tokens: int | None = None  # prompt and answer together; None = what the target holds
    request_timeout_s: float = 600.0  # from the request's arrival to its last token
    body_timeout_s: float = 30.0  # for a client to hand its request over
    max_body_bytes: int = 4 * 1024 * 1024
    shutdown_timeout_s: float = 120.0  # for running requests once the server has been told to stop
    allowed_hosts: frozenset[str] | None = None  # Host headers to answer; None = any

    def __post_init__(self) -> None:
        for name in ("default_max_tokens", "request_timeout_s", "body_timeout_s", "max_body_bytes", "shutdown_timeout_s"):
            _positive(name, self.__dict__[name])
        if self.max_context_tokens is not None:
            _positive("max_context_tokens", self.max_context_tokens)
        if self.max_queue < 0:
            raise UserError(f"max_queue = {self.max_queue}: give 0 (nothing waits) or more")
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("the API key is empty; give one, or none at all to leave the server open")
        if not self.model_name:
            raise UserError("the served model's name is empty; give the name that clients ask for")


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name} = {value}: give a number above 0")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's own."""
    return host in LOOPBACK_NAMES or host.startswith("127.")
