"""The few-call RMSNorm against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from dspine.modules.decoder import fold_norm
from dspine.modules.norm import folded_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 6, 48), (3, 5, 4, 16)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_it_is_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5)
    kept = x.clone()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    assert torch.equal(x, kept)
    plain = torch.nn.functional.rms_norm(x, shape[-1:], None, 1e-5)
    torch.testing.assert_close(rms_norm(x, None, 1e-5), plain)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_folded_norm_and_its_products_are_the_whole_norms(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(2, 6, 48, generator=generator)
    weight, w = torch.randn(48, generator=generator), torch.randn(32, 48, generator=generator)
    left, (folded,) = fold_norm(weight, w)
    assert left is None
    floor = torch.tensor((48 * 1e-5) ** 0.5)
    expected = torch.nn.functional.rms_norm(x, (48,), weight, 1e-5) @ w.T
    torch.testing.assert_close(folded_rms_norm(x, floor) @ folded.T, expected)


def test_a_norm_of_16_bits_stays_where_it_is() -> None:
    weight, w = torch.randn(48).bfloat16(), torch.randn(32, 48).bfloat16()
    left, (kept,) = fold_norm(weight, w)
    assert left is weight
    assert torch.equal(kept, w)


def test_zeros_stay_zeros_and_strides_do_not_matter() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 3, 8), torch.ones(8), 1e-6), torch.zeros(2, 3, 8))
    x = torch.randn(3, 7, 20)[:, 2:5, 4:12]
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-6), torch.nn.functional.rms_norm(x, (8,), None, 1e-6))


def test_it_serves_both_inside_and_outside_of_inference_mode() -> None:
    x = torch.randn(2, 8)
    with torch.inference_mode():
        inside = rms_norm(x, torch.ones(8), 0.125)
    assert torch.equal(rms_norm(x, torch.ones(8), 0.125), inside)
