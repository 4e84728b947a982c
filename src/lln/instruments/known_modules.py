"""Where a model of torch's modules attends, watched while it runs and without changing what it does.

A watcher is given the model and `see`, a function that takes Observations; `active()` says whether anybody is looking
now. Each returns a function that takes it away again, or None where the model has nothing for it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.instruments.observation import Observation, Pattern, default_scale, observe_softmax, read_mask
from lln.nn.attention import LLNAttention
from lln.nn.multihead import MultiheadAttention

Remove = Callable[[], None]


class Look(NamedTuple):
    """What a watcher gets to know, and whom it tells."""

    active: Callable[[], bool]
    see: Callable[[Observation], None]
    samples: int | None  # the first so many of a batch; None: all

    def first(self, t: Tensor) -> Tensor:
        return t if self.samples is None or len(t) == 1 else t[: self.samples]


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> Remove:
    """Let `around(original, *args, **kwargs)` run in place of the forward of this one module. Not a hook, because where
    there are hooks torch's encoder layers leave their fused kernels and round differently."""
    original, own = module.forward, vars(module).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    module.forward = forward

    def remove() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return remove


def watch_lln(model: nn.Module, look: Look) -> list[Remove]:
    """Every LLNAttention, by the name of the module that it serves."""
    removes: list[Remove] = []
    hosts = [name for name, m in model.named_modules() if isinstance(m, MultiheadAttention)]
    owners = {f"{name}.attention".removeprefix("."): name for name in hosts}
    for name, module in model.named_modules():
        if not isinstance(module, LLNAttention):
            continue
        # lln.hf gives an attention module its LLNAttention as `.lln`.
        layer = owners.get(name, f".{name}".removesuffix(".lln").removeprefix("."))

        def hook(module: LLNAttention, args: Any, kwargs: Any, output: Any, layer: str = layer) -> None:
            if look.active():
                for seen in observe_lln(layer, module, look, args, kwargs):
                    look.see(seen)

        # After forward, which first brings running statistics up to date.
        removes.append(module.register_forward_hook(hook, with_kwargs=True).remove)
    return removes


LLN_CALL = inspect.signature(LLNAttention.forward)


def observe_lln(layer: str, module: LLNAttention, look: Look, args: Any, kwargs: Any) -> Iterator[Observation]:
    call = LLN_CALL.bind(module, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query, key = given["query"].detach(), given["key"].detach()
    masks = {name: given[name] for name in ("is_causal", "key_mask", "query_mask")}
    if given["state"] is not None:
        raise ValueError(
            f"record: {layer} goes on from a state, which does not keep the keys that came before; record a call "
            "on whole sequences."
        )
    with torch.no_grad():
        found = module.coefficients(query, key, **masks, cu_seqlens=given["cu_seqlens"])
        plain = (query, key) if module.moves else None
        query, key = module.features(query, key, **masks, cu_seqlens=given["cu_seqlens"])
    alpha, beta = (c if c.ndim else c.view(1, 1, 1) for c in found)  # "batch" statistics give one number for all
    key_mask, query_mask, is_causal = masks["key_mask"], masks["query_mask"], masks["is_causal"]
    length, keys = query.shape[2], key.shape[2]
    apart = query_mask is not None and (key_mask is None or not torch.equal(query_mask, key_mask))
    scale = default_scale(query) if module.scale is None else module.scale
    kind = "lln" if module.block_size is None else "lln_diag"
    cross = getattr(module, "cross", False) or length != keys or (apart and not is_causal)
    seen = Observation(
        layer, kind, query, key, scale, is_causal, key_mask, query_mask, None, cross, alpha, beta, module.block_size,
        find_mix(module), overlap=module.overlap,
    )  # fmt: skip
    if given["cu_seqlens"] is None:
        names = ("query", "key", "key_mask", "query_mask", "alpha", "beta")
        batched: dict[str, Any] = {name: getattr(seen, name) for name in names}
        batched = {name: None if t is None else look.first(t) for name, t in batched.items()}
        first = None if plain is None else (look.first(plain[0]), look.first(plain[1]))
        yield dataclasses.replace(seen, **batched, plain=first)
        return
    unmapped = [] if plain is None else list(split_sequences(*plain, given["cu_seqlens"], look.samples))
    for index, (q, k) in enumerate(split_sequences(query, key, given["cu_seqlens"], look.samples)):
        own: dict[str, Any] = {"alpha": alpha, "beta": beta}
        own = {name: c[index : index + 1] if len(c) > 1 else c for name, c in own.items()}
        own["plain"] = None if plain is None else unmapped[index]
        yield dataclasses.replace(seen, query=q, key=k, cross=cross or q.shape[2] != k.shape[2], **own)


def split_sequences(query: Tensor, key: Tensor, offsets: Any, count: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first packed sequences, one by one."""
    pair = offsets if isinstance(offsets, (tuple, list)) else (offsets, offsets)
    ends = [one.tolist() for one in pair]
    number = len(ends[0]) - 1 if count is None else min(len(ends[0]) - 1, count)
    for i in range(number):
        yield query[:, :, ends[0][i] : ends[0][i + 1]], key[:, :, ends[1][i] : ends[1][i + 1]]


def find_mix(module: LLNAttention) -> Any:
    """Detached. "scales" have a P for each value channel; the one at the mean of their sizes stands for them."""
    mix = module.mix_weights() if module.block_size is not None else 0.5
    if isinstance(mix, tuple):
        r, p = (torch.as_tensor(side).detach().abs().mean(-1)[0] for side in mix)
        return r / (r + p).clamp_min(1e-12)
    return mix.detach() if isinstance(mix, Tensor) else mix


def watch_multihead(model: nn.Module, look: Look) -> list[Remove]:
    """torch.nn.MultiheadAttention, and the encoder layers whose fused kernel goes past it."""
    calls = [0]  # of MultiheadAttention

    def attend(name: str, module: nn.MultiheadAttention, original: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = original(*args, **kwargs)
        if look.active():
            given = MULTIHEAD_CALL.bind(module, *args, **kwargs).arguments
            masks = [given.get(mask) for mask in ("key_padding_mask", "attn_mask")]
            look.see(observe_multihead(name, module, look, given["query"], given["key"], *masks))
        return result

    def encode(name: str, module: nn.TransformerEncoderLayer, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = calls[0]
        result = original(*args, **kwargs)
        if look.active() and calls[0] == before and not isinstance(module.self_attn, MultiheadAttention):
            given = LAYER_CALL.bind(module, *args, **kwargs).arguments
            x = given["src"]
            with torch.no_grad():
                x = module.norm1(x) if module.norm_first else x
            masks = [given.get(mask) for mask in ("src_key_padding_mask", "src_mask")]
            place = f"{name}.self_attn".removeprefix(".")
            look.see(observe_multihead(place, module.self_attn, look, x, x, *masks))
        return result

    removes: list[Remove] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            removes.append(replace_forward(module, functools.partial(attend, name, module)))
        elif isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, nn.MultiheadAttention):
            removes.append(replace_forward(module, functools.partial(encode, name, module)))
    return removes


MULTIHEAD_CALL = inspect.signature(nn.MultiheadAttention.forward)
LAYER_CALL = inspect.signature(nn.TransformerEncoderLayer.forward)


@torch.no_grad()
def observe_multihead(
    layer: str, module: nn.MultiheadAttention, look: Look, query: Tensor, key: Tensor, padding: Tensor | None,
    mask: Tensor | None,
) -> Observation:  # fmt: skip
    """The queries and keys of a call, projected once more: it keeps them to itself."""
    one_sequence = query is key
    if query.is_nested:  # torch's encoder packs padded inputs so
        lengths = [len(one) for one in query.unbind()]
        query = key = query.to_padded_tensor(0.0)
        ends = torch.tensor(lengths, device=query.device)
        padding = torch.arange(query.shape[1], device=query.device) >= ends[:, None]
    batched, heads = query.dim() == 3, module.num_heads
    if not batched:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        padding = None if padding is None else padding.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    query, key = look.first(query), look.first(key)  # [B, N, E]
    joint: Tensor | None = module.in_proj_weight
    w_q, w_k = (module.q_proj_weight, module.k_proj_weight) if joint is None else joint.chunk(3)[:2]
    b_q, b_k = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    q, k = F.linear(query, w_q, b_q), F.linear(key, w_k, b_k)
    more_k: Tensor | None = module.bias_k
    extra = [] if more_k is None else [more_k]
    extra += [torch.zeros_like(k[:1, :1])] if module.add_zero_attn else []
    for more in extra:
        k = torch.cat([k, more.to(k).expand(len(k), -1, -1)], 1)
    batch, rows, keys = len(q), q.shape[1], k.shape[1]
    pattern = Pattern()
    if padding is not None or mask is not None:
        added = torch.zeros(1, 1, 1, 1, device=q.device)
        if padding is not None:
            added = added + F.pad(as_added(look.first(padding)), (0, len(extra)))[:, None, None]
        if mask is not None:
            pairs = as_added(mask)
            pairs = pairs[None, None] if pairs.dim() == 2 else pairs.unflatten(0, (-1, heads))[:batch]
            added = added + F.pad(pairs, (0, len(extra)))
        pattern = read_mask(added, rows, keys, one_sequence, False)
    q, k = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k))
    return observe_softmax(layer, q, k, module.head_dim**-0.5, pattern, cross=not one_sequence)


def as_added(mask: Tensor) -> Tensor:
    """torch's masks, bool with True = ignore or added to the scores, as the latter."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask.bool(), -torch.inf)
