"""Memory is linear in length: no N x N or N x D x Dv tensor is ever made, only q, k, v wait for backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from helpers.memory import LargestTensor
from helpers.tensors import normal
from helpers.untyped import lln_attention

DIM = 16
CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "block": {"block_size": 64},
    "causal block": {"is_causal": True, "block_size": 64},
    "mask": {"key_mask": True},
    "causal mask": {"is_causal": True, "key_mask": True},
    "causal block mask mix": {"is_causal": True, "block_size": 64, "key_mask": True, "mix": True},
    "block mask mix": {"block_size": 64, "key_mask": True, "mix": True},
}


def arguments(case: str, length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """(leaves: q, k, v, alpha, beta and perhaps mix, options)"""
    leaves = [normal(s, 1, 1, length, DIM).float() for s in range(3)]
    leaves += [torch.full((1,), 1.5), torch.full((1, DIM), 1.25)]
    options = dict(CASES[case])
    if "key_mask" in options:
        options["key_mask"] = normal(3, 1, length) > -1
    if "mix" in options:
        options["mix"] = torch.full((1, DIM), 0.5).requires_grad_()
        leaves.append(options["mix"])
    return [x.requires_grad_() for x in leaves], options


def forward_and_backward(case: str, length: int) -> None:
    leaves, options = arguments(case, length)
    torch.autograd.grad(lln_attention(*leaves[:5], **options).sum(), leaves)


def allocations(case: str, length: int) -> Iterator[int]:
    """Bytes of each allocation (negative: release), as the allocator sees them, whatever op made them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        forward_and_backward(case, length)
    yield from (e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_is_quadratic_in_length_or_holds_a_state_per_token(case: str) -> None:
    length = 2048
    with LargestTensor() as largest:
        forward_and_backward(case, length)
    assert largest.numel >= length * DIM  # it did look
    assert largest.numel <= length * DIM * DIM // 2 < length * length // 2


@pytest.mark.parametrize("case", CASES)
def test_peak_memory_grows_with_length_not_its_square(case: str) -> None:
    peaks = []
    for length in (1024, 2048):
        held, peak = 0, 0
        for nbytes in allocations(case, length):
            held += nbytes
            peak = max(peak, held)
        peaks.append(peak)
    assert peaks[0] > 1024 * DIM * 4
    assert peaks[1] <= 2.2 * peaks[0]


@pytest.mark.parametrize("case", CASES)
def test_only_query_key_and_value_are_kept_for_backward(case: str) -> None:
    length = 2048
    leaves, options = arguments(case, length)
    inputs = {x.untyped_storage().data_ptr() for x in (*leaves, options.get("key_mask")) if x is not None}
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = lln_attention(*leaves[:5], **options)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    extra = {address: nbytes for address, nbytes in storages.items() if address not in inputs}
    assert kept, "nothing was saved through autograd: this test would see nothing"
    assert out.untyped_storage().data_ptr() not in extra  # not even the output
    # log_sum in float64 and mean_value in float32; as much again for the end state of a scan, alpha, beta, mix;
    # and of the mask a byte a token for each of the two parts, the block's rounded up to whole blocks
    masks = 2 * (length + 64) if "key_mask" in options else 0
    assert sum(extra.values()) <= 2 * (8 * DIM + 4 * DIM * DIM) + masks


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_between_forward_and_backward_does_not_grow_with_length(case: str) -> None:
    """The same, by what the allocator still holds once forward is over: it sees what hides from the hooks."""
    held = []
    for length in (1024, 2048):
        leaves, options = arguments(case, length)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            out = lln_attention(*leaves[:5], **options)
        events = recorded.profiler.kineto_results.events()
        total = sum(e.nbytes() for e in events if e.name() == "[memory]")
        held.append(total - out.untyped_storage().nbytes())
    # a boolean mask is one byte a token, an index of blocks eight; one channel-wide float32 would be 64 bytes
    assert held[1] - held[0] <= 16 * 1024
