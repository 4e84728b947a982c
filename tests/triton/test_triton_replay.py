"""Calls that are played from their tape: without a GPU the interpreter stands in for compiled kernels, on memory at the
addresses that a tape gives it."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.replaying import count_played, count_recognised, forget_played
from helpers.tensors import normal
from helpers.triton_cases import DEVICE, MARKS, MODES, attend, only_triton
from lln import LLNAttention
from lln.kernels.triton import op

pytestmark = [
    *MARKS,
    only_triton,
    pytest.mark.usefixtures("playable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own
]

CASES: dict[str, dict[str, Any]] = MODES | {
    "dropout": {"dropout_p": 0.3, "block_size": 48},
    "padded": {"block_size": 16, "key_mask": torch.arange(70, device=DEVICE)[None] >= 9},
    "padded causal": {"is_causal": True, "key_mask": torch.arange(70, device=DEVICE)[None] >= 9},
}
cases = pytest.mark.parametrize("case", CASES)
Hooks = contextlib.AbstractContextManager[Any]


def leaves(seed: int, length: int = 70) -> list[Tensor]:
    """As models pass them: heads and tokens exchanged."""
    shapes = [(1, length, heads, 16) for heads in (2, 1, 1)]
    made = [normal(4 * seed + i, *shape).to(DEVICE, torch.float32).transpose(1, 2) for i, shape in enumerate(shapes)]
    return [x.detach().requires_grad_() for x in made]


def pass_through(given: list[Tensor], function: Callable[..., Tensor], hooks: Hooks | None = None) -> list[Tensor]:
    torch.manual_seed(3)
    with hooks or contextlib.nullcontext():
        out = function(*given)
    return [out.detach(), *torch.autograd.grad(out, given, normal(30, *out.shape).to(out))]


def are_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@cases
def test_a_played_call_gives_the_same_bits(case: str) -> None:
    def call(*given: Tensor) -> Tensor:
        return attend(*given, 1.2, 1.4, **CASES[case])

    for seed in range(3):
        given = leaves(seed)
        found = pass_through(given, call)
        with forget_played():
            assert are_equal(found, pass_through(given, call))
    assert count_played() == 2 + (case == "padded")  # the start of the blocks, forward and backward
    assert count_recognised() == 1


@cases
def test_compiled_calls_are_played(case: str) -> None:
    torch.compiler.reset()

    def call(*given: Tensor) -> Tensor:
        return attend(*given, 1.2, 1.4, **CASES[case])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        given = leaves(seed)
        found = pass_through(given, compiled)
        with forget_played():
            assert are_equal(found, pass_through(given, call))
    assert count_played() == 2


@pytest.mark.parametrize("statistics", ["sample", "batch", "running"])
def test_statistics_are_played(statistics: Any) -> None:
    torch.manual_seed(0)
    attention = LLNAttention(2, 16, num_key_heads=1, statistics=statistics, backend="triton").to(DEVICE)
    attention.eval()  # running averages stay
    for seed in range(3):
        given = leaves(seed)
        found = pass_through(given, attention)
        with forget_played():
            assert are_equal(found, pass_through(given, attention))
    assert count_played() == 3


def offload() -> Hooks:
    """What torch.autograd.graph.save_on_cpu(pin_memory=True) does: what comes back is contiguous."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: torch.empty_like(t).copy_(t).contiguous(), lambda t: t)


@cases
def test_tensors_that_come_back_with_other_strides_are_told_apart(case: str) -> None:
    def call(*given: Tensor) -> Tensor:
        return attend(*given, 1.2, 1.4, **CASES[case])

    for seed, hooks in enumerate((None, offload(), None, offload())):
        given = leaves(seed)
        found = pass_through(given, call, hooks)
        with forget_played():
            assert are_equal(found, pass_through(given, call))
    assert count_played() == 3 + (case == "padded")  # one forward, two backward; the start of the blocks


@pytest.mark.parametrize("case", [name for name in CASES if "causal" not in name])  # those always fold again
def test_keys_that_are_folded_again_give_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (0, 2**18):
        monkeypatch.setattr(op, "FREE", free)
        found.append(pass_through(leaves(0), lambda *given: attend(*given, 1.2, 1.4, **CASES[case])))
    assert are_equal(*found)
