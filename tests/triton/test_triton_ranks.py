"""A call over several ranks by the kernels: each rank gives what one process gives for its rows."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.ranks_in_turn import run_ranks
from helpers.replaying import count_played, make_playable
from helpers.tensors import normal, relative_error
from helpers.triton_cases import DEVICE, MARKS
from lln.checks import check_call, check_inputs
from lln.distributed import fused
from lln.functional import attend_here
from lln.ranks import Ranks, Sending, count_bytes

pytestmark = MARKS

LENGTHS = (16, 48, 32)
CALLS: dict[str, dict[str, Any]] = {
    "LLN": {"mask": True},
    "LLN, causal": {"is_causal": True, "mask": True},
    "LLN+Diag": {"block_size": 16},
    "LLN+Diag, causal": {"block_size": 16, "is_causal": True},
    "evidence": {"read": "evidence", "directions": "signed", "mask": True},
    "evidence+Diag": {"read": "evidence", "block_size": 16},
}


def draw_rows(apart: float = 0.0) -> tuple[list[Tensor], Tensor]:
    """(queries, keys, values; weights of the output). apart: how much larger the keys of each rank are."""
    q, k, v, weights = (normal(n, 1, heads, sum(LENGTHS), 8) for n, heads in ((1, 2), (2, 1), (3, 1), (4, 2)))
    ranks = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return [t.float().to(DEVICE) for t in (q, k + apart * ranks[:, None], v)], weights.to(DEVICE)


def attend_whole(rows: list[Tensor], weights: Tensor, mask: Tensor | None, options: dict[str, Any]) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in rows]
    alpha = None if "read" in options else 2.0
    inputs = check_inputs(*leaves, key_mask=mask, cu_seqlens=None)
    out: Any = attend_here(inputs, alpha, 2.0, backend="eager", **options)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def attend_over_ranks(
    rows: list[Tensor], weights: Tensor, mask: Tensor | None, options: dict[str, Any], eager: tuple[int, ...] = ()
) -> tuple[list[Tensor], list[int]]:
    """(output and gradients of all rows, bytes sent); eager: the ranks that do without the kernels."""

    def work(ranks: Ranks) -> list[Tensor]:
        cut = slice(sum(LENGTHS[: ranks.rank]), sum(LENGTHS[: ranks.rank + 1]))
        leaves = [t[:, :, cut].clone().requires_grad_() for t in rows]
        inputs = check_inputs(*leaves, key_mask=None if mask is None else mask[:, cut], cu_seqlens=None)
        backend = "eager" if ranks.rank in eager else "triton"
        out = ranks.attend(ranks, inputs, None if "read" in options else 2.0, 2.0, backend=backend, **options)
        assert (type(out.grad_fn).__name__ == "AttendTogetherBackward") == (backend == "triton")
        with torch.autograd.set_multithreading_enabled(False):  # a GPU has one thread for the backward of all ranks
            return [out.detach(), *torch.autograd.grad((out * weights[:, :, cut]).sum(), leaves)]

    found, sent = run_ranks(LENGTHS, work)
    return [torch.cat(parts, 2) for parts in zip(*found, strict=True)], sent


def begin_in_turn(self: Sending, parcels: Any, expected: Any) -> None:
    """As `Sending.begin`, by the way that kernels' ranks send."""
    flat = [[t.contiguous().flatten().view(torch.uint8) for t in parts] for parts in parcels]
    every = [t for parts in flat for t in parts]
    out = torch.cat(every) if every else torch.empty(0, dtype=torch.uint8, device=self.device)
    sizes = [[sum(map(len, parts)) for parts in flat], [sum(map(count_bytes, forms)) for forms in expected]]
    self.under_way = mock.Mock(), self.ranks.swap(out, *sizes), out, expected


@pytest.mark.parametrize("name", CALLS)
def test_ranks_give_what_one_process_gives_and_may_differ_in_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(CALLS[name])
    rows, weights = draw_rows(apart=3.0)  # so that of what a rank has another rank's share is next to nothing
    mask = torch.arange(sum(LENGTHS), device=DEVICE)[None] % 5 > 0 if options.pop("mask", False) else None
    if mask is not None:
        mask[:, : LENGTHS[0]] = False  # a rank without any key
    make_playable(monkeypatch)
    monkeypatch.setattr(Sending, "begin", begin_in_turn)
    expected = attend_whole(rows, weights, mask, options)
    sizes = []
    for eager in ((), (1,)):
        found, sent = attend_over_ranks(rows, weights, mask, options, eager)
        sizes.append(sorted(sent))
        assert eager or count_played() == 4 * len(LENGTHS)  # the second time all steps come from their tapes
        for what, got, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            assert relative_error(got, wanted) <= 2e-5, (what, eager)
    assert sizes[0] == sizes[1]  # what is sent is the same


def test_what_the_kernels_do_not_do_is_left_to_others() -> None:
    rows, _ = draw_rows()
    inputs = check_inputs(*rows, key_mask=None, cu_seqlens=None)

    def can(backend: str = "triton", return_state: bool = False, **options: Any) -> bool:
        alpha = None if "read" in options else 2.0
        beta = options.pop("beta", 2.0)
        return fused.can_fuse(check_call(inputs, alpha=alpha, beta=beta, **options), backend, return_state)

    assert can()
    assert can(block_size=16)
    assert not can("eager")
    assert not can(return_state=True)
    assert not can(dropout_p=0.1)
    assert not can(beta=torch.full((1,), 2.0, device=DEVICE, requires_grad=True))
    assert not can(read="evidence", is_causal=True)
    assert not can(read="evidence", directions=torch.ones(3, 8, device=DEVICE))
