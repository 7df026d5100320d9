from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspine.modules.rope import Rope, interleave_halves

HEAD_DIM = 8
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def textbook(x: Tensor, positions: Tensor, scaling: float = 1.0) -> Tensor:
    """x cos + rotate_half(x) sin, halves layout, in float64."""
    angles = positions.double()[..., None] * INV_FREQ
    angles = torch.cat((angles, angles), -1)[:, :, None]
    first, second = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()) * scaling


def rotated(x: Tensor, positions: Tensor, dtype: torch.dtype, scaling: float = 1.0) -> Tensor:
    """What `Rope` makes of x, in halves layout again."""
    rope = Rope(INV_FREQ, scaling, dtype)
    order = interleave_halves(HEAD_DIM) if rope.interleaved else torch.arange(HEAD_DIM)
    y = x.to(dtype)[..., order].contiguous()
    rope.apply_(y, rope.at(positions, int(positions.max()) + 1))
    return y[..., order.argsort()].double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_rotation_is_the_textbooks(dtype: torch.dtype, tolerance: float, scaling: float) -> None:
    x, positions = random(2, 5, 3, HEAD_DIM), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 30, 31, 32]])
    expected = textbook(x, positions, scaling)
    torch.testing.assert_close(rotated(x, positions, dtype, scaling), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_range_of_positions_is_its_positions(dtype: torch.dtype) -> None:
    rope, positions = Rope(INV_FREQ, 1.0, dtype), torch.arange(3, 9)[None]
    assert torch.equal(rope.between(3, 9), rope.at(positions, 9))


def test_interleaving_puts_the_halves_side_by_side() -> None:
    assert interleave_halves(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_position_zero_changes_nothing_and_length_is_kept() -> None:
    x = random(1, 2, 1, HEAD_DIM)
    y = rotated(x, torch.tensor([[0, 9]]), torch.float32)
    torch.testing.assert_close(y[:, 0], x[:, 0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)
    assert (y[:, 1] - x[:, 1]).abs().max() > 0.1


def test_dot_products_depend_on_the_distance_only() -> None:
    q, k = random(1, 1, 1, HEAD_DIM), random(1, 1, 1, HEAD_DIM, seed=1)

    def score(i: int, j: int) -> float:
        a = rotated(q, torch.tensor([[i]]), torch.float32)
        return float((a * rotated(k, torch.tensor([[j]]), torch.float32)).sum())

    assert score(12, 5) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(12, 5) != pytest.approx(score(12, 6), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_grows_without_changing_what_it_held(dtype: torch.dtype) -> None:
    rope = Rope(INV_FREQ, 1.0, dtype)
    early = torch.arange(6)[None]
    before = rope.at(early, 6).clone()
    late = rope.at(torch.tensor([[5000]]), 5001)
    torch.testing.assert_close(rope.at(early, 6), before)
    torch.testing.assert_close(late, Rope(INV_FREQ, 1.0, dtype).at(torch.tensor([[5000]]), 9000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_into_a_wider_tensor_is_rotated_in_place(dtype: torch.dtype) -> None:
    rope = Rope(INV_FREQ, 1.0, dtype)
    wide = random(2, 3, 5, HEAD_DIM).to(dtype)
    before, positions = wide.clone(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    rope.apply_(wide[:, :, :4], rope.at(positions, 7))
    assert torch.equal(wide[:, :, 4], before[:, :, 4])
    alone = before[:, :, :4].contiguous()
    rope.apply_(alone, rope.at(positions, 7))
    torch.testing.assert_close(wide[:, :, :4], alone)
