"""Mechanisms as modules: on q, k, v, or on hidden states (mixers)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lln.functional import CuSeqlens
from lln.kernels.call import Call
from lln.nn.image_grid import Patches
from lln.nn.module_options import check_options
from lln.nn.value_convolution import Width, read_width
from lln.peers.dispatch import Attend, check_blocks, run
from lln.peers.registry import COMMON, REGISTRY, Mechanism, check_names, find
from lln.values import check_count, describe


class PeerModule(nn.Module):
    """What modules of all kinds share: sizes, dropout, and a call of `attend` that is checked."""

    name: str  # in the registry

    def __init__(
        self, num_heads: int, head_dim: int, max_length: int | None = None, *, num_key_heads: int | None = None,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_options(num_heads=num_heads, head_dim=head_dim, num_key_heads=num_key_heads, dropout=dropout)
        if max_length is not None:
            check_count("max_length", max_length)
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads or num_heads, head_dim
        self.max_length, self.dropout, self.channels = max_length, dropout, num_heads * head_dim

    @property
    def entry(self) -> Mechanism:
        return REGISTRY[self.name]  # by name, so that modules can be copied and pickled

    def check_split(self, size: int) -> None:
        raise ValueError(
            f"split_heads: {self.name} cannot have its heads on several ranks; of all mechanisms only LLN attention "
            "can."
        )

    def attend(self, call: Call) -> Tensor:
        """Attention of one sequence's call (of a batch of them when nothing is packed)."""
        raise NotImplementedError

    def run(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        p = self.dropout if self.training else 0.0
        return run(self.entry, self.attend, query, key, value, dropout_p=p, **arguments)

    def extra_repr(self) -> str:
        return f"{self.name}, num_heads={self.num_heads}, head_dim={self.head_dim}"


class AttentionModule(PeerModule):
    """A mechanism on q, k, v as a module, with `forward` as `lln.attention`'s. Those that learn derive from it.

    Args:
        num_heads, head_dim: of the queries.
        num_key_heads: key and value heads, where fewer.
        max_length: the most keys, for mechanisms whose parameters or constants depend on it.
        dropout: probability in training.
        scale, block_size, mix: as in `lln.attention`.
        value_convolution: an odd width: the module learns a convolution of the values over so many tokens, which starts
            at zero and is added to the output (see `lln.nn.value_convolution`).
        value_dim: of the values, where not head_dim; only that convolution needs to know.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("nystromformer", num_heads=4, head_dim=16, num_key_heads=2, landmarks=8)
        >>> query, key, value = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 8)
        >>> module(query, key, value).shape
        torch.Size([2, 4, 50, 8])
    """

    patches: Patches | None = None  # of the model, where it has any and the option asks for them
    value_convolution: Width | None = None  # modules that an earlier version pickled lack it

    def __init__(
        self, *sizes: Any, scale: float | None = None, block_size: int | None = None, mix: float = 0.5,
        value_convolution: Width | None = None, value_dim: int | None = None, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(*sizes, **common)
        check_blocks(self.entry, block_size, mix)
        self.scale, self.block_size, self.mix = scale, block_size, mix
        self.value_convolution, self.value_dim = value_convolution, value_dim or self.head_dim
        if value_convolution is not None:
            start = torch.zeros(self.num_key_heads, self.value_dim, *read_width(value_convolution))
            self.value_taps = nn.Parameter(start)

    @property
    def asks_for_patches(self) -> str | None:
        """The option that needs to know how the patches of an image lie."""
        return "value_convolution" if isinstance(self.value_convolution, str) else None

    def attend_alone(self, query: Tensor, key: Tensor, value: Tensor, **where: Any) -> Tensor:
        """`forward` without what the value convolution adds."""
        return self._run_qkv(query, key, value, **({"is_causal": False, "key_mask": None, "cu_seqlens": None} | where))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> Tensor:
        return self._run_qkv(
            query, key, value, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens,
            taps=self._parameters.get("value_taps"), patches=self.patches,
        )  # fmt: skip

    def _run_qkv(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self.run(
            query, key, value, **arguments, scale=self.scale, block_size=self.block_size, mix=self.mix,
            heads=(self.num_heads, self.num_key_heads, self.head_dim),
        )  # fmt: skip


class FunctionModule(AttentionModule):
    """A mechanism that learns nothing: `function`, with its options set. `lln.mechanism` builds it.

    Args:
        name: of the mechanism.
        function: of a checked call, with its options set.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("elu", num_heads=4, head_dim=16, block_size=16)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, name: str, function: Attend, *sizes: Any, **common: Any) -> None:
        self.name = name
        super().__init__(*sizes, **common)
        self.function = function

    def attend(self, call: Call) -> Tensor:
        return self.function(call)


class Mixer(PeerModule):
    """A mechanism that replaces the whole attention block: hidden states to hidden states, without norm and residual,
    which are the block's. `attend` gets them as query, key and value of one head.

    Shape:
        - hidden: [batch, length, num_heads * head_dim], and the same for the output

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("tnn", num_heads=4, head_dim=16, rpe_dim=8)
        >>> module(torch.randn(2, 50, 64), is_causal=True).shape
        torch.Size([2, 50, 64])
    """

    def forward(
        self,
        hidden: Tensor,
        *others: Tensor,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """key_mask [B, N] bool, True = a token; cu_seqlens as in `lln.lln_attention`."""
        if others:
            raise TypeError(
                f"{self.name} mixes hidden states in the place of the whole attention block and takes one tensor, "
                f"hidden [batch, length, {self.channels}]; got {1 + len(others)}: give it what would be "
                "projected to q, k, v."
            )
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[2] != self.channels:
            raise ValueError(f"hidden must be [batch, length, {self.channels}]; got {describe(hidden)}.")
        one = hidden.unsqueeze(1)
        return self.run(one, one, one, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens).squeeze(1)


def apply_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """In the dtype of the weights: hidden states may be narrower, under autocast say."""
    out: Tensor = module(x.to(module.weight.dtype))
    return out


def mechanism(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Build a module of the mechanism with this name.

    Its forward is `forward(query, key, value, *, is_causal, key_mask, cu_seqlens)`. A mechanism whose kind is "mixer"
    takes hidden states of num_heads * head_dim channels instead: `forward(hidden, *, is_causal, key_mask)`.

    Args:
        name: one of `lln.mechanisms()`.
        num_heads, head_dim: number of query heads, and their dimension.
        max_length: the longest sequence; needed by mechanisms whose parameters or constants depend on it.
        options: dropout, scale, num_key_heads, block_size, mix, value_convolution and value_dim (for modules on q, k
            and v), and the options of the mechanism, see `lln.mechanisms()[name].module_options`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]
        - hidden and output of a mixer: [batch, length, num_heads * head_dim]

    Raises:
        ValueError or TypeError: the message is one sentence.

    Examples:
        >>> import lln, torch
        >>> linformer = lln.mechanism("linformer", num_heads=4, head_dim=16, max_length=64, rank=8)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> linformer(query, key, value).shape
        torch.Size([2, 4, 50, 16])
        >>> mixer = lln.mechanism("tnn", num_heads=4, head_dim=16)
        >>> mixer(torch.randn(2, 50, 64), is_causal=True).shape
        torch.Size([2, 50, 64])
    """
    entry = find(name)
    if entry.module is not None:
        kinds = {p.kind for p in inspect.signature(entry.module).parameters.values()}
        common = dict.fromkeys(COMMON if inspect.Parameter.VAR_KEYWORD in kinds else ())
        check_names(name, options, {**entry.module_options, **common})
        built = entry.module(num_heads, head_dim, max_length, **options)
    else:
        assert entry.function is not None
        check_names(name, options, {**entry.options, **dict.fromkeys(COMMON)})
        own = {option: options.pop(option) for option in entry.options if option in options}
        if "max_length" in entry.options:
            own["max_length"] = max_length
        function = functools.partial(entry.function, **own)
        built = FunctionModule(name, function, num_heads, head_dim, max_length, **options)
    return built.to(device=device, dtype=dtype)
