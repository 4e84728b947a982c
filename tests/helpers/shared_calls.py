"""Calls whose rows lie on several ranks, compared with the same calls of one process. They run in those processes."""

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import lln
from helpers.tensors import relative_error
from helpers.untyped import lln_attention
from lln.distributed import across, context_parallel, sum_gradients, unshard
from lln.distributed.near import attend_near
from lln.lab.bench.traffic import Traffic
from lln.ranks import Sending

attend_across: Any = lln.distributed.attend_across  # of options that are drawn


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_call(
    total: int, *, batch: int = 2, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (8, 6),
    mask: str | None = None, factors: str = "number", packed: list[int] | None = None, mix: str = "number",
    directions: str | None = None, **options: Any,
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """(q, k, v; alpha, beta and what else requires grad, by name; all other options)"""
    batch = 1 if packed else batch
    many = len(packed) - 1 if packed else batch
    qkv = [draw(1, batch, heads[0], total, dims[0]), draw(2, batch, heads[1], total, dims[0])]
    qkv.append(draw(3, batch, heads[1], total, dims[1]))
    learned: dict[str, Any] = {}
    if options.get("read") != "evidence":
        learned["alpha"] = 1.2 if factors == "number" else 1.0 + draw(4, many, heads[0], 1).abs()
    learned["beta"] = 1.4 if factors == "number" else 1.0 + draw(5, many, heads[1], 1).abs()
    if directions == "tensor":
        learned["directions"] = draw(8, heads[1], 5, dims[0])
    elif directions is not None:
        options["directions"] = directions
    if options.get("block_size") is not None and mix == "tensor":
        learned["mix"] = draw(6, many, heads[0], 1).sigmoid()
    at = torch.arange(total)
    if mask == "left":
        options["key_mask"] = at >= torch.tensor([[7 + 8 * row] for row in range(batch)])
    elif mask == "right":
        options["key_mask"] = at < torch.tensor([[total - 3 - 9 * row] for row in range(batch)])
    elif mask == "holes":
        options["key_mask"] = draw(7, batch, total) > -0.5
    elif mask == "dead":
        options["key_mask"] = torch.arange(batch)[:, None] + at * 0 > 0
    if packed:
        options["cu_seqlens"] = torch.tensor(packed, dtype=torch.int32)
    return qkv, learned, options


def compare(mesh: DeviceMesh, rank: int, lengths: tuple[int, ...], settings: dict[str, Any]) -> dict[str, float]:
    """The largest differences from one process, relative to the largest number, of the output and every gradient."""
    settings = dict(settings)
    wants_state = settings.pop("return_state", False)
    told = settings.pop("told", False)
    qkv, learned, options = make_call(sum(lengths), **settings)
    leaves = [t for t in (*qkv, *learned.values()) if isinstance(t, Tensor)]
    for leaf in leaves:
        leaf.requires_grad_()
    whole = lln_attention(*qkv, **learned, **options)
    weights = draw(9, *whole.shape)
    expected = torch.autograd.grad((whole * weights).sum(), leaves)

    rows = [t.split(list(lengths), 2)[rank].detach().requires_grad_() for t in qkv]
    given = {n: t.detach().requires_grad_() if isinstance(t, Tensor) else t for n, t in learned.items()}
    here = {n: t.split(list(lengths), 1)[rank] if n == "key_mask" else t for n, t in options.items()}
    out = attend_across(mesh, *rows, **given, **here, lengths=lengths if told else None)
    own = [*rows, *(t for t in given.values() if isinstance(t, Tensor))]
    loss = (out * weights.split(list(lengths), 2)[rank]).sum()
    # Where there are no rows nothing was used, and yet all ranks go backward.
    grads = torch.autograd.grad(loss, own, materialize_grads=not lengths[rank])

    found = compare_rows([out, *grads[:3]], [whole, *expected[:3]], lengths, rank)
    names = [name for name, t in given.items() if isinstance(t, Tensor)]
    for name, grad, want in zip(names, grads[3:], expected[3:], strict=True):
        total = grad.clone(memory_format=torch.contiguous_format)  # gloo adds memory up, however it lies
        torch.distributed.all_reduce(total, group=mesh.get_group())
        found[f"d{name}"] = relative_error(total, want)
    if wants_state:
        after = lln_attention(*qkv, **learned, **options, return_state=True)[1]
        _, state = attend_across(mesh, *rows, **given, **here, return_state=True)
        found |= compare_states(state, after)
    return found


def compare_rows(mine: list[Tensor], whole: list[Tensor], lengths: tuple[int, ...], rank: int) -> dict[str, float]:
    """Of the output and the gradients of queries, keys and values: this rank's rows of one process's."""
    found = {}
    for name, own, every in zip(("out", "dq", "dk", "dv"), mine, whole, strict=True):
        share = every.split(list(lengths), 2)[rank]
        assert own.shape == share.shape, name
        largest = every.detach().abs().max().clamp_min(1e-30)
        found[name] = float((own - share).detach().abs().max() / largest) if own.numel() else 0.0
    return found


def compare_states(state: lln.LLNState, after: lln.LLNState) -> dict[str, float]:
    found = {}
    for name in ("log_sum", "mean_value", "mean_key", "entropy", "count", "block_key", "block_value", "block_mask"):
        mine, want = getattr(state, name), getattr(after, name)
        assert (mine is None) == (want is None), name
        if mine is None:
            continue
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape), name
        if name in ("block_key", "block_value", "block_mask"):  # what stands behind the open rows is arbitrary
            assert after.count is not None
            assert after.block_size is not None
            rows = torch.arange(mine.shape[-2 if mine.ndim == 4 else -1]) < (after.count % after.block_size)[:, None]
            rows = rows[:, None, :, None] if mine.ndim == 4 else rows
            mine, want = mine * rows, want * rows
        assert torch.equal(mine.isfinite(), want.isfinite()), name
        mine, want = (t.detach().double().masked_fill(~t.isfinite(), 0.0) for t in (mine, want))
        found[name] = float((mine - want).abs().max() / want.abs().max().clamp_min(1.0))
    return found


def compare_module(mesh: DeviceMesh, rank: int, lengths: tuple[int, ...], settings: dict[str, Any]) -> dict[str, float]:
    """As `compare`, of a module in training: of its parameters' gradients and its buffers too."""
    settings = dict(settings)
    packed, mask, is_causal = settings.pop("packed", None), settings.pop("mask", None), settings.pop("is_causal", False)
    total, batch = sum(lengths), 1 if packed else 2
    qkv, _, where = make_call(total, mask=mask, packed=packed, is_causal=is_causal, dims=(8, 8), batch=batch)
    torch.manual_seed(0)
    module = lln.LLNAttention(4, 8, num_key_heads=2, **settings).double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(draw(20 + number, *parameter.shape), alpha=0.3)
    twin = copy.deepcopy(module)
    for t in qkv:
        t.requires_grad_()
    weights = draw(9, *qkv[0].shape[:3], 8)
    parameters = list(module.parameters())

    torch.distributed.barrier()
    initialized, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False  # this one is alone
    try:
        whole = module(*qkv, **where)
        expected = torch.autograd.grad((whole * weights).sum(), [*qkv, *parameters])
        module.eval()
    finally:
        torch.distributed.is_initialized = initialized

    rows = [t.split(list(lengths), 2)[rank].detach().requires_grad_() for t in qkv]
    here = {n: t.split(list(lengths), 1)[rank] if n == "key_mask" else t for n, t in where.items()}
    with context_parallel(mesh):
        out = twin(*rows, **here)
    share = weights.split(list(lengths), 2)[rank]
    own = [*rows, *twin.parameters()]
    grads = torch.autograd.grad((out * share).sum(), own, materialize_grads=not lengths[rank])
    twin.eval()
    found = compare_rows([out.detach(), *grads[:3]], [whole.detach(), *expected[:3]], lengths, rank)
    for (name, parameter), grad, want in zip(twin.named_parameters(), grads[3:], expected[3:], strict=True):
        parameter.grad = grad
        sum_gradients([parameter], mesh)
        found[name] = relative_error(parameter.grad, want)
    for (name, mine), want in zip(twin.named_buffers(), module.buffers(), strict=True):
        found[name] = float((mine.double() - want.double()).abs().max())
    return found


def compare_heads(mesh: DeviceMesh, rank: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """MultiheadAttention and the function in torch's words, in a context that cuts their inputs."""
    total = sum(lengths)
    torch.manual_seed(0)
    module = lln.MultiheadAttention(16, 2, batch_first=True, block_size=8).double()
    x, padding = draw(1, 2, total, 16), torch.arange(total) >= torch.tensor([[total], [total - 11]])
    whole = module(x, x, x, padding, need_weights=False)[0]
    q = draw(2, 2, 3, total, 8)
    seen = ~padding[:, None, None]
    dotted = lln.scaled_dot_product_attention(q, q, q, seen, block_size=4, matching="entropy")
    buffers, before = [x, padding, q, seen], [t.clone() for t in (x, padding, q, seen)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 2, 3], lengths=lengths):
        assert [t.shape[d] for t, d in zip(buffers, (1, 1, 2, 3), strict=True)] == [lengths[rank]] * 4
        out = module(x, x, x, padding, need_weights=False)[0]
        part = lln.scaled_dot_product_attention(q, q, q, seen, block_size=4, matching="entropy")
    assert all(torch.equal(t, was) for t, was in zip(buffers, before, strict=True))
    return {
        "module": relative_error(unshard(out, mesh, 1).detach(), whole.detach()),
        "function": relative_error(unshard(part, mesh, 2), dotted),
    }


def drop_rows(mesh: DeviceMesh, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What dropout makes of rows that are the same on every rank, whose outputs are then the same without it."""
    qkv, learned, options = make_call(64, dims=(8, 1), **settings)
    qkv[2] = torch.ones_like(qkv[2])  # each output is the sum of what is left of weights that sum to 1

    def attend() -> Tensor:
        torch.manual_seed(3)
        out: Tensor = attend_across(mesh, *qkv, **learned, **options, dropout_p=0.4)
        return out

    first, again = attend(), attend()
    return {"same": torch.equal(first, again), "mean": float(first.mean()), "rows": first.flatten()[:50].tolist()}


def count_traffic(mesh: DeviceMesh, rank: int, length: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes sent forward, bytes sent backward, collectives) of one call with `length` rows on every rank, in
    bfloat16."""
    usual: dict[str, Any] = {"heads": (2, 2), "dims": (4, 4), "batch": 1}
    settings = usual | settings
    qkv, learned, options = make_call(length, **settings)
    rows = [t.bfloat16().requires_grad_() for t in qkv]
    with Traffic() as forward:
        out = attend_across(mesh, *rows, **learned, **options)
    with Traffic() as backward:
        out.float().sum().backward()
    return forward.sent, backward.sent, forward.calls + backward.calls


def watch_order(mesh: DeviceMesh, rank: int, lengths: tuple[int, ...]) -> list[str]:
    """In which order a call sends, computes its blocks and waits, forward and then backward."""
    events: list[str] = []
    q, k, v = make_call(sum(lengths))[0]
    rows = [t.split(list(lengths), 2)[rank].detach().requires_grad_() for t in (q, k, v)]
    begin, wait = Sending.begin, Sending.wait

    def attend(call: Any) -> Tensor:
        out = attend_near(call)
        events.append("blocks")
        assert out.grad_fn is not None
        out.grad_fn.register_hook(lambda *_: events.append("blocks"))
        return out

    def note(name: str, function: Any) -> Any:
        return lambda *given: (events.append(name), function(*given))[1]

    changed = mock.patch.multiple(Sending, begin=note("sends", begin), wait=note("waits", wait))
    with changed, mock.patch.object(across, "attend_near", attend):
        attend_across(mesh, *rows, 1.2, 1.4, block_size=8, lengths=lengths).sum().backward()
    return events


def lose(mesh: DeviceMesh, rank: int) -> str:
    """The last rank ends in the middle; what the others are told."""
    qkv, learned, _ = make_call(32)
    out = attend_across(mesh, *(t.requires_grad_() for t in qkv), **learned)
    if rank == mesh.size() - 1:
        os._exit(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def attempt(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """What is refused, and in which words."""
    q = draw(1, 1, 2, 8, 8)
    state = lln.LLNState.empty(1, 2, 8, dtype=torch.float64)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    module = lln.MultiheadAttention(16, 2, batch_first=True).double()
    x = draw(2, 1, 8, 16)
    tries: dict[str, Callable[[], Any]] = {
        "DTensor": lambda: lln.lln_attention(DTensor.from_local(q, mesh, [Shard(2)]), q, q, 1.0, 1.0),
        "state": lambda: lln.lln_attention(q, q, q, 1.0, 1.0, state=state),
        "offsets": lambda: lln.lln_attention(q, q, q, 1.0, 1.0, cu_seqlens=offsets),
        "cross": lambda: lln.lln_attention(q, q, q, 1.0, 1.0, cu_seqlens=(offsets, offsets)),
        "mix": lambda: lln.lln_attention(q, q, q, beta=1.0, read="evidence", mix="evidence", block_size=4),
        "overlap": lambda: lln.LLNAttention(2, 8, block_size=4, overlap=True)(q, q, q),
        "weights": lambda: module(x, x, x),
        "peer": lambda: lln.attention("performer", q, q, q),
        "sample": lambda: lln.LLNAttention(2, 8)(q, q, q, is_causal=True),
    }
    found = {}
    with context_parallel(mesh):
        for name, call in tries.items():
            try:
                call()
            except (ValueError, TypeError) as error:
                found[name] = str(error)
    wrong: dict[str, dict[str, Any]] = {"order": {"load_balancer": object()}, "lengths": {"lengths": [1]}}
    for name, options in wrong.items():
        try:
            with context_parallel(mesh, **options):
                pass
        except ValueError as error:
            found[name] = str(error)
    from torch.distributed.tensor.experimental import context_parallel as torchs_own

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is a prototype
        try:
            with torchs_own(mesh, buffers=[draw(3, 1, 2, 8, 8)], buffer_seq_dims=[2]):
                lln.LLNAttention(2, 8).double()(q, q, q)
        except ValueError as error:
            found["torch"] = str(error)
    try:
        attend_across(mesh, q, q, q, 1.0, 1.0, block_size=4, lengths=[7] * mesh.size())
    except ValueError as error:
        found["told"] = str(error)
    return found
