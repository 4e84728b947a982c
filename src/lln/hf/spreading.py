"""A model whose sequences lie on several processes: its attention goes over all of them, and its positions count on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.distributed.context import make_ranks, split_evenly
from lln.hf.attach import ModelAttention
from lln.hf.cache import LLNCache
from lln.hf.find import Model, attention_modules, find_model, list_attending
from lln.hf.layers import find_running, make_cache
from lln.hf.packing import find_start, list_arguments
from lln.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = "lln_ranks"  # the attribute of a model that says who shares its sequences


def spread(model: Model, mesh: DeviceMesh | None, *, lengths: Sequence[int] | None = None) -> Model:
    """Let a transformers model attend over the tokens of all ranks of `mesh` in every later call, backward passes
    included, for sequences that are cut over several cards.

    Every rank calls the model with its own columns of input_ids (or inputs_embeds), attention_mask and the like: rank 0
    with the first columns, and so on. It gets the outputs of these columns. Positions count on from the ranks before.

    Labels belong to a rank's own tokens. A causal model shifts them and would lose the last label of each rank: pass
    `shift_labels` instead, cut from `labels[:, 1:]` of the whole sequence, as transformers' own context parallelism
    does. The loss of the model is the mean over the rank's own tokens. Pass `num_items_in_batch`, or compute the loss
    yourself, to get the mean over all. `lln.distributed.sum_gradients` adds gradients up; DDP and FSDP average them.

    Args:
        model: a transformers model, or a module that holds one, that runs "lln" or "lln_diag" in all its layers and
            takes position_ids; changed in place.
        mesh: a DeviceMesh of one dimension; None undoes `spread`.
        lengths: how many tokens each rank has, if that never changes. Default: the ranks exchange it in every call.

    Returns:
        The model.

    Example:
        >>> import torch, transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = lln.hf.convert(transformers.BertModel(transformers.BertConfig(**shape)), block_size=4).eval()
        >>> tokens = torch.arange(1, 9)[None]
        >>> whole = model(tokens).last_hidden_state
        >>> if not torch.distributed.is_initialized():
        ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> part = lln.distributed.shard(tokens, mesh, 1)  # here of one process
        >>> torch.testing.assert_close(lln.hf.spread(model, mesh)(part).last_hidden_state, whole)
        >>> torch.distributed.destroy_process_group()
    """
    inner = find_model(model)
    ranks = None if mesh is None else make_ranks(mesh, lengths)
    found = find_running(inner)
    if ranks is not None:
        check_spread(inner, found)
    for attention in found.values():
        if isinstance(attention, ModelAttention):
            attention.ranks = ranks
    for part in list_attending(inner):
        setattr(part, RANKS, ranks)
        if ranks is not None and count_on not in part._forward_pre_hooks.values():
            list_arguments(type(part))
            part.register_forward_pre_hook(count_on, prepend=True, with_kwargs=True)
    return model


def check_spread(model: PreTrainedModel, found: dict[str, Any]) -> None:
    """ValueError for a model of which something would see this rank's rows alone."""
    name = type(model).__name__
    other = [path for path, _ in attention_modules(model) if not isinstance(found.get(path), ModelAttention)]
    if other or not found:
        what = f"{other[0]} of {name} does not run LLN attention" if other else f"{name} has no LLN attention"
        raise ValueError(
            f"spread: {what}, and attention of other kinds would see the tokens of one rank alone; convert the model "
            "with lln.hf.convert(model, 'lln')."
        )
    for part in list_attending(model):
        names = list_arguments(type(part))
        if "position_ids" not in names:
            raise ValueError(
                f"spread: {type(part).__name__} takes no position_ids, so the tokens of every rank would get the first "
                "positions; use a model that takes position_ids."
            )


def count_on(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of a call with the positions of this rank's tokens, where it has none of its own. A hook."""
    ranks: Ranks | None = getattr(part, RANKS, None)
    if ranks is None:
        return None
    given = dict(zip(list_arguments(type(part)), args, strict=False)) | kwargs
    labels = given.get("labels")
    if labels is not None and given.get("shift_labels") is None and is_shifting(part):
        raise ValueError(
            f"labels: {type(part).__name__} shifts them, and the label of a rank's last token is on the next one; give "
            "shift_labels, cut from labels[:, 1:] of the whole sequence."
        )
    if given.get("position_ids") is None:
        tokens, embedded = given.get("input_ids"), given.get("inputs_embeds")
        if tokens is None and embedded is None:
            return None
        given["position_ids"] = number(ranks, part, tokens, embedded)
        return (), given
    return None


def is_shifting(part: nn.Module) -> bool:
    """Whether its labels are those of the next token."""
    return type(part).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def number(ranks: Ranks, part: nn.Module, tokens: Tensor | None, embedded: Tensor | None) -> Tensor:
    """[B or 1, N]: the positions of this rank's tokens, as the model itself would give them to the whole."""
    like = tokens if tokens is not None else embedded
    assert like is not None
    length = like.shape[1]
    counts = ranks.measure(length)
    if 0 in counts:  # known to all of them, so that all stop here
        raise ValueError(
            f"spread: every rank must hold at least one token for {type(part).__name__}; the ranks hold {list(counts)}."
        )
    start = find_start(part)
    if tokens is not None and start:  # RoBERTa and its kin: padding has no place, and the rest is counted without it
        here = tokens != start - 1
        before = sum(ranks.gather(here.sum(-1).to(ranks.device))[: ranks.rank], torch.zeros_like(here.sum(-1)))
        counted = here.cumsum(-1) + before.to(tokens.device).unsqueeze(-1)
        return torch.where(here, counted + start - 1, start - 1)
    begin = start + sum(counts[: ranks.rank])
    return torch.arange(begin, begin + length, device=like.device).unsqueeze(0)


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, mesh: DeviceMesh, *, attention_mask: Tensor | None = None) -> LLNCache:
    """Read a prompt that is too long for one card on all ranks together, and return the cache of the whole prompt on
    every rank. Any rank can then generate from it alone.

    Args:
        model: a causal transformers model that runs "lln" or "lln_diag" in all its layers.
        input_ids: [B, N], the whole prompt on every rank.
        mesh: a DeviceMesh of one dimension.
        attention_mask: [B, N], also whole; default: no padding.

    `generate` needs at least one token that the cache has not seen, so leave the last one out:

        cache = lln.hf.prefill(model, prompt[:, :-1], mesh)
        model.generate(prompt, past_key_values=cache)

    Example:
        >>> import torch, transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
        >>> model = lln.hf.convert(model, "lln", statistics="fixed").eval()
        >>> prompt = torch.arange(8)[None]
        >>> if not torch.distributed.is_initialized():
        ...     torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> cache = lln.hf.prefill(model, prompt[:, :-1], mesh)
        >>> made = model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
        >>> torch.equal(made, model.generate(prompt, max_new_tokens=4, do_sample=False))
        True
        >>> torch.distributed.destroy_process_group()
    """
    inner = find_model(model)
    ranks = make_ranks(mesh)
    counts = list(split_evenly(input_ids.shape[1], ranks.size))
    if 0 in counts:
        raise ValueError(
            f"prefill: {input_ids.shape[1]} tokens are fewer than the {ranks.size} ranks; use one process."
        )
    cache = make_cache(inner.config)
    given: dict[str, Any] = {"input_ids": input_ids.split(counts, 1)[ranks.rank], "past_key_values": cache}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask.split(counts, 1)[ranks.rank]
        places = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)  # as generate counts them
        given["position_ids"] = places.split(counts, 1)[ranks.rank]
    try:
        spread(inner, mesh, lengths=counts)
        base = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
        base(**given, use_cache=True)  # without the logits of every token
    finally:
        spread(inner, None)
    return cache
