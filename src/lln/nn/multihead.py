"""torch.nn.MultiheadAttention on LLN attention: the same arguments, parameters, shapes and results to unpack."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks import Matching, Read, Statistics
from lln.functional import Backend, Coefficient
from lln.matching.moments import LENGTH
from lln.nn.attention import LLNAttention
from lln.nn.torch_masks import can_read, read_hidden, split_mask
from lln.nn.weights import check_weights, dense_weights
from lln.ranks import refuse_ranks
from lln.values import describe


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Replace torch.nn.MultiheadAttention by LLN attention, in time and memory linear in the length.

    Arguments up to dtype are torch's. Parameters have torch's names and shapes, so a state_dict can be loaded in both
    directions. Only statistics="running", alpha and beta given as tensors, a learnable alpha, beta or mix, and a value
    convolution add entries, whose names begin with `attention.`.

    Inside torch.nn.TransformerEncoderLayer and similar modules it runs the same code in eval as in training, because it
    turns off torch's fused softmax path. torch.nn.TransformerEncoder(enable_nested_tensor=True) therefore warns that it
    does not use nested tensors. Causal attention needs statistics="running" or "fixed". Attention to an encoder's
    memory needs decoder=True and one of these. Only `lln.LLNAttention` has `feature_map`, `convolution` and `overlap`.

    Args:
        dropout: probability of dropout on the softmax over channels and on the blocks' P, in training only.
        add_bias_kv: append a learned key and value that padding never hides. Not with block_size, nor causal.
        add_zero_attn: append a key and a value of zeros, likewise. A zero key weighs exp(0) in each channel.
        matching: how alpha and beta follow from the spread of queries and keys: "paper" (eq. (10)), "entropy"
            (recommended for new models) or "variance", see `lln.match_moments`.
        statistics: where that spread comes from: "sample" (each sample and head for itself), "batch" (one number for
            the whole tensor), "running" (a moving average for each head, frozen in eval) or "fixed" (none: alpha and
            beta as given, or those of a spread of 1). Causal attention needs "running" or "fixed".
        block_size: for LLN+Diag: adds softmax attention inside consecutive blocks of this many tokens. None (default):
            LLN alone.
        mix: how the linear part and the blocks are weighed, with block_size: a number from 0 to 1 (default 0.5), the
            share of the linear part; "ratio" learns one number for each head; "scales" learns two factors for each head
            and value channel; "evidence", with the evidence read, lets each query weigh its block against everything
            outside it (see `lln.lln_attention`).
        read: "paper" (default), or "evidence" for weights that were trained with softmax; see `lln.LLNAttention`.
        directions: the directions of the evidence read's channels; see `lln.LLNAttention`.
        alpha: with "fixed": factor of the queries, a positive number or a tensor [num_heads] or [num_heads, head_dim].
            Larger means more concentrated attention.
        beta: with "fixed": factor of the keys, of the same shapes.
        learnable: with "fixed": "head" or "channel" makes alpha and beta parameters, one for each head or each channel,
            that start from the given values.
        value_convolution: an odd width: a learned convolution of the values over that many tokens is added to the
            output of attention (see `lln.LLNAttention`). Not with add_bias_kv or add_zero_attn, nor for cross
            attention.
        decoder: the queries belong to a causal decoder that attends to an encoder's memory, so statistics must not look
            at all of them.
        length: number of keys that "entropy" matching assumes with "running" and "fixed" statistics.
        momentum: weight of a new batch in the "running" averages.
        backend: "eager" (any device), "triton", or "auto" for the fastest that can run the call.

    Raises:
        ValueError: embed_dim or num_heads is not positive, num_heads does not divide embed_dim, or block_size or
            value_convolution comes with add_bias_kv or add_zero_attn.

    Shape:
        - query: [L, batch, embed_dim], or [batch, L, embed_dim] with batch_first, or [L, embed_dim]
        - key: [S, batch, kdim], [batch, S, kdim] or [S, kdim]; value likewise with vdim
        - output: the shape of query, and P [batch, L, S] or None

    Examples:
        >>> import lln, torch
        >>> _ = torch.manual_seed(0)
        >>> attention = lln.MultiheadAttention(embed_dim=32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 50, 32)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 50, 32]), torch.Size([2, 50, 50]))
        >>> torch.allclose(weights.sum(-1), torch.ones(2, 50))
        True
        >>> out, _ = attention(x, x, x, need_weights=False)  # in time linear in the length
        >>> softmax = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> softmax.load_state_dict(attention.state_dict())
        <All keys matched successfully>
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        matching: Matching = "paper",
        statistics: Statistics = "sample",
        block_size: int | None = None,
        mix: float | Literal["ratio", "scales", "evidence"] = 0.5,
        read: Read = "paper",
        directions: int | Literal["signed"] | None = None,
        alpha: Coefficient | None = None,
        beta: Coefficient | None = None,
        learnable: Literal["head", "channel"] | None = None,
        value_convolution: int | None = None,
        decoder: bool = False,
        length: int = LENGTH,
        momentum: float = 0.1,
        backend: Backend = "auto",
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                "embed_dim must be a positive multiple of a positive num_heads; "
                f"got embed_dim={embed_dim} and num_heads={num_heads}."
            )
        if block_size is not None and (add_bias_kv or add_zero_attn):
            name = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise ValueError(f"{name} appends a key that belongs to no block; use block_size=None, got {block_size}.")
        if value_convolution is not None and (add_bias_kv or add_zero_attn):
            name = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise ValueError(
                f"{name} appends a value that stands beside no token; use value_convolution=None, got "
                f"{value_convolution}."
            )
        if isinstance(value_convolution, str):
            raise ValueError(
                "value_convolution must be an odd int here: which tokens are the patches of an image is not known to "
                f"lln.MultiheadAttention; got {value_convolution!r}."
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.attention = LLNAttention(
            num_heads, self.head_dim, matching=matching, statistics=statistics, alpha=alpha, beta=beta,
            learnable=learnable, block_size=block_size, mix=mix, read=read, directions=directions, dropout=dropout,
            value_convolution=value_convolution, decoder=decoder, length=length,
            momentum=momentum, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip

    def check_split(self, size: int) -> None:
        raise ValueError(
            "split_heads: MultiheadAttention projects all heads at once; use lln.LLNAttention after projections that "
            "give every rank its own heads."
        )

    def _reset_parameters(self) -> None:
        # torch's encoder layers read _qkv_same_embed_dim before they hand the weights to a fused softmax kernel that
        # would bypass forward. It stays False for good, except here, where it tells which parameters there are.
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention for B sequences of L queries and S keys; shapes as in torch, [length, features] unbatched.

        Args:
            query: [L, B, embed_dim], or [B, L, embed_dim] with batch_first.
            key: [S, B, kdim] or [B, S, kdim].
            value: [S, B, vdim] or [B, S, vdim].
            key_padding_mask: [B, S] ([S] when unbatched), bool with True = ignore, or float with 0 = attend and -inf,
                or any number of -1,000 or less (-1e9, finfo.min), = ignore. On a CPU other values are refused; on other
                devices values are not checked, and negative ones hide.
                A query that has nothing to attend to gives the output projection's bias, never NaN.
            need_weights: also return P, which costs time and memory of order L * S; False keeps the call linear. Not
                with mix="scales", where every value channel has its own P.
            attn_mask: [L, S] or [B * num_heads, L, S], bool or float as above. Only what linear attention can do: a
                causal mask, or one that hides the same keys from every query (and from every head), or both at once.
                Finding out which waits for the mask's device; with is_causal=True it need not.
            average_attn_weights: the mean of P over heads rather than P of each head.
            is_causal: a query attends its own and earlier positions; attn_mask may be left out then. On a CPU a mask
                that says otherwise is refused; elsewhere its last row says which keys are padding.

        Returns:
            The output, of the shape of query, and P: [B, L, S], or [B, num_heads, L, S] without averaging (no B when
            unbatched), or None without need_weights. Each key that add_bias_kv or add_zero_attn appends is one more
            column. P is exact and differentiable, and always the undropped one: dropout acts on its factors.

        Raises:
            ValueError or TypeError: the message names the argument, what came, and what is allowed.
        """
        if isinstance(query, Tensor) and query.is_nested:
            return self._forward_nested(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        self._check(query, key, value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)  # [B, H, L or S, D]
        batch, length, key_length = q.shape[0], q.shape[2], k.shape[2]
        if is_causal and length != key_length:
            raise ValueError(f"is_causal needs query and key of equal length; got {length} and {key_length}.")

        hidden = None  # [B, S]
        if key_padding_mask is not None:
            shape = [batch, key_length] if batched else [key_length]
            hidden = read_hidden("key_padding_mask", key_padding_mask, [shape], q.device, can_read(q))
            hidden = hidden.view(batch, key_length)
        if attn_mask is not None:
            is_causal, keys = split_mask(attn_mask, is_causal, q, key_length)
            if keys is not None:
                hidden = keys.expand(batch, -1) if hidden is None else hidden | keys
        key_mask = None if hidden is None else ~hidden
        # The padding of the keys is that of the queries only where both are one sequence.
        query_mask = key_mask if query is key else torch.ones(batch, length, dtype=torch.bool, device=q.device)

        extra = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            extra.append((q.new_zeros(1, 1, self.embed_dim), q.new_zeros(1, 1, self.embed_dim)))
        if extra and is_causal:
            raise ValueError(
                "is_causal: keys that add_bias_kv and add_zero_attn append have no place in time; use neither."
            )
        if extra:
            refuse_ranks("add_bias_kv and add_zero_attn", "they append a key to the rows of every rank; use neither")
        for more_k, more_v in extra:
            k = torch.cat([k, self._heads(more_k.to(k)).expand(batch, -1, -1, -1)], 2)
            v = torch.cat([v, self._heads(more_v.to(v)).expand(batch, -1, -1, -1)], 2)
            key_mask = None if key_mask is None else F.pad(key_mask, (0, 1), value=True)

        masks: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "query_mask": query_mask}
        if need_weights:
            check_weights(self.attention, q, k, "need_weights", "pass need_weights=False")
        # torch's attribute, which models set after construction
        attended = self.attention(q, k, v, **masks, dropout=self.dropout)
        out = self.out_proj(attended.transpose(1, 2).flatten(2))  # [B, L, E]
        # After forward, which first brings running statistics up to date.
        weights = dense_weights(self.attention, q, k, **masks) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, H, N, D]"""
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return heads.transpose(1, 2)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None and query is key and key is value:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            inputs = zip((query, key, value), list_projections(self), strict=True)
            projected = tuple(F.linear(x, *each) for x, each in inputs)
        if query.dim() == 2:
            return [self._heads(x.unsqueeze(0)) for x in projected]
        return [self._heads(x if self.batch_first else x.transpose(0, 1)) for x in projected]

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, need_weights: bool,
        attn_mask: Tensor | None, is_causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """A torch.nn.TransformerEncoder built before its layers' attention was replaced passes nested tensors."""
        if query is not key or key is not value or not self.batch_first:
            raise ValueError("query: a nested tensor needs batch_first=True and must also be the key and the value.")
        if key_padding_mask is not None or attn_mask is not None or need_weights:
            raise ValueError("query: with a nested tensor pass need_weights=False and no masks.")
        x, padding = pad_nested(query)
        out, _ = self(x, x, x, padding, need_weights=False, is_causal=is_causal)
        return torch.nested.as_nested_tensor([o[: len(s)] for o, s in zip(out, query.unbind(), strict=True)]), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, t, dim in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(t, Tensor) or t.is_nested:
                came = "a nested tensor" if isinstance(t, Tensor) else describe(t)
                raise TypeError(f"{name} must be a dense tensor; got {came}.")
            if t.dim() not in (2, 3) or t.dim() != query.dim():
                raise ValueError(f"{name} must have 3 dimensions, or 2 like query, key and value; got {describe(t)}.")
            if t.shape[-1] != dim:
                raise ValueError(f"{name} must have {dim} features in its last dimension; got {describe(t)}.")
        if key.shape[:-1] != value.shape[:-1]:
            shapes = f"got key {list(key.shape)} and value {list(value.shape)}"
            raise ValueError(f"key and value must agree in batch and length; {shapes}.")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            shapes = f"got query {list(query.shape)} and key {list(key.shape)}"
            raise ValueError(f"query and key must agree in batch, dimension {batch}; {shapes}.")


def list_projections(module: torch.nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of queries, keys and values."""
    joint: Tensor | None = module.in_proj_weight
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return list(zip(apart if joint is None else joint.chunk(3), biases, strict=True))


def pad_nested(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor as [B, N, E] and which tokens [B, N] only fill it up."""
    x = sequences.to_padded_tensor(0.0)
    ends = torch.tensor([len(one) for one in sequences.unbind()], device=x.device)
    return x, torch.arange(x.shape[1], device=x.device) >= ends[:, None]
