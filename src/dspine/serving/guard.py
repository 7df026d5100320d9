"""What stands before every request: its Host, its API key, and the size and pace of its body.

Plain ASGI, so that nothing is buffered and a client that leaves is noticed. Starlette's own body limit answers in plain
text, which OpenAI's clients cannot read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspine.serving.errors import ApiError, error_response
from dspine.serving.settings import ServerSettings

OPEN_PATHS = frozenset(("/", "/health"))  # and the page's files: none of them says anything secret
OPEN_FOLDER = "/page/"
# A refused body is read on up to here: closing before it is through would reset the connection and lose the reply.
DRAINED_BYTES = 64 * 1024 * 1024


class Guard:
    """ASGI middleware that lets through what the settings allow and answers the rest itself."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._key_hash = None if settings.api_key is None else _hashed(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._settings)
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_key(headers, scope["path"])
            body.check_announced(headers)
        except ApiError as error:
            await body.drain()
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, body.receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page elsewhere may point its own name at this machine (DNS rebinding); its Host header gives it away."""
        allowed = self._settings.allowed_hosts
        if allowed is None:
            return
        host = headers.get("host", "")
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in allowed:
            raise ApiError(403, f"this server does not answer for the host {name!r}", code="host_not_allowed")

    def _check_key(self, headers: Headers, path: str) -> None:
        if self._key_hash is None or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Hashes have one length, and compare_digest takes the same time wherever they differ.
        if scheme.lower() != "bearer" or not hmac.compare_digest(_hashed(key.strip().encode("latin-1")), self._key_hash):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _hashed(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _Body:
    """A request's body on its way in, counted and timed."""

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive, self._settings = receive, settings
        self._deadline = time.monotonic() + settings.body_timeout_s
        self._size, self._complete = 0, False

    def check_announced(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message, for the app. Raises ApiError where a body is too large or too slow."""
        message = await self._next()
        if self._size > self._settings.max_body_bytes:
            await self.drain()
            raise self._too_large()
        return message

    async def drain(self) -> None:
        """Read the rest and forget it, within the time and the size that are left."""
        try:
            while not self._complete and self._size <= DRAINED_BYTES:
                await self._next()
        except ApiError:
            return

    async def _next(self) -> Message:
        if self._complete:  # what comes now is that the client has gone
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._deadline - time.monotonic())
        except asyncio.TimeoutError:
            self._complete = True
            seconds = self._settings.body_timeout_s
            raise ApiError(
                408, f"the body took longer than {seconds:g} s", code="body_timeout", headers={"Connection": "close"}
            ) from None
        self._size += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        limit = self._settings.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes, the most this server takes", code="body_too_large")
