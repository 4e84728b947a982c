"""What transformers says about masks, brought into a form that linear attention can use.

transformers describes a mask by a function of single query-key pairs. Linear attention forms no pairs, so the mask that
goes through the model to the attention function is one of these:

    [B, keys] bool      bidirectional; True = attend
    [B, keys] uint8     causal; 1 = attend
    [B, 0]              either, and no key is hidden
    [offsets] int32     causal; all rows one after another hold sequences that begin at these offsets (packing)
    [B, 1, 1, keys]     uint8, causal: the new keys after those in an LLNCache; [B, 1, 1, 0]: none of them is hidden
    [1, 1, 1, offsets]  uint32, causal or not as the module is: packing again, found before the model ran (`packing`)
    [B, 0, 0]           uint8, a sliding window or chunk, which linear attention refuses where it is used

Those of four dimensions may be made before the call, and what has four dimensions is handed on as it is. The kind is in
the dtype and the number of dimensions, so that nobody has to wait for a device to know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from lln.hf.mixed import SOFTMAX_MASK, is_mixed, make_softmax_mask, needs_softmax

CAUSAL = torch.uint8
BIDIRECTIONAL = torch.bool
OFFSETS = torch.uint32  # which nobody else has for a mask


def lln_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The mask function that is registered with transformers' AttentionMaskInterface."""
    config, local = kwargs.get("config"), kwargs.get("local_size") is not None
    device = torch.device(kwargs["device"])
    softmax = None
    if mixed := is_mixed(config):
        given = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset,
                 "mask_function": mask_function, "attention_mask": attention_mask}  # fmt: skip
        if local or needs_softmax(config):
            softmax = make_softmax_mask(config, given | kwargs)
        if local:  # layers that attend within it have softmax attention
            return softmax
        if isinstance(kv_offset, int):
            kv_length, kv_offset = kv_offset + kv_length, 0
    if local:  # models make it whether a layer uses it or not; one that does is told by `split`
        return torch.empty(batch_size, 0, 0, dtype=CAUSAL, device=device)
    found = describe_mask(batch_size, kv_length, kv_offset, mask_function, attention_mask, device, kwargs)
    if mixed:
        setattr(found, SOFTMAX_MASK, softmax)
    return found


def describe_mask(
    batch_size: int, kv_length: int, kv_offset: int | Tensor, mask_function: Callable[..., Any],
    attention_mask: Tensor | None, device: torch.device, kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The mask in the form that linear attention takes."""
    plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    # Where positions begin anew, transformers joins "same sequence" to a causal mask; what others join comes with vmap.
    packed = not plain and mask_function.__name__ == "and_mask" and not kwargs.get("use_vmap", False)
    if not plain and not packed:
        raise ValueError(
            "attention mask: this model lays another pattern over its causal or bidirectional mask, and linear "
            "attention forms no query-key pairs that could be masked one by one; use another attn_implementation."
        )
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        attention_mask = None  # a mask from here: some models (PaliGemma) make one for a model inside, which does again
    if isinstance(kv_offset, Tensor) or kv_offset:
        return mask_after_state(batch_size, kv_length, kv_offset, attention_mask, device)
    if kwargs.get("allow_is_bidirectional_skip") is None:  # of masks that are not bidirectional
        check_positions(kv_length, attention_mask, kwargs["q_length"], kwargs["q_offset"])
    if packed:
        return find_offsets(mask_function, batch_size, kwargs["q_length"], device)
    kind = BIDIRECTIONAL if mask_function is bidirectional_mask_function else CAUSAL
    if attention_mask is None:
        return torch.empty(batch_size, 0, dtype=kind, device=device)
    return cast_kind(attention_mask[:, :kv_length], kind)


def mask_after_state(
    batch_size: int, new: int, before: int | Tensor, attention_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Of the new keys alone: what was hidden before them is not in the state."""
    if attention_mask is None:
        return torch.empty(batch_size, 1, 1, 0, dtype=CAUSAL, device=device)
    if attention_mask.shape[-1] < new or (isinstance(before, int) and attention_mask.shape[-1] != before + new):
        raise ValueError(
            f"attention_mask must cover the {before} tokens in past_key_values and the {new} new ones; got "
            f"{attention_mask.shape[-1]}."
        )
    return cast_kind(attention_mask[:, None, None, attention_mask.shape[-1] - new :], CAUSAL)


def cast_kind(mask: Tensor, kind: torch.dtype) -> Tensor:
    """Zeros and ones of that dtype. `split` reads the bytes of either as what is visible."""
    # Contiguous: its strides must not tell how long the whole mask is, or every step of decoding would be a new kind.
    visible = mask.bool().contiguous()
    if kind == BIDIRECTIONAL:
        return visible
    return visible.to(CAUSAL) if torch.compiler.is_exporting() else visible.view(CAUSAL)  # ONNX reads no bytes


def check_positions(keys: int, attention_mask: Tensor | None, length: int, first: int | Tensor) -> None:
    """ValueError where the queries are not the last of the keys: a mask of another length, or a cache with places that
    nothing was written to yet."""
    if isinstance(first, int) and attention_mask is not None:
        seen, came = first + length, attention_mask.shape[-1]
        # Without a cache transformers takes the length of the mask for that of the keys.
        if came < seen or came == keys != seen:
            raise ValueError(
                f"attention_mask must have a column for each of the {seen} tokens, those in the cache included; "
                f"got shape {list(attention_mask.shape)}."
            )
    if not isinstance(first, int) or first + length != keys:
        raise ValueError(
            "past_key_values: a cache with places for tokens to come (StaticCache) cannot be read by linear attention; "
            "use DynamicCache, or LLNCache(static=True) for 'lln' and 'lln_diag'."
        )


def find_offsets(mask_function: Callable[..., Any], batch_size: int, length: int, device: torch.device) -> Tensor:
    """Where sequences begin when several are packed into a row: wherever a token may not attend the one before it.
    Rows are laid one after another, so that each row's first token also begins one."""
    row = torch.arange(batch_size, device=device)[:, None]
    at = torch.arange(1, length, device=device)[None]
    begins = ~mask_function(row, torch.zeros_like(row), at, at - 1)  # [B, N - 1]
    if torch.compiler.is_compiling():
        # How many there are cannot be known in a graph. transformers asks for packing whenever it compiles without a
        # cache, nearly always with one sequence a row; where there are more the program stops instead of going on.
        torch._assert_async(~begins.any(), "lln: packed sequences inside torch.compile; pass cu_seq_lens_q instead.")
        return torch.empty(batch_size, 0, dtype=CAUSAL, device=device)
    begins = torch.nn.functional.pad(begins, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=batch_size * length)


def split(mask: Any, keys: int, after_state: bool) -> tuple[bool | None, Tensor | None, Tensor | None]:
    """(causal or not, None where the mask does not say; key mask [B, keys]; offsets) of what came through the model.

    after_state: keys came through an LLNCache."""
    if mask is None:
        return None, None, None
    if after_state and isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == CAUSAL:
        mask = mask[:, 0, 0]
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == OFFSETS:
        return None, None, mask[0, 0, 0].view(torch.int32)
    if isinstance(mask, Tensor) and mask.ndim == 3 and mask.dtype == CAUSAL:
        raise ValueError(
            "sliding_window: a window or chunk hides other keys from every query, and linear attention forms no "
            "query-key pairs that could be masked one by one; use a model without it, or another attn_implementation."
        )
    if not isinstance(mask, Tensor) or mask.ndim not in (1, 2):
        came = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            "attention_mask must be a padding mask [batch, length], because linear attention forms no query-key pairs "
            f"that could be masked one by one; got {came}."
        )
    if mask.ndim == 1:
        return True, None, mask
    if mask.is_floating_point():
        raise ValueError(f"attention_mask must be bool or int, not {mask.dtype}: a bias cannot be added to keys.")
    # A mask that came past `lln_mask` (some models hand theirs on as it is) says nothing about causality.
    causal = {CAUSAL: True, BIDIRECTIONAL: False}.get(mask.dtype)
    if mask.shape[-1] == 0 and keys > 0:
        return causal, None, None
    # The same memory where it can be: a call is known again by what it is given.
    if mask.dtype == CAUSAL and not torch.compiler.is_exporting():
        return causal, mask.view(torch.bool), None
    return causal, mask.bool(), None
