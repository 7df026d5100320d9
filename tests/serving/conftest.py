"""A server on a tiny model, in this process, on a free port; the official client in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the openai package is not installed")

import openai
from fastapi import FastAPI

from dspine.api import LLM
from dspine.decoding.engine import Engine
from dspine.drafters.base import BlockDrafter
from dspine.serving.app import create_app
from dspine.serving.run import bind, make_server, url_of
from dspine.serving.scheduler import Scheduler
from dspine.serving.settings import ServerSettings
from dspine.targets.model import Target

MODEL = "tiny"
SETTINGS = ServerSettings(model_name=MODEL, max_queue=256, default_max_tokens=32, max_body_bytes=1_000_000)


@dataclass(frozen=True, eq=False)
class Running:
    """A server and what it is made of."""

    url: str
    port: int
    app: FastAPI
    engine: Engine

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.app.state.service.scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def wait_until_idle(self, timeout_s: float = 20.0) -> None:
        """Return once nothing is held any more; fail where something stays."""
        give_up = time.monotonic() + timeout_s
        while self.scheduler.num_unfinished or self.engine.has_work:
            assert time.monotonic() < give_up, f"{self.scheduler.num_unfinished} answers are still held"
            time.sleep(0.01)


Serve = Callable[..., AbstractContextManager["Running"]]


@contextmanager
def running(engine: Engine, settings: ServerSettings) -> Iterator[Running]:
    app = create_app(engine, settings)
    bound = bind("127.0.0.1", 0)
    server = make_server(app, settings, "warning")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    url, port = url_of(bound), bound.getsockname()[1]
    thread.start()
    try:
        give_up = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < give_up, "the server does not start"
            time.sleep(0.01)
        yield Running(url, port, app, engine)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the server does not stop"


@pytest.fixture(scope="session")
def llm(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> LLM:
    """What the servers should answer."""
    return LLM(tiny_target, make_drafter(tiny_target), max_rows=4, width=4)


@pytest.fixture(scope="session")
def serve(tiny_target: Target, llm: LLM) -> Serve:
    """`with serve(max_queue=1) as server`: a server with these settings changed, and an engine of its own."""

    def start(*, max_rows: int = 4, **changes: Any) -> AbstractContextManager[Running]:
        assert llm.drafter is not None
        engine = Engine(tiny_target, llm.drafter.runner(tiny_target), max_rows=max_rows, width=4)
        return running(engine, replace(SETTINGS, **changes))

    return start


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Running]:
    """One server for all tests that need no settings of their own."""
    with serve() as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
