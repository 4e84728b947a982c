"""What users of PyTorch do with an op: compile it, checkpoint it, differentiate it functionally, autocast it."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.tensors import make_inputs, weighted_gradients
from helpers.untyped import lln_attention
from lln import LLNState

CALLS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "blocks": {"block_size": 8},
    "blocks with padding": {"block_size": 8, "key_mask": torch.arange(20).expand(2, 20) >= torch.tensor([[3], [0]])},
}


def make_leaves(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in make_inputs(2, 2, 2, 20, 4, dtype=dtype)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_one_graph_it_gives_the_same(name: str) -> None:
    torch.compiler.reset()
    leaves = make_leaves()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lln_attention(q, k, v, 1.5, 1.5, **CALLS[name])

    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(weighted_gradients(out, leaves), weighted_gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_dropout_and_gradients_exactly(use_reentrant: bool) -> None:
    leaves = make_leaves()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lln_attention(q, k, v, 1.5, 1.5, block_size=8, dropout_p=0.3)

    results = []
    for run in (lambda: call(*leaves), lambda: checkpoint(call, *leaves, use_reentrant=use_reentrant)):
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(5)
        run().square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_functional_gradients_are_the_gradients(name: str) -> None:
    leaves = make_leaves()

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return lln_attention(*tensors, 1.5, 1.5, **CALLS[name]).square().sum()

    functional = torch.func.grad(loss, argnums=(0, 1, 2))(*leaves)
    for got, wanted in zip(functional, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_narrows_the_inputs_and_nothing_inside(name: str) -> None:
    leaves = make_leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = lln_attention(*leaves, 1.5, 1.5, **CALLS[name])
        grads = weighted_gradients(out, leaves)  # the backward pass, too, may run under autocast
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    expected = lln_attention(*narrow, 1.5, 1.5, **CALLS[name])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    for got, wanted in zip(grads, weighted_gradients(expected, narrow), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted.float())


def test_float64_is_left_alone_by_autocast() -> None:
    leaves = make_leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = lln_attention(*leaves, 1.5, 1.5, is_causal=True)
    assert torch.equal(out, lln_attention(*leaves, 1.5, 1.5, is_causal=True))


@pytest.mark.parametrize("name", CALLS)
def test_transposed_views_as_models_pass_them_give_the_same(name: str) -> None:
    leaves = make_leaves()
    views = [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]
    assert not views[0].is_contiguous()
    out, expected = (lln_attention(*t, 1.5, 1.5, **CALLS[name]) for t in (views, leaves))
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def test_inputs_are_not_written_to() -> None:
    for options in CALLS.values():
        leaves = make_leaves()
        copies = [leaf.detach().clone() for leaf in leaves]
        weighted_gradients(lln_attention(*leaves, 1.5, 1.5, **options), leaves)
        for leaf, before in zip(leaves, copies, strict=True):
            assert torch.equal(leaf, before)


def test_repeated_runs_are_bit_equal() -> None:
    leaves = make_leaves(torch.float32)
    runs = [
        weighted_gradients(lln_attention(*leaves, 1.5, 1.5, block_size=8, is_causal=True), leaves) for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block_size", [None, 8])
def test_a_compiled_step_takes_and_gives_a_state(block_size: int | None) -> None:
    torch.compiler.reset()
    options = {"is_causal": True, "block_size": block_size, "return_state": True}
    first, second = make_leaves(), make_leaves()
    state = lln_attention(*first, 1.5, 1.5, **options)[1].detach()
    expected, after = lln_attention(*second, 1.5, 1.5, state=state, **options)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: LLNState) -> tuple[torch.Tensor, LLNState]:
        return lln_attention(q, k, v, 1.5, 1.5, state=state, **options)

    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, compiled_after = compiled(*second, state)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(compiled_after.mean_value, after.mean_value)


def test_a_state_survives_copying_pickling_and_saving() -> None:
    leaves = [leaf.detach() for leaf in make_leaves()]
    _, state = lln_attention(*leaves, 1.5, 1.5, is_causal=True, block_size=8, return_state=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file)):
        out, expected = (
            lln_attention(*leaves, 1.5, 1.5, is_causal=True, block_size=8, state=s) for s in (copied, state)
        )
        assert torch.equal(out, expected)


def test_inference_mode_gives_the_same() -> None:
    leaves = make_leaves()
    with torch.inference_mode():
        out, state = lln_attention(*leaves, 1.5, 1.5, is_causal=True, return_state=True)
        again = lln_attention(*leaves, 1.5, 1.5, is_causal=True, state=state)
    assert torch.equal(out, lln_attention(*leaves, 1.5, 1.5, is_causal=True))
    assert again.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"block_size": 8}])
def test_shapes_can_be_worked_out_without_data(options: dict[str, Any]) -> None:
    q, k, v = (torch.empty(2, h, 20, d, device="meta", requires_grad=True) for h, d in ((4, 6), (2, 6), (2, 5)))
    out = lln_attention(q, k, v, 1.5, 1.5, **options)
    assert out.shape == (2, 4, 20, 5)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"block_size": 8}])
def test_an_empty_batch_gives_an_empty_output(options: dict[str, Any]) -> None:
    leaves = [leaf[:0].detach().requires_grad_() for leaf in make_leaves()]
    out = lln_attention(*leaves, 1.5, 1.5, **options)
    assert out.shape == (0, 2, 20, 4)
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [leaf.shape for leaf in leaves]


def test_offsets_may_be_int64_and_numbers_numpy_ones() -> None:
    q, k, v = (leaf[:1].detach() for leaf in make_leaves())
    for block_size in (4, np.int64(4)):
        outs = [
            lln_attention(
                q, k, v, factor, factor, block_size=block_size, cu_seqlens=torch.tensor([0, 7, 20], dtype=dtype)
            )
            for dtype, factor in ((torch.int32, 1.5), (torch.int64, np.float32(1.5)))
        ]
        assert torch.equal(*outs)
