"""LLNState: all that LLN attention needs to know of the keys and values it has seen.

Per key head it is the pair (log_sum, mean_value) of D + D * E numbers, whatever the length:

    L_c = logsumexp_j(beta k_jc)          S_c = sum_j softmax_j(beta k_jc) v_j

Two states merge into the state of both sets of keys. The merge is associative and commutative, and the empty state
(L = -inf, S = 0) is its identity, so a sequence may be cut anywhere and put together again in any grouping.

With the evidence read a state has M channels (D, or more), and also the centre of the keys in each, K_c, and the
entropy H_c of its weights (see `lln.kernels.evidence`): M (D + E + 2) numbers.

With `block_size` (LLN+Diag) a state belongs to a causal sequence and also carries the block that is still open; with a
value convolution, likewise, the last values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.kernels import evidence
from lln.kernels.common import can_look, compute_dtype, wide_dtype
from lln.kernels.fold import merge
from lln.values import check_choice, check_count, check_flag, describe, show


@dataclasses.dataclass(frozen=True, eq=False)
class LLNState:
    """Everything that LLN attention needs to know of the keys and values it has seen: for B sequences with H key heads
    of dimension D and values of dimension E. Its size does not depend on the length.

    `lln_attention(..., return_state=True)` and `LLNState.empty` make it, and `lln_attention(..., state=...)` takes it.

    Examples:
        >>> import torch
        >>> from lln import LLNState, lln_attention
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
        >>> state = LLNState.empty(1, 2, 8)
        >>> for t in range(10):  # token by token, in memory that does not grow
        ...     rows = (x[:, :, t : t + 1] for x in (q, k, v))
        ...     out, state = lln_attention(*rows, 1.5, 1.5, is_causal=True, state=state, return_state=True)
        >>> torch.testing.assert_close(out, lln_attention(q, k, v, 1.5, 1.5, is_causal=True)[:, :, 9:])
        >>> state
        LLNState(batch=1, heads=2, head_dim=8, value_dim=8, dtype=torch.float32, device=cpu)
    """

    log_sum: Tensor  # [B, H, D] float64: 100,000 one-token merges in float32 would drift
    mean_value: Tensor  # [B, H, D, E] float32, or float64 for float64 inputs
    beta: float | Tensor | None = (
        None  # what the keys were multiplied with; [B, H, D], any size may be 1. None: no keys
    )
    count: Tensor | None = None  # [B] int64, tokens since the first valid one; this and the rest only with block_size
    block_key: Tensor | None = None  # [B, H, block_size, D]; the first count % block_size rows are the open block
    block_value: Tensor | None = None  # [B, H, block_size, E]
    block_mask: Tensor | None = None  # [B, block_size] bool, which of the rows hold a key that may be attended to
    mean_key: Tensor | None = None  # [B, H, M, D] as mean_value; this and entropy only with the evidence read
    entropy: Tensor | None = None  # [B, H, M] float64
    outside: bool = False  # mix="evidence": block_key and block_value hold keys that are in nothing else here
    overlap: bool = False  # of them: half of block_key's rows come before the open group of as many
    last_value: Tensor | None = None  # [B, H, width - 1, E], of a causal value convolution, zeros where none or hidden

    def __post_init__(self) -> None:
        log_sum, mean = self.log_sum, self.mean_value
        if not isinstance(log_sum, Tensor) or not isinstance(mean, Tensor):
            raise TypeError("LLNState: log_sum and mean_value must be tensors; LLNState.empty(...) makes an empty one.")
        if log_sum.ndim != 3 or mean.ndim != 4 or mean.shape[:3] != log_sum.shape:
            raise ValueError(
                "LLNState: log_sum must be [batch, heads, dim] and mean_value [batch, heads, dim, value dim]; "
                f"got {list(log_sum.shape)} and {list(mean.shape)}."
            )
        if (self.mean_key is None) != (self.entropy is None):
            raise ValueError("LLNState: mean_key and entropy go together; give both or neither.")
        block = [self.count, self.block_key, self.block_value, self.block_mask]
        if any(t is None for t in block) and any(t is not None for t in block):
            raise ValueError("LLNState: count, block_key, block_value and block_mask go together; give all or none.")
        if mean.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"LLNState: mean_value must be float32 or float64; got {mean.dtype}.")
        if log_sum.dtype != wide_dtype(log_sum.device):
            object.__setattr__(self, "log_sum", log_sum.to(wide_dtype(log_sum.device)))

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        block_size: int | None = None,
        read: str = "paper",
        channels: int | None = None,
        mix: str | None = None,
        overlap: bool = False,
        value_convolution: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> LLNState:
        """Make the state of a sequence that has no tokens yet. `heads` counts key heads, and `dtype` is that of the
        keys and values to come. `channels` is the number of channels of the evidence read if it is not head_dim. Give
        block_size, mix="evidence", overlap and value_convolution if the calls have them.

        >>> LLNState.empty(1, 2, 8, block_size=4)
        LLNState(batch=1, heads=2, head_dim=8, value_dim=8, block_size=4, dtype=torch.float32, device=cpu)
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim, "channels": channels}
        check_count("LLNState.empty: batch", batch, least=0)
        for name, size in (sizes | {"block_size": block_size}).items():
            if size is not None:
                check_count(f"LLNState.empty: {name}", size)
        check_flag("LLNState.empty: overlap", overlap)
        check_choice("LLNState.empty: dtype", dtype, torch.float32, torch.float64, torch.bfloat16, torch.float16)
        try:
            device = torch.empty(0, device=device).device
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"LLNState.empty: device {show(device)} is none: {str(error).splitlines()[0]}.") from None
        if read not in ("paper", "evidence"):
            raise ValueError(f"LLNState.empty: read must be 'paper' or 'evidence'; got {read!r}.")
        if channels is not None and read != "evidence":
            raise ValueError(f"LLNState.empty: channels go with read='evidence'; got read={read!r}.")
        if mix not in (None, "evidence"):
            raise ValueError(f"LLNState.empty: mix must be 'evidence', or left out for all others; got {mix!r}.")
        if (mix is not None and (read != "evidence" or block_size is None)) or (overlap and mix is None):
            raise ValueError("LLNState.empty: overlap needs mix='evidence', read='evidence' and block_size.")
        shape, wide = (batch, heads, head_dim if channels is None else channels), compute_dtype(dtype)
        log_sum = torch.full(shape, -torch.inf, dtype=wide_dtype(device), device=device)
        mean = torch.zeros(*shape, value_dim, dtype=wide, device=device)
        more: dict[str, Any] = {}
        if read == "evidence":
            more["mean_key"] = torch.zeros(*shape, head_dim, dtype=wide, device=device)
            more["entropy"] = torch.zeros(shape, dtype=wide_dtype(device), device=device)
        if value_convolution is not None:
            if value_convolution < 3 or value_convolution % 2 == 0:
                raise ValueError(
                    f"LLNState.empty: value_convolution must be an odd int of 3 or more; got {value_convolution!r}."
                )
            last = (batch, heads, value_convolution - 1, value_dim)
            more["last_value"] = torch.zeros(last, dtype=dtype, device=device)
        if block_size is None:
            return cls(log_sum, mean, **more)
        return cls(
            log_sum,
            mean,
            **more,
            count=torch.zeros(batch, dtype=torch.int64, device=device),
            block_key=torch.zeros(batch, heads, block_size, head_dim, dtype=dtype, device=device),
            block_value=torch.zeros(batch, heads, block_size, value_dim, dtype=dtype, device=device),
            block_mask=torch.zeros(batch, block_size, dtype=torch.bool, device=device),
            outside=mix is not None,
            overlap=overlap,
        )

    @property
    def block_size(self) -> int | None:
        """The block size of LLN+Diag; None for LLN alone."""
        return None if self.block_key is None else self.block_key.shape[-2]

    @property
    def read(self) -> str:
        """ "paper" or "evidence": how queries read it.

        >>> LLNState.empty(1, 2, 8, read="evidence").read
        'evidence'
        """
        return "paper" if self.mean_key is None else "evidence"

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, which is the same after one token and after a million.

        >>> LLNState.empty(1, 2, 8).nbytes  # 2 heads of 8 numbers in float64, 64 in float32
        640
        """
        return sum(t.nbytes for t in list_tensors(self))

    def merge(self, other: LLNState) -> LLNState:
        """Return the state of the keys of both states. Raises ValueError if they cannot be merged: if they differ in
        size, dtype, device or beta (beta tensors on a GPU are not compared, because that would wait for the device), or
        if they have blocks.

        >>> from lln import lln_attention
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
        >>> parts = [lln_attention(q, k[:, :, i : i + 5], v[:, :, i : i + 5], 1.5, 1.5, return_state=True)[1]
        ...          for i in (0, 5)]
        >>> both = parts[0].merge(parts[1])  # as if all keys had come at once
        >>> out = lln_attention(q, k[:, :, :0], v[:, :, :0], 1.5, 1.5, state=both)
        >>> torch.testing.assert_close(out, lln_attention(q, k, v, 1.5, 1.5))
        """
        if not isinstance(other, LLNState):
            raise TypeError(f"LLNState.merge: other must be an LLNState; got {type(other).__name__}.")
        if self.read != other.read:
            raise ValueError(
                f"LLNState.merge: one state is for read={self.read!r}, the other for {other.read!r}; use one for both."
            )
        if self.mean_value.shape != other.mean_value.shape:
            raise ValueError(
                "LLNState.merge: the states must have the same [batch, heads, dim, value dim]; "
                f"got {list(self.mean_value.shape)} and {list(other.mean_value.shape)}."
            )
        if self.last_value is not None or other.last_value is not None:
            raise ValueError(
                "LLNState.merge: states with the last values of a value convolution do not merge, because which are "
                "last depends on the order; pass the earlier state with the later tokens."
            )
        for what in ("dtype", "device"):
            mine, others = getattr(self.mean_value, what), getattr(other.mean_value, what)
            if mine != others:
                raise ValueError(f"LLNState.merge: the states differ in {what}, {mine} and {others}; use .to() on one.")
        if self.block_size is not None or other.block_size is not None:
            same = self.outside == other.outside and self.overlap == other.overlap
            if self.block_size == other.block_size and same:
                for state, rest in ((self, other), (other, self)):
                    if state.count is not None and not state.count.any():
                        return rest
            raise ValueError(
                "LLNState.merge: states with an open block (block_size) do not merge, because where a block starts "
                "depends on all that came before; pass the earlier state as lln_attention(..., state=...) with the "
                "later tokens."
            )
        if not is_same_beta(self.beta, other.beta):
            raise ValueError(
                "LLNState.merge: the states were made with different beta, so their sums are not comparable; "
                "make both with the same beta."
            )
        beta = self.beta if self.beta is not None else other.beta
        if self.read == "paper":
            return LLNState(*merge(self.log_sum, self.mean_value, other.log_sum, other.mean_value), beta)
        log_sum, mean_value, mean_key, entropy = evidence.merge(list_evidence(self), list_evidence(other))
        return LLNState(log_sum, mean_value, beta, mean_key=mean_key, entropy=entropy)

    def with_last(self, last_value: Tensor | None) -> LLNState:
        """Return the same state with other last values, for a module that convolves values.

        >>> LLNState.empty(1, 2, 8).with_last(torch.zeros(1, 2, 4, 8)).last_value.shape
        torch.Size([1, 2, 4, 8])
        """
        held = {name: getattr(self, name) for name in FIELDS}
        return LLNState(**(held | {"last_value": last_value}))

    def _map(self, function: Callable[[Tensor], Tensor]) -> LLNState:
        held = [getattr(self, name) for name in FIELDS]
        moved: list[Any] = [function(t) if isinstance(t, Tensor) else t for t in held]
        return LLNState(*moved)

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> LLNState:
        """Return the state on another device, or for keys and values of another dtype, as Tensor.to does:
        `state.to("cuda")`, `state.to(torch.bfloat16)`. log_sum stays float64, and mean_value at least float32.

        >>> LLNState.empty(1, 2, 8, dtype=torch.float64).to(torch.bfloat16).mean_value.dtype
        torch.float32
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        moved = self._map(lambda t: t.to(device=device, non_blocking=non_blocking))
        if dtype is None:
            return moved
        cast: dict[str, Any] = {"mean_value": moved.mean_value.to(compute_dtype(dtype))}
        if moved.mean_key is not None:
            cast["mean_key"] = moved.mean_key.to(compute_dtype(dtype))
        if moved.block_key is not None and moved.block_value is not None:
            cast |= {"block_key": moved.block_key.to(dtype), "block_value": moved.block_value.to(dtype)}
        if moved.last_value is not None:
            cast["last_value"] = moved.last_value.to(dtype)
        return dataclasses.replace(moved, **cast)

    def detach(self) -> LLNState:
        """Return the same numbers without gradients to what made them (for truncated backpropagation through time).

        >>> LLNState.empty(1, 2, 8).detach().mean_value.requires_grad
        False
        """
        return self._map(Tensor.detach)

    def clone(self) -> LLNState:
        """Return a copy that shares no memory with this state.

        >>> state = LLNState.empty(1, 2, 8)
        >>> state.clone().mean_value.data_ptr() == state.mean_value.data_ptr()
        False
        """
        return self._map(Tensor.clone)

    def index_select(self, index: Tensor) -> LLNState:
        """Return the states of the sequences in `index` (int64 [n]), as beam search reorders them.

        >>> LLNState.empty(2, 2, 8).index_select(torch.tensor([1, 1, 0])).log_sum.shape
        torch.Size([3, 2, 8])
        """
        batch = self.log_sum.shape[0]
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.ndim != 1:
            raise TypeError(f"LLNState.index_select: index must be an int64 tensor, [n]; got {describe(index)}.")
        if index.device != self.log_sum.device:
            raise ValueError(
                f"LLNState.index_select: index must be on the device of the state, {self.log_sum.device}; got "
                f"{index.device}."
            )
        if index.numel() and can_look(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
            outside = int(index.max()) if int(index.max()) >= batch else int(index.min())
            raise ValueError(
                f"LLNState.index_select: index must lie between 0 and {batch - 1}, for a state of {batch} sequences; "
                f"got {outside}."
            )
        return self._map(lambda t: t.index_select(0, index) if t.shape[0] == batch else t)

    def __repr__(self) -> str:
        batch, heads, dim, value_dim = self.mean_value.shape
        block = "" if self.block_size is None else f", block_size={self.block_size}"
        if self.mean_key is not None:
            block += f", read='evidence', channels={dim}"
            dim = self.mean_key.shape[-1]
        if self.last_value is not None:
            block += f", value_convolution={self.last_value.shape[2] + 1}"
        return (
            f"LLNState(batch={batch}, heads={heads}, head_dim={dim}, value_dim={value_dim}{block}, "
            f"dtype={self.mean_value.dtype}, device={self.mean_value.device})"
        )


# By name, not by vars(): torch 2.8's compiler does not know that of a dataclass.
FIELDS = tuple(field.name for field in dataclasses.fields(LLNState))


def list_tensors(state: LLNState) -> list[Tensor]:
    return [t for t in (getattr(state, name) for name in FIELDS) if isinstance(t, Tensor)]


def list_evidence(state: LLNState) -> evidence.Held:
    """Its tensors as the evidence read's kernels take them."""
    assert state.mean_key is not None
    assert state.entropy is not None
    return evidence.Held(state.log_sum, state.mean_value, state.mean_key, state.entropy)


def is_same_beta(first: float | Tensor | None, second: float | Tensor | None) -> bool:
    """Whether two states, or a state and a call, used one beta, as far as is known without waiting for a device."""
    if first is None or second is None or first is second:
        return True
    if torch.compiler.is_compiling():
        return True
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-6)
    one, two = torch.broadcast_tensors(torch.as_tensor(first), torch.as_tensor(second))
    if not one.is_cpu or not two.is_cpu:
        return True
    return torch.allclose(one.float(), two.float(), rtol=1e-6, atol=0.0)


def describe_mix(outside: bool, overlap: bool) -> str:
    return f"{'' if outside else 'another mix than '}mix='evidence'{' and overlap=True' if overlap else ''}"


def check_state(
    state: LLNState, batch: int, key: Tensor, value: Tensor, block_size: int | None, beta: float | Tensor, read: str,
    channels: int, joint: bool, overlap: bool,
) -> None:  # fmt: skip
    """ValueError or TypeError where a call on these keys and values cannot go on from it. batch: of sequences."""
    if not isinstance(state, LLNState):
        raise TypeError(f"state must be an lln.LLNState; got {type(state).__name__}.")
    if state.read != read:
        raise ValueError(f"state was made with read={state.read!r}, this call has read={read!r}; use one for both.")
    expected = [batch, key.shape[1], channels, value.shape[3]]
    if list(state.mean_value.shape) != expected:
        raise ValueError(
            f"state must be of [batch, key heads, dim, value dim] = {expected}; got {list(state.mean_value.shape)}. "
            "A state, and a cache that holds it, goes on with the batch that it began with; begin a new one for others."
        )
    if state.block_size != block_size:
        raise ValueError(
            f"state was made with block_size={state.block_size}, this call has block_size={block_size}; "
            "a sequence keeps one block_size from its start (LLNState.empty(..., block_size=...) begins one)."
        )
    if (state.outside, state.overlap) != (joint, overlap):
        raise ValueError(
            f"state was made with {describe_mix(state.outside, state.overlap)}, this call has "
            f"{describe_mix(joint, overlap)}; use one for both."
        )
    if state.last_value is not None:
        raise ValueError(
            "state holds the last values of a value convolution, and this call has none; use the module that made it."
        )
    if state.mean_value.device != key.device:
        raise ValueError(f"state is on {state.mean_value.device}, key on {key.device}; use state.to(key.device).")
    other = state.block_key is not None and state.block_key.dtype != key.dtype
    if other or state.mean_value.dtype != compute_dtype(key.dtype):
        raise ValueError(f"state is for keys of another dtype than {key.dtype}; use state.to({key.dtype}).")
    if not is_same_beta(state.beta, beta):
        raise ValueError(
            "state was made with another beta than this call's, so their sums are not comparable; "
            "give every call of one sequence the same beta."
        )


# A state may be saved with torch.save and loaded with weights_only=True, the default.
torch.serialization.add_safe_globals([LLNState])
