"""The calls that a transformers model's modules make of their attention functions, shown while the model runs.

Every module asks `AttentionInterface.get_interface` for its function, with the plain softmax of its own file ("eager")
as what it gets where nothing else was chosen. So this one public method, exchanged while somebody watches, shows all
calls of all implementations, and nothing about the model changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lln.hf.find import attention_modules, configs, is_cross, read_sizes, rescale_query
from lln.hf.interface import refuse
from lln.hf.layers import Plan, find_running, read_plan
from lln.hf.mixed import drop_scores
from lln.hf.options import IMPLEMENTATIONS
from lln.hf.packing import is_packed

# torch's softmax attention under a name of our own. Under "sdpa" some modules make masks of what they hand to other
# functions as arguments, which LLN attention refuses, and some files have a function of their own.
SOFTMAX = "lln_measure"
AttentionInterface.register(SOFTMAX, sdpa_attention_forward)
AttentionMaskInterface.register(SOFTMAX, sdpa_mask)


LEAKS = "batches: softmax attention does not keep packed sequences apart here; give each sequence a row of its own."
NO_BATCHES = "batches must hold at least one batch; it is empty."


@dataclasses.dataclass(frozen=True)
class Call:
    """What a module hands to its attention function."""

    layer: str  # the module's name in the model
    implementation: str
    module: Any
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, key heads, M, D]
    value: Tensor  # [B, key heads, M, E]
    mask: Any  # in the form that the implementation takes; of softmax here [B, 1, N, M] or None
    given: dict[str, Any]  # the other arguments


Around = Callable[[Call, Callable[[], Any]], Any]  # is given a call and what runs it, and returns what that gives


# One exchange serves all watchers, and it is there only while somebody watches.
WATCHERS: list[tuple[dict[int, str], Around]] = []  # each with the names of its model's modules
LOCK = threading.Lock()
plain_get_interface: Callable[..., Any] = AttentionInterface.get_interface


def get_interface(interface: AttentionInterface, attn_implementation: str, default: Any) -> Any:
    """In place of AttentionInterface.get_interface: the function it gives, with a look at what it is called with."""
    function = plain_get_interface(interface, attn_implementation, default)
    # Ours show themselves, and another model's graph must not depend on who watches.
    if attn_implementation in IMPLEMENTATIONS or (torch.compiler.is_compiling() and attn_implementation != SOFTMAX):
        return function

    # The mask's name is transformers', since some models (BLIP-2) give it by that.
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *more: Any, **given: Any
    ) -> Any:
        go = functools.partial(function, module, query, key, value, attention_mask, *more, **given)
        for names, around in tuple(WATCHERS):
            if (layer := names.get(id(module))) is not None:
                call = Call(layer, attn_implementation, module, query, key, value, attention_mask, given)
                go = functools.partial(around, call, go)
        return go()

    return attend


def watch(model: nn.Module, around: Around) -> Callable[[], None] | None:
    """Let `around(call, go)` run in place of the model's calls; `go()` is the call. Returns what takes it away again,
    or None where no attention of the model uses transformers' interface."""
    global plain_get_interface
    if not any(True for _ in attention_modules(model)):
        return None
    watcher = ({id(module): name for name, module in model.named_modules()}, around)
    with LOCK:
        if not WATCHERS:
            plain_get_interface = AttentionInterface.get_interface
            AttentionInterface.get_interface = get_interface
        WATCHERS.append(watcher)

    def remove() -> None:
        with LOCK:
            WATCHERS.remove(watcher)
            if not WATCHERS:
                AttentionInterface.get_interface = plain_get_interface

    return remove


@dataclasses.dataclass(frozen=True)
class SoftmaxCall(Call):
    """A call of softmax attention, without gradients, and what it gave."""

    out: Tensor  # [B, N, H, E]
    scale: float | None  # of q . k; None: 1 / sqrt(D)
    where: dict[str, Any]  # is_causal; key_mask [B, M]; query_mask [B, N], rows that are no padding; None: all


@contextlib.contextmanager
def show_softmax(
    model: PreTrainedModel, look: Callable[[SoftmaxCall], None], plan: Plan | None = None
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that runs the model, in eval and with softmax attention, on a batch of its arguments, and shows
    each call of an attention module that runs one of ours, or is to by `plan`. ValueError for what LLN attention could
    not do."""
    if plan is None:
        plan, running = read_plan(model), find_running(model)
        plan.kept |= {name for name, _ in attention_modules(model) if name not in running}

    def show_call(call: Call, go: Callable[[], Any]) -> Any:
        if call.layer in plan.kept:
            return go()
        mixed = plan.chosen.get(id(call.module.config)) is not None
        refuse(call.module, drop_scores(call.given) if mixed else call.given)
        if call.mask is not None and call.implementation == "eager":
            call = dataclasses.replace(call, mask=read_eager(call.mask))
        if call.given.get("cu_seq_lens_q") is not None:
            raise ValueError(LEAKS)
        if call.mask is not None and call.mask.dtype != torch.bool:
            raise ValueError("batches: attention_mask must be a padding mask [batch, length], not numbers to be added.")
        result = go()
        look(read_softmax(call, result[0]))
        return result

    @torch.no_grad()
    def run(batch: Mapping[str, Any]) -> None:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batches must be dicts of the model's arguments; got a {type(batch).__name__}.")
        causal = any(getattr(module, "is_causal", False) for _, module in attention_modules(model))
        if not causal and is_packed(batch):
            raise ValueError(LEAKS)
        model(**move_batch(batch, model))

    before = [(config, config._attn_implementation) for config in configs(model)]
    remove = watch(model, show_call)
    try:
        with switch_to_eval(model, caches=True):
            for config, _ in before:
                mixed = plan.chosen.get(id(config)) is not None
                softmax = plan.others[id(config)] if mixed else "sdpa"
                config._attn_implementation_internal = SOFTMAX if softmax == "sdpa" else softmax
            yield run
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        if remove is not None:
            remove()


def read_eager(mask: Tensor) -> Tensor:
    """A mask of numbers to be added, as transformers makes it, as one of what is seen; another one as it is."""
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else mask


def read_softmax(call: Call, out: Tensor) -> SoftmaxCall:
    rows, keys, said = call.query.shape[2], call.key.shape[2], call.given.get("is_causal")
    is_causal = bool(getattr(call.module, "is_causal", False) if said is None else said) and rows == keys
    # Some query sees every key that is not padding, with a causal mask and with packed sequences as without.
    key_mask = None if call.mask is None else call.mask[:, 0].any(1).expand(len(call.key), -1)
    query_mask = key_mask
    if rows != keys or is_cross(call.module, call.layer):  # which queries are padding is not said
        query_mask = torch.ones(call.query.shape[0], rows, dtype=torch.bool, device=call.query.device)
    scale = read_sizes(call.module)["scale"]
    where = {"is_causal": is_causal, "key_mask": key_mask, "query_mask": query_mask}
    given = vars(call) | {"query": rescale_query(call.query, scale, call.given.get("scaling"))}
    return SoftmaxCall(**given, out=out, scale=scale, where=where)


def check_batches(batches: Any) -> None:
    """For those who go through the batches more than once."""
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches must be a list, since they are gone through again; got {type(batches).__name__}.")
    if not batches:
        raise ValueError(NO_BATCHES)


def check_pattern(call: SoftmaxCall) -> None:
    """ValueError where the model hides single pairs, which LLN attention cannot."""
    if call.mask is None or call.mask.shape[2] != call.query.shape[2]:
        return
    is_causal, key_mask, query_mask = (call.where[name] for name in ("is_causal", "key_mask", "query_mask"))
    seen = torch.ones_like(call.mask) if key_mask is None else key_mask[:, None, None].expand_as(call.mask)
    seen = seen.tril() if is_causal else seen
    counts = True if query_mask is None else query_mask[:, None, :, None]
    if bool(((seen != call.mask) & counts).any()):
        raise ValueError(
            f"batches: {call.layer} hides other keys from each query (packed sequences, a window), and LLN attention "
            "would not; give each sequence a row of its own."
        )


def move_batch(batch: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    return {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def find_rows(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor | None:
    """[B, N] bool: where the model's last hidden states are of no padding; None: everywhere."""
    mask = batch.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    return None if mask is None else mask.bool()


@contextlib.contextmanager
def switch_to_eval(model: PreTrainedModel, *, caches: bool = False) -> Iterator[None]:
    """Without dropout, and unless `caches` without a cache of keys and values."""
    training = {module: module.training for module in model.modules()}
    uses = not caches and getattr(getattr(model, "config", None), "use_cache", None)
    try:
        model.eval()
        if uses:
            model.config.use_cache = False
        yield
    finally:
        if uses:
            model.config.use_cache = uses
        for module, mode in training.items():
            module.training = mode
