"""LLNCache: generation in constant memory. Each layer keeps an LLNState instead of keys and values.

transformers gives new keys and values to a cache and hands what comes back to the attention function. Here the same
keys come back, and on them the layer itself: the attention function finds it there, attends with its state, and gives
it the next one. A layer that attends to another sequence (an encoder's) folds that sequence once and then only reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lln.state import FIELDS, LLNState, list_tensors

if TYPE_CHECKING:
    from lln.hf.decoding import Stepper

TAG = "lln_layer"  # the attribute of a key tensor that says which layer it came through


class Past(NamedTuple):
    """A call that may be taken back: a state cannot forget, so the one before it is kept."""

    before: LLNState | None
    new: int  # keys that came
    fold: Callable[[int], LLNState]  # the state after the first so many of them


class StateLayer(CacheLayerMixin):
    """What one layer keeps.

    static: tensors stay where they are and are written in place, and the length is a tensor, so that a compiled step
    serves every position. Otherwise every step makes a new state, which gradients can go through.
    """

    is_sliding = False

    def __init__(self, static: bool = False, record_past: bool = False) -> None:
        self.is_compileable, self.record_past = static, record_past
        self.past: list[Past] = []  # of the calls since the last crop, where they are recorded
        self.state: LLNState | None = None
        self.length: int | Tensor = torch.zeros((), dtype=torch.int64) if static else 0
        self.empty = True
        self.cross: bool | None = None  # known with the first state
        self.waits = False  # for the attention function, after an update
        self.stepper: Stepper | None = None  # of the state that is here now, once a token was decoded
        self.ticket: Tensor | None = None  # [B] int32, what heads of one sequence count each other with in a step
        self.is_initialized = False

    def __setstate__(self, held: dict[str, Any]) -> None:
        """A cache that an earlier version saved lacks what came later."""
        self.__dict__.update({"record_past": False, "past": [], "stepper": None, "ticket": None} | held)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The attention function brings the first state: it knows whether there are blocks."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values, unchanged, and on the keys this layer."""
        if self.waits:
            raise RuntimeError(
                "past_key_values: the attention did not get the state that LLNCache handed to the model. LLNCache "
                "works with attn_implementation='lln' or 'lln_diag', and with models that pass a cache's keys to "
                "attention unchanged; use past_key_values=DynamicCache() instead."
            )
        self.waits = True
        setattr(key_states, TAG, self)
        return key_states, value_states

    def keep(self, state: LLNState, new: int, cross: bool, dtype: torch.dtype) -> None:
        """The state after `new` more keys of that dtype."""
        self.dtype = dtype
        self.waits, self.empty, self.is_initialized, self.cross = False, False, True, cross
        if not isinstance(self.length, Tensor):
            self.state, self.length = state, self.length + new
            return
        if self.state is None:
            self.length = self.length.to(state.log_sum.device)
            self.state = state.detach()._map(Tensor.contiguous)
            if not torch.compiler.is_compiling():
                self.ticket = self.state.log_sum.new_zeros(len(self.state.log_sum), dtype=torch.int32)
                for tensor in (self.length, self.ticket, *list_tensors(self.state)):
                    torch._dynamo.mark_static_address(tensor)
        else:
            self.write(state)
        self.length.add_(new)

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def activate_past_recording(self) -> None:
        """From now on keep the states before every call, until the next `crop`."""
        self.record_past = True

    def record(self, new: int, fold: Callable[[int], LLNState]) -> None:
        """Before `keep`: so many keys will come. fold: the state after the first so many of them."""
        if self.record_past:
            self.past.append(Past(self.state, new, fold))

    def count_step(self) -> None:
        """The state has one more token, and a length in memory too."""
        self.waits = False
        if not isinstance(self.length, Tensor):
            self.length += 1

    @torch.no_grad()
    def write(self, state: LLNState) -> None:
        assert self.state is not None
        for mine, new in zip(list_tensors(self.state), list_tensors(state), strict=True):
            mine.copy_(new)

    # An encoder's sequence is asked for again in every step: there is nothing left of it but the state.
    def make_empty(self, like: Tensor, width: int) -> Tensor:
        """No keys or values [B, key heads, 0, width], and on them this layer."""
        none = like.new_empty(*like.shape[:2], 0, width, dtype=self.dtype)
        setattr(none, TAG, self)
        return none

    @property
    def keys(self) -> Tensor | None:
        if self.state is None:
            return None
        mean, key = self.state.mean_value, self.state.mean_key  # [B, key heads, channels, E], [..., channels, D]
        # Of the evidence read there may be more channels than a key has.
        return self.make_empty(mean, mean.shape[2] if key is None else key.shape[3])

    @property
    def values(self) -> Tensor | None:
        return None if self.state is None else self.make_empty(self.state.mean_value, self.state.mean_value.shape[3])

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(keys that an attention function is given, keys before them)"""
        return query_length, self.length

    def get_seq_length(self) -> Any:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.log_sum.shape[0]

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    def select(self, index: Tensor) -> None:
        if self.state is None:
            return
        chosen = self.state.index_select(index.to(self.state.log_sum.device))
        if self.is_compileable and len(index) == self.batch_size:
            self.write(chosen)
        else:
            self.state = chosen

    reorder_cache = select

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by so many tokens (transformers counts them below 0) to a recorded state, or to the one before it
        and some tokens on. What was recorded is forgotten then."""
        left = abs(tokens_to_remove)
        if left > sum(past.new for past in self.past):
            remedy = (
                "only those since the last crop can be taken back"
                if self.record_past
                else "call its activate_past_recording() before they come, or use past_key_values=DynamicCache(), "
                "which keeps all keys and values"
            )
            raise ValueError(
                f"crop({tokens_to_remove}): LLNCache keeps sums, from which no token can be taken away again; {remedy}."
            )
        while left:
            past = self.past.pop()
            kept = max(past.new - left, 0)
            self.state = past.fold(kept) if kept else past.before
            self.length -= past.new - kept
            left -= past.new - kept
            self.stepper = None
        self.past.clear()

    def offload(self) -> None:
        raise ValueError("offloading: LLNCache has a fixed size and stays on its device; leave offloading out.")

    prefetch = offload

    def reset(self) -> None:
        """As new, for other sequences."""
        self.waits, self.empty, self.cross, self.stepper = False, True, None, None
        self.past.clear()
        if not isinstance(self.length, Tensor):
            self.state, self.length, self.is_initialized = None, 0, False
            return
        self.length.zero_()
        for name in FIELDS if self.state is not None else ():
            value = getattr(self.state, name)
            if isinstance(value, Tensor) and name != "beta":
                value.fill_(-torch.inf if name == "log_sum" else 0)


class LLNCache(Cache):
    """A cache for models that run "lln" or "lln_diag", whose size does not depend on how many tokens it has seen.

    `model.generate(...)` makes one by itself. Pass `past_key_values=lln.hf.LLNCache()` to generate, or to the model's
    forward, if you want to continue later: pass the same cache again with the following tokens.

    Args:
        layers: the number of layers of the model's decoder. Only needed with static=True, so that transformers knows
            before the first step that it may compile. Default: layers are added as the model reaches them.
        static: write every step into the same memory, for compiled decoding, as `cache_implementation="static"` of
            generate does. Default False.

    Example:
        >>> import torch, transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
        >>> model = lln.hf.convert(model, "lln", statistics="fixed").eval()
        >>> cache, tokens = lln.hf.LLNCache(), torch.arange(8)[None]
        >>> first = model(tokens[:, :5], past_key_values=cache).logits
        >>> size = cache.nbytes
        >>> later = model(tokens[:, 5:], past_key_values=cache).logits
        >>> torch.allclose(later, model(tokens).logits[:, 5:], atol=1e-5), cache.nbytes == size
        (True, True)
    """

    def __init__(self, layers: int = 0, *, static: bool = False) -> None:
        self.static = static
        super().__init__(layers=[StateLayer(static) for _ in range(layers)])
        self.layer_class_to_replicate = functools.partial(StateLayer, static)

    def activate_past_recording(self) -> None:
        """Keep the state from before every call until the next `crop`, which goes back to one of them. Assisted and
        prompt-lookup decoding call this by themselves."""
        if self.static:
            raise ValueError(
                "LLNCache(static=True) writes every state over the one before it, and assisted and prompt-lookup "
                "decoding take tokens back; use LLNCache()."
            )
        self.layer_class_to_replicate = functools.partial(StateLayer, False, True)
        super().activate_past_recording()

    @property
    def nbytes(self) -> int:
        """The number of bytes of all layers, which is the same after one token and after a million."""
        return sum(count_bytes(layer) for layer in self.layers)


def count_bytes(layer: Any) -> int:
    """Of a state, or of the keys and values of a layer that has softmax attention."""
    if isinstance(layer, StateLayer):
        return layer.nbytes
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
