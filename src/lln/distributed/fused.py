"""A call over ranks by the GPU kernels, each step of a rank replayed: see `lln.kernels.triton.rank_turn`.

Ranks need not agree on it: what is sent, forward and backward, is what `across` sends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.backend import choose
from lln.kernels.call import Call
from lln.kernels.common import is_plain, is_watched
from lln.kernels.evidence import SIGNED
from lln.kernels.triton import attend as triton
from lln.kernels.triton import plan
from lln.ranks import Ranks


class Turn:
    """One rank's part in a call, step by step; what goes to other ranks and comes from them are bytes, one row for each
    of them, in their order.

    givers: the ranks whose states this one reads; takers: those that read its state."""

    def __init__(self, call: Call, givers: Sequence[int], takers: Sequence[int]) -> None:
        from lln.kernels.triton import rank_turn  # on demand: `import lln` does without triton

        self.steps = rank_turn
        self.tensors, rest = rank_turn.take_apart(call)
        self.kind = rank_turn.Kind(rest, len(givers), len(takers))
        self.givers, self.takers = givers, takers
        self.own: list[Tensor] = []
        self.held: list[Tensor] = []
        self.came: Tensor | None = None

    def fold(self) -> Tensor:
        """The state of the keys here, [takers * bytes]."""
        self.folded = self.steps.fold(self.kind, self.tensors)
        self.own = self.folded[: self.kind.fields]
        if not self.takers:
            return self.own[0].new_empty(0, dtype=torch.uint8)
        return torch.cat([t.view(-1).view(torch.uint8) for t in self.own] * len(self.takers))

    def read(self, came: Tensor) -> Tensor:
        """The output; came: states, [givers * bytes]."""
        self.came = came if self.givers else None
        out, *self.held = self.steps.read(self.kind, self.tensors, self.folded, self.came)
        del self.folded
        return out

    def keep(self) -> list[Any]:
        """What the backward needs; nothing of it is held here any longer."""
        kept = [*self.tensors, *self.own, *self.held, self.came]
        self.tensors, self.own, self.held, self.came = [], [], [], None
        return kept

    def restore(self, kept: Sequence[Any]) -> None:
        from lln.kernels.triton.rank_turn import INPUTS

        first, count = len(INPUTS), self.kind.fields
        self.tensors, self.own = list(kept[:first]), list(kept[first : first + count])
        *self.held, self.came = kept[first + count :]

    def ask(self, grad: Tensor) -> Tensor:
        """The gradients of what came, [givers * bytes]."""
        self.grad = grad
        self.dq, self.asked, back = self.steps.ask(self.kind, self.tensors, self.held, self.came, grad)
        if not self.givers:
            return grad.new_empty(0, dtype=torch.uint8)
        return torch.cat([t.view(len(t), -1).view(torch.uint8) for t in back], 1).view(-1)

    def answer(self, came: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); came: gradients of this rank's state, [takers * bytes]."""
        given = came if self.takers else None
        dk, dv, *rest = self.steps.answer(
            self.kind, self.tensors, self.own, self.held, self.grad, self.asked, given
        )  # fmt: skip
        return rest[0] if self.dq is None else self.dq, dk, dv

    def exchange(self, ranks: Ranks, sent: Tensor, givers: Sequence[int], takers: Sequence[int]) -> Tensor:
        """What comes from givers for what takers get."""
        size = self.steps.count_bytes(self.kind, self.tensors)
        out, into = ([size if rank in some else 0 for rank in range(ranks.size)] for some in (takers, givers))
        return ranks.swap(sent, out, into)


class AttendTogether(Function):
    """(query, key, value, turn, ranks) -> output"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, turn: Turn, ranks: Ranks) -> Tensor:
        out = turn.read(turn.exchange(ranks, turn.fold(), turn.givers, turn.takers))
        ctx.save_for_backward(*turn.keep())
        ctx.turn, ctx.ranks = turn, ranks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph: gradients without a graph would count for nothing, silently
            from lln.kernels.triton.op import ONCE

            raise RuntimeError(ONCE)
        turn = ctx.turn
        turn.restore(ctx.saved_tensors)
        found = turn.answer(turn.exchange(ctx.ranks, turn.ask(grad), turn.takers, turn.givers))
        turn.keep()
        return *(t if need else None for t, need in zip(found, ctx.needs_input_grad, strict=False)), None, None


def can_fuse(call: Call, backend: Any, return_state: bool) -> bool:
    """Whether the kernels do all of a call whose blocks no border cuts."""
    if call.cu_query is not None or return_state or call.dropout_p or isinstance(call.directions, Tensor):
        return False
    if call.joint or (call.is_causal and call.read == "evidence") or torch.compiler.is_compiling() or is_watched():
        return False
    tensors = call.query, call.key, call.value
    others = call.alpha, call.beta, call.lln_weight, call.block_weight
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in others):
        return False  # sums that torch does
    if (
        not all(map(is_plain, tensors))
        or any(0 in t.shape for t in tensors)
        or choose(backend, call) is not triton.attend
    ):
        return False
    dim, width, dtype = call.query.shape[-1], call.value.shape[-1], call.query.dtype
    if call.is_causal and call.key_mask is not None and not plan.masks_fit(dim, dtype):
        return False
    if call.block_size is not None and (call.scale < 1e-30 or not plan.blocks_fit(call.block_size, dim, width, dtype)):
        return False
    # Numbers of float64 begin at multiples of their size.
    channels = call.key.shape[0] * call.key.shape[1] * dim * (2 if call.directions == SIGNED else 1)
    return channels * (width + (dim if call.read == "evidence" else 0)) % 2 == 0


@functools.lru_cache(maxsize=256)
def list_partners(rank: int, size: int, is_causal: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(givers, takers)"""
    before, after = tuple(range(rank)), tuple(range(rank + 1, size))
    return (before, after) if is_causal else (before + after, before + after)


def attend_fused(ranks: Ranks, call: Call) -> Tensor | None:
    """None where the kernels do not fit into the device."""
    from lln.kernels.triton.fit import DoesNotFit

    turn = Turn(call, *list_partners(ranks.rank, ranks.size, call.is_causal))
    try:
        out: Tensor = AttendTogether.apply(call.query, call.key, call.value, turn, ranks)
    except DoesNotFit:  # only before anything was computed or sent
        return None
    return out
