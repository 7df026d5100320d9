"""An OpenAI-compatible server on this machine that streams what it is told, well or badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, StubServer)
        self.reply(self.server.models_status, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, StubServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            behave = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            behave(self)
        finally:
            with server.lock:
                server.under_way -= 1

    def reply(self, status: int, data: object, **headers: str) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data: object) -> None:
        line = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        """Close the connection in the middle of the answer."""
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


Behaviour = Callable[[Handler], None]


class StubServer(ThreadingHTTPServer):
    """Answers by the script: a behaviour a request, the last one for all that follow."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *script: Behaviour, models: tuple[str, ...] = ("tiny",), models_status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.models, self.models_status = list(script), models, models_status
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


def piece(text: str | None, finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": {**content, **delta}, "finish_reason": finish_reason}], "usage": None}


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens, **details}}


def streaming(*events: object, before_s: float = 0.0, between_s: float = 0.0, complete: bool = True) -> Behaviour:
    """Send `events`, and the end of the stream unless it is not `complete`."""

    def behave(handler: Handler) -> None:
        handler.begin()
        handler.event(piece(None, role="assistant"))
        time.sleep(before_s)
        for number, data in enumerate(events):
            if number:
                time.sleep(between_s)
            handler.event(data)
        if complete:
            handler.event("[DONE]")
            handler.end()
        else:
            handler.hang_up()

    return behave


def answering(text: str = "Hi you", tokens: int = 7, cached: int | None = None, **pace: float) -> Behaviour:
    """A good answer in chunks of a word."""
    words = text.split(" ")
    return streaming(*(piece(word) for word in words), piece("", "stop"), usage(tokens, cached), **pace)  # type: ignore[arg-type]


def refusing(status: int, **headers: str) -> Behaviour:
    return lambda handler: handler.reply(status, {"error": {"message": "no"}}, **headers)
