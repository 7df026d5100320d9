"""Requests made up from the server's own schema, valid and not: no crash, no undocumented reply, no leftover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="the schemathesis package is not installed")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 12
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
ENDPOINTS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture(scope="module")
def small(serve: Any) -> Iterator[Any]:
    """A server whose answers are short, whatever is asked for."""
    with serve(max_context_tokens=48) as server:
        yield server


@pytest.fixture(scope="module")
def schema(small: Any) -> Any:
    loaded = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    assert sorted(loaded.raw_schema["paths"]) == sorted(path for path, _ in ENDPOINTS), "every endpoint is fuzzed"
    return loaded


def make_answerable(body: dict[str, Any], number: int) -> None:
    """Hardly any request would come as far as the engine: no schema can say what the model's name and vocabulary are."""
    body["model"] = "tiny"
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if "prompt" in body and number % 2:
        body["prompt"] = "some text"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), ENDPOINTS)
def test_requests_from_the_schema(schema: Any, small: Any, path: str, method: str, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("without a body nothing can be wrong there")
    statuses: list[int] = []

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and method == "POST":
            make_answerable(case.body, len(statuses))
        response = case.call(timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    check()
    assert statuses
    small.wait_until_idle()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert 200 in statuses
