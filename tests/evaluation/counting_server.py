"""A server that speaks as vLLM, dspine or SGLang do about what they drafted, on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CountingServer(ThreadingHTTPServer):
    """Every answer takes two rounds of three drafted tokens, of which two and one are accepted: five tokens and the first.

    `page()` renders the counters; `foreign_rounds` is what another client adds during each answer.
    """

    daemon_threads = True

    def __init__(self, dialect: str) -> None:
        super().__init__(("127.0.0.1", 0), CountingHandler)
        self.dialect, self.answers, self.foreign_rounds = dialect, 0, 0
        self.requests: list[dict[str, Any]] = []
        self.meta_info = {"completion_tokens": 6, "spec_verify_ct": 2, "spec_accept_token_num": 3, "spec_draft_token_num": 6}
        self.usage: dict[str, int] | None = {"completion_tokens": 6}
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def page(self) -> str:
        n, more = self.answers, self.answers * self.foreign_rounds
        if self.dialect == "vllm":
            name = "vllm:spec_decode_num_"
            lines = [
                f'{name}drafts_total{{engine="0"}} {2 * n + more}.0',
                f'{name}drafts_created{{engine="0"}} 1.7e9',
                f'{name}draft_tokens_total{{engine="0"}} {6 * n + 3 * more}.0',
                f'{name}accepted_tokens_total{{engine="0"}} {3 * n}.0',
                *(f'{name}accepted_tokens_per_pos_total{{engine="0",position="{j}"}} {c * n}.0' for j, c in enumerate((2, 1, 0))),
            ]
        elif self.dialect == "dspine":
            lines = [f"dspine_rounds_total {2 * n + more}.0", "dspine_acceptance_length 2.5"]
            if n:  # positions turn up with the first round
                lines += [f'dspine_drafted_tokens_total{{position="{j}"}} {2 * n + more}.0' for j in (1, 2, 3)]
                lines += [f'dspine_accepted_tokens_total{{position="{j}"}} {c * n}.0' for j, c in ((1, 2), (2, 1), (3, 0))]
        else:
            lines = ['sglang:spec_accept_length{model_name="m"} 2.5']
        return "\n".join(["# TYPE unrelated gauge", "unrelated 3", *lines]) + "\n"


class CountingHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, CountingServer)
        self._reply(self.server.page().encode() if self.path == "/metrics" else b"", 200 if self.path == "/metrics" else 404)

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, CountingServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append({"path": self.path, **body})
        server.answers += 1
        text = f"answer {server.answers}"
        if self.path == "/generate":
            reply: dict[str, Any] = {"text": text, "meta_info": server.meta_info}
        else:
            reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": server.usage}
        self._reply(json.dumps(reply).encode(), 200)

    def _reply(self, data: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def counting_server(dialect: str) -> Iterator[CountingServer]:
    """A running server: "vllm", "dspine" or "sglang"."""
    server = CountingServer(dialect)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
