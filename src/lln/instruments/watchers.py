"""Where a model of torch's modules attends, watched while it runs and without changing what it does.

A watcher is given the model and whom it tells, a Look. It yields functions that take it away again, none where the
model has nothing for it.

Attention modules that keep their queries and keys to themselves are found by the names of their linear layers. Nothing
says how such a module attends, so it is run once more on the same input, without dropout, and watched: what its query
and key layers give must, put through softmax with the mask that came, give what the module made of its values.
Otherwise it attends in some other way (rotated positions, windows), and nothing is recorded about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.instruments.observation import Observation, Pattern, default_scale, make_bias, observe_softmax, read_mask
from lln.nn.attention import LLNAttention
from lln.nn.multihead import MultiheadAttention, list_projections, pad_nested
from lln.nn.statistics import Where

Remove = Callable[[], None]
LLN_CALL = inspect.signature(LLNAttention.forward)
MULTIHEAD_CALL = inspect.signature(nn.MultiheadAttention.forward)
LAYER_CALL = inspect.signature(nn.TransformerEncoderLayer.forward)
NAMES = (
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
)
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
MASKS = ("attention_mask", "attn_mask", "mask")
ERRORS = {torch.float16: 2e-2, torch.bfloat16: 5e-2}  # relative, of what the observed queries and keys give; else:
ERROR = 1e-3


class Look(NamedTuple):
    """What a watcher gets to know, and whom it tells."""

    is_active: Callable[[], bool]
    see: Callable[[Observation], None]
    samples: int | None  # the first so many of a batch; None: all

    def take_first(self, t: Tensor) -> Tensor:
        return t if self.samples is None or len(t) == 1 else t[: self.samples]

    def show(self, observe: Callable[..., Iterable[Observation]], *call: Any) -> None:
        """What `observe(look, *call)` gives, where anybody is looking now."""
        for seen in observe(self, *call) if self.is_active() else ():
            self.see(seen)


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


def watch_lln(model: nn.Module, look: Look) -> Iterator[Remove]:
    """Every LLNAttention, by the name of the module that it serves."""
    hosts = [name for name, m in model.named_modules() if isinstance(m, MultiheadAttention)]
    owners = {f"{name}.attention".removeprefix("."): name for name in hosts}
    for name, module in model.named_modules():
        if isinstance(module, LLNAttention):
            # lln.hf gives an attention module its LLNAttention as `.lln`.
            layer = owners.get(name, f".{name}".removesuffix(".lln").removeprefix("."))

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, layer: str = layer) -> None:
                look.show(observe_lln, layer, module, args, kwargs)

            # After forward, which first brings running statistics up to date.
            yield module.register_forward_hook(hook, with_kwargs=True).remove


def observe_lln(look: Look, layer: str, module: LLNAttention, args: Any, kwargs: Any) -> Iterator[Observation]:
    call = LLN_CALL.bind(module, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query, key = given["query"].detach(), given["key"].detach()
    where = {name: given[name] for name in Where._fields}
    is_causal, key_mask, query_mask, offsets = where.values()
    if given["state"] is not None:
        raise ValueError(
            f"record: {layer} continues from a state, which does not keep the earlier keys; record a call on whole "
            "sequences."
        )
    with torch.no_grad():
        found = module.coefficients(query, key, **where)
        plain = (query, key) if module.moves else None
        query, key = module.features(query, key, **where)
    # "batch" statistics give one number for all; the evidence read has no alpha
    alpha, beta = (c if c is None or c.ndim else c.view(1, 1, 1) for c in found)
    read = module.read_options()
    apart = query_mask is not None and (key_mask is None or not torch.equal(query_mask, key_mask))
    cross = getattr(module, "cross", False) or query.shape[2] != key.shape[2] or (apart and not is_causal)

    def cut(t: Any) -> Any:
        return look.take_first(t) if offsets is None and t is not None else t

    seen = Observation(
        layer, "lln" if module.block_size is None else "lln_diag", cut(query), cut(key),
        default_scale(query) if module.scale is None else module.scale, is_causal, cut(key_mask), cut(query_mask),
        None, cross, cut(alpha), cut(beta), module.block_size, find_mix(module),
        None if plain is None else (cut(plain[0]), cut(plain[1])), module.overlap,
        module.evidence_offset.detach() if module.mix == "evidence" else 0.0,
        read.get("read", "paper"), read.get("directions"), module.list_tiles(query),
    )  # fmt: skip
    if offsets is None:
        yield seen
        return
    unmapped = [] if plain is None else list(split_sequences(*plain, offsets, look.samples))
    for index, (q, k) in enumerate(split_sequences(query, key, offsets, look.samples)):
        own: list[Any] = [c[index : index + 1] if c is not None and len(c) > 1 else c for c in (alpha, beta)]
        own.append(unmapped[index] if unmapped else None)
        changes = dict(zip(("alpha", "beta", "plain"), own, strict=True))
        yield dataclasses.replace(seen, query=q, key=k, cross=cross or q.shape[2] != k.shape[2], **changes)


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


def watch_multihead(model: nn.Module, look: Look) -> Iterator[Remove]:
    """torch.nn.MultiheadAttention, and the encoder layers whose fused kernel goes past it."""
    calls = [0]  # of MultiheadAttention

    def attend(name: str, module: nn.MultiheadAttention, original: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = original(*args, **kwargs)
        given = MULTIHEAD_CALL.bind(module, *args, **kwargs).arguments
        masks = [given.get(mask) for mask in ("key_padding_mask", "attn_mask")]
        look.show(observe_multihead, name, module, given["query"], given["key"], *masks)
        return result

    def encode(name: str, module: nn.TransformerEncoderLayer, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = calls[0]
        result = original(*args, **kwargs)
        if look.is_active() and calls[0] == before and not isinstance(module.self_attn, MultiheadAttention):
            given = LAYER_CALL.bind(module, *args, **kwargs).arguments
            with torch.no_grad():
                x = module.norm1(given["src"]) if module.norm_first else given["src"]
            masks = [given.get(mask) for mask in ("src_key_padding_mask", "src_mask")]
            place = f"{name}.self_attn".removeprefix(".")
            look.show(observe_multihead, place, module.self_attn, x, x, *masks)
        return result

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            yield replace_forward(module, functools.partial(attend, name, module))
        elif isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, nn.MultiheadAttention):
            yield replace_forward(module, functools.partial(encode, name, module))


@torch.no_grad()
def observe_multihead(
    look: Look, layer: str, module: nn.MultiheadAttention, query: Tensor, key: Tensor, padding: Tensor | None,
    mask: Tensor | None,
) -> list[Observation]:  # fmt: skip
    """The queries and keys of a call, projected once more: it keeps them to itself."""
    one_sequence = query is key
    if query.is_nested:  # torch's encoder packs padded inputs so
        query, padding = pad_nested(query)
        key = query
    batched, heads = query.dim() == 3, module.num_heads
    if not batched:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        padding = None if padding is None else padding.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    query, key = look.take_first(query), look.take_first(key)  # [B, N, E]
    q, k = (F.linear(x, *each) for x, each in zip((query, key), list_projections(module), strict=False))
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
            added = added + F.pad(make_bias(look.take_first(padding), hides=True), (0, len(extra)))[:, None, None]
        if mask is not None:
            pairs = make_bias(mask, hides=True)
            pairs = pairs[None, None] if pairs.dim() == 2 else pairs.unflatten(0, (-1, heads))[:batch]
            added = added + F.pad(pairs, (0, len(extra)))
        pattern = read_mask(added, rows, keys, one_sequence, False)
    q, k = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k))
    return [observe_softmax(layer, q, k, module.head_dim**-0.5, pattern, cross=not one_sequence)]


def linear_layers(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Of queries, keys and values."""
    children = dict(module.named_children())
    for names in NAMES:
        found = [children.get(name) for name in names]
        if all(isinstance(one, nn.Linear) for one in found) and count_heads(module) is not None:
            return tuple(found)  # type: ignore[return-value]
    return None


def count_heads(module: Any) -> int | None:
    found = (getattr(module, name, None) for name in HEADS)
    return next((heads for heads in found if isinstance(heads, int)), None)


def watch_linear(model: nn.Module, look: Look, skip: Container[nn.Module]) -> Iterator[Remove]:
    """Every module with such layers, but for those that others watch."""
    for name, module in model.named_modules():
        layers = linear_layers(module)
        if layers is None or module in skip or any(isinstance(m, LLNAttention) for m in module.modules()):
            continue

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name, layers: Any = layers) -> None:
            look.show(observe_linear, name, module, layers, args, kwargs)

        yield module.register_forward_pre_hook(hook, with_kwargs=True).remove


@torch.no_grad()
def observe_linear(look: Look, layer: str, module: nn.Module, layers: Any, args: Any, kwargs: Any) -> list[Observation]:
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    if any(value is not None and "past" in name for name, value in given.items()):
        raise ValueError(f"record: {layer} reads keys from a cache that cannot be observed; pass use_cache=False.")
    with watch_layers(module) as seen_by:
        result = module.forward(*args, **kwargs)
    if not all(one in seen_by for one in layers):
        raise ValueError(f"record: {layer} ({type(module).__name__}) did not use its query and key layers.")
    heads = count_heads(module) or 1
    q, k, v = (look.take_first(seen_by[one][1]).unflatten(-1, (heads, -1)).transpose(1, 2) for one in layers)
    scale = next((s for s in (getattr(module, n, None) for n in ("scaling", "scale")) if isinstance(s, float)), None)
    scale = default_scale(q) if scale is None else scale
    made = [look.take_first(t) for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
    made += [look.take_first(t) for one, (t, _) in seen_by.items() if one not in layers]
    for pattern in list_patterns(given, look, q.shape[2], k.shape[2]):
        seen = observe_softmax(layer, q, k, scale, pattern, cross=q.shape[2] != k.shape[2])
        wanted = (seen.softmax_map().dense() @ v.to(torch.float64)).transpose(1, 2).flatten(2)  # [B, N, H E]
        live = seen.softmax_map().live[..., None]
        if any(is_near(t, wanted, live) for t in made):
            return [seen]
    raise ValueError(
        f"record: {layer} ({type(module).__name__}) cannot be observed: softmax attention of what its query and key "
        "layers give is not what it computes."
    )


def list_patterns(given: dict[str, Any], look: Look, rows: int, keys: int) -> Iterator[Pattern]:
    """What the masks may mean, likely ones first."""
    masks = [look.take_first(given[name]) for name in MASKS if isinstance(given.get(name), Tensor)]
    bias = given.get("position_bias")
    if isinstance(bias, Tensor):
        yield read_mask(sum(map(make_bias, masks), look.take_first(bias)), rows, keys, rows == keys, False)
        return
    for causal in (False, True) if rows == keys else (False,):
        yield read_mask(masks[0], rows, keys, rows == keys, causal) if masks else Pattern(causal)


def is_near(found: Tensor, wanted: Tensor, live: Tensor) -> bool:
    """Whether an output is the one wanted at live tokens, up to what its dtype rounds."""
    if found.shape != wanted.shape:
        return False
    error = torch.where(live, found - wanted, 0.0).norm() / torch.where(live, wanted, 0.0).norm()
    return bool(error < ERRORS.get(found.dtype, ERROR))


@contextlib.contextmanager
def watch_layers(module: nn.Module) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """(input, output) of the linear layers inside, while the module is in eval."""
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def hook(one: nn.Module, args: Any, output: Tensor) -> None:
        found[one] = args[0], output

    modes = {one: one.training for one in module.modules()}
    handles = [one.register_forward_hook(hook) for one in modes if isinstance(one, nn.Linear)]
    try:
        module.eval()
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for one, mode in modes.items():
            one.training = mode
