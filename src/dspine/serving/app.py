"""The ASGI application: endpoints, page, errors and guard around one engine.

app = create_app(Engine(target, drafter), ServerSettings(model_name="smollm2-135m"))
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from dspine import __version__
from dspine.decoding.engine import Engine
from dspine.serving.errors import install_error_handlers
from dspine.serving.guard import Guard
from dspine.serving.metrics import Metrics
from dspine.serving.routes import Service, build_router
from dspine.serving.scheduler import Scheduler
from dspine.serving.settings import ServerSettings
from dspine.serving.token_text import TokenText

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    # The page needs nothing from anywhere else, and nothing that gets into it may run.
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """An application that owns `engine` while it runs (from its lifespan's start to its end)."""
    service = Service(
        engine.target,
        settings,
        Metrics(),
        TokenText(engine.target.tokenizer),
        ThreadPoolExecutor(1, thread_name_prefix="dspine-tokenizer"),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler = Scheduler(engine, settings, service.metrics)
        service.started_at = int(time.time())
        try:
            yield
        finally:
            await service.scheduler.close()
            service.tokenizing.shutdown()

    # The interactive documentation of FastAPI loads its scripts from elsewhere.
    app = FastAPI(title="dspine", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    install_error_handlers(app)
    app.include_router(build_router(service))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))
    app.add_middleware(Guard, settings=settings)
    return app
