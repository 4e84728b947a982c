"""Heads of one attention module that lie on several ranks (tensor parallelism): each has what belongs to its own.

What is learned becomes a DTensor cut along the heads, as torch's ColwiseParallel leaves the projections, so that
checkpoints hold the whole, and clipping and FSDP2 see one kind of parameter. What is only kept (running statistics,
fixed alpha and beta) is a plain tensor of the heads here, and whole in a state_dict.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lln.values import derive_seed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The dimension of the heads in what a module keeps beside its parameters, which have them first.
KEPT = {"pending": 2, "running_variance_q": 0, "running_variance_k": 0, "fixed_alpha": 1, "fixed_beta": 1}


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSplit:
    """Which part of the heads is here."""

    mesh: DeviceMesh
    rank: int
    size: int

    def __deepcopy__(self, memo: Any) -> HeadSplit:
        return self  # a copy of a module lies on the same ranks

    def take(self, t: Tensor, dim: int) -> Tensor:
        """Of something of all heads, what is of those here."""
        count = t.shape[dim] // self.size
        return t.narrow(dim, self.rank * count, count).clone()

    def place(self, t: Tensor, dim: int) -> Tensor:
        """Of all heads, zeros but for those here, so that a sum over ranks mixes no heads."""
        count = t.shape[dim]
        wide = t.new_zeros(*t.shape[:dim], count * self.size, *t.shape[dim + 1 :])
        wide.narrow(dim, self.rank * count, count).copy_(t)
        return wide

    def add_up(self, t: Tensor) -> Tensor:
        """The sum over all heads' ranks."""
        t = t.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(t, group=self.mesh.get_group())
        return t

    def label(self, t: Tensor, dim: int) -> Tensor:
        """What is here, as a part of the whole."""
        from torch.distributed.tensor import DTensor, Shard  # on demand: it imports sympy

        made: Tensor = DTensor.from_local(t.detach(), self.mesh, [Shard(dim)], run_check=False)
        return made

    def find_own(self, t: Any, dim: int, count: int) -> Any:
        """What is here of a tensor in a state_dict, which has all heads, is labelled, or has these alone."""
        from torch.distributed.tensor import DTensor

        if isinstance(t, DTensor):
            return t.to_local() if t.placements[0].is_shard() else self.take(t.full_tensor(), dim)
        whole = isinstance(t, Tensor) and t.ndim > dim and t.shape[dim] == count * self.size
        return self.take(t, dim) if whole else t

    @contextlib.contextmanager
    def hold(self, module: nn.Module, dropout_p: float = 0.0) -> Iterator[None]:
        """Within it the parameters of `module` are those of the heads here, plain and differentiable, and dropout draws
        other numbers than for the heads of other ranks, though all were seeded alike."""
        from torch.distributed.tensor import DTensor

        held: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
        module._parameters.update({name: p.to_local() for name, p in held.items()})
        before = None
        if dropout_p:
            seed = int(torch.randint(2**40, (), device="cpu"))
            before = torch.default_generator.get_state()
            torch.default_generator.manual_seed(derive_seed(seed, self.rank))
        try:
            yield
        finally:
            module._parameters.update(held)
            if before is not None:
                torch.default_generator.set_state(before)


def check_split(module: Any, size: int) -> None:
    """ValueError for an LLNAttention whose heads cannot lie on so many ranks."""
    from torch.distributed.tensor import DTensor

    if module.split is not None:
        raise ValueError("split_heads: the heads of this model are split already; call it once.")
    for name, what in (("num_heads", "heads"), ("num_key_heads", "key heads")):
        count = getattr(module, name)
        if count % size:
            raise ValueError(f"split_heads: the number of {what}, {count}, must be divisible by the {size} ranks.")
    if any(isinstance(p, DTensor) for p in module._parameters.values()):
        raise ValueError("split_heads must be called before fully_shard; this model is sharded already.")


def split_module(module: Any, mesh: DeviceMesh) -> None:
    """Leave an LLNAttention the heads of this rank of a mesh of one dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    split = HeadSplit(mesh, mesh.get_local_rank(), mesh.size())
    check_split(module, split.size)
    module.commit()
    for name, p in module._parameters.items():
        if p is None:
            continue
        # Every rank has the whole, so that nothing has to be sent.
        part = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, requires_grad=p.requires_grad)
    for name, dim in KEPT.items():
        if (t := module._buffers.get(name)) is not None:
            module._buffers[name] = split.take(t, dim)
    module.num_heads //= split.size
    module.num_key_heads //= split.size
    module.split = split


def label_kept(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Of the state_dict of a module whose heads are split, what it keeps: as parts of the whole."""
    for name, dim in KEPT.items():
        if (t := state.get(prefix + name)) is not None and name != "pending":
            state[prefix + name] = module.split.label(t, dim)


def find_kept(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Of a state_dict that is about to be loaded into such a module, what is of the heads here."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    for name, dim in KEPT.items():
        if (mine := module._buffers.get(name)) is not None and (t := state.get(prefix + name)) is not None:
            state[prefix + name] = module.split.find_own(t, dim, mine.shape[dim])
    for name, p in module._parameters.items():
        t = state.get(prefix + name)
        if isinstance(p, DTensor) and isinstance(t, Tensor) and not isinstance(t, DTensor) and t.shape == p.shape:
            state[prefix + name] = distribute_tensor(t, module.split.mesh, [Shard(0)], src_data_rank=None)
