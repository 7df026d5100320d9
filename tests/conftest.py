"""Shared fixtures: tiny random models of every supported family, and a tiny byte-level tokenizer. No network, no data.

`make_model("llama", sliding_window=8)` builds a fresh model; `make_target("llama")` wraps one and keeps it for the session.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from dspine.drafters.base import BlockDrafter
from dspine.drafters.config import DrafterConfig, TargetFacts
from dspine.drafters.registry import drafter_class
from dspine.targets.model import Target

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large, so that logits differ clearly and errors cannot hide
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
# Family -> (transformers' model type, its own settings). Names after a "+" are variants.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama+biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama+llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama+yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral+window": ("mistral", {"sliding_window": 6}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # These take the fallback through transformers' own forward.
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),  # its layers return tuples
    "gpt_neox": ("gpt_neox", {}),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}),
}
LEAN_FAMILIES = tuple(
    name for name in _FAMILIES if name.split("+")[0] in {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2"}
)
GENERIC_FAMILIES = tuple(name for name in _FAMILIES if name not in LEAN_FAMILIES)

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[[str], Target]
MakeDrafter = Callable[..., BlockDrafter]


def _build_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    model_type, settings = _FAMILIES[family]
    common = {k: v for k, v in _COMMON.items() if model_type != "gpt2" or not k.startswith(("hidden", "inter", "num", "max"))}
    config = transformers.AutoConfig.for_model(model_type, **{**common, **settings, **overrides})
    torch.manual_seed(seed)
    # Eager attention is the definition; older releases' SDPA forgets Gemma 2's soft-cap.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Norm weights and biases start at 1 or 0: only random ones show that they are used at all.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
        assert torch.isfinite(parameter).all(), name
    return model.eval()


def _build_drafter(
    target: Target, name: str = "dspine", *, draft_ids: torch.Tensor | None = None, seed: int = 0, **overrides: Any
) -> BlockDrafter:
    config = target.config
    shape: dict[str, Any] = {
        "target_layer_ids": tuple(range(min(2, target.num_layers))),
        "block_size": 6,
        "mask_token_id": 0,
        "attention": "bidirectional" if name == "dflash" else "causal",
        "alignment": drafter_class(name).alignments[0],
        "num_layers": 1 if name == "eagle3" else 2,
        "qk_norm": False,
        "transfer_rank": 6,
        "message_width": 5,
        "num_candidates": 4,
        "gru_width": 5,
        "correction_rank": 4,
        "markov_rank": 4,
        "conv_groups_of": 8,
        "selector_rank": 5,
        **overrides,
    }
    names = drafter_class(name).Options.model_fields
    options = {field: shape.pop(field) for field in [*shape] if field in names}
    for field in (
        "transfer_rank",
        "message_width",
        "num_candidates",
        "gru_width",
        "correction_rank",
        "markov_rank",
        "conv_groups_of",
        "selector_rank",
    ):
        shape.pop(field, None)  # not this drafter's
    drafter_config = DrafterConfig(
        drafter=name,
        target=TargetFacts.of(target),
        hidden_size=target.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=TargetFacts.of(target).rope_theta,
        draft_vocab_size=0 if draft_ids is None else len(draft_ids),
        options=options,
        **shape,
    )
    torch.manual_seed(seed)
    drafter = drafter_class(name)(drafter_config, draft_ids)
    drafter.initialise(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return drafter.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges: ids 0-3 are special, then one id per byte, so a character may span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """`make_model(family, seed=0, **config)`: a fresh random fp32 model in evaluation mode, the same every time."""
    return _build_model


@pytest.fixture(scope="session")
def make_target(tiny_tokenizer: PreTrainedTokenizerFast) -> MakeTarget:
    """`make_target(family)`: a `Target` on the family's model, built once a session."""
    built: dict[str, Target] = {}

    def make(family: str = "llama") -> Target:
        if family not in built:
            built[family] = Target.wrap(_build_model(family), tiny_tokenizer, f"tiny-{family}")
        return built[family]

    return make


@pytest.fixture(scope="session")
def tiny_target(make_target: MakeTarget) -> Target:
    """The tiny Llama."""
    return make_target("llama")


@pytest.fixture(params=sorted(_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every family, one after the other."""
    return str(request.param)


@pytest.fixture(params=LEAN_FAMILIES)
def lean_family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=GENERIC_FAMILIES)
def generic_family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_drafter() -> MakeDrafter:
    """`make_drafter(target, "dspine", block_size=4)`: a small random drafter for a lean target, its injection active."""
    return _build_drafter


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium from $CHROMIUM or the system."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium: apt-get install chromium, or its path in $CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]  # containers have neither
        started = playwright.chromium.launch(executable_path=program, args=arguments)
        yield started
        started.close()
