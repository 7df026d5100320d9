"""Adjacent causal injection against its equations, one slot at a time, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dspine.modules.injection import AdjacentInjection, rms, unit_code

D, LAYERS, RANK, WIDTH = 10, 3, 6, 4


def make_injection(seed: int = 0) -> AdjacentInjection:
    """One with no zero anywhere, so that every term counts."""
    torch.manual_seed(seed)
    injection = AdjacentInjection(D, LAYERS, RANK, WIDTH)
    for parameter in injection.parameters():
        nn.init.normal_(parameter, std=0.7)
    return injection


def slow_readout(injection: AdjacentInjection, layer: int, u: Tensor) -> Tensor:
    r = injection.readouts[layer].get_parameter("weight") @ u
    return RANK**0.5 * r / r.square().sum().sqrt()


def slow_slot(injection: AdjacentInjection, layer: int, u: Tensor, z: Tensor, z_previous: Tensor) -> Tensor:
    gate = 1 / (
        1
        + torch.exp(
            -(injection.receiver_gate.weight @ z + injection.sender_gate.weight @ z_previous + injection.receiver_gate.bias)
        )
    )
    message = injection.message.weight @ z_previous
    return u + u.square().mean().sqrt() * (injection.writes[layer].get_parameter("weight") @ (gate * message))


def slow_block(injection: AdjacentInjection, layer: int, u: Tensor, anchor_code: Tensor, true_codes: Tensor | None) -> Tensor:
    """One block u [B, d]; `true_codes` [M - 1, r] replace the predecessors of slots 2..M."""
    z = [slow_readout(injection, layer, u[t]) for t in range(u.shape[0])]
    out = [u[0]]
    for t in range(1, u.shape[0]):
        neighbour = z[t - 1] if true_codes is None or t == 1 else true_codes[t - 2]
        previous = anchor_code if t == 1 else neighbour
        out.append(slow_slot(injection, layer, u[t], z[t], previous))
    return torch.stack(out)


@pytest.mark.parametrize("with_curriculum", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_values_and_gradients_of_the_equations(layer: int, with_curriculum: bool) -> None:
    injection = make_injection()
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(3, 5, D, generator=generator).requires_grad_()
    anchor = unit_code(torch.randn(3, RANK, generator=generator))
    codes = unit_code(torch.randn(3, 3, RANK, generator=generator))
    blocks = torch.tensor([True, False, True])
    got = injection(layer, u, anchor, (blocks, codes) if with_curriculum else None)
    expected = torch.stack(
        [slow_block(injection, layer, u[a], anchor[a], codes[a] if with_curriculum and blocks[a] else None) for a in range(3)]
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(got.shape, generator=generator)
    sources = [u, *injection.parameters()]
    fast = torch.autograd.grad((got * direction).sum(), sources, allow_unused=True)
    slow = torch.autograd.grad((expected * direction).sum(), sources, allow_unused=True)
    for a, b in zip(fast, slow, strict=True):
        assert (a is None) == (b is None)  # another layer's own parameters
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert b.abs().max() > 1e-3


def test_starts_as_the_identity() -> None:
    torch.manual_seed(0)
    injection = AdjacentInjection(D, LAYERS, RANK, WIDTH)
    basis = torch.linalg.qr(torch.randn(D, RANK)).Q
    injection.initialise(basis)
    u, anchor = torch.randn(2, 7, D), torch.randn(2, RANK)
    for layer in range(LAYERS):
        assert torch.equal(injection(layer, u, anchor), u)
        assert torch.equal(injection.readouts[layer].get_parameter("weight"), basis.t())
    assert injection.sender_gate.weight.abs().max() == 0
    # Only the writes are silent: the receiver's gate and the messages can learn from the first step on.
    assert injection.receiver_gate.weight.abs().max() > 0
    assert injection.message.weight.abs().max() > 0
    injection(1, u, anchor).square().sum().backward()
    gradient = injection.writes[1].get_parameter("weight").grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_anchor_state_passes_and_first_slot_hears_the_anchors_code() -> None:
    injection = make_injection()
    u, anchor = torch.randn(2, 4, D), torch.randn(2, RANK)
    h = injection(0, u, anchor)
    assert torch.equal(h[:, 0], u[:, 0])
    changed = injection(0, u, anchor + 1)
    assert not torch.allclose(changed[:, 1], h[:, 1])
    assert torch.equal(changed[:, 2:], h[:, 2:])


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_a_slot_hears_its_left_neighbour_only(slot: int) -> None:
    injection = make_injection()
    u, anchor = torch.randn(1, 6, D), torch.randn(1, RANK)
    h = injection(1, u, anchor)
    moved = u.clone()
    moved[:, slot] += 1
    changed = (injection(1, moved, anchor) - h).abs().amax(-1)[0] > 1e-9
    # The anchor's own state says nothing: its code does.
    expected = [t == slot or (t == slot + 1 and slot > 0) for t in range(6)]
    assert changed.tolist() == expected


def test_curriculum_leaves_other_blocks_and_the_first_slot_alone() -> None:
    injection = make_injection()
    u, anchor = torch.randn(2, 5, D), torch.randn(2, RANK)
    plain = injection(0, u, anchor)
    forced = injection(0, u, anchor, (torch.tensor([False, True]), torch.randn(2, 3, RANK)))
    assert torch.equal(forced[0], plain[0])
    assert torch.equal(forced[1, :2], plain[1, :2])
    assert ((forced[1, 2:] - plain[1, 2:]).abs().amax(-1) > 1e-6).all()


def test_rms_has_no_weight_and_no_epsilon() -> None:
    u = torch.tensor([[3e-20, 4e-20], [6.0, 8.0]])
    torch.testing.assert_close(rms(u), torch.tensor([[5e-20 / 2**0.5], [10 / 2**0.5]]))
    half = torch.full((1, 4096), 300.0, dtype=torch.float16)  # the squares' sum would overflow in fp16
    assert rms(half).dtype == torch.float16
    torch.testing.assert_close(rms(half).float(), torch.tensor([[300.0]]))


def test_unit_code_has_root_mean_square_one_in_any_dtype() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    torch.testing.assert_close(unit_code(x).square().mean(-1), torch.ones(5))
    low = unit_code(x.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), unit_code(x), rtol=0.02, atol=0.02)


def test_parameter_count_at_the_papers_size() -> None:
    with torch.device("meta"):
        injection = AdjacentInjection(hidden_size=4096, num_layers=5, rank=1024, message_width=512)
    count = sum(p.numel() for p in injection.parameters())
    assert abs(count - 33.0e6) <= 0.1e6
