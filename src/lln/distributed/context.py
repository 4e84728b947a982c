"""Entering and leaving attention over several processes, and cutting tensors for it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lln.checks import Coefficient
from lln.distributed import across
from lln.functional import lln_attention
from lln.ranks import Ranks, share
from lln.values import check_count, describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_ranks(mesh: Any, lengths: Sequence[int] | None = None) -> Ranks:
    """The processes of a mesh, as attention needs to know them."""
    from torch.distributed.device_mesh import DeviceMesh  # on demand: it imports numpy and more

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, as torch.distributed.init_device_mesh makes it; got {describe(mesh)}."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"mesh must have one dimension, that of the sequence; got {mesh.ndim} ({names}): take one by its name, "
            f"as in mesh[{'cp' if not names else names[-1]!r}]."
        )
    group = mesh.get_group()
    size = dist.get_world_size(group)
    if lengths is not None:
        lengths = tuple(check_count("lengths", length, least=0) for length in lengths)
        if len(lengths) != size:
            raise ValueError(f"lengths must have one number for each of the {size} ranks; got {list(lengths)}.")
    return Ranks(group, dist.get_rank(group), size, across.attend, lengths)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    load_balancer: None = None,
) -> Iterator[None]:
    """Within it LLN attention goes over the rows of all ranks of `mesh`, of which each holds consecutive ones: rank 0
    the first, and so on. `lln.lln_attention`, `lln.LLNAttention`, `lln.MultiheadAttention`,
    `lln.scaled_dot_product_attention` and models of transformers with `attn_implementation="lln"` or "lln_diag" heed
    it; what cannot be spread is refused. The arguments are those of torch's own
    `torch.distributed.tensor.experimental.context_parallel`, and two more.

    Args:
        mesh: a DeviceMesh of one dimension.
        buffers: tensors that every rank holds whole, and that are cut in their place: inputs, labels, positions. They
            are whole again afterwards.
        buffer_seq_dims: the dimension of the sequence in each of them.
        no_restore_buffers: those of them that nobody needs afterwards.
        lengths: how many rows each rank holds, where they are not as even as can be (of buffers), or known (else).
            Where neither buffers nor lengths say, ranks tell each other in every call that needs it (LLN+Diag, packed
            sequences), which waits for the device where there is no other way.
        load_balancer: None. A state is the same work for every rank, also in causal attention, so there is nothing to
            balance; another order of the rows (head-tail) is refused.

    Everything but attention goes by rows and needs no change; positions are to be given, as they begin at 0 on the
    first rank alone. All ranks make the same calls, with gradients or without, and go backward likewise, within the
    context where activations are computed again. Gradients of parameters are those of each rank's rows:
    `lln.distributed.sum_gradients` adds them up, as DDP and FSDP average them.

    Examples:
        >>> import os, torch, lln
        >>> from lln.distributed import context_parallel
        >>> if not torch.distributed.is_initialized():
        ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).double()
        >>> with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):  # here of one process
        ...     out = lln.lln_attention(q, k, v, 2.0, 2.0)
        >>> torch.testing.assert_close(out, lln.lln_attention(q, k, v, 2.0, 2.0))
        >>> torch.distributed.destroy_process_group()
    """
    refuse_order(load_balancer)
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    dropped = list(no_restore_buffers or ())
    if len(buffers) != len(dims):
        came = f"got {len(dims)} for {len(buffers)}"
        raise ValueError(f"buffer_seq_dims must name one dimension for each buffer; {came}.")
    if any(all(own is not b for b in buffers) for own in dropped):
        raise ValueError("no_restore_buffers must hold only tensors that are also in buffers.")
    ranks = make_ranks(mesh, lengths)
    if buffers:
        counts = ranks.lengths or split_evenly(buffers[0].shape[dims[0]], ranks.size)
        wrong = [b.shape[d] for b, d in zip(buffers, dims, strict=True) if b.shape[d] != sum(counts)]
        if wrong:
            raise ValueError(f"buffers must all have {sum(counts)} rows along buffer_seq_dims; got one of {wrong[0]}.")
        ranks = make_ranks(mesh, counts)
    kept = [None if any(b is own for own in dropped) else b.detach().clone() for b in buffers]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            replace(buffer, buffer.split(list(ranks.lengths or ()), dim)[ranks.rank].clone())
    try:
        with share(ranks):
            yield
    finally:
        with torch.no_grad():
            for buffer, whole in zip(buffers, kept, strict=True):
                if whole is not None:
                    replace(buffer, whole)


def replace(buffer: Tensor, by: Tensor) -> None:
    buffer.resize_(by.shape)
    buffer.copy_(by)


def refuse_order(load_balancer: Any) -> None:
    """ValueError for rows that do not lie one after another."""
    if load_balancer is not None:
        raise ValueError(
            "load_balancer must be None: rows must lie one after another, the first rank's first, and every rank has "
            f"the same work then; got {type(load_balancer).__name__}."
        )


def attend_across(
    mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor, alpha: Coefficient | None = None,
    beta: Coefficient | None = None, *, lengths: Sequence[int] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """`lln.lln_attention` of queries, keys and values that lie one after another on the ranks of a mesh: what one call
    inside `context_parallel` gives. cu_seqlens are offsets in the rows of all ranks; all other arguments are of the
    rows here. return_state gives every rank the state after all rows.

    Examples:
        >>> import torch, lln
        >>> from lln.distributed import attend_across
        >>> if not torch.distributed.is_initialized():
        ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).double()
        >>> out = attend_across(torch.distributed.init_device_mesh("cpu", (1,)), q, k, v, 2.0, 2.0, block_size=4)
        >>> torch.testing.assert_close(out, lln.lln_attention(q, k, v, 2.0, 2.0, block_size=4))
        >>> torch.distributed.destroy_process_group()
    """
    with share(make_ranks(mesh, lengths)):
        return lln_attention(query, key, value, alpha, beta, **options)


def split_evenly(total: int, ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """How many of so many rows each rank holds: as even as can be, in multiples but for the last that has any.

    >>> split_evenly(10, 4), split_evenly(10, 4, multiple=2)
    ((3, 3, 2, 2), (4, 2, 2, 2))
    """
    check_count("total", total, least=0)
    parts, rest = divmod(-(-total // multiple), ranks)
    counts = [(parts + (at < rest)) * multiple for at in range(ranks)]
    over = sum(counts) - total
    for at in reversed(range(ranks)):
        taken = min(over, counts[at])
        counts[at], over = counts[at] - taken, over - taken
    return tuple(counts)


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int, *, lengths: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of a tensor that every rank holds whole.

    >>> import torch
    >>> if not torch.distributed.is_initialized():
    ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> shard(torch.arange(6), torch.distributed.init_device_mesh("cpu", (1,)), 0)
    tensor([0, 1, 2, 3, 4, 5])
    >>> torch.distributed.destroy_process_group()
    """
    ranks = make_ranks(mesh, lengths)
    counts = ranks.lengths or split_evenly(tensor.shape[dim], ranks.size)
    mine: Tensor = tensor.split(list(counts), dim)[ranks.rank]
    return mine


@torch.no_grad()
def unshard(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The rows of all ranks, on every rank, without gradients: for looking at outputs.

    >>> import torch
    >>> if not torch.distributed.is_initialized():
    ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> unshard(torch.arange(6), torch.distributed.init_device_mesh("cpu", (1,)), 0)
    tensor([0, 1, 2, 3, 4, 5])
    >>> torch.distributed.destroy_process_group()
    """
    ranks = make_ranks(mesh)
    counts = [told[0] for told in ranks.tell(tensor.shape[dim])]
    first = tensor.movedim(dim, 0).contiguous()
    padded = first.new_zeros(max(counts), *first.shape[1:])
    padded[: len(first)] = first
    rows = [part[:count] for part, count in zip(ranks.gather(padded), counts, strict=True)]
    return torch.cat(rows).movedim(0, dim)


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Add up the gradients of parameters over the ranks of a mesh, each of which has those of its own rows: afterwards
    every rank has those of the sum of all ranks' losses. Of a DTensor that is cut over another mesh (its heads), the
    part here is added up.

    >>> import torch
    >>> if not torch.distributed.is_initialized():
    ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> layer = torch.nn.Linear(2, 2)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> sum_gradients(layer.parameters(), torch.distributed.init_device_mesh("cpu", (1,)))
    >>> layer.bias.grad
    tensor([1., 1.])
    >>> torch.distributed.destroy_process_group()
    """
    ranks = make_ranks(mesh)
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # here no row used it; elsewhere one may
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        own = grad.to_local() if hasattr(grad, "to_local") else grad  # of a DTensor, what is here
        own.copy_(ranks.add_up(own))


def split_heads(model: Any, mesh: DeviceMesh) -> Any:
    """Leave the LLN attention of a model the heads of this rank of a mesh: tensor parallelism, where the projections of
    queries, keys and values give every rank some heads of all tokens. Call it when these have been cut, by
    transformers' `tp_plan` or by torch's `parallelize_module` with ColwiseParallel, on every rank, and before
    fully_shard and an optimiser. Heads must divide by the ranks, key heads too, and lie one after another.

    What attention learns becomes DTensors, as the projections' weights are, and statistics are those of the heads here,
    so that outputs and gradients are those of one process. A state_dict has the whole of both.

    Args:
        model: anything that holds LLN attention: a transformers model, an `lln.LLNAttention`.
        mesh: a DeviceMesh of one dimension.

    Examples:
        >>> import torch, lln
        >>> if not torch.distributed.is_initialized():
        ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> attention = lln.distributed.split_heads(lln.LLNAttention(4, 8), mesh)  # here of one process
        >>> attention.num_heads
        4
        >>> torch.distributed.destroy_process_group()
    """
    ranks = make_ranks(mesh)
    found = [part for part in model.modules() if hasattr(part, "check_split")]
    if not found:
        raise ValueError(
            f"split_heads: {type(model).__name__} has no LLN attention; convert it first with lln.hf.convert(model, "
            "'lln')."
        )
    for part in found:  # before anything changes
        part.check_split(ranks.size)
    for part in found:
        part.split_heads(mesh)
    return model
