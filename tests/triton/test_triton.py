"""backend="triton" is eq. (8) at every size and in every layout: outputs, states and gradients against float64."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import normal
from helpers.triton_cases import DEVICE, GPU, MARKS, MODES, Case, build_arguments, check, errors, evaluate, only_triton
from helpers.untyped import lln_attention

pytestmark = MARKS

modes = pytest.mark.parametrize("mode", MODES)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


def test_the_memory_of_these_tests_is_poisoned() -> None:
    assert torch.empty(100, device=DEVICE).isnan().all()


@modes
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, *([1000, 4097] if GPU else [])])
def test_every_length(length: int, mode: str) -> None:
    check(Case((length,), key_heads=1, alpha="[H]", beta="[H]", **MODES[mode]))


@causal_or_not
@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 100, 150, 1000])
@pytest.mark.parametrize("length", [200, *([1500] if GPU else [])])
def test_every_block_size(length: int, block_size: int, is_causal: bool) -> None:
    check(Case((length,), key_heads=1, is_causal=is_causal, block_size=block_size, return_state=is_causal, scale=0.4))


@causal_or_not
@pytest.mark.parametrize("block_size", [65, 100, 128])
def test_blocks_that_only_bfloat16_has_in_one_tile(block_size: int, is_causal: bool) -> None:
    options: dict[str, Any] = {"is_causal": is_causal, "return_state": is_causal, "dtype": torch.bfloat16, "scale": 0.4}
    case = Case((200,), key_heads=1, dim=64 if GPU else 16, block_size=block_size, **options)
    check(case, 2e-5 if GPU else 4e-3)  # the interpreter cuts float32 to bfloat16 off where a GPU rounds


DIMENSIONS = [(1, 1), (8, 8), (16, 16), (24, 24), (40, 40), (64, 64), (80, 80), (128, 128)]
DIMENSIONS += [(8, 1), (16, 40), (64, 24), (40, 128), (1, 256), (256, 16)]


LARGEST = pytest.param(256, 256, True, marks=pytest.mark.long)  # 256 in one of the two is among the others


@pytest.mark.parametrize(
    ("dim", "value_dim", "is_causal"),
    [*((*d, True) for d in DIMENSIONS), *((*d, False) for d in DIMENSIONS[::3]), LARGEST],
)
def test_every_head_dimension(dim: int, value_dim: int, is_causal: bool) -> None:
    options: dict[str, Any] = {"state": is_causal, "return_state": is_causal, "mix": "wide pair"}
    options |= {"alpha": "[H, D]", "beta": "[H, D]"}
    check(Case((24,), key_heads=1, dim=dim, value_dim=value_dim, is_causal=is_causal, block_size=16, **options))


@modes
@pytest.mark.parametrize("mask", ["none", "left"])
def test_six_query_heads_share_two_key_heads(mask: str, mode: str) -> None:
    check(Case((36,), group=3, mask=mask, alpha="[H]", beta="[H]", **MODES[mode]))


CROSS = [(5, 70), (70, 5), (1, 65), (65, 1), (0, 9), (9, 0), (0, 0), *([(300, 3000), (3000, 300)] if GPU else [])]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("nq", "nk"), CROSS)
def test_cross_attention_fold_alone_and_read_alone(nq: int, nk: int, state: bool) -> None:
    options: dict[str, Any] = {"state": state, "return_state": True, "alpha": "[H]", "beta": "[H, D]"}
    check(Case((nq, nq), (nk, nk), key_heads=1, group=2, value_dim=24, **options))


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("length", [0, 1])
def test_a_causal_sequence_may_be_empty_or_one_token(length: int, block_size: int | None) -> None:
    check(Case((length, length), is_causal=True, block_size=block_size, state=True, return_state=True))


@modes
@pytest.mark.parametrize("lengths", [(0, 65, 1, 0, 33, 0), *([(1, 700, 0, 2048, 3)] if GPU else [])])
def test_packed_sequences_do_not_see_each_other(lengths: tuple[int, ...], mode: str) -> None:
    options: dict[str, Any] = {"alpha": "[B, H]", "beta": "[B, H]", "return_state": mode != "blocks"}
    check(Case(lengths, packed=True, key_heads=1, group=2, **MODES[mode], **options))


@pytest.mark.parametrize(("mask", "state"), [("none", False), ("holes", True)])
def test_packed_cross_attention_reads_its_own_source_only(mask: str, state: bool) -> None:
    options: dict[str, Any] = {"packed": True, "mask": mask, "state": state, "return_state": state, "beta": "[B, H]"}
    check(Case((5, 0, 66, 3), (66, 4, 0, 30), group=2, value_dim=8, **options))


@modes
@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_without_valid_keys_gives_zeros_and_zero_gradients(packed: bool, mode: str) -> None:
    found = evaluate(Case((20, 20), packed=packed, key_heads=1, group=2, mask="dead sample", **MODES[mode]))
    for name in ("out", "d query", "d key", "d value"):
        dead, other = found[name].split(20, 2) if packed else found[name].split(1)
        assert not dead.any(), name  # NaN counts as any
        assert other.isfinite().all()
        assert other.any()


@modes
def test_what_is_hidden_has_no_gradient_and_does_not_matter(mode: str) -> None:
    case = Case((70,), key_heads=1, mask="holes", **MODES[mode])
    found, hidden = evaluate(case), ~build_arguments(case)["key_mask"][0]
    assert not found["d key"][0, 0, hidden].any()
    assert not found["d value"][0, 0, hidden].any()

    def change_numbers(given: dict[str, Any]) -> dict[str, Any]:
        noise = 50 * normal(40, 70, 16).to(DEVICE, torch.float32) * hidden[:, None].to(DEVICE)
        return given | {name: given[name] + noise for name in ("key", "value")}

    changed = evaluate(case, layout=change_numbers)
    assert max(errors(changed, found).values()) <= 1e-6


# Layouts in memory. Each has the same numbers as before, except that "expanded" repeats some.


def change_each(function: Callable[[Tensor], Tensor], *names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: given | {name: function(given[name]) for name in names or ("query", "key", "value")}


def transpose(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def add_stride(x: Tensor) -> Tensor:
    return torch.stack([x, x.detach() + 1], -1)[..., 0]


def columns(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def unalign(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def fuse(given: dict[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value")
    parts = torch.stack([given[name].transpose(1, 2) for name in names], 2).unbind(2)  # [B, N, 3, H, D] -> [B, N, H, D]
    return given | {name: x.transpose(1, 2) for name, x in zip(names, parts, strict=True)}


def expand_rows(given: dict[str, Any]) -> dict[str, Any]:
    given = change_each(lambda x: x[:1].expand_as(x), "query", "alpha", "key_mask")(given)
    given = change_each(lambda x: x[:, :1].expand_as(x), "key", "beta", "mix r", "mix p")(given)
    return change_each(lambda x: x[..., :1, :].expand_as(x), "value")(given)


LAYOUTS: dict[str, tuple[Callable, Callable]] = {  # of the arguments, of the gradient that comes back
    "transposed": (change_each(transpose), transpose),
    "fused": (fuse, lambda g: g),
    "last stride 2": (change_each(add_stride), add_stride),
    "last stride length": (change_each(columns), columns),
    "unaligned": (change_each(unalign, "query", "key", "value", "alpha", "beta"), unalign),
    "expanded": (expand_rows, lambda g: g[..., :1].expand_as(g)),
    "summed": (change_each(lambda x: x), lambda g: g.new_ones(()).expand_as(g)),
    "state": (change_each(columns, "state mean_value", "state block_key", "state block_value"), lambda g: g),
}


LAID_OUT = [(name, is_causal) for name in LAYOUTS for is_causal in (True, False) if is_causal or name != "state"]


@pytest.mark.parametrize(("name", "is_causal"), LAID_OUT)  # a state with a block is causal only
def test_memory_layout_is_invisible(name: str, is_causal: bool) -> None:
    layout, upstream = LAYOUTS[name]
    options: dict[str, Any] = {"mask": "left", "alpha": "[B, H, D]", "beta": "[B, H, D]", "mix": "wide pair"}
    options |= {"return_state": is_causal, "state": name == "state"}
    check(Case((20, 20), is_causal=is_causal, block_size=16, **options), layout=layout, upstream=upstream)


@modes
def test_arguments_are_not_written_to(mode: str) -> None:
    case = Case((20, 20), mask="left", alpha="[H]", beta="[H]", state=mode == "causal blocks", **MODES[mode])
    seen: dict[str, Any] = {}
    evaluate(case, layout=lambda given: seen.update(given) or given)
    for name, before in build_arguments(case).items():
        if isinstance(before, Tensor):
            assert torch.equal(seen[name].detach().cpu(), before), name


@pytest.mark.parametrize(("mode", "packed"), [("bidirectional", False), ("causal", True), ("blocks", True)])
def test_repeated_runs_are_bit_equal(mode: str, packed: bool) -> None:
    options: dict[str, Any] = {"alpha": "[H]", "beta": "[H]", "mix": "pair", "mask": "holes", "group": 2}
    case = Case((65, 1) if packed else (65,), packed=packed, key_heads=1, **options, **MODES[mode])
    first, second = evaluate(case), evaluate(case)
    for name in first:
        assert torch.equal(first[name], second[name]), name


# What it does not take.


def complaint(q: Tensor, k: Tensor, v: Tensor) -> str:
    with pytest.raises(ValueError, match=r"backend='triton'[^\n]*'eager'[^\n]*\.$") as caught:
        lln_attention(q, k, v, 1.5, 1.5, backend="triton")
    assert ". " not in str(caught.value), "one sentence"
    return str(caught.value)


@only_triton
def test_it_says_what_it_cannot_take_and_what_can() -> None:
    q, k, v = (torch.randn(1, 1, 4, 16, device=DEVICE) for _ in range(3))
    assert "float64" in complaint(q.double(), k.double(), v.double())
    wide = torch.zeros(1, 1, 4, 257, device=DEVICE)
    message = complaint(wide, wide, v)
    assert "256" in message
    assert "257" in message


WITHOUT_INTERPRETER = """
import sys, torch, lln
q = torch.randn(1, 2, 70, 16)
lln.lln_attention(q, q, q, 1.5, 1.5, block_size=16, is_causal=True)
print("triton" in sys.modules)
try:
    lln.lln_attention(q, q, q, 1.5, 1.5, backend="triton")
except ValueError as error:
    print(error)
"""


@only_triton
def test_tensors_on_the_cpu_need_the_interpreter_and_auto_leaves_triton_alone() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERPRETER], env=environment, capture_output=True, text=True, check=True
    )
    loaded, message = run.stdout.splitlines()
    assert loaded == "False"
    assert "backend='triton'" in message
    assert "CPU" in message or "cpu" in message
    assert "'eager'" in message or "'auto'" in message


@modes
def test_auto_on_the_cpu_is_eager_even_with_the_interpreter(mode: str) -> None:
    q, k, v = (torch.randn(1, 1, 130, 16) for _ in range(3))
    outs = [lln_attention(q, k, v, 1.5, 1.5, backend=backend, **MODES[mode]) for backend in ("auto", "eager")]
    assert torch.equal(*outs)
