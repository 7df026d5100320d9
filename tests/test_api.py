"""The public API on a tiny model: generate, stream, messages, errors. What the engine does is tested in tests/decoding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import dspine
from dspine.api import LLM, find_drafter
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import save_drafter
from dspine.errors import UserError
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeDrafter = Callable[..., BlockDrafter]
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: MakeDrafter) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target), max_rows=3, width=4)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: MakeModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_target: Target,
    make_drafter: MakeDrafter,
) -> tuple[Path, Path]:
    """A saved target and its saved drafter."""
    root = tmp_path_factory.mktemp("api")
    make_model("llama").save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    save_drafter(make_drafter(tiny_target), root / "drafter")
    return root / "target", root / "drafter"


# --- generate --------------------------------------------------------------------------------------------------------


def test_generate_gives_text_ids_and_statistics(llm: LLM) -> None:
    result = llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert result.prompt_ids == llm.encode(PROMPT)
    assert result.text == llm.target.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert len(result.token_ids) == len(result.accepted) == result.stats.tokens == 20
    assert result.finish_reason == "length"
    assert 0 < result.ttft_s < result.elapsed_s
    assert result.tok_per_s == pytest.approx(20 / result.elapsed_s)
    assert result.stats.num_drafted_tokens > 0


def test_speculation_and_plain_decoding_agree(llm: LLM) -> None:
    plain = llm.generate(PROMPT, speculative=False, max_new_tokens=30)
    assert llm.generate(PROMPT, max_new_tokens=30).token_ids == plain.token_ids
    assert (plain.stats.num_drafted_tokens, plain.stats.acceptance_length) == (0, 1.0)


def test_a_list_of_prompts_is_answered_in_order(llm: LLM) -> None:
    prompts = ["one", "two two", "three three three", "four", "five"]
    results = llm.generate(prompts, max_new_tokens=9)
    assert [r.text for r in results] == [llm.generate(p, max_new_tokens=9).text for p in prompts]
    nothing: list[str] = []
    assert llm.generate(nothing, max_new_tokens=9) == []


def test_chat_and_messages_go_through_the_template(llm: LLM) -> None:
    chat = llm.generate("hello", chat=True, max_new_tokens=5)
    assert llm.target.tokenizer.decode(chat.prompt_ids) == "<|user|>hello<eos><|assistant|>"
    messages = llm.generate([{"role": "user", "content": "hello"}], max_new_tokens=5)
    assert (messages.prompt_ids, messages.token_ids) == (chat.prompt_ids, chat.token_ids)
    longer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert llm.target.tokenizer.decode(llm.encode(longer)) == "<|user|>a<eos><|assistant|>b<eos><|user|>c<eos><|assistant|>"


def test_seeds_make_sampling_repeatable(llm: LLM) -> None:
    texts = [llm.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=20).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_drafter_generate_decodes_plainly(tiny_target: Target, llm: LLM) -> None:
    result = LLM(tiny_target, None, width=4).generate(PROMPT, max_new_tokens=10)
    assert result.stats.num_drafted_tokens == 0
    assert result.token_ids == llm.generate(PROMPT, max_new_tokens=10).token_ids


def test_an_interrupted_generate_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_round", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two", "three", "four"], max_new_tokens=20)
    assert not engine.has_work


# --- stream ----------------------------------------------------------------------------------------------------------


def test_chunks_add_up_to_the_result(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, max_new_tokens=25, ignore_eos=True))
    result = chunks[-1].result
    assert result is not None
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [t for chunk in chunks for t in chunk.token_ids] == result.token_ids
    assert [a for chunk in chunks for a in chunk.accepted] == result.accepted
    assert result.token_ids == llm.generate(PROMPT, max_new_tokens=25, ignore_eos=True).token_ids


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
    assert next(stream).token_ids
    assert llm.engine().num_live == 1
    stream.close()
    assert not llm.engine().has_work


def test_streams_may_interleave_with_each_other_and_with_generate(llm: LLM) -> None:
    params: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    expected = [r.text for r in llm.generate(["alpha", "beta"], **params)]
    first, second = llm.stream("alpha", **params), llm.stream("beta", **params)
    texts = [next(first).text, next(second).text]
    texts[0] += next(first).text
    assert llm.generate("gamma", **params).finish_reason == "length"  # steps the others too
    rest = [list(first), list(second)]
    assert [text + "".join(chunk.text for chunk in chunks) for text, chunks in zip(texts, rest, strict=True)] == expected
    assert all(chunks[-1].result is not None for chunks in rest)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_load_reads_target_and_drafter_from_folders(folders: tuple[Path, Path], llm: LLM) -> None:
    target, drafter = folders
    loaded = dspine.load(str(target), drafter=drafter, width=4)
    result = loaded.generate(PROMPT, max_new_tokens=15)
    assert result.token_ids == llm.generate(PROMPT, max_new_tokens=15).token_ids
    assert result.stats.num_drafted_tokens > 0


def test_load_without_a_shipped_drafter_decodes_plainly(folders: tuple[Path, Path]) -> None:
    assert dspine.load(str(folders[0])).drafter is None
    assert dspine.load(str(folders[0]), drafter=None).drafter is None


def test_a_loaded_model_can_be_wrapped(
    folders: tuple[Path, Path], make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, llm: LLM
) -> None:
    model = make_model("llama")
    wrapped = LLM.wrap(model, tiny_tokenizer, folders[1])
    assert wrapped.generate(PROMPT, max_new_tokens=10).token_ids == llm.generate(PROMPT, max_new_tokens=10).token_ids
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "cpu", "the caller keeps the model"


def test_auto_finds_what_ships_for_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Target, make_drafter: MakeDrafter
) -> None:
    monkeypatch.setattr("dspine.drafters.checkpoint.shipped_folder", lambda: tmp_path)
    assert find_drafter(tiny_target, "auto") is None
    save_drafter(make_drafter(tiny_target), tmp_path / "tiny-llama-dspine")
    save_drafter(make_drafter(tiny_target, "dflash"), tmp_path / "tiny-llama-dflash")
    found = [find_drafter(tiny_target, name) for name in ("auto", "dspine", "dflash")]
    assert [drafter.config.drafter for drafter in found if drafter is not None] == ["dspine", "dspine", "dflash"]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": "x" * 600}, "the prompt has 600 tokens, but tiny-llama holds 512 with the answer"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1 is out of range"),
        ({"prompt": "x", "top_p": 0}, "top_p=0 is out of range"),
        ({"prompt": "x", "top_kk": 3}, "unknown sampling parameter 'top_kk'; choose from: temperature, top_k"),
        ({"prompt": ["x", ""]}, "the prompt is empty"),
    ],
)
def test_bad_arguments_are_explained(arguments: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(**arguments)
    assert not llm.engine().has_work


def test_a_list_with_one_bad_prompt_queues_none_of_them(llm: LLM) -> None:
    with pytest.raises(UserError, match="has 600 tokens"):
        llm.generate(["fine", "x" * 600])
    assert not llm.engine().has_work


@pytest.mark.parametrize("drafter", ["no-such-folder", "dflash"])
def test_an_unknown_drafter_is_explained(
    drafter: str, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dspine.drafters.checkpoint.shipped_folder", lambda: tmp_path)
    with pytest.raises(UserError, match=f"no draft checkpoint '{drafter}' for tiny-llama; give a checkpoint folder"):
        find_drafter(tiny_target, drafter)


def test_a_drafter_for_another_target_is_refused(
    folders: tuple[Path, Path], make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match="has head_norms ="):
        LLM.wrap(make_model("llama", seed=9), tiny_tokenizer, folders[1])


def test_importing_the_package_does_not_import_torch() -> None:
    loaded = "print('torch' in sys.modules)"
    code = f"import dspine, sys; dspine.UserError; {loaded}; dspine.SamplingParams(); {loaded}"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\nTrue\n"


def test_unknown_attributes_of_the_package_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        dspine.lod  # noqa: B018
