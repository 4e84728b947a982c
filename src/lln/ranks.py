"""The processes that share one sequence: who they are, and what they send each other. `lln.distributed` says when."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

SDPA = functional.scaled_dot_product_attention  # torch's, as it is outside of its own context_parallel
Form = tuple[tuple[int, ...], torch.dtype]  # of a tensor that will come: its shape and dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """Processes that hold consecutive pieces of the same sequences."""

    group: Any  # of torch.distributed
    rank: int
    size: int
    attend: Callable[..., Any]  # in the place of `lln.functional.attend_here`: attention over all pieces
    lengths: tuple[int, ...] | None = None  # tokens of each piece, where they were said beforehand

    @property
    def device(self) -> torch.device:
        """Where numbers lie that are told to all: on the CPU if the processes can talk there, since nobody waits."""
        backends = str(dist.get_backend_config(self.group))
        return torch.device("cpu" if "cpu" in backends or backends == "gloo" else "cuda")

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # the processes are the same for a copy of what they share

    def tell(self, *numbers: int) -> list[list[int]]:
        """These numbers of every rank. Where processes can only talk on a GPU, this waits for it."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return [one.tolist() for one in self.gather(mine)]

    def gather(self, t: Tensor) -> list[Tensor]:
        """That of every rank, all of one shape."""
        every = [torch.empty_like(t) for _ in range(self.size)]
        with explain_loss(self):
            dist.all_gather(every, t, group=self.group)
        return every

    def swap(self, outgoing: Tensor, sent: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Bytes for bytes, in one collective: so many for each rank, and so many from each."""
        incoming = outgoing.new_empty(sum(expected))
        with explain_loss(self):
            dist.all_to_all_single(incoming, outgoing, list(expected), list(sent), group=self.group)
        return incoming

    def measure(self, length: int) -> tuple[int, ...]:
        """How many rows each rank has, of which this one has so many."""
        if self.lengths is None:
            return tuple(told for (told,) in self.tell(length))
        if self.lengths[self.rank] != length:
            raise ValueError(
                f"context_parallel: this rank should hold {self.lengths[self.rank]} tokens according to lengths or "
                f"buffers, and got {length}; leave lengths out if calls differ in length."
            )
        return self.lengths

    def cut_offsets(self, offsets: Tensor | None, length: int) -> Tensor | None:
        """Of packed sequences in all rows, those in the rows here: of sequences elsewhere nothing is left."""
        if offsets is None:
            return None
        begin = sum(self.measure(length)[: self.rank])
        return (offsets - begin).clamp(0, length)

    def add_up(self, t: Tensor) -> Tensor:
        """The sum over all ranks, on all of them, without gradients."""
        t = t.detach().clone(memory_format=torch.contiguous_format)  # memory is added up, however it lies
        with explain_loss(self):
            dist.all_reduce(t, group=self.group)
        return t


class Held:
    """Which processes share the sequences of the calls that are made now. Not a context variable: backward runs in
    threads of its own, and what it computes again must come out as before."""

    ranks: Ranks | None = None


def find_ranks() -> Ranks | None:
    """The processes that share the sequences of a call that is made now; None: the whole of it is here."""
    if Held.ranks is None and functional.scaled_dot_product_attention is not SDPA:
        refuse_torchs_own()
    return Held.ranks


def refuse_torchs_own() -> None:
    """ValueError inside torch's own context_parallel, which transformers and accelerate enter where they are told to
    share sequences: it puts another function in the place of softmax attention, and LLN attention would see the tokens
    of one rank alone."""
    module = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed.tensor.experimental"):
        raise ValueError(
            "LLN attention inside torch's own context_parallel, which deals tokens out from both ends and spreads "
            "softmax attention alone: use lln.distributed.context_parallel or lln.hf.spread in its place, and "
            "leave cp_size of accelerate's ParallelismConfig at 1."
        )


@contextlib.contextmanager
def share(ranks: Ranks | None) -> Iterator[None]:
    """Within it calls are shared by these ranks; None: by nobody."""
    before, Held.ranks = Held.ranks, ranks
    try:
        yield
    finally:
        Held.ranks = before


def refuse_ranks(what: str, remedy: str) -> None:
    """ValueError where tokens are spread over processes."""
    if find_ranks() is not None:
        raise ValueError(f"{what} inside lln.distributed.context_parallel: {remedy}.")


@contextlib.contextmanager
def explain_loss(ranks: Ranks) -> Iterator[None]:
    """torch names a connection; say what it means."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel: rank {ranks.rank} of {ranks.size} could not exchange with the others, of which one "
            f"has probably ended or was given another call; its own message says more. torch: {error}"
        ) from error


class Sending:
    """One exchange that is under way, forward or backward, and the forms of all that is in it."""

    def __init__(
        self, ranks: Ranks, device: torch.device, sent: list[list[Form]], expected: Sequence[Sequence[Form]]
    ) -> None:
        self.ranks, self.device, self.sent, self.expected = ranks, device, sent, expected
        self.token: Tensor | None = None
        self.under_way: tuple[Any, ...] | None = None

    def begin(self, parcels: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Form]]) -> None:
        """Whatever their dtypes are, tensors go as bytes in one collective."""
        flat = [[t.contiguous().flatten().view(torch.uint8) for t in parts] for parts in parcels]
        out_sizes = [sum(map(len, parts)) for parts in flat]
        in_sizes = [sum(map(count_bytes, forms)) for forms in expected]
        every = [t for parts in flat for t in parts]
        outgoing = torch.cat(every) if every else torch.empty(0, dtype=torch.uint8, device=self.device)
        incoming = outgoing.new_empty(sum(in_sizes))
        with explain_loss(self.ranks):
            group = self.ranks.group
            work = dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=group, async_op=True)
        self.under_way = work, incoming, outgoing, expected  # what goes out has to live until it has gone

    def wait(self) -> list[list[Tensor]]:
        """What came, bit by bit what was sent."""
        assert self.under_way is not None
        work, incoming, _, expected = self.under_way
        with explain_loss(self.ranks):
            work.wait()
        self.under_way = None
        pieces = iter(incoming.split([count_bytes(form) for forms in expected for form in forms]))
        # Copies: of a piece that begins anywhere, bytes could not be read as wider numbers.
        return [[next(pieces).clone().view(form[1]).view(form[0]) for form in forms] for forms in expected]

    def finish(self) -> tuple[list[list[Tensor]], Tensor]:
        """What every rank has sent here, by its rank, and a tensor for `tie`."""
        begun, self.token = self.token, None  # else the graph would hold itself, until Python collects garbage
        token, *came = Receive.apply(self, begun)
        arrived = iter(came)
        return [[next(arrived) for _ in forms] for forms in self.expected], token


def send(
    ranks: Ranks, parcels: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Form]], anchors: Sequence[Any],
    device: torch.device,
) -> Sending:  # fmt: skip
    """Begin an exchange, in one collective. What is computed before `finish` is called runs meanwhile, in the backward
    too, where gradients take the same way back: autograd runs the latest first.

    parcels: for each rank the tensors that go there. expected: the forms of those that come from each. All ranks must
    take part in the backward, so that the node hangs on everything in `anchors` that requires grad, and `tie` hangs it
    before what each rank goes on with, even where nothing is sent. One exchange is finished before the next."""
    held = [t for t in anchors if isinstance(t, Tensor) and t.requires_grad]
    sent = [t for parts in parcels for t in parts]
    sending = Sending(ranks, device, [[describe(t) for t in parts] for parts in parcels], expected)
    sending.token = Send.apply(sending, len(held), *held, *sent)
    return sending


def exchange(
    ranks: Ranks, parcels: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Form]], anchors: Sequence[Any],
    device: torch.device,
) -> tuple[list[list[Tensor]], Tensor]:  # fmt: skip
    """`send` and `finish` at once."""
    return send(ranks, parcels, expected, anchors, device).finish()


class Send(Function):
    """(sending, number of anchors, *anchors, *parcels) -> token"""

    @staticmethod
    def forward(ctx: Any, sending: Sending, anchors: int, *given: Tensor) -> Tensor:
        sending.begin(cut(given[anchors:], [len(forms) for forms in sending.sent]), sending.expected)
        ctx.sending, ctx.anchors = sending, anchors
        # On the device: a node with gradients on the CPU alone would run in another thread, at any time.
        return torch.zeros((), device=sending.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        came = [iter(parts) for parts in ctx.sending.wait()]
        found = [
            next(parts) if form[1].is_floating_point else None
            for forms, parts in zip(ctx.sending.sent, came, strict=True)
            for form in forms
        ]
        return *[None] * (2 + ctx.anchors), *found


class Receive(Function):
    """(sending, token) -> (token, *what came)"""

    @staticmethod
    def forward(ctx: Any, sending: Sending, token: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        came = [t for parts in sending.wait() for t in parts]
        ctx.mark_non_differentiable(*(t for t in came if not t.is_floating_point()))
        ctx.sending = sending
        return token.clone(), *came

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Any, ...]:
        sending: Sending = ctx.sending
        # Of whole numbers there is no gradient, and none is sent.
        back: list[list[Tensor]] = [
            [
                torch.zeros(form[0], dtype=form[1], device=sending.device) if grad is None else grad
                for form, grad in zip(own, parts, strict=True)
                if form[1].is_floating_point
            ]
            for own, parts in zip(sending.expected, cut(grads, [len(own) for own in sending.expected]), strict=True)
        ]
        sending.begin(back, [[form for form in forms if form[1].is_floating_point] for forms in sending.sent])
        return None, torch.zeros((), device=sending.device)


class Tie(Function):
    """(out, token) -> out, so that a backward through it comes by the exchange that made the token."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, token: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g.new_zeros((), dtype=torch.float32)


def tie(out: Tensor, token: Tensor) -> Tensor:
    """out, whose backward takes part in the exchange whatever of it was used."""
    tied: Tensor = Tie.apply(out, token)
    return tied


def describe(t: Tensor) -> Form:
    return tuple(t.shape), t.dtype


def cut(tensors: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    rest = iter(tensors)
    return [[next(rest) for _ in range(count)] for count in counts]


def count_bytes(form: Form) -> int:
    return math.prod(form[0]) * form[1].itemsize
