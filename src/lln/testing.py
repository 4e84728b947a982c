"""The checks that every mechanism of this package has to pass, for attention of your own: `lln.testing`."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lln.peers import Mechanism, attention, attention_matrix, mechanism
from lln.peers.registry import find
from lln.values import check_choice, check_count

__all__ = ["CHECKS", "check_mechanism"]

EXACT = 1e-8  # of float64, relative to the largest entry; iterations inside some mechanisms lose digits
NARROW = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # likewise, of the norm


class Subject:
    """A mechanism with its options and sizes, as the checks call it."""

    def __init__(
        self, name: str, num_heads: int, head_dim: int, length: int, device: torch.device | str, options: dict[str, Any]
    ) -> None:
        self.entry: Mechanism = find(name)
        self.name, self.length, self.options = name, length, options
        self.heads, self.dim, self.device = num_heads, head_dim, device
        self.module: nn.Module | None = None
        if self.entry.parameters:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                sizes = {"num_heads": num_heads, "head_dim": head_dim, "max_length": 2 * length}
                built: Any = mechanism(name, dtype=torch.float64, device=device, **sizes, **options)
            self.module = built.eval()

    def draw(
        self, seed: int, *, batch: int = 2, length: int | None = None, key_heads: int | None = None
    ) -> list[Tensor]:
        """Query, key and value, in float64."""
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads, key_heads or self.heads, key_heads or self.heads)
        shapes = [(batch, number, length or self.length, self.dim) for number in heads]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device) for shape in shapes]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, weights: torch.dtype | None = None, **where: Any
    ) -> Tensor:
        """weights: the dtype that a module's are rounded to; default: that of the query."""
        if self.module is not None:
            module: Any = copy.deepcopy(self.module).to(weights or query.dtype).to(query.dtype)
            out: Tensor = module(query, key, value, **where)
            return out
        return attention(self.name, query, key, value, **where, **self.options)

    def ways(self) -> list[bool]:
        """is_causal of the calls that it supports."""
        return [False, True] if self.entry.supports("causal") else [False]

    def fail(self, sentence: str) -> None:
        raise AssertionError(f"{self.name}: {sentence}")

    def need_close(self, out: Tensor, wanted: Tensor, sentence: str, tolerance: float = EXACT) -> None:
        if not out.isfinite().all():
            self.fail(f"{sentence}: there are {int((~out.isfinite()).sum())} entries that are not finite.")
        difference, size = (t.detach().abs().max().item() for t in (out - wanted, wanted))
        if difference > tolerance * max(size, 1e-3):
            self.fail(f"{sentence}: entries differ by up to {difference:.2g}, where the largest is {size:.2g}.")


Check = Callable[[Subject], None]


def check_shape(subject: Subject) -> None:
    """The output has the value's width and the query's length and dtype, is finite, and the same each time."""
    for is_causal in subject.ways():
        q, k, v = subject.draw(0)
        wide = v if subject.module is not None else torch.cat([v, v[..., :1]], -1)
        out = subject(q, k, wide, is_causal=is_causal)
        if out.shape != (*q.shape[:3], wide.shape[3]) or out.dtype != q.dtype:
            subject.fail(f"the output of value {list(wide.shape)} is {list(out.shape)} {out.dtype}.")
        subject.need_close(subject(q, k, wide, is_causal=is_causal), out, "the same call gives something else", 0.0)


def check_padding(subject: Subject) -> None:
    """Padding is invisible, on either side, and what key_mask hides may be anything."""
    n, extra = subject.length, 7
    q, k, v = subject.draw(1)
    for is_causal in subject.ways():
        alone = subject(q, k, v, is_causal=is_causal)
        for side, pad, rows in (("left", (0, 0, extra, 0), slice(extra, None)), ("right", (0, 0, 0, extra), slice(n))):
            mask = torch.zeros(2, n + extra, dtype=torch.bool, device=q.device)
            mask[:, rows] = True
            longer = [nn.functional.pad(t, pad, value=3.0) for t in (q, k, v)]
            out = subject(*longer, key_mask=mask, is_causal=is_causal)[:, :, rows]
            subject.need_close(out, alone, f"padding on the {side} changes the rows of real tokens")
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(0)).to(q.device) < 0.7
    other = (torch.where(mask[:, None, :, None], t, 50 * t.flip(2)) for t in (q, k, v))
    shown = mask[:, None].expand(2, subject.heads, n)
    out, wanted = subject(*other, key_mask=mask), subject(q, k, v, key_mask=mask)
    subject.need_close(out[shown], wanted[shown], "what key_mask hides changes the rows of other tokens")


def check_batch(subject: Subject) -> None:
    """A sample's output does not depend on the others in its batch."""
    q, k, v = subject.draw(2)
    for is_causal in subject.ways():
        out, alone = (subject(q[:n], k[:n], v[:n], is_causal=is_causal)[:1] for n in (2, 1))
        subject.need_close(out, alone, "the other sample of a batch changes the output")


def check_future(subject: Subject) -> None:
    """With is_causal, later tokens are invisible to earlier ones, and visible from their own place on."""
    cut = subject.length // 2
    before = subject(*subject.draw(3), is_causal=True)
    for what, places in (("queries and keys", (0, 1)), ("values", (2,))):
        tensors = subject.draw(3)
        for place in places:
            tensors[place][:, :, cut:] *= -30.0
        after = subject(*tensors, is_causal=True)
        subject.need_close(after[:, :, :cut], before[:, :, :cut], f"later {what} change earlier rows")
    if torch.allclose(before[:, :, cut:], after[:, :, cut:]):
        subject.fail("values have no effect on the rows of their own tokens.")


def check_packing(subject: Subject) -> None:
    """Packed sequences give what each gives alone."""
    q, k, v = subject.draw(4, batch=1)
    ends = [0, subject.length // 4, subject.length - 1, subject.length]
    offsets = torch.tensor(ends, dtype=torch.int32, device=q.device)
    for is_causal in subject.ways():
        out = subject(q, k, v, is_causal=is_causal, cu_seqlens=offsets)
        for a, b in itertools.pairwise(ends):
            alone = subject(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=is_causal)
            subject.need_close(out[:, :, a:b], alone, "a packed sequence sees the others")


def check_grouped(subject: Subject) -> None:
    """Fewer key heads give what repeated ones give."""
    if subject.module is not None:
        return  # its parameters are those of so many key heads
    q, k, v = subject.draw(5, key_heads=subject.heads // 2)
    repeated = (t.repeat_interleave(2, 1) for t in (k, v))
    subject.need_close(subject(q, k, v), subject(q, *repeated), "fewer key heads differ from repeated ones")


def check_cross(subject: Subject) -> None:
    """Queries of one sequence can attend to another of a different length."""
    q, k, v = subject.draw(6)
    out = subject(q[:, :, : subject.length // 2], k, v)
    if out.shape[2] != subject.length // 2 or not out.isfinite().all():
        subject.fail(f"attention to a longer sequence gives {list(out.shape)}, or is not finite.")


def check_nothing(subject: Subject) -> None:
    """A query that has no key to attend to gives zeros, and gradients that are finite."""
    mask = torch.ones(2, subject.length, dtype=torch.bool, device=subject.device)
    mask[0] = False
    for is_causal in subject.ways():
        tensors = [t.requires_grad_() for t in subject.draw(7)]
        out = subject(*tensors, key_mask=mask, is_causal=is_causal)
        if not (out[0] == 0).all():
            subject.fail("a sample whose keys are all hidden does not give zeros.")
        for grad in torch.autograd.grad(out.square().sum(), tensors, allow_unused=True):
            if grad is not None and not grad.isfinite().all():
                subject.fail("gradients are not finite where a sample's keys are all hidden.")


def check_gradients(subject: Subject) -> None:
    """Gradients are those of finite differences."""
    where: dict[str, Any] = {}
    if subject.entry.supports("padding"):
        where["key_mask"] = torch.arange(11, device=subject.device)[None] < 9
    for is_causal in subject.ways():
        call = functools.partial(subject, is_causal=is_causal, **where)
        inputs = [t.requires_grad_() for t in subject.draw(8, batch=1, length=11)]
        try:
            torch.autograd.gradcheck(call, inputs, atol=1e-6, fast_mode=True)
        except RuntimeError as error:
            subject.fail(f"gradients differ from finite differences: {' '.join(str(error).split())[:200]}")


def check_precision(subject: Subject) -> None:
    """In narrower types the output is near that of float64."""
    for dtype, tolerance in NARROW.items():
        tensors = [t.to(dtype) for t in subject.draw(9)]
        for is_causal in subject.ways():
            exact = subject(*(t.double() for t in tensors), weights=dtype, is_causal=is_causal)
            out = subject(*tensors, is_causal=is_causal)
            error = ((out.double() - exact).norm() / exact.norm()).item()
            if out.dtype != dtype or not error < tolerance:
                subject.fail(f"in {dtype} the output is {out.dtype} and off by {error:.2g} of its norm.")


def check_extremes(subject: Subject) -> None:
    """With tiny and with huge scores, output and gradients stay finite in float32."""
    for factor in (0.0, 1e-6, 1e3):
        q, k, v = (t.float() for t in subject.draw(10))
        tensors = [t.requires_grad_() for t in (factor * q, factor * k, v)]
        for is_causal in subject.ways():
            out = subject(*tensors, is_causal=is_causal)
            grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
            if not all(t.isfinite().all() for t in (out, *grads) if t is not None):
                subject.fail(f"with queries and keys times {factor:g}, output or gradients are not finite in float32.")


def check_matrix(subject: Subject) -> None:
    """The output is P times value, with the P that unit vectors for values give."""
    if subject.module is not None or not subject.entry.matrix:
        return
    q, k, v = subject.draw(11)
    for is_causal in subject.ways():
        p = attention_matrix(subject.name, q, k, is_causal=is_causal, **subject.options)
        out = subject(q, k, v, is_causal=is_causal)
        subject.need_close(p @ v, out, "the output is not P times value; register it with matrix=False")


CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {  # and what it must support for them to be made
    "shape": (check_shape, ()),
    "batch": (check_batch, ()),
    "padding": (check_padding, ("padding",)),
    "nothing": (check_nothing, ("padding",)),
    "causal": (check_future, ("causal",)),
    "packing": (check_packing, ("packing",)),
    "grouped": (check_grouped, ("grouped",)),
    "cross": (check_cross, ("cross",)),
    "gradients": (check_gradients, ()),
    "precision": (check_precision, ()),
    "extremes": (check_extremes, ()),
    "matrix": (check_matrix, ()),
}  # fmt: skip


def check_mechanism(
    name: str,
    *,
    only: Iterable[str] | None = None,
    num_heads: int = 4,
    head_dim: int = 16,
    length: int = 37,
    device: torch.device | str = "cpu",
    **options: Any,
) -> list[str]:
    """Check your own attention, registered by `lln.register`, or any other mechanism, as this package checks its own.

    Among others, the checks are: padding, other samples of the batch and later tokens have no influence, gradients are
    right, a query with nothing to attend to gives zeros, and narrow types stay near float64. What the mechanism refuses
    is not checked.

    Args:
        name: one of `lln.mechanisms()` that works on query, key and value.
        only: names of some of `lln.testing.CHECKS`; default: all.
        num_heads: number of query heads, an even number. Default 4.
        head_dim: dimension of query, key and value. Default 16.
        length: length of the sequences. Default 37.
        device: device of the tensors. Default "cpu".
        options: options of the mechanism.

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: for the first check that fails, with one sentence that gives the number.

    Examples:
        >>> import lln, torch
        >>> lln.testing.check_mechanism("elu", only=["padding", "causal"])
        ['padding', 'causal']
        >>> @lln.register("forgets_the_mask")
        ... def attend(query, key, value, *, key_mask=None):
        ...     return torch.softmax(query @ key.transpose(-1, -2), -1) @ value
        >>> lln.testing.check_mechanism("forgets_the_mask", only=["nothing"])
        Traceback (most recent call last):
        AssertionError: forgets_the_mask: a sample whose keys are all hidden does not give zeros.
    """
    entry = find(name)
    if entry.kind == "mixer":
        raise ValueError(f"name must be a mechanism on query, key and value; {name} mixes hidden states.")
    chosen = list(CHECKS) if only is None else list(only)
    for one in chosen:
        check_choice("only", one, *CHECKS)
    for argument, count in (("num_heads", num_heads), ("head_dim", head_dim), ("length", length)):
        check_count(argument, count)
    subject = Subject(name, num_heads, head_dim, length, device, options)
    made = []
    for one in chosen:
        check, features = CHECKS[one]
        if all(feature not in entry.refuses for feature in features):
            check(subject)
            made.append(one)
    return made
