"""Fixtures: small drafter configs for what needs no engine; the bundled model and its shipped drafters for what does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before vLLM is imported. "nobind": threads stay where the system puts them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import pytest

from dspine.drafters.checkpoint import shipped_folder
from dspine.drafters.config import DrafterConfig, TargetFacts
from dspine.targets import bundled
from dspine.targets.model import Target

QUESTIONS = (
    "A box holds 12 pencils. How many pencils are in 7 boxes, and how many are left when 15 are given away?",
    "Why does the moon change its shape in the sky over a month?",
    "Write a Python function that returns the second largest number of a list.",
    "List the days of the week, then say which of them have the letter n.",
    "Explain to a child what a library is for.",
    "Tom walks 3 km on Monday and twice as far on Tuesday. How far does he walk in all? Think step by step.",
)

MakeConfig = Callable[..., DrafterConfig]


@pytest.fixture
def make_config() -> MakeConfig:
    """`make_config("dspine", block_size=6)`: the config of a small drafter."""

    def make(drafter: str = "dspine", **overrides: Any) -> DrafterConfig:
        facts = TargetFacts(
            name="tiny", model_type="llama", hidden_size=32, num_layers=3, vocab_size=100, rope_theta=1e4, rms_norm_eps=1e-5,
            chat_template_sha256="", head_norms=[1.0] * 8,
        )  # fmt: skip
        settings: dict[str, Any] = {
            "drafter": drafter, "target": facts, "target_layer_ids": (0, 1), "block_size": 6, "mask_token_id": 0,
            "attention": "causal" if drafter == "dspine" else "bidirectional", "num_layers": 2, "hidden_size": 32,
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "qk_norm": False,
            "options": {"transfer_rank": 6, "message_width": 5, "num_candidates": 4} if drafter == "dspine" else {},
        }  # fmt: skip
        return DrafterConfig(**{**settings, **overrides})

    return make


@pytest.fixture(scope="session")
def target() -> Target:
    """The bundled model in dspine's own engine."""
    return Target.load("smollm2-135m")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return bundled.ensure("smollm2-135m")


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[list[int]]:
    return [target.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="session")
def shipped() -> Callable[[str], Path]:
    """`shipped("dspine")`: the folder of the shipped drafter."""
    return lambda drafter: shipped_folder() / f"smollm2-135m-{drafter}"
