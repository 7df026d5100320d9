from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspine.kernels.linear import GatedLinear, PackedLinear


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 8), (2, 5), (1, 33), (2, 3, 4)])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 13), (64, 32), (97, 31)])
@pytest.mark.parametrize("with_bias", [False, True])
@torch.inference_mode()
def test_equals_the_plain_product(shape: tuple[int, ...], out_features: int, in_features: int, with_bias: bool) -> None:
    weight, x = random(out_features, in_features), random(*shape, in_features, seed=1)
    bias = random(out_features, seed=2) if with_bias else None
    add = random(*shape, out_features, seed=3)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    linear = PackedLinear(weight, bias)
    kept = add.clone()
    torch.testing.assert_close(linear(x).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear(x, add=add).double(), expected + add.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(add, kept)  # the residual is read, not written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.inference_mode()
def test_other_dtypes_are_not_packed_but_computed_alike(dtype: torch.dtype) -> None:
    weight, x, add = random(16, 8, dtype=dtype), random(3, 8, seed=1, dtype=dtype), random(3, 16, seed=2, dtype=dtype)
    linear = PackedLinear(weight)
    assert not linear.packed
    assert linear(x).dtype == dtype
    torch.testing.assert_close(linear(x, add=add), x @ weight.T + add)


@torch.inference_mode()
def test_an_input_that_is_a_view_gives_the_same() -> None:
    weight, wide = random(16, 8), random(4, 6, 16, seed=1)
    linear = PackedLinear(weight)
    for view in (wide[:, ::2, :8], wide[..., 8:], wide[..., ::2], wide.transpose(0, 1)[..., :8]):
        torch.testing.assert_close(linear(view), view @ weight.T, atol=1e-5, rtol=1e-5)
    add = random(16, 4, 6, seed=2).permute(1, 2, 0)
    torch.testing.assert_close(linear(wide[..., :8], add=add), wide[..., :8] @ weight.T + add, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_weight_may_be_a_transposed_view_and_freed_afterwards() -> None:
    weight, x = random(8, 16), random(2, 8, seed=1)
    expected = x @ weight
    linear = PackedLinear(weight.T)
    weight.zero_()
    if linear.packed:
        torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
    assert (linear.in_features, linear.out_features) == (8, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 5), (40,)])
@torch.inference_mode()
def test_a_gated_product(shape: tuple[int, ...], activation: str, with_bias: bool, dtype: torch.dtype) -> None:
    gate, up, x = random(24, 8, dtype=dtype), random(24, 8, seed=1, dtype=dtype), random(*shape, 8, seed=2, dtype=dtype)
    biases = (random(24, seed=3, dtype=dtype), random(24, seed=4, dtype=dtype)) if with_bias else None
    a, b = x.double() @ gate.double().T, x.double() @ up.double().T
    if biases is not None:
        a, b = a + biases[0].double(), b + biases[1].double()
    curve = torch.nn.functional.silu(a) if activation == "silu" else torch.nn.functional.gelu(a, approximate="tanh")
    linear = GatedLinear(gate, up, activation, biases)
    assert linear.packed == (dtype == torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(linear(x).double(), curve * b, atol=tolerance, rtol=tolerance)
