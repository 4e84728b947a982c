"""Recorded launches: without a GPU kernels are stood in for by functions that write through addresses."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from lln.kernels.triton import tape
from lln.kernels.triton.tape import Recording, Tape, addresses, signature


class Add:
    """out = x + y + number, as a kernel with a constant at its end would do it."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, stream: int | None = None) -> "Add":
            x, y, out, number, size = (v.data_ptr() if isinstance(v, Tensor) else v for v in args)
            if not isinstance(args[0], Tensor):
                assert grid == (3, 1, 1)
                assert stream == 0
                self.calls += 1
            a, b, c = (ctypes.cast(p, ctypes.POINTER(ctypes.c_float)) for p in (x, y, out))
            for i in range(size):
                c[i] = a[i] + b[i] + number
            return self

        return run


def record(kernel: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tape | None]:
    """out = (x + y + 1) + x + 2, over one piece of scratch memory."""
    recording = Recording([x, None, y])
    between, out = (recording.make(torch.empty(4)) for _ in range(2))
    for args in ((x, y, between, 1.0, 4), (between, x, out, 2.0, 4)):
        compiled = kernel[(3,)](*args)
        recording.launch(compiled, (3,), args)
    return out, recording.tape([out], x.device)


def test_a_tape_repeats_the_launches_with_new_addresses() -> None:
    kernel = Add()
    x, y = torch.randn(4), torch.randn(4)
    out, found = record(kernel, x, y)
    torch.testing.assert_close(out, (x + y + 1) + x + 2)
    assert found is not None
    assert found.scratch == 256
    for _ in range(3):
        x, y = torch.randn(4), torch.randn(4)
        (again,) = found.play(addresses([x, None, y]))
        torch.testing.assert_close(again, (x + y + 1) + x + 2)
    assert kernel.calls == 6
    first, second = found.play(addresses([x, None, y])), found.play(addresses([y, None, x]))
    assert first[0].data_ptr() != second[0].data_ptr()
    torch.testing.assert_close(first[0], (x + y + 1) + x + 2)


def test_a_tensor_from_elsewhere_is_not_repeated() -> None:
    kernel = Add()
    x, other = torch.randn(4), torch.randn(4)
    recording = Recording([x])
    out = recording.make(torch.empty(4))
    recording.launch(kernel, (3,), (x, other, out, 1.0, 4))
    assert recording.tape([out], x.device) is None


def test_a_result_that_torch_made_is_not_repeated() -> None:
    kernel = Add()
    x = torch.randn(4)
    recording = Recording([x])
    out = recording.make(torch.empty(4))
    recording.launch(kernel, (3,), (x, x, out, 1.0, 4))
    assert recording.tape([out + 1], x.device) is None
    assert recording.tape([out, out], x.device) is None
    assert recording.tape([out], x.device) is not None


def test_what_the_interpreter_runs_is_not_repeated() -> None:
    recording = Recording([])
    recording.launch(None, (3,), ())
    assert recording.tape([], torch.device("cpu")) is None


def test_signatures_tell_apart_what_launches_depend_on() -> None:
    x = torch.zeros(2, 3, 8, 16)
    same = signature([x, torch.zeros(2, 3, 8, 16), None])
    assert same == signature([torch.ones(2, 3, 8, 16), x, None])
    others = [
        [x, x, None],
        [x, torch.zeros(2, 3, 8, 16), torch.zeros(1)],
        [x, torch.zeros(2, 3, 16, 8), None],
        [x, torch.zeros(2, 8, 3, 16).transpose(1, 2), None],
        [x, torch.zeros(2, 3, 8, 16, dtype=torch.bfloat16), None],
        [x, torch.zeros(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16), None],
    ]
    found = {signature(tensors) for tensors in others}  # type: ignore[arg-type]
    assert len(found) == len(others)
    assert same not in found


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "TAPES", {})
    monkeypatch.setattr(tape, "MOST", 3)
    for i in range(10):
        tape.remember(tape.TAPES, i, None)
        assert len(tape.TAPES) <= 3
    assert 9 in tape.TAPES


def test_a_call_is_recorded_once_and_then_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "TAPES", {})
    kernel, asked = Add(), []

    def call(x: Tensor, y: Tensor, number: float, elsewhere: Tensor | None = None) -> Tensor:
        def launches(recording: Recording | None) -> list[Tensor]:
            asked.append(recording is not None)
            out = torch.empty(4) if recording is None else recording.make(torch.empty(4))
            args = (x, y if elsewhere is None else elsewhere, out, number, 4)
            compiled = kernel[(3,)](*args)
            if recording is not None:
                recording.launch(compiled, (3,), args)
            return [out]

        return tape.replay((number, signature([x, y])), [x, y], launches)[0]

    x, y, z = (torch.randn(4) for _ in range(3))
    for a, b in ((x, y), (y, z), (z, x)):
        torch.testing.assert_close(call(a, b, 1.0), a + b + 1)
    assert asked == [True]
    assert kernel.calls == 2
    torch.testing.assert_close(call(x, y, 2.0), x + y + 2)  # another key
    assert asked == [True, True]
    for _ in range(3):  # what cannot be played is tried once, and launched every time
        torch.testing.assert_close(call(x, y, 3.0, z), x + z + 3)
    assert asked == [True, True, True, False, False]
    assert kernel.calls == 2
