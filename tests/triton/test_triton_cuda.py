"""backend="triton" on a GPU alone: graphs, no waiting for the device, memory, sizes beyond launch grids and int32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.call_options import make_offsets
from helpers.tensors import relative_error
from helpers.triton_cases import GPU, MODES, attend
from helpers.untyped import lln_attention
from helpers.waiting import forbid_waiting
from lln import LLNState
from lln.kernels.triton import tape
from lln.matching.moments import both_moments, sigma

if not GPU:
    pytest.skip("conftest.py leaves this file out where there is no GPU", allow_module_level=True)

LENGTH = 300
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "causal blocks": lambda: {"is_causal": True, "block_size": 48},
    "packed": lambda: {"cu_seqlens": make_offsets((100, 0, 200), "cuda"), "block_size": 64},
    "packed causal": lambda: {"cu_seqlens": make_offsets((100, 0, 200), "cuda"), "block_size": 64, "is_causal": True},
    "masked": lambda: {"key_mask": torch.arange(LENGTH, device="cuda")[None] >= 30, "block_size": 64},
    "dropout": lambda: {"dropout_p": 0.3, "block_size": 64, "is_causal": True},
    "state": lambda: {"state": LLNState.empty(1, 1, 64, block_size=64, device="cuda"), "block_size": 64,
                      "is_causal": True},
}  # fmt: skip
calls = pytest.mark.parametrize("name", CALLS)


def leaves(length: int = LENGTH, dim: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, h, length, dim, device="cuda", dtype=dtype, requires_grad=True) for h in (2, 1, 1)]


def run_both_passes(tensors: list[Tensor], g: Tensor, options: dict[str, Any], seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    out = attend(*tensors, 1.2, 1.4, **options)
    return [out, *torch.autograd.grad(out, tensors, g)]


@calls
def test_the_host_never_waits_for_the_device(name: str) -> None:
    tensors, options, g = leaves(), CALLS[name](), torch.randn(1, 2, LENGTH, 64, device="cuda")
    run_both_passes(tensors, g, options)  # kernels are compiled once
    with forbid_waiting():
        run_both_passes(tensors, g, options)


@calls
def test_a_replayed_graph_computes_with_the_new_inputs(name: str) -> None:
    tensors, options, g = leaves(), CALLS[name](), torch.randn(1, 2, LENGTH, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_both_passes(tensors, g, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.manual_seed(1)
    with torch.cuda.graph(graph):
        out = attend(*tensors, 1.2, 1.4, **options)
        captured = [out, *torch.autograd.grad(out, tensors, g)]
    for seed in (5, 6):
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for x in (*tensors, g):
                x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        graph.replay()
        replayed = [x.clone() for x in captured]
        if name == "dropout":  # which weights a replay drops is its own affair: linear in the values all the same
            total = (replayed[0].double() * g).sum().item()
            assert (replayed[3].double() * tensors[2]).sum().item() == pytest.approx(total, rel=1e-5, abs=1e-3)
            continue
        for got, wanted in zip(replayed, run_both_passes(tensors, g, options), strict=True):
            assert torch.equal(got, wanted)


@calls
def test_another_stream_gives_the_same(name: str) -> None:
    tensors, options, g = leaves(), CALLS[name](), torch.randn(1, 2, LENGTH, 64, device="cuda")
    expected = run_both_passes(tensors, g, options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = run_both_passes(tensors, g, options)
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["plain", "causal", "causal blocks", "dropout", "state"])
def test_what_is_held_until_backward_does_not_grow_with_length(name: str) -> None:
    options, held = CALLS[name](), []
    for length in (4096, 65536):
        tensors = leaves(length)
        attend(*tensors, 1.2, 1.4, **options)
        before = torch.cuda.memory_allocated()
        out = attend(*tensors, 1.2, 1.4, **options)
        held.append(torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes())
    assert held[1] <= held[0] + 4096


@pytest.mark.parametrize("mode", MODES)
def test_peak_memory_is_a_few_times_the_arguments(mode: str) -> None:
    """Query, output, their gradients and those of key and value, and no more than as much again."""
    tensors = leaves(131072, dtype=torch.bfloat16)
    g = torch.randn(1, 2, 131072, 64, device="cuda", dtype=torch.bfloat16)
    run_both_passes(tensors, g, MODES[mode])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_both_passes(tensors, g, MODES[mode])
    results = g.nbytes + sum(x.nbytes for x in tensors)
    assert torch.cuda.max_memory_allocated() - before <= 4 * results


@pytest.mark.parametrize("mode", MODES)
def test_more_sequences_than_a_grid_dimension_holds(mode: str) -> None:
    tensors = [torch.randn(70_000, 1, 3, 16, device="cuda", requires_grad=True) for _ in range(3)]
    g = torch.randn(70_000, 1, 3, 16, device="cuda")
    found = run_both_passes(tensors, g, MODES[mode])
    last = [x[-2:].detach().requires_grad_() for x in tensors]
    for got, wanted in zip(found, run_both_passes(last, g[-2:], MODES[mode]), strict=True):
        assert relative_error(got[-2:], wanted) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_strides_beyond_int32_are_followed(mode: str) -> None:
    """Two samples of one large buffer, more than 2 ** 31 elements apart where there is memory for it."""
    stride = (2**31 if torch.cuda.mem_get_info()[0] > 16 * 2**30 else 2**24) // 64
    buffer = torch.zeros(1, stride + 1024, 64, device="cuda", dtype=torch.bfloat16)
    narrow = torch.randn(3, 2, 1, 130, 64, device="cuda").bfloat16()
    tensors = []
    for i in range(3):
        far = buffer.as_strided((2, 1, 130, 64), (stride * 64, 64, 64, 1), i * 130 * 64)
        far.copy_(narrow[i])
        tensors.append(far.requires_grad_())
    g = torch.randn(2, 1, 130, 64, device="cuda").bfloat16()
    near = [x.clone().requires_grad_() for x in narrow]
    for got, wanted in zip(
        run_both_passes(tensors, g, MODES[mode]), run_both_passes(near, g, MODES[mode]), strict=True
    ):
        assert relative_error(got, wanted) <= 1e-6


def test_auto_takes_what_only_eager_can() -> None:
    wide = [x.detach().double() for x in leaves(70)]
    assert torch.equal(lln_attention(*wide, 1.2, 1.4), lln_attention(*wide, 1.2, 1.4, backend="eager"))
    long = [torch.randn(1, 1, 70, 300, device="cuda") for _ in range(3)]
    assert torch.equal(lln_attention(*long, 1.2, 1.4), lln_attention(*long, 1.2, 1.4, backend="eager"))
    for moved in ([x.float() for x in wide], [x.bfloat16() for x in wide]):
        expected = lln_attention(*wide, 1.2, 1.4)
        assert relative_error(lln_attention(*moved, 1.2, 1.4), expected) <= 1e-2


def test_statistics_of_more_programs_than_a_second_grid_dimension_would_take() -> None:
    query = torch.randn(17_000, 4, 2, 4, device="cuda")
    found = both_moments(query, query, 4, backend="triton")
    torch.testing.assert_close(sigma(*found[0]).float(), query.flatten(2).std(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_repeated_calls_follow_their_inputs(is_causal: bool, block_size: int | None) -> None:
    """The second call of a kind plays the launches of the first: see lln.kernels.triton.tape."""
    options = {"is_causal": is_causal, "block_size": block_size}
    tape.TAPES.clear()
    for offset in (0, 0, 1, 0, 1):  # also at addresses that are no multiple of 16 bytes
        heap = [torch.randn(2 * LENGTH * 64 + 1, device="cuda") for _ in range(3)]
        tensors = [x[offset:][: 2 * LENGTH * 64].view(1, 2, LENGTH, 64).detach().requires_grad_() for x in heap]
        g = torch.randn(1, 2, LENGTH, 64, device="cuda")
        wide = [x.detach().double().requires_grad_() for x in tensors]
        exact = lln_attention(*wide, 1.2, 1.4, **options, backend="eager")
        expected = [exact, *torch.autograd.grad(exact, wide, g.double())]
        assert max(map(relative_error, run_both_passes(tensors, g, options), expected)) < 1e-5
    assert [x is not None for x in tape.TAPES.values()] == [True] * 4  # forward and backward, aligned and not


def test_repeated_calls_with_one_tensor_for_all_and_its_gradient() -> None:
    x = torch.randn(1, 2, LENGTH, 64, device="cuda")
    for tensors, g in (([x, x, x], x), ([x, x.clone(), x.clone()], x.clone()), ([x.clone(), x, x], x)):
        inputs = [t.detach() for t in {id(t): t for t in tensors}.values()]
        place = {id(t): i for i, t in enumerate({id(t): t for t in tensors}.values())}
        found, wide = ([t.clone().to(d).requires_grad_() for t in inputs] for d in (torch.float32, torch.float64))
        both = []
        for leaf, backend in ((found, "triton"), (wide, "eager")):
            out = lln_attention(*(leaf[place[id(t)]] for t in tensors), 1.2, 1.4, backend=backend)
            both.append([out, *torch.autograd.grad(out, leaf, g.to(out.dtype))])
        assert max(map(relative_error, *both)) < 1e-5
