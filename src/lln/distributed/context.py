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
    """Let LLN attention inside a `with` block attend over the tokens of all ranks of `mesh`, for sequences that are cut
    over several cards. Each rank holds consecutive tokens: rank 0 the first ones, and so on.

    It works for `lln.lln_attention`, `lln.LLNAttention`, `lln.MultiheadAttention`, `lln.scaled_dot_product_attention`
    and models of transformers with `attn_implementation="lln"` or "lln_diag". Calls that cannot be spread over ranks
    are refused. The arguments are those of `torch.distributed.tensor.experimental.context_parallel`, and lengths.

    Args:
        mesh: a DeviceMesh of one dimension.
        buffers: tensors that every rank holds whole, for example inputs, labels and positions. They are cut in place,
            so that each rank has its own part, and restored afterwards. Default: none.
        buffer_seq_dims: the dimension of the sequence in each buffer.
        no_restore_buffers: buffers that need not be restored afterwards.
        lengths: how many tokens each rank holds. Default: buffers are cut as evenly as possible. Without buffers and
            lengths, the ranks exchange their lengths in every call that needs them (LLN+Diag, packed sequences), which
            may wait for the device.
        load_balancer: must be None. Every rank has the same work, also in causal attention, so there is nothing to
            balance, and tokens in another order (head-tail) are refused.

    Layers other than attention work on each token alone and need no change. Give a model its positions, because they
    begin at 0 on the first rank only. All ranks must make the same forward and backward calls. With activation
    checkpointing, the backward pass belongs inside the context. Each rank gets the gradients of its own tokens:
    `lln.distributed.sum_gradients` adds them up, while DDP and FSDP average them.

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
    """Attend over the tokens of all ranks of a mesh in one call: `lln.lln_attention` inside `context_parallel`.

    Args:
        mesh: a DeviceMesh of one dimension, whose ranks hold consecutive tokens, rank 0 the first.
        query, key, value, alpha, beta: of this rank's tokens, as in `lln.lln_attention`.
        lengths: how many tokens each rank holds; default: the ranks exchange them where a call needs them.
        options: other arguments of `lln.lln_attention`, for this rank's tokens. cu_seqlens are offsets in the tokens of
            all ranks, and return_state=True gives every rank the state after all tokens.

    Returns:
        The output of this rank's tokens; with return_state also the state.

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
    """How many of `total` rows each rank holds: as evenly as possible, and in multiples of `multiple` (but for the
    last rank that has any rows).

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
    """Cut a tensor that every rank holds whole, and return this rank's part along dimension `dim`. lengths: how many
    rows each rank gets; default: as even as possible.

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
    """Put the parts of all ranks together along dimension `dim`, on every rank, without gradients: to look at outputs.

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
    """Add up the gradients of parameters over the ranks of a mesh, in place. Each rank has the gradients of its own
    tokens before; afterwards every rank has the gradients of the sum of all losses. Of a DTensor that is cut over
    another mesh (by heads), the local part is added up.

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
    """Give the LLN attention of a model only the heads of this rank, for tensor parallelism, where every rank has some
    heads of all tokens.

    Call it on every rank after the projections of queries, keys and values were cut (by transformers' `tp_plan`, or by
    torch's `parallelize_module` with ColwiseParallel), and before fully_shard and the optimiser. The numbers of heads
    and of key heads must be divisible by the number of ranks, and each rank has consecutive heads.

    Learned values become DTensors, as the projections' weights are, and statistics are those of this rank's heads, so
    that outputs and gradients are those of one process. A state_dict holds all heads.

    Args:
        model: a module that holds LLN attention, such as a transformers model or an `lln.LLNAttention`; changed in
            place.
        mesh: a DeviceMesh of one dimension.

    Returns:
        The model.

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
