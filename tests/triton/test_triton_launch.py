"""What the driver is asked for when a tape is played: a function in the place of cuLaunchKernel reads it back."""

import ctypes
import struct
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.build import compile_module_from_src

from lln.kernels.triton import launch

PTX = """.visible .entry add(
    .param .u64 .ptr .global .align 1 add_param_0,
    .param .u64 .ptr .global .align 1 add_param_1,
    .param .u32 add_param_2,
    .param .f32 add_param_3,
    .param .u64 .ptr .global .align 1 add_param_4
)"""
KINDS = {"x": "*fp32", "y": "*bf16", "n": "i32", "BLOCK": "constexpr", "f": "fp32", "out": "*fp32"}
TYPES = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]


def make_compiled(function: int, **changed: Any) -> Any:
    """As Triton describes a kernel of two given pointers, a size, a switch, a factor and an output."""
    facts = {
        "launch_cooperative_grid": False, "launch_pdl": False, "num_ctas": 1, "global_scratch_size": 0,
        "profile_scratch_size": 0, "num_warps": 4, "shared": 1024, "name": "add",
    }  # fmt: skip
    metadata, source = SimpleNamespace(**(facts | changed)), SimpleNamespace(signature=KINDS)
    return SimpleNamespace(metadata=metadata, src=source, asm={"ptx": PTX}, function=function)


class Driver:
    """Keeps what it is asked to launch, and answers with codes."""

    def __init__(self, *codes: int) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.codes = list(codes)
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *TYPES)(self.launch)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        assert parameters is None
        words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p * 5)).contents
        assert (words[0], words[2], words[4]) == (1, 2, None)
        size = ctypes.c_size_t.from_address(words[3] or 0).value
        self.asked.append((function, sizes, stream, struct.unpack("QQifQ", ctypes.string_at(words[1] or 0, size))))
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture(scope="module")
def run() -> Any:
    source = (files("lln.kernels.triton") / "play.c").read_text()
    return compile_module_from_src(src=source, name="lln_play").play


def make_kernel(function: int, number: float, places: list[launch.Place]) -> launch.Kernel:
    return make_compiled(function), (7, 2, 1), [None, None, 5, 64, number, None], places


def test_the_driver_is_given_addresses_and_constants_in_order(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(launch, "load_player", lambda: (run, driver.address))
    kernels = [
        make_kernel(11, 0.5, [(0, 0, 0), (1, 1, 8), (5, 2, 256)]),
        make_kernel(12, 0.25, [(0, 2, 256), (5, 3, 0)]),  # y is None
    ]
    play = launch.make_play(kernels)
    for bases in ([1000, 2000, 3000, 4000], [2**48, 2**48 + 16, 2**48 + 32, 2**63]):
        driver.asked.clear()
        play(bases, 99)
        x, y, between, out = bases
        sizes = [7, 2, 1, 128, 1, 1, 1024]
        assert driver.asked == [
            (11, sizes, 99, (x, y + 8, 5, 0.5, between + 256)),
            (12, sizes, 99, (between + 256, 0, 5, 0.25, out)),
        ]


def test_an_error_of_the_driver_ends_the_tape(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0, 700)
    monkeypatch.setattr(launch, "load_player", lambda: (run, driver.address))
    play = launch.make_play([make_kernel(n, 1.0, [(0, 0, 0)]) for n in (1, 2, 3)])
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        play([16], 0)
    assert [asked[0] for asked in driver.asked] == [1, 2]


def test_what_does_not_fit_play_is_refused(run: Any) -> None:
    for wrong in ((1, b"", [0]), (1, "", [0], 0), (1, b"", (0,), 0), (1, b"", [0] * 300, 0)):
        with pytest.raises(TypeError):
            run(*wrong)
    with pytest.raises((TypeError, OverflowError)):
        run(1, b"", [-1], 0)


@pytest.mark.parametrize("changed", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 64}])
def test_kernels_out_of_the_ordinary_are_launched_by_triton(changed: dict[str, Any]) -> None:
    assert launch.pack(make_compiled(1), (1, 1, 1), [None, None, 5, 64, 1.0, None], []) is not None
    assert launch.pack(make_compiled(1, **changed), (1, 1, 1), [None, None, 5, 64, 1.0, None], []) is None


def test_without_a_compiler_somebody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", refuse)
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: Failed to find C compiler\.\).*install gcc"):
        assert launch.load_player.__wrapped__() is None
