"""Pieces that every eager kernel uses: safe softmaxes, spans of rows, dropout that can be drawn again.

Layout of all kernels in this folder. Query heads are grouped by the key head they share, so that
grouped-query attention is plain broadcasting and nothing is repeated in memory:

    q          [B, H, G, N, D]     G query heads for each of the H key heads
    k, v       [B, H, 1, M, D], [B, H, 1, M, E]
    alpha      [B, H, G, 1, D]     any of these sizes may be 1; beta alike with G = 1
    weight     [B, H, G, 1, E]     the factor of the output (one side of `mix`), or None
    hidden     [B, 1, 1, M, 1]     True where a key is masked out, or None
    log_sum    [B, H, 1, D]        L of the state
    mean_value [B, H, 1, D, E]     S of the state
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from lln.kernels.paper_line import PAPER_A as PAPER_A
from lln.kernels.paper_line import PAPER_B as PAPER_B
from lln.kernels.paper_line import SIGMA_FLOOR as SIGMA_FLOOR

F = TypeVar("F", bound=Callable[..., Tensor])
K = TypeVar("K")

# Temporaries of about this many elements: they stay in a CPU's cache; on other devices launches cost more than memory.
SPAN_ELEMENTS = {"cpu": 2**20}
SPAN_ELEMENTS_ELSEWHERE = 2**24

# See `constant`: by what it is and by the stream that wrote it.
CONSTANTS: dict[tuple[float, torch.dtype, torch.device], dict[int, Tensor]] = {}
MOST_CONSTANTS = 1024


def raw_stream(device: torch.device) -> int:
    """What torch.cuda.current_stream(device).cuda_stream is, without the objects around it: it is asked for often."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """value as a tensor [1, 1, 1] that nobody changes. It is made once: at short lengths a kernel that fills one number
    takes as long as one that attends."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.full((1, 1, 1), value, dtype=dtype, device=device)
    known = CONSTANTS.get((value, dtype, device), {})
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The capture began with a wait, so that what any stream has made is there. What is made now would not be.
        for tensor in known.values():
            return tensor
        return torch.full((1, 1, 1), value, dtype=dtype, device=device)
    stream = raw_stream(device) if device.type == "cuda" else 0
    if stream in known:
        return known[stream]
    with torch.inference_mode(False):  # a tensor of inference mode could not be kept for a backward later
        made = torch.full((1, 1, 1), value, dtype=dtype, device=device)
        made.lln_constant = True  # type: ignore[attr-defined]
    if len(CONSTANTS) < MOST_CONSTANTS:  # none is ever dropped: a captured graph may read it
        CONSTANTS.setdefault((value, dtype, device), {})[stream] = made
    return made


def is_constant(t: Tensor) -> bool:
    """Whether it is one that nobody changes, of `constant`."""
    return getattr(t, "lln_constant", False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything narrower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of log_sum: float64, so that many small merges do not drift. (Apple's MPS has none.)"""
    return torch.float32 if device.type == "mps" else torch.float64


def make_once(
    store: dict[K, Tensor], key: K, make: Callable[[], Tensor], device: torch.device, most: int = 4096
) -> Tensor:
    """store[key], made on the CPU on the first call. Nothing is ever taken out, since a CUDA graph may still read it;
    beyond so many, what is made is not kept."""
    if is_in_torch_dispatch_mode():
        # In torch.export what is made has no values, and torch 2.11 cannot draw there: it is made outside, and taken in
        # as torch.tensor takes its numbers.
        with _disable_current_modes(), torch.inference_mode(False):
            made = make()
        taken: Tensor = torch.ops.aten.lift_fresh_copy(made)
        return taken.to(device)
    if key in store:
        return store[key]
    with torch.inference_mode(False):  # a tensor of inference mode could not be used for training later
        made = make().to(device)
    if len(store) < most:
        store[key] = made
    return made


def trace_as_constant(function: F) -> F:
    """For functions of plain values that return a tensor they keep: torch.compile calls them while it traces and takes
    the tensor as it is. What they make they make on the CPU: that copy waits, so that any stream may read it."""
    # What torch.compiler.assume_constant_result does, without importing the compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def spans(t: Tensor, dim: int = -2, at_least: int = 64) -> Iterator[slice]:
    """Slices that cover dimension `dim` of t, each of about SPAN_ELEMENTS elements but at least so many long.

    A compiler gets one: how many there are would be a property of the length, and a graph good for few lengths."""
    length = t.shape[dim]
    if torch.compiler.is_compiling():
        if length:
            yield slice(0, length)
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise TypeError(
            "torch.jit.trace would keep what holds for this length alone; use torch.compile or torch.export, and "
            "torch.onnx.export(..., dynamo=True) for ONNX."
        )
    elements = SPAN_ELEMENTS.get(t.device.type, SPAN_ELEMENTS_ELSEWHERE)
    step = max(elements * length // max(t.numel(), 1), at_least)
    step = max(-(-length // max(round(length / step), 1)), at_least)  # of equal size, without a small rest
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


def reuse(buffer: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer of the last span where it still fits: on a CPU the page faults of a fresh temporary cost
    more than the arithmetic in it."""
    if buffer is not None and buffer.shape == like.shape:
        return buffer
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def split_heads(t: Tensor, heads: int) -> Tensor:
    """[B, Hq, D] -> [B, H, G, D], where any size may be 1."""
    parts: Tensor = t.unflatten(1, (heads, -1) if t.shape[1] > 1 else (1, 1))
    return parts


def zeros_like(weight: Tensor | None) -> Any:
    """Where the gradient of an optional weight is summed up: None for None."""
    return None if weight is None else torch.zeros_like(weight)


def make_finite(t: Tensor) -> Tensor:
    """-inf becomes a finite number, so that subtracting it from an exponent of -inf gives -inf, not NaN."""
    if torch.compiler.is_exporting():  # ONNX gets limits as float32, where the lowest number of float64 is -inf
        return t.masked_fill(t == -torch.inf, 0.0)
    return t.clamp_min(torch.finfo(t.dtype).min)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b) where two empty sums (-inf) make an empty sum with zero, not NaN, gradient."""
    exporting = torch.compiler.is_exporting()
    if not torch.is_grad_enabled() and not exporting:
        return torch.logaddexp(a, b)
    empty = (a == -torch.inf) & (b == -torch.inf)
    a, b = a.masked_fill(empty, 0.0), b.masked_fill(empty, 0.0)
    # What stands for torch's function in ONNX takes the exponentials as they are, which overflow.
    both = torch.maximum(a, b) + (1.0 + (-(a - b).abs()).exp()).log() if exporting else torch.logaddexp(a, b)
    return both.masked_fill(empty, -torch.inf)


def softmax_or_zero(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of -inf, which has nothing to attend to, gives zeros."""
    top = make_finite(logits.detach().amax(-1, keepdim=True))
    weights = (logits - top).exp()
    # The largest weight of a row that has any is exactly 1, so the clamp changes empty rows only. It is below 1, which
    # is the sum of a row with one key: what passes through a clamp at its limit depends on the version of torch.
    return weights / weights.sum(-1, keepdim=True).clamp_min(0.5)


def exponents(t: Tensor, factor: Tensor, hidden: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """factor * t in the compute dtype, -inf where hidden; written to `out` where given.

    Kept well inside the finite numbers: differences of two exponents must be finite, too."""
    limit = torch.finfo(factor.dtype).max / 8
    if out is None:
        x = (t * factor).clamp(-limit, limit)
        return x if hidden is None else x.masked_fill(hidden, -torch.inf)
    x = torch.mul(t, factor, out=out).clamp_(-limit, limit)
    return x if hidden is None else x.masked_fill_(hidden, -torch.inf)


def is_surely(true: Any) -> bool:
    """Whether a comparison of sizes holds whatever sizes a compiler leaves open. Asking for its truth would settle it,
    and the graph would be good for those lengths alone."""
    if not torch.compiler.is_compiling():
        return bool(true)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # on demand: it imports sympy

    return statically_known_true(true)


def is_known(length: int) -> bool:
    """Whether no compiler leaves it open."""
    return is_surely(length >= 64) or is_surely(length < 64)


def count_parts(length: int, size: int) -> int:
    """So many parts of that size hold all rows. Where a compiler leaves the length open there is one more, so that they
    are surely two: of a size that may be 1 compilers make two cases."""
    exact = (length + size - 1) // size  # not -(-length // size): ONNX divides towards 0
    return exact if is_surely(exact >= 2) or is_surely(exact == 1) else (length - 1) // size + 2


def cut_rows(t: Tensor, count: int, size: int, dim: int = -2) -> Tensor:
    """The rows along `dim` as so many parts of that size. Beyond the last row anything may stand."""
    if not torch.compiler.is_exporting():
        missing = count * size - t.shape[dim]
        if not is_surely(missing == 0):
            t = torch.nn.functional.pad(t, [0, 0] * (-1 - dim) + [0, missing])
        parts: Tensor = t.unflatten(dim, (count, size))
        return parts
    # By their places: torch.export could not prove of a view that it fits every length.
    at = torch.arange(count, device=t.device)[:, None] * size + torch.arange(size, device=t.device)
    where: Any = ..., at.clamp_max(t.shape[dim] - 1), *[slice(None)] * (-1 - dim)
    return t[where]


def join_rows(t: Tensor, length: int, dim: int = -2) -> Tensor:
    """The inverse: the first `length` rows of the parts at `dim` - 1."""
    size = t.shape[dim]
    if not torch.compiler.is_exporting():
        return t.flatten(dim - 1, dim).narrow(dim, 0, length)
    at = torch.arange(length, device=t.device)
    where: Any = ..., at // size, at % size, *[slice(None)] * (-1 - dim)
    return t[where]


def fit_size(most: int, count: int) -> int:
    """The smallest power of two that surely is at least `count`, where that is not more than `most`, a power of two."""
    while most > 1 and is_surely(count <= most // 2):
        most //= 2
    return most


def is_plain(t: Tensor) -> bool:
    """Whether it has memory of its own: it is no subclass, and no tensor inside torch.func."""
    if type(t) not in (Tensor, torch.nn.Parameter):
        return False
    if torch.compiler.is_compiling():  # which cannot ask a tensor, and would break its graph there
        return not torch._C._are_functorch_transforms_active()
    return not torch._C._functorch.is_functorch_wrapped_tensor(t)


def can_look(t: Tensor) -> bool:
    """Whether its values may decide what is done next: on a CPU nothing has to be waited for, and nobody traces."""
    return t.is_cpu and not torch.compiler.is_compiling() and is_plain(t) and not is_in_torch_dispatch_mode()


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Inverted dropout whose masks are drawn again in the backward pass instead of being kept.

    A mask is a function of (seed, place), where place says which rows of the computation it is for.
    """

    p: float
    seed: int

    def mask(self, like: Tensor, *place: int) -> Tensor:
        generator = torch.Generator(like.device)
        generator.manual_seed(self.make_stream(*place).seed)
        keep = torch.rand(like.shape, generator=generator, device=like.device) >= self.p
        return keep.to(like.dtype) * (1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0)

    def make_stream(self, *place: int) -> Dropout:
        """An independent stream, for another part of the same call."""
        # Not hash(): in CPython hash(-1) == hash(-2).
        digest = hashlib.blake2b(repr((self.seed, *place)).encode(), digest_size=8).digest()
        return Dropout(self.p, int.from_bytes(digest, "big") >> 2)


def drop(weights: Tensor, dropout: Dropout | None, *place: int) -> tuple[Tensor, Tensor | None]:
    """Dropped weights, and the mask that did it (None without dropout)."""
    if dropout is None:
        return weights, None
    mask = dropout.mask(weights, *place)
    return weights * mask, mask


def is_watched() -> bool:
    """Whether somebody looks on who has to see each step: torch.func, forward-mode derivatives."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_taken_apart(by_compilers: bool = False) -> bool:
    """Whether somebody takes a computation apart: torch.export, which keeps no backward of an autograd.Function, and
    what `is_watched` knows. by_compilers: also torch.compile."""
    if torch.compiler.is_compiling():
        return by_compilers or torch.compiler.is_exporting()
    return is_watched()


def run(function: type[Function], composed: Callable[..., Any], *args: Any, in_graphs: bool = False) -> Any:
    """function.apply, without it where nobody asks for gradients: it takes longer than attention of a few tokens.

    composed: the same in operations that are differentiable by themselves, for those who take it apart; in_graphs: for
    torch.compile too."""
    if is_taken_apart(in_graphs):
        return composed(*args)
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)
    if wanted or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return function.apply(*args)
    return function.forward(*args)


def is_autocast_enabled(device_type: str) -> bool:
    # torch has no autocast for the meta device and says so with an error.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def keep_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run without autocast: the softmaxes must stay in the compute dtype in forward and backward alike."""

    @functools.wraps(function)
    def run_without_autocast(*args: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        if not is_autocast_enabled(device):
            return function(*args)
        with torch.autocast(device, enabled=False):
            return function(*args)

    return run_without_autocast
