"""The tests run on a CPU, on the platform in tests/platform; `engine` tests start SGLang with the bundled model."""

from __future__ import annotations

import os

# Before anything of SGLang is imported: it reads them once.
os.environ.update(SGLANG_PLATFORM="dspine_cpu", TRITON_INTERPRET="1")

from pathlib import Path

import pytest
from engines import QUESTIONS, in_dspine
from sglang.srt.plugins import load_plugins

from dspine.drafters.checkpoint import shipped_folder
from dspine.targets import bundled
from dspine.targets.model import Target

TARGET = "smollm2-135m"


@pytest.fixture(scope="session", autouse=True)
def plugins() -> None:
    """SGLang's plugins loaded, as each of its processes does first."""
    load_plugins()


@pytest.fixture(scope="session")
def dspine_checkpoint() -> Path:
    return shipped_folder() / f"{TARGET}-dspine"


@pytest.fixture(scope="session")
def dflash_checkpoint() -> Path:
    return shipped_folder() / f"{TARGET}-dflash"


@pytest.fixture(scope="session")
def target_folder() -> Path:
    return bundled.ensure(TARGET)


@pytest.fixture(scope="session")
def target() -> Target:
    return Target.load(TARGET)


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[list[int]]:
    return [target.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="session")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """What the target writes by itself, in dspine's engine."""
    return in_dspine(target, None, prompts, width=1).outputs
