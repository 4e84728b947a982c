"""`mix="evidence"` by kernels: pieces of the keys are folded by those of the evidence read, as if each were a sequence
of its own; their states are merged into what lies outside each window (`evidence_outside`); and the queries of a group
attend to both at once (`evidence_join`). How sequences are laid out is said in `evidence_mix`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from lln.kernels.blocks import gather_rows
from lln.kernels.call import Call
from lln.kernels.carry import Layout
from lln.kernels.evidence import count_channels
from lln.kernels.evidence_mix import count_groups, lay_keys, place_queries
from lln.kernels.triton import plan
from lln.kernels.triton.evidence_join import join_backward_kernel, join_kernel
from lln.kernels.triton.evidence_launch import HELD, KERNELS
from lln.kernels.triton.evidence_op import apply, fit_backward, fit_forward, take_whole
from lln.kernels.triton.evidence_outside import outside_backward_kernel, outside_kernel
from lln.kernels.triton.fit import Fit, find
from lln.kernels.triton.forward import Launch, name_strides, read_factor_strides
from lln.kernels.triton.op import ONCE

SET = 64  # channels that a program reads at once
KEPT = ("LOG_FAR", "LOG_NEAR", "EVIDENCE", "ADVANTAGE")


class Groups(NamedTuple):
    """How the sequences of a call are cut."""

    layout: Layout
    number: int
    empty: Tensor | None  # [B] int32: groups before the first valid token; None: no token moves
    closed: Tensor | int  # pieces before the window of the token that comes next
    trains: bool  # whether there may be a backward pass; inside of an autograd function nobody can tell


class Joined(Launch):
    """Launches on rows that are in their slots, with the states of pieces or of what lies outside, [B, n, H, M, ...].

    call: query [B, Hq, count * rows, D], key and value [B, Hk, slots, ...], and the mask of the slots."""

    def __init__(self, call: Call, groups: Groups, fit: Fit | None = None) -> None:
        super().__init__(call, None, fit)
        self.groups, self.channels = groups, count_channels(call.directions, self.dim)
        layout, size = groups.layout, min(plan.pad_dim(self.channels), SET)
        given = [getattr(call, name) for name in HELD]
        self.held = [None if t is None else t.contiguous() for t in given]
        room = max(min(self.channels, 8), 4)
        self.values |= {
            "M": self.channels, "SETS": -(-self.channels // size), "BX": size, "BC": triton.next_power_of_2(room),
            "R": layout.rows, "SIZE": layout.size, "BEFORE": layout.before, "BM": plan.pad_dim(layout.rows),
            "BN": plan.pad_dim(layout.size), "REACH": layout.size // layout.rows, "CAUSAL": call.is_causal,
            "MOVED": groups.empty is not None, "EMPTY": groups.empty, "groups": groups.number, "ADD": call.offset,
            "HAS_ADD": call.offset is not None, "HAS_STATE": call.log_sum is not None,
            "LOW": self.dtype == torch.bfloat16,
        }  # fmt: skip
        self.values |= {f"{name}_IN": t for name, t in zip(KERNELS, self.held, strict=True)}
        self.values |= dict(zip(("add_b", "add_h"), read_factor_strides(call.offset), strict=False))

    def settings(self, kernel: str) -> plan.Settings:
        """From what the compiler says of registers. Not measured."""
        found = self.fit.settings.get(kernel)
        warps = 4 if self.dtype == torch.bfloat16 and self.size <= 64 and self.values["BN"] <= 64 else 8
        usual = plan.Settings(8 if kernel == "join_backward" else warps, 1)
        return usual if found is None else found

    def allocate_held(self, *lead: int) -> list[Tensor]:
        wide = torch.float64
        return [
            self.allocate(*lead, self.channels, dtype=wide), self.allocate(*lead, self.channels, self.width),
            self.allocate(*lead, self.channels, self.dim), self.allocate(*lead, self.channels, dtype=wide),
        ]  # fmt: skip

    def launch_merging(self, kernel: Any, name: str, **given: Any) -> None:
        programs = self.batch * self.heads * -(-self.channels // self.values["BC"])
        with plan.use_device(self.device):
            self.launch(kernel, programs, name, **given)

    def merge_pieces(self, pieces: list[Tensor]) -> list[Tensor]:
        """(L, S, K, H) outside of each group, and of the pieces that are closed, [B, H, M, ...]."""
        outside = self.allocate_held(self.batch, self.groups.number, self.heads)
        end = self.allocate_held(self.batch, self.heads)
        closed = self.groups.closed
        at = {"CLOSED": None, "closed": closed} if isinstance(closed, int) else {"CLOSED": closed, "closed": 0}
        named = dict(zip(KERNELS, pieces, strict=True)) | {f"{n}_OUT": t for n, t in zip(KERNELS, outside, strict=True)}
        named |= {f"{n}_END": t for n, t in zip(KERNELS, end, strict=True)}
        self.launch_merging(outside_kernel, "outside", **named, **at)
        return [*outside, *end]

    def merge_backward(
        self, pieces: list[Tensor], outside: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Of the pieces, and of the given state; grads: of S, K and H outside."""
        lead = self.batch, self.groups.number + self.values["REACH"] - 1, self.heads
        found = self.allocate_held(*lead)
        given = None if self.held[0] is None else self.allocate_held(self.batch, self.heads)
        named: dict[str, Any] = dict(zip(KERNELS, pieces, strict=True))
        named |= {f"{n}_OUT": t for n, t in zip(KERNELS, outside, strict=True)}
        named |= {f"G_{n}": t for n, t in zip(KERNELS[1:], grads, strict=True)}
        named |= {f"D{n}": t for n, t in zip(KERNELS, found, strict=True)}
        named |= {f"D{n}_IN": None if given is None else given[i] for i, n in enumerate(KERNELS)}
        self.launch_merging(outside_backward_kernel, "outside_backward", **named)
        return found, given

    def join(self, outside: list[Tensor]) -> list[Tensor]:
        """The output, and what the backward pass takes of it."""
        out = self.allocate_like(self.call.query, self.width)
        rows = self.batch * self.query_heads * self.rows
        kept = [self.allocate(rows) for _ in KEPT]
        named = dict(zip((*KERNELS, *KEPT), (*outside, *kept), strict=True)) | dict(name_strides("o", out))
        with plan.use_device(self.device):
            self.launch(join_kernel, self.batch * self.query_heads * self.groups.number, "join", **named, OUT=out)
        return [out, *kept]

    def join_backward(self, outside: list[Tensor], kept: list[Tensor], grad: Tensor) -> list[Tensor]:
        """dq, dk, dv; dS, dK and dH of what lies outside; and the gradient of the advantage, [B, Hq, N]."""
        lead = self.batch, self.query_heads, self.groups.number
        # Wide: they are added to what the fold of pieces asks, and to those of other heads and windows.
        windows = [self.allocate(*lead, self.groups.layout.size, dim) for dim in (self.dim, self.width)]
        at = self.batch, self.groups.number, self.query_heads, self.channels
        asked = [self.allocate(*at, self.width), self.allocate(*at, self.dim), self.allocate(*at)]
        dq = self.allocate_like(self.call.query, self.dim)
        dadvantage = self.allocate(self.batch, self.query_heads, self.rows)
        named: dict[str, Any] = dict(zip((*KERNELS, *KEPT), (*outside, *kept), strict=True))
        named |= dict(zip(("DK", "DV", "DMEAN", "DKEY", "DENTROPY"), (*windows, *asked), strict=True))
        named |= dict(name_strides("g", grad)) | dict(name_strides("dq", dq))
        with plan.use_device(self.device):
            self.launch(
                join_backward_kernel, self.batch * self.query_heads * self.groups.number, "join_backward", **named,
                GRAD=grad, DQ=dq, DADVANTAGE=dadvantage,
            )  # fmt: skip
        if self.group > 1:
            asked = [t.unflatten(2, (self.heads, self.group)).sum(3) for t in asked]
        return [dq, *(self.lay_windows(t).to(self.dtype) for t in windows), *asked, dadvantage]

    def lay_windows(self, windows: Tensor) -> Tensor:
        """[B, Hk, slots, D]: what the groups [B, Hq, n, size, D] ask of each slot."""
        if self.group > 1:
            windows = windows.unflatten(1, (self.heads, self.group)).sum(2)
        if self.values["REACH"] == 1:
            return windows.flatten(2, 3)
        first, second = windows.unflatten(3, (2, -1)).unbind(3)
        first, second = functional.pad(first, (0, 0, 0, 0, 0, 1)), functional.pad(second, (0, 0, 0, 0, 1, 0))
        return (first + second).flatten(2, 3)


def name_kind(call: Call, groups: Groups) -> tuple[Any, ...]:
    """What decides about kernels, beside the call."""
    return "joined", count_channels(call.directions, call.key.shape[3]), *groups.layout, groups.empty is None


def fit_join(call: Call, groups: Groups, backward: bool) -> Fit:
    """Raises DoesNotFit."""

    def rehearse(part: Call, fit: Fit) -> None:
        take_whole(call, part)
        joined = Joined(part, groups, fit)
        made = joined.allocate_held(joined.batch, groups.number, joined.heads)
        if backward:
            kept = [joined.allocate(joined.batch * joined.query_heads * joined.rows) for _ in KEPT]
            joined.join_backward(made, kept, joined.allocate_like(part.query, joined.width))
            joined.merge_backward(made, made, [*made[1:3], made[3].float()])
        else:
            joined.join(made)
            joined.merge_pieces(made)

    return find(call, (*name_kind(call, groups), backward), rehearse)


class MergeOutside(Function):
    """(call, groups, the states of pieces, the given one) -> as `Joined.merge_pieces`"""

    @staticmethod
    def forward(ctx: Any, call: Call, groups: Groups, *tensors: Any) -> tuple[Tensor, ...]:
        pieces, given = list(tensors[:4]), tensors[4:]
        found = Joined(call, groups, fit_join(call, groups, False)).merge_pieces(pieces)
        ctx.save_for_backward(*pieces, *given, *found)
        ctx.fit = fit_join(call, groups, True) if groups.trains and any(ctx.needs_input_grad) else None
        # Of the rows the backward pass knows the sizes alone.
        sizes = {name: getattr(call, name) for name in ("query", "key", "value")}
        none: dict[str, Any] = dict.fromkeys((*HELD, "key_mask", "offset", "seed"))
        ctx.call = call.change(**{n: t.new_empty(()).expand(t.shape) for n, t in sizes.items()}, **none)
        ctx.groups = groups
        ctx.mark_non_differentiable(found[0])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_graph()
        saved = list(ctx.saved_tensors)
        pieces, given, outside, end = saved[:4], saved[4:8], saved[8:12], saved[12:]
        call = ctx.call.change(**dict(zip(HELD, given, strict=True)))
        of_outside = [make_grad(g, t) for g, t in zip(grads[1:4], outside[1:], strict=True)]
        found, of_given = Joined(call, ctx.groups, ctx.fit).merge_backward(pieces, outside, of_outside)
        if any(g is not None for g in grads[4:]):
            add_end(ctx.groups, pieces, given, end, list(grads[4:]), found, of_given)
        return None, None, *found, *([None] * 4 if of_given is None else of_given)


def make_grad(g: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros(like.shape, device=like.device) if g is None else g.float().contiguous()


def refuse_graph() -> None:
    if torch.is_grad_enabled():  # as in `evidence_op`
        raise RuntimeError(ONCE)


def add_end(
    groups: Groups, pieces: list[Tensor], given: list[Any], end: list[Tensor], grads: list[Any],
    found: list[Tensor], of_given: list[Tensor] | None,
) -> None:  # fmt: skip
    """The gradients of the returned state, into those of the pieces and of the given state. It is small beside what the
    groups ask, or there is none; torch does it."""
    dlog, dmean, dkey, dentropy = (
        torch.zeros_like(t) if g is None else g.to(t.dtype) for g, t in zip(grads, end, strict=True)
    )
    closed, count = groups.closed, pieces[0].shape[1]
    at = torch.arange(count, device=dlog.device)
    has = (at < closed).view(1, -1, 1, 1) if isinstance(closed, int) else (at < closed[:, None])[..., None, None]
    whole = end[0].masked_fill(end[0] == -torch.inf, 0.0)

    def ask(part: list[Tensor], has: Tensor | None, into: list[Tensor], wide: Any) -> None:
        log, mean, key, entropy = part
        below = log - wide(whole)
        some = below > -torch.inf if has is None else (below > -torch.inf) & has
        share = below.masked_fill(~some, -torch.inf).exp()
        own = ((mean - wide(end[1])) * wide(dmean)).sum(-1) + ((key - wide(end[2])) * wide(dkey)).sum(-1)
        own = own + wide(dlog) + wide(dentropy) * (entropy - wide(end[3]) - below.masked_fill(~some, 0.0))
        into[0] += share * own
        into[1] += share.unsqueeze(-1).to(mean.dtype) * wide(dmean)
        into[2] += share.unsqueeze(-1).to(key.dtype) * wide(dkey)
        into[3] += share * wide(dentropy)

    ask(pieces, has, found, lambda t: t.unsqueeze(1))
    if of_given is not None:
        ask(given, None, of_given, lambda t: t)


class Join(Function):
    """(call, groups, q, k, v, offset, the state outside) -> out"""

    @staticmethod
    def forward(ctx: Any, call: Call, groups: Groups, *tensors: Any) -> Tensor:
        q, k, v, offset, *outside = tensors
        laid = call.change(query=q, key=k, value=v, offset=offset)
        out, *kept = Joined(laid, groups, fit_join(laid, groups, False)).join(outside)
        ctx.fit = fit_join(laid, groups, True) if groups.trains and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(*tensors, *kept, call.key_mask, call.seed)
        none: dict[str, Any] = dict.fromkeys(("query", "key", "value", "key_mask", "seed", "offset", *HELD))
        ctx.call, ctx.groups = call.change(**none), groups
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_graph()
        q, k, v, offset, *rest = ctx.saved_tensors
        outside, kept, (mask, seed) = rest[:4], rest[4:8], rest[8:]
        call = ctx.call.change(query=q, key=k, value=v, offset=offset, key_mask=mask, seed=seed)
        found = Joined(call, ctx.groups, ctx.fit).join_backward(outside, kept, grads[0])
        dq, dk, dv, dmean, dkey, dentropy, dadvantage = found
        doffset = None if offset is None else dadvantage.sum(-1, keepdim=True).sum_to_size(offset.shape)
        return None, None, dq, dk, dv, doffset, None, dmean, dkey, dentropy


def attend(call: Call) -> tuple[Tensor, ...]:
    """(out, log_sum, mean_value, mean_key, entropy) as `evidence_mix.attend`, the output in the dtype of the query."""
    parts, stride = [], 2 * call.query.shape[0] * call.query.shape[1]
    for number, sequence in enumerate(call.sequences()):
        seed = call.seed if call.seed is None or not number else call.seed + number * stride
        parts.append(attend_sequence(sequence.change(seed=seed)))
    if len(parts) == 1:
        return parts[0]
    outs, *states = zip(*parts, strict=True)
    return torch.cat(outs, -2), *(torch.cat(held) for held in states)


def lay(call: Call) -> tuple[Call, Groups, Tensor | None]:
    """(the call with its rows in slots, how these are cut, [B]: the slot of the first row among the queries; None: 0)
    of one sequence."""
    assert call.block_size is not None
    layout, length = Layout.choose(call.block_size, call.overlap, call.is_causal), call.key.shape[2]
    rows, first, empty = layout.rows, None, None
    closed: Tensor | int = length // rows
    if call.start is None:
        count = max(count_groups(layout, length, False), 1)
    else:
        # Whole groups before the first valid token are there, too: without a window of their own.
        empty = (-call.start).clamp_min(0).add(rows - 1).div(rows, rounding_mode="floor")
        first = call.start + empty * rows
        count = count_groups(layout, length, True) if length else 1
        closed = (first + length).div(rows, rounding_mode="floor").to(torch.int32)
    before = None if first is None else first + layout.before
    k, v, seen = lay_keys(call, layout, count, before, call.query.dtype)
    q = place_queries(call.query.unsqueeze(2), layout, count, before).squeeze(2)
    none: dict[str, Any] = dict.fromkeys(("start", "open_key", "open_value", "open_mask", "count"))
    none |= dict.fromkeys(("cu_query", "cu_key", "lln_weight", "block_weight"))
    mask = None if seen is None else seen.expand(call.key.shape[0], -1)
    laid = call.change(query=q, key=k.squeeze(2), value=v.squeeze(2), key_mask=mask, **none)
    moved = None if empty is None else empty.to(torch.int32)
    return laid, Groups(layout, count, moved, closed, torch.is_grad_enabled()), first


def attend_sequence(call: Call) -> tuple[Tensor, ...]:
    length = call.query.shape[2]
    laid, groups, first = lay(call)
    pieces = fold_pieces(laid, groups.layout)
    given = [getattr(call, name) for name in HELD]
    *outside, log, mean, key, entropy = MergeOutside.apply(laid, groups, *pieces, *given)
    out: Tensor = Join.apply(laid, groups, laid.query, laid.key, laid.value, call.offset, *outside)
    if first is None:
        out = out[:, :, :length]
    else:
        slots = torch.arange(length, device=out.device) + first.unsqueeze(-1)
        out = gather_rows(out.unsqueeze(2), slots).squeeze(2)
    return out, log, mean, key, entropy


def take_pieces(call: Call, layout: Layout) -> Call:
    """Each piece as a sequence of its own, which nobody reads."""
    count = call.key.shape[2] // layout.rows

    def cut(t: Tensor) -> Tensor:
        pieces: Tensor = t.unflatten(2, (count, layout.rows))
        return pieces.transpose(1, 2).flatten(0, 1)

    key, value = cut(call.key), cut(call.value)
    beta = call.beta if call.beta.shape[0] == 1 else call.beta.repeat_interleave(count, 0)
    mask = None if call.key_mask is None else call.key_mask.unflatten(1, (count, layout.rows)).flatten(0, 1)
    none: dict[str, Any] = dict.fromkeys((*HELD, "offset", "seed", "block_size"))
    return call.change(
        query=key[:, :, :0], key=key, value=value, beta=beta, key_mask=mask, is_causal=False, joint=False,
        overlap=False, dropout_p=0.0, **none,
    )  # fmt: skip


def fold_pieces(call: Call, layout: Layout) -> list[Tensor]:
    """(L, S, K, H) of each piece, [B, n, H, M, ...]."""
    _out, *held = apply(take_pieces(call, layout))
    return [t.unflatten(0, (call.key.shape[0], -1)) for t in held]


def fit_pass(call: Call, wanted: frozenset[str] | None) -> Fit:
    """What the forward pass runs with, or with `wanted` the backward pass. Directions have beta in them."""
    laid, groups, _first = lay(call)
    pieces = take_pieces(laid, groups.layout)
    if wanted is None:
        fit_forward(pieces)
    else:
        held = Joined(laid, groups).allocate_held(pieces.key.shape[0], pieces.key.shape[1])
        fit_backward(pieces, (pieces.query, *held), wanted - {"query"} | {"key"})
    return fit_join(laid, groups, wanted is not None)
