from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dspine.errors import UserError
from dspine.targets import bundled
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[[str], Target]

TOLERANCE = 1e-4
LENGTH = 20  # longer than every sliding window of the tiny models


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(4, 260, shape, generator=torch.Generator().manual_seed(seed))


def full_logits(target: Target, tokens: Tensor) -> Tensor:
    """Logits [b, n, v] of one forward over an empty cache."""
    return target.logits(target.forward(tokens, target.new_cache(tokens.shape[0], 64)).hidden)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_logits_and_features_are_those_of_transformers(family: str, make_model: MakeModel, make_target: MakeTarget) -> None:
    model, target = make_model(family), make_target(family)
    tokens = random_tokens(2, LENGTH)
    with torch.inference_mode():
        expected = model(tokens, output_hidden_states=True)
    taps = (0, target.num_layers - 2)  # not the last layer: hidden_states[-1] is already normed
    out = target.forward(tokens, target.new_cache(2, 64), taps)
    assert_same(target.logits(out.hidden), expected.logits)
    assert out.features is not None
    assert_same(out.features, torch.cat([expected.hidden_states[i + 1] for i in taps], -1))


def test_the_last_layer_is_tapped_before_the_final_norm(family: str, make_model: MakeModel, make_target: MakeTarget) -> None:
    model, target = make_model(family), make_target(family)
    tokens = random_tokens(1, LENGTH)
    with torch.inference_mode():
        normed = model(tokens, output_hidden_states=True).hidden_states[-1]
    out = target.forward(tokens, target.new_cache(1, 64), (target.num_layers - 1,))
    assert_same(out.hidden, normed)
    assert out.features is not None
    assert (out.features - normed).abs().max() > 0.1


def test_taps_come_in_the_order_asked_for(tiny_target: Target) -> None:
    tokens = random_tokens(1, 5)
    both = tiny_target.forward(tokens, tiny_target.new_cache(1, 8), (1, 0)).features
    one = tiny_target.forward(tokens, tiny_target.new_cache(1, 8), (0,)).features
    assert both is not None
    assert one is not None
    torch.testing.assert_close(both[..., tiny_target.hidden_size :], one)
    assert tiny_target.forward(tokens, tiny_target.new_cache(1, 8)).features is None


@pytest.mark.parametrize("widths", [[7, 1, 1, 1, 5, 5], [1] * LENGTH])
def test_decoding_in_steps_equals_one_forward(family: str, widths: list[int], make_target: MakeTarget) -> None:
    target = make_target(family)
    tokens = random_tokens(2, LENGTH)
    cache = target.new_cache(2, 4)  # grows on the way
    pieces = []
    for piece in tokens.split(widths, 1):
        pieces.append(target.logits(target.forward(piece, cache).hidden))
        cache.lengths += piece.shape[1]
    assert cache.capacity >= LENGTH
    assert_same(torch.cat(pieces, 1), full_logits(target, tokens))


def test_rows_that_advance_differently_equal_rows_on_their_own(family: str, make_target: MakeTarget) -> None:
    target = make_target(family)
    tokens = random_tokens(3, 40)
    cache = target.new_cache(3, 64)
    kept: list[list[Tensor]] = [[], [], []]
    generator = torch.Generator().manual_seed(2)
    for width in (6, 4, 4, 1, 4, 1):
        columns = cache.lengths[:, None] + torch.arange(width)
        logits = target.logits(target.forward(tokens.gather(1, columns), cache).hidden)
        # Each row keeps at least one of its new tokens; what it refuses is overwritten in the next round.
        keep = torch.randint(1, width + 1, (3,), generator=generator)
        for row in range(3):
            kept[row].append(logits[row, : int(keep[row])])
        cache.lengths += keep
    assert len(set(cache.lengths.tolist())) == 3
    for row in range(3):
        length = int(cache.lengths[row])
        assert_same(torch.cat(kept[row]), full_logits(target, tokens[row : row + 1, :length])[0])


def test_a_roll_back_leaves_no_trace(family: str, make_target: MakeTarget) -> None:
    target = make_target(family)
    tokens, refused = random_tokens(1, LENGTH), random_tokens(1, 8, seed=9)
    cache = target.new_cache(1, 64)
    target.forward(tokens[:, :10], cache)
    cache.lengths += 10
    target.forward(refused, cache)
    cache.lengths += 8
    cache.lengths -= 8
    rest = target.logits(target.forward(tokens[:, 10:], cache).hidden)
    assert_same(rest, full_logits(target, tokens)[:, 10:])


def test_forward_does_not_move_lengths(tiny_target: Target) -> None:
    cache = tiny_target.new_cache(2, 8)
    tiny_target.forward(random_tokens(2, 3), cache)
    assert cache.lengths.tolist() == [0, 0]


def test_a_moved_row_goes_on_as_before(family: str, make_target: MakeTarget) -> None:
    target = make_target(family)
    tokens = random_tokens(3, LENGTH)
    cache = target.new_cache(3, 2)  # so small that the forward replaces its storage
    target.forward(tokens[:, :12], cache)
    cache.lengths += torch.tensor([4, 12, 9])
    cache.move_row(2, 0)
    assert cache.lengths.tolist() == [9, 12, 9]
    found = target.logits(target.forward(tokens[2:, 9:14], cache).hidden)  # row 0 alone
    assert_same(found[0], full_logits(target, tokens[2:])[0, 9:14])


def test_embeddings_are_those_that_enter_the_first_layer(
    lean_family: str, make_model: MakeModel, make_target: MakeTarget
) -> None:
    tokens = random_tokens(2, 5)
    with torch.inference_mode():
        entering = make_model(lean_family)(tokens, output_hidden_states=True).hidden_states[0]
    assert_same(make_target(lean_family).embed(tokens), entering)


def test_soft_caps_bound_the_logits(make_target: MakeTarget) -> None:
    logits = full_logits(make_target("gemma2"), random_tokens(1, LENGTH))
    assert 1.0 < float(logits.abs().max()) < 3.0


@pytest.mark.parametrize("window", [1, 3, LENGTH - 1, LENGTH, 100])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_windows_shorter_and_longer_than_the_text(family: str, window: int, make_model: MakeModel) -> None:
    model = make_model(family, sliding_window=window)
    tokens = random_tokens(1, LENGTH)
    with torch.inference_mode():
        expected = model(tokens).logits
    target = Target.wrap(model, None)
    assert_same(full_logits(target, tokens), expected)
    cache = target.new_cache(1, 64)
    target.forward(tokens[:, :-1], cache)
    cache.lengths += LENGTH - 1
    assert_same(target.logits(target.forward(tokens[:, -1:], cache).hidden), expected[:, -1:])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox"])
def test_bfloat16_is_as_close_as_transformers_own(family: str, make_model: MakeModel) -> None:
    tokens = random_tokens(2, LENGTH)
    model = make_model(family)
    with torch.inference_mode():
        exact = model(tokens).logits
        model.to(torch.bfloat16)
        theirs = model(tokens).logits.float()
    ours = full_logits(Target.wrap(model, None), tokens).float()
    assert (ours - exact).pow(2).mean() < 2 * (theirs - exact).pow(2).mean()


def test_wrapping_leaves_the_model_as_it_was(family: str, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(family)
    prompt = random_tokens(1, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    target = Target.wrap(model, tiny_tokenizer)
    full_logits(target, prompt)
    torch.testing.assert_close(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_chat_ends_at_the_assistants_turn(tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Hé!"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "No."}]
    ids = tiny_target.encode_chat(messages)
    assert tiny_tokenizer.decode(ids) == "<|user|>Hé!<eos><|assistant|>Yes?<eos><|user|>No.<eos><|assistant|>"
    assert ids[0] == 2
    assert ids[-1] == 3


def test_a_model_without_a_chat_template_says_so(make_model: MakeModel) -> None:
    target = Target.wrap(make_model("llama"), None, "plain")
    with pytest.raises(UserError, match="plain has no chat template"):
        target.encode_chat([{"role": "user", "content": "hello"}])


def test_end_tokens_of_the_generation_config_and_the_tokenizer_both_count(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_model("llama")
    assert Target.wrap(model, None).eos_token_ids == {1}
    model.generation_config.eos_token_id = [7, 9]
    assert Target.wrap(model, tiny_tokenizer).eos_token_ids == {1, 7, 9}
    model.generation_config.eos_token_id = None
    assert Target.wrap(model, None).eos_token_ids == frozenset()


def test_a_saved_folder_loads(make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_model("qwen2")
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), device="cpu")
    tokens = random_tokens(1, LENGTH)
    with torch.inference_mode():
        assert_same(full_logits(target, tokens), model(tokens).logits)
    assert target.tokenizer.decode([2]) == "<|user|>"
    assert target.max_length == 512


@pytest.mark.parametrize("name", ["no-such/model", "no such name", "", "/no/such/folder", "../nowhere"])
def test_an_unknown_target_is_named_with_the_remedy(name: str) -> None:
    with pytest.raises(UserError, match=r"cannot load target .*; give a hub id, a local model folder.*smollm2-135m") as caught:
        Target.load(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="unknown dtype 'int3'; choose one of auto, float32, bfloat16, float16"):
        Target.load("smollm2-135m", dtype="int3")


def test_a_corrupt_weights_file_is_refused(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot load target"):
        Target.load(str(tmp_path))


def test_missing_tensors_are_not_replaced_by_random_ones(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lack 3 tensors, the first is model\.layers\.1\.mlp\.down_proj\.weight"):
        Target.load(str(tmp_path))


@pytest.mark.real
def test_the_bundled_model_gives_transformers_logits_and_greedy_tokens() -> None:
    target = Target.load("smollm2-135m", device="cpu")
    assert target.is_lean
    model = AutoModelForCausalLM.from_pretrained(bundled.ensure("smollm2-135m"), dtype=torch.float32)
    prompt = torch.tensor([target.encode_chat([{"role": "user", "content": "What is the capital of France?"}])])
    new = 12
    with torch.inference_mode():
        expected = model(prompt).logits
        continued = model.generate(prompt, max_new_tokens=new, do_sample=False)[0, prompt.shape[1] :].tolist()
    cache = target.new_cache(1, 128)
    found = target.logits(target.forward(prompt, cache).hidden)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    cache.lengths += prompt.shape[1]
    tokens = [int(found[0, -1].argmax())]
    while len(tokens) < len(continued):
        logits = target.logits(target.forward(torch.tensor([tokens[-1:]]), cache).hidden)
        cache.lengths += 1
        tokens.append(int(logits[0, -1].argmax()))
    assert tokens == continued
    assert "Paris" in target.tokenizer.decode(tokens)


@pytest.mark.real
def test_the_bundled_tokenizer_is_the_same_under_every_release_of_transformers() -> None:
    tokenizer = Target.load("smollm2-135m", device="cpu").tokenizer
    text = "It's 12345 tests, héllo 🙂.\n  return x<|im_end|>"
    ids = [1589, 506, 216, 33, 34, 35, 36, 37, 3642, 28, 294, 2756, 31394, 47526, 30, 3805, 1003, 1792, 2]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)


@pytest.mark.real
def test_a_damaged_copy_of_the_bundled_model_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundled.ensure("smollm2-135m")
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("model.safetensors"))
    with (folder / "model.safetensors").open("rb") as source:
        (copy / "model.safetensors").write_bytes(source.read(100_000))
    monkeypatch.setitem(os.environ, "DSPINE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=f"delete .*{folder.name} and try again"):
        Target.load("smollm2-135m")
