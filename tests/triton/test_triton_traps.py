"""Calls that a plain implementation of the Triton back end gets wrong without a word."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import make_inputs, relative_error
from helpers.triton_cases import BACKEND, DEVICE, MARKS, only_triton
from helpers.untyped import lln_attention

pytestmark = MARKS

draw_inputs = functools.partial(make_inputs, dim=16, dtype=torch.float32, device=DEVICE)


def test_offsets_need_not_lie_side_by_side() -> None:
    q, k, v = draw_inputs(1, 2, length=70)
    offsets = torch.tensor([0, 99, 30, 99, 70, 99], dtype=torch.int32, device=DEVICE)[::2]
    found = lln_attention(q, k, v, 1.2, 1.4, cu_seqlens=offsets, backend=BACKEND)
    assert torch.equal(found, lln_attention(q, k, v, 1.2, 1.4, cu_seqlens=offsets.clone(), backend=BACKEND))


@only_triton
def test_a_gradient_penalty_is_refused_rather_than_lost() -> None:
    q, k, v = draw_inputs(1, 1, length=20)
    out = lln_attention(q.requires_grad_(), k, v, 1.2, 1.4, backend=BACKEND)
    with pytest.raises(RuntimeError, match="backend='eager'"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has one way to say tf32")
def test_both_ways_to_allow_tf32_are_understood() -> None:
    q, k, v = draw_inputs(1, 1, length=20)
    expected = lln_attention(q, k, v, 1.2, 1.4, backend="eager")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = lln_attention(q, k, v, 1.2, 1.4, backend=BACKEND)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert relative_error(found, expected) < 1e-2


@pytest.mark.parametrize("block_size", [16, 150])
def test_an_empty_sequence_does_not_widen_the_output(block_size: int) -> None:
    q, k, v = draw_inputs(1, 2, length=70, dtype=torch.float16)
    offsets = torch.tensor([0, 0, 70], dtype=torch.int32, device=DEVICE)
    out = lln_attention(q, k, v, 1.2, 1.4, cu_seqlens=offsets, block_size=block_size, backend=BACKEND)
    assert out.dtype == torch.float16


def test_a_block_size_may_be_any_kind_of_integer() -> None:
    q, k, v = draw_inputs(1, 1, length=40)
    found = lln_attention(q, k, v, 1.2, 1.4, block_size=np.int64(16), backend=BACKEND)
    assert torch.equal(found, lln_attention(q, k, v, 1.2, 1.4, block_size=16, backend=BACKEND))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_factors_lie_as_a_compiler_expects(is_causal: bool) -> None:
    """Inductor takes the layout from the fake kernel's word."""
    tensors = [t.requires_grad_() for t in draw_inputs(2, 2, length=70)]
    factors = [torch.full(shape, 1.3, device=DEVICE, requires_grad=True) for shape in ((2, 2, 16), (2, 2, 1))]
    out = lln_attention(*tensors, *factors, is_causal=is_causal, backend=BACKEND)
    for gradient in torch.autograd.grad(out.sum(), factors):
        assert gradient.is_contiguous()


def test_backward_under_autocast_keeps_the_digits_of_factors() -> None:
    q, k, v = draw_inputs(1, 2, length=70)
    alpha = torch.full((2, 2, 1), 1.3, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE)

    def gradient(enabled: bool) -> Tensor:
        out = lln_attention(q, k, v, alpha, 1.4, cu_seqlens=offsets, backend=BACKEND)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(out.square().sum(), alpha)[0]

    assert relative_error(gradient(True), gradient(False)) < 1e-5
