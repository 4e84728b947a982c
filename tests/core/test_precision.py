"""The error rule: at most twice the error of plain PyTorch in the same dtype, gradients too, and finite always."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.tensors import normal, relative_error
from helpers.untyped import lln_attention


def attend_plainly(*qkv: Tensor, alpha: float, beta: float, is_causal: bool) -> Tensor:
    """Two softmaxes as anyone would write them; causal: one prefix after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = beta * k
        return (alpha * q + x.logsumexp(-2, keepdim=True)).softmax(-1) @ (x.softmax(-2).transpose(-1, -2) @ v)

    q, k, v = qkv
    if not is_causal:
        return attend(q, k, v)
    prefixes = [attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(q.shape[2])]
    return torch.cat(prefixes, 2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [10.0, 60.0, 200.0, 400.0])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_float32_outputs_and_gradients_are_as_good_as_plain_pytorch(size: float, is_causal: bool, shift: float) -> None:
    """max|alpha q| = max|beta k| = size; `shift` is a constant added to beta k, which changes nothing in P."""
    ours: list[list[float]] = []
    others: list[list[float]] = []
    for seed in range(3):
        *qkv, g = normal(seed, 4, 1, 2, 200, 16, dtype=torch.float64)
        alpha, beta = (size / t.abs().max().item() for t in qkv[:2])
        qkv[1] = qkv[1] + shift / beta
        exact = results(lambda *t: attend_plainly(*t, alpha=alpha, beta=beta, is_causal=is_causal), qkv, g)  # noqa: B023
        narrow, g32 = [t.float() for t in qkv], g.float()
        mine = results(lambda *t: lln_attention(*t, alpha, beta, is_causal=is_causal), narrow, g32)  # noqa: B023
        theirs = results(lambda *t: attend_plainly(*t, alpha=alpha, beta=beta, is_causal=is_causal), narrow, g32)  # noqa: B023
        ours.append([relative_error(a, b) for a, b in zip(mine, exact, strict=True)])
        others.append([relative_error(a, b) for a, b in zip(theirs, exact, strict=True)])
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        worst, allowed = max(e[i] for e in ours), 2 * max(e[i] for e in others)
        assert worst <= max(allowed, 1e-6), (name, worst, allowed)


def results(call: Callable[..., Tensor], tensors: list[Tensor], g: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, g)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_finite_queries_and_keys_give_finite_results(dtype: torch.dtype, is_causal: bool) -> None:
    *qkv, g = (t.to(dtype) for t in normal(0, 4, 1, 2, 40, 8, dtype=torch.float64))
    for scaled in ([0], [1], [0, 1]):
        tensors = [t / t.abs().max() * torch.finfo(dtype).max if i in scaled else t for i, t in enumerate(qkv)]
        for found in results(lambda *t: lln_attention(*t, 8.0, 8.0, is_causal=is_causal), tensors, g):
            assert found.isfinite().all()


def test_the_usual_form_shrinks_to_zero_where_the_two_softmaxes_hold() -> None:
    """Subtract the maxima of q and of k, add an epsilon: what linear attention code usually does."""
    q, k, v, _ = normal(0, 4, 1, 2, 200, 16, dtype=torch.float64)
    alpha, beta = (400.0 / t.abs().max().item() for t in (q, k))
    exact = attend_plainly(q, k, v, alpha=alpha, beta=beta, is_causal=False)
    a, b = ((factor * t.float()) for factor, t in ((alpha, q), (beta, k)))
    a, b = (a - a.amax()).exp(), (b - b.amax()).exp()
    usual = a @ (b.transpose(-1, -2) @ v.float()) / ((a * b.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-8)
    assert usual.norm() < 0.2 * exact.norm()
    assert relative_error(lln_attention(q.float(), k.float(), v.float(), alpha, beta), exact) < 3e-5
