"""Which calls the kernels run on a device, and what is in the way of others: asked of every kind that matters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lln.kernels.call import FIELDS, Call
from lln.kernels.triton import plan
from lln.kernels.triton.support import DTYPES, explain_refusal

if TYPE_CHECKING:
    from lln.kernels.triton.fit import Fit

DIMS = (64, 128)
MODES = {"LLN": (False, None), "LLN+Diag": (False, 64), "LLN, causal": (True, None), "LLN+Diag, causal": (True, 64)}
# By directions (a number stands for so many learned ones), causality and block size.
EVIDENCE: dict[str, tuple[str | int | None, bool, int | None]] = {
    "evidence": (None, False, None), "evidence, signed": ("signed", False, None), "evidence, Diag": (None, False, 64),
    "evidence, directions": (256, False, None), "evidence, directions, Diag": (256, False, 64),
    "evidence, causal": (None, True, None), "evidence, directions, causal": (128, True, None),
    "evidence, mix": (256, False, 64), "evidence, mix, causal": (256, True, 64),
}  # fmt: skip
MIXED = ("evidence, mix", "evidence, mix, causal")  # mix="evidence" as `lln convert` chooses it


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
    is_causal, block_size = MODES.get(mode, (False, None))
    directions, is_causal, block_size = EVIDENCE.get(mode, (None, is_causal, block_size))
    heads, length = (4, length - 12) if hard else (2, length)

    def rows(number: int) -> torch.Tensor:
        return torch.empty(2, number, length, dim, dtype=dtype, device=device)

    def factor(number: int) -> torch.Tensor:
        return torch.ones((1, number, dim) if hard else (1, 1, 1), device=device)

    given: dict[str, Any] = dict.fromkeys(FIELDS)
    given |= {"query": rows(heads), "key": rows(2), "value": rows(2), "alpha": factor(heads), "beta": factor(2)}
    given |= {"block_size": block_size, "is_causal": is_causal, "scale": dim**-0.5, "dropout_p": 0.1 if hard else 0.0}
    if mode in MIXED:
        given |= {"joint": True, "overlap": is_causal, "offset": factor(heads)[..., :1] if hard else None}
    elif block_size is not None:
        given |= {"lln_weight": factor(heads), "block_weight": factor(heads)}
    if hard:
        given["key_mask"] = torch.ones(2, length, dtype=torch.bool, device=device)
        given["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        if block_size is not None:
            given["start"] = torch.zeros(2, dtype=torch.int64, device=device)
    call = Call(**given, read="evidence" if mode in EVIDENCE else "paper")
    if not isinstance(directions, int):
        return call.change(directions=directions)
    # With beta in it, as kernels take it.
    way = torch.ones(2 if hard and mode not in MIXED else 1, 2, directions, dim, device=device)
    return call.change(directions=way)


def fit_pass(name: str, call: Call, wanted: frozenset[str]) -> Fit:
    """What the "forward" or "backward" pass of a call runs with; raises DoesNotFit."""
    from lln.kernels.triton import evidence_join_launch, evidence_op, passes

    if call.joint:
        return evidence_join_launch.fit_pass(call, wanted if name == "backward" else None)
    if call.read == "evidence":
        outer = call.query, None, None, None, None
        return evidence_op.fit_forward(call) if name == "forward" else evidence_op.fit_backward(call, outer, wanted)
    if name == "forward":
        return passes.fit_forward(call)
    return passes.fit_backward(call, None, (call.query, None, None), wanted)


def ask(dtype: torch.dtype, dim: int, mode: str, device: torch.device) -> Answer:
    """For training with plain calls; compiles their kernels where that has not been done."""
    kind = str(dtype).removeprefix("torch."), dim, mode
    reason = explain_refusal(torch.empty(0, dim, dtype=dtype, device=device))
    if reason is None and plan.find_card(device) is None:
        reason = "Triton's interpreter, which would run them here, is for tests"
    if reason is not None:
        return Answer(*kind, "eager", reason)
    from lln.kernels.triton.fit import DoesNotFit

    call = build_call(dtype, dim, mode, device)
    try:
        passes = [fit_pass(name, call, frozenset({"query"})) for name in ("forward", "backward")]
    except DoesNotFit as lack:
        if "LLN+Diag" in mode and ask(dtype, dim, mode.replace("+Diag", ""), device).runs == "kernels":
            return Answer(*kind, "kernels, blocks eager", str(lack))
        return Answer(*kind, "eager", str(lack))
    return Answer(*kind, "kernels", parts=tuple(fit.part for fit in passes))


def survey(device: torch.device) -> Iterator[Answer]:
    for dtype, dim, mode in itertools.product(DTYPES, DIMS, (*MODES, *EVIDENCE)):
        yield ask(dtype, dim, mode, device)
