"""MALA, RALA, PolaFormer, NaLaFormer and SLA's linear branch are their papers' formulas, written densely in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.mechanism_cases import draw_inputs
from helpers.tensors import relative_error
from helpers.untyped import attention, mechanism

LENGTH = 37


def positive(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


def see(is_causal: bool) -> Tensor:
    """[B, 1, N, M], and padding on both sides of the first sample."""
    seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    seen[0, :, :, :4], seen[0, :, :, 33:] = False, False
    return seen.tril() if is_causal else seen


def divide(weights: Tensor, seen: Tensor) -> Tensor:
    weights = weights * seen
    total = weights.sum(-1, keepdim=True)
    return torch.where(total != 0, weights / torch.where(total != 0, total, 1.0), 0.0)


def mala(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Weights beta_i s_ij - gamma_i with beta = 1 + 1 / S and gamma = S / n."""
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    s = q.shape[-1] ** -0.5 * (positive(q) @ positive(k).mT) / count * seen
    total = s.sum(-1, keepdim=True)
    beta, gamma = 1 + 1 / torch.where(total > 0, total, 1.0), total / count
    return (beta * s - gamma) * seen


def rala(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Keys weighted by n softmax_j of their product with the mean query."""
    valid = seen[:, 0, -1]  # [B, M], which are the queries that count, too
    rows = (positive(q) * valid[:, None, :, None]).sum(2) / valid.sum(-1)[:, None, None]
    liked = q.shape[-1] ** -0.5 * torch.einsum("bhd,bhjd->bhj", rows, positive(k))
    weights = valid.sum(-1)[:, None, None] * liked.masked_fill(~valid[:, None], -torch.inf).softmax(-1)
    return divide(positive(q) @ (weights[..., None] * positive(k)).mT, seen)


def nalaformer(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    norm = q.norm(dim=-1, keepdim=True)
    power, direction = 3 * (0.5 + norm.tanh()), q / norm
    similarity = direction.clamp_min(0) ** power @ k.clamp_min(0).mT ** 3
    return divide(similarity + (-direction).clamp_min(0) ** power @ (-k).clamp_min(0).mT ** 3, seen)


def sla(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return divide(q.softmax(-1) @ k.softmax(-1).mT, seen)


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mala": mala, "rala": rala, "nalaformer": nalaformer, "sla": sla
}  # fmt: skip


def assert_same_with_gradients(out: Tensor, want: Tensor, given: list[Tensor]) -> None:
    assert relative_error(out, want) < 1e-12
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    found, wanted = (torch.autograd.grad((t * weight).sum(), given) for t in (out, want))
    for got, right in zip(found, wanted, strict=True):
        assert relative_error(got, right) < 1e-10


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_they_are_their_formulas(name: str, is_causal: bool) -> None:
    if name == "rala" and is_causal:
        return
    given = [t.requires_grad_() for t in draw_inputs(4, key_heads=2)]
    q, k, v = given[0], *(t.repeat_interleave(2, 1) for t in given[1:])
    seen = see(is_causal)
    out = attention(name, *given, key_mask=see(False)[:, 0, 0], is_causal=is_causal)
    assert_same_with_gradients(out, FORMULAS[name](q, k, seen) @ v, given)


def test_malas_rows_sum_to_one_and_some_weights_are_negative() -> None:
    q, k, _ = draw_inputs(4)
    weights = mala(q, k, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, LENGTH, dtype=torch.float64))
    assert bool((weights < 0).any())


def test_a_longer_query_attends_to_fewer_keys_where_the_paper_says_so() -> None:
    """The entropy of NaLaFormer and the spread of MALA follow the norm; those of the ReLU kernel do not."""
    q, k, _ = draw_inputs(4)
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    for name, formula in (("nalaformer", nalaformer), ("mala", mala)):
        small, large = (formula(factor * q, k, seen).square().sum(-1).mean() for factor in (0.1, 3.0))
        assert float(large) > 1.05 * float(small), name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_dim", [5, 6])
def test_polaformer_is_its_formula(is_causal: bool, value_dim: int) -> None:
    module: Any = mechanism("polaformer", num_heads=4, num_key_heads=2, head_dim=6, dtype=torch.float64, span=3.0)
    with torch.no_grad():
        for parameter in (module.power, module.channel_scale):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    q, k, v = (t.requires_grad_() for t in draw_inputs(4, key_heads=2))
    v = torch.cat([v, v[..., :1]], -1)[..., :value_dim].detach().requires_grad_()
    seen = see(is_causal)
    power = (1 + 3 * module.power.sigmoid()).repeat_interleave(2, 0)[:, None]
    scale = functional.softplus(module.channel_scale).repeat_interleave(2, 0)[:, None]
    key, value = (t.repeat_interleave(2, 1) for t in (k, v))
    q_up, q_down, k_up, k_down = ((sign * t / scale).clamp_min(0) ** power for t in (q, key) for sign in (1, -1))
    same = divide(q_up @ k_up.mT + q_down @ k_down.mT, seen)
    opposite = divide(q_up @ k_down.mT + q_down @ k_up.mT, seen)
    half = -(-value_dim // 2)
    want = torch.cat([same @ value[..., :half], opposite @ value[..., half:]], -1)
    out = module(q, k, v, key_mask=see(False)[:, 0, 0], is_causal=is_causal)
    assert_same_with_gradients(out, want, [q, k, v, module.power, module.channel_scale])


def test_sla_is_lln_with_normalised_keys() -> None:
    """Keys of one sum are LLN's own, so there the two agree."""
    q, k, v = draw_inputs(4)
    k = k.log_softmax(-1)  # whose exponentials sum to one
    plain = attention("lln", q, k, v, alpha=1.0, beta=1.0)
    assert relative_error(attention("sla", q, k, v), plain) < 1e-12
