"""Which calls the kernels run on a device, and what is in the way of others: asked of every kind that matters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lln.kernels.call import FIELDS, Call
from lln.kernels.triton import plan
from lln.kernels.triton.support import DTYPES, explain_refusal

DIMS = (64, 128)
MODES = {"LLN": (False, None), "LLN+Diag": (False, 64), "LLN, causal": (True, None), "LLN+Diag, causal": (True, 64)}


@dataclasses.dataclass(frozen=True)
class Answer:
    """For calls of one kind: what runs them."""

    dtype: str
    dim: int
    mode: str
    runs: str  # kernels, eager, or of LLN+Diag: kernels, with blocks by eager
    reason: str = ""  # of anything but kernels
    parts: tuple[int, ...] = ()  # channels of the values at once, forward and backward


def build_call(
    dtype: torch.dtype, dim: int, mode: str, device: torch.device, *, length: int = 512, hard: bool = False
) -> Call:
    """A call of this kind. hard: with all that asks for room, which is a key mask, dropout, two query heads a key head,
    factors of every channel, and lengths that leave tiles half full."""
    is_causal, block_size = MODES[mode]
    heads, length = (4, length - 12) if hard else (2, length)

    def rows(number: int) -> torch.Tensor:
        return torch.empty(2, number, length, dim, dtype=dtype, device=device)

    def factor(number: int) -> torch.Tensor:
        return torch.ones((1, number, dim) if hard else (1, 1, 1), device=device)

    given: dict[str, Any] = dict.fromkeys(FIELDS)
    given |= {"query": rows(heads), "key": rows(2), "value": rows(2), "alpha": factor(heads), "beta": factor(2)}
    given |= {"block_size": block_size, "is_causal": is_causal, "scale": dim**-0.5, "dropout_p": 0.1 if hard else 0.0}
    if block_size is not None:
        given |= {"lln_weight": factor(heads), "block_weight": factor(heads)}
    if hard:
        given["key_mask"] = torch.ones(2, length, dtype=torch.bool, device=device)
        given["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        if block_size is not None:
            given["start"] = torch.zeros(2, dtype=torch.int64, device=device)
    return Call(**given)


def ask(dtype: torch.dtype, dim: int, mode: str, device: torch.device) -> Answer:
    """For training with plain calls; compiles their kernels where that has not been done."""
    kind = str(dtype).removeprefix("torch."), dim, mode
    reason = explain_refusal(torch.empty(0, dim, dtype=dtype, device=device))
    if reason is None and plan.find_card(device) is None:
        reason = "Triton's interpreter, which would run them here, is for tests"
    if reason is not None:
        return Answer(*kind, "eager", reason)
    from lln.kernels.triton.fit import DoesNotFit
    from lln.kernels.triton.passes import fit_backward, fit_forward

    call = build_call(dtype, dim, mode, device)
    try:
        passes = fit_forward(call), fit_backward(call, None, (call.query, None, None), frozenset({"query"}))
    except DoesNotFit as lack:
        if "Diag" in mode and ask(dtype, dim, mode.replace("+Diag", ""), device).runs == "kernels":
            return Answer(*kind, "kernels, blocks eager", str(lack))
        return Answer(*kind, "eager", str(lack))
    return Answer(*kind, "kernels", parts=tuple(fit.part for fit in passes))


def survey(device: torch.device) -> Iterator[Answer]:
    for dtype, dim, mode in itertools.product(DTYPES, DIMS, MODES):
        yield ask(dtype, dim, mode, device)
