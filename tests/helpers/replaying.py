"""Calls that are played from their tape: without a GPU the interpreter stands in for compiled kernels, on memory at the
addresses that a tape gives it."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from helpers.triton_cases import GPU
from lln.kernels.triton import recognise, tape


class StandIn:
    """A compiled kernel: it takes addresses where it was given tensors."""

    def __init__(self, kernel: Any, values: tuple[Any, ...]) -> None:
        self.kernel, self.kinds = kernel, [(v.dtype, reach(v)) if isinstance(v, Tensor) else None for v in values]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, stream: int) -> None:
            values = [a if kind is None else view_memory(a, *kind) for a, kind in zip(args, self.kinds, strict=True)]
            self.kernel[grid[:1]](*values)

        return run


def reach(t: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def view_memory(address: int, dtype: torch.dtype, count: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def make_playable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was called yet, and everything can be played."""
    monkeypatch.setattr(tape, "TAPES", {})
    monkeypatch.setattr(recognise, "KNOWN", {})
    if GPU:
        return
    monkeypatch.setattr(tape, "raw_stream", lambda device: 0)
    run = InterpretedFunction.run

    def run_as_compiled(self: Any, *args: Any, **options: Any) -> StandIn:
        run(self, *args, **options)
        return StandIn(self, args)

    monkeypatch.setattr(InterpretedFunction, "run", run_as_compiled)


@contextlib.contextmanager
def forget_played() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape, "TAPES", {})
        patch.setattr(recognise, "KNOWN", {})
        yield


def count_played() -> int:
    """Calls that have a tape."""
    return sum(found is not None for found in tape.TAPES.values())


def count_recognised() -> int:
    """Calls that are known as a whole."""
    return sum(found is not recognise.NEVER for found in recognise.KNOWN.values())
