"""Which settings the kernels of a call run with on a device: compiled and looked at, never timed.

A call is rehearsed before its first launch: each of its kernels is compiled with the settings that it prefers, and with
lesser ones until the device has what it takes: fewer stages, then keys read again, and then, for the call as a whole,
fewer channels of the values at once. What was found is kept for all calls of its kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from lln.kernels.call import Call
from lln.kernels.triton import plan
from lln.kernels.triton.plan import Card, Settings

TENSOR_MEMORY = 512  # columns that a program can have where there is such memory
RESERVED = 1024  # bytes of shared memory that a program takes for the system
MOST = 1024  # kinds of calls remembered


class DoesNotFit(RuntimeError):
    """No settings of a kernel fit into the device."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes."""

    shared: int  # bytes a program
    registers: int = 0  # a thread; 0: not known
    tensor: int = 0  # columns of tensor memory


@dataclasses.dataclass
class Fit:
    """What calls of a kind run with."""

    part: int  # channels of the values at once
    settings: dict[str, Settings] = dataclasses.field(default_factory=dict)  # by kernel; others as the plan has them
    again: dict[str, bool] = dataclasses.field(default_factory=dict)  # by kernel: whether it reads keys again
    trained: set[Hashable] = dataclasses.field(default_factory=set)  # gradients for which the backward fits as well


Look = Callable[[Any, Sequence[Any], Settings], Needs]


def count_programs(needs: Needs, warps: int, card: Card) -> int:
    """Programs that a multiprocessor has room for at the same time, at least one."""
    threads = warps * card.warp
    room = [card.threads // threads]
    if needs.registers:
        room.append(card.registers // (-(-needs.registers // 8) * 8 * threads))
    if needs.shared:
        room.append(card.shared_all // (needs.shared + RESERVED))
    if needs.tensor:
        room.append(TENSOR_MEMORY // needs.tensor)
    return max(min(room), 1)


def fit(
    look: Callable[[Settings, bool], Needs], first: Settings, card: Card, again: bool | None = None
) -> tuple[Settings, bool]:
    """(settings, whether keys are read again): the first that fit, from `first` downwards, with how many programs there
    is room for. On a card like the one that settings were measured on they are taken as they fit; on others with the
    most stages at which two programs share a multiprocessor, or else the most that fit.

    Args:
        look: compiles the kernel with these settings; DoesNotFit where it does not compile.
        again: whether keys are read again in any case; None: the kernel knows no such choice.

    Raises:
        DoesNotFit: none does.
    """
    lack, found = "", None
    rungs = [(stages, again) for stages in range(first.stages, 0, -1)] + ([(1, True)] if again is False else [])
    for stages, reread in rungs:
        if found is not None and reread != again:
            break
        settings = dataclasses.replace(first, stages=stages)
        try:
            needs = look(settings, bool(reread))
        except DoesNotFit as failure:
            lack = str(failure)
            continue
        if needs.shared > card.shared:
            lack = f"needs {needs.shared / 1024:.0f} KiB of shared memory, and there are {card.shared / 1024:.0f}"
        elif needs.tensor > TENSOR_MEMORY:
            lack = f"needs {needs.tensor} columns of tensor memory, and there are {TENSOR_MEMORY}"
        else:
            settings = dataclasses.replace(settings, programs=count_programs(needs, first.warps, card))
            found = found or (settings, bool(reread))
            if settings.programs > 1 or card.measured:
                return settings, bool(reread)
    if found is None:
        raise DoesNotFit(lack)
    return found


class Rehearsal(Fit):
    """Takes the launches of a call, none of which is done."""

    def __init__(self, part: int, card: Card, look: Look) -> None:
        super().__init__(part)
        self.card, self.look = card, look

    def launch(self, name: str, kernel: Any, args: Sequence[Any], settings: Settings) -> None:
        place = kernel.arg_names.index("AGAIN") if "AGAIN" in kernel.arg_names else None

        def look(settings: Settings, again: bool) -> Needs:
            given = args if place is None else (*args[:place], again, *args[place + 1 :])
            return self.look(kernel, given, settings)

        try:
            found, again = fit(look, settings, self.card, None if place is None else bool(args[place]))
        except DoesNotFit as lack:
            raise DoesNotFit(f"{kernel.fn.__name__} {lack}") from None
        self.settings[name], self.again[name] = found, again


def compile_and_look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
    """On the current device."""
    try:
        compiled = kernel.warmup(*args, grid=(1,), **settings.options)
    except Exception as error:  # a compiler knows many
        said = " ".join(str(error).split()) or type(error).__name__
        raise DoesNotFit(f"does not compile with this Triton: {said[:200]}") from error
    shared, tensor = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
    registers = 0
    # Loaded, it knows its registers; that fails where it takes too much, which is for `fit` to say.
    with contextlib.suppress(Exception):
        compiled._init_handles()
        registers = compiled.n_regs or 0
    return Needs(shared, registers, tensor)


FITS: dict[Hashable, Fit | str] = {}


def describe_kind(call: Call) -> Hashable:
    """What decides which kernels a call launches, and how they are compiled."""
    query, key, value = call.query, call.key, call.value
    (batch, heads, rows, dim), (_, key_heads, keys, _) = query.shape, key.shape
    wide = [t is not None and t.shape[-1] > 1 for t in (call.alpha, call.beta, call.lln_weight, call.block_weight)]
    steps = [n if n < 16 else 16 + n % 16 for n in (*query.stride(), *key.stride(), *value.stride())]
    return (
        query.device, query.dtype, dim, value.shape[3], heads // key_heads, call.block_size, call.is_causal,
        plan.is_tf32_allowed(), plan.is_small(batch, heads, max(rows, keys)), lowest_bits(rows), lowest_bits(keys),
        call.key_mask is None, call.cu_query is None, call.log_sum is None, call.start is None, call.open_key is None,
        call.seed is None, *wide, *steps,
    )  # fmt: skip


def lowest_bits(length: int) -> int:
    """Which tiles can all be full: the largest power of two in it, from half a tile to two; 1 for others, 0 for 0."""
    size = min(length & -length, 2 * plan.TILE)
    return size if size >= plan.TILE // 2 else min(size, 1)


def find(call: Call, more: Hashable, rehearse: Callable[[Call, Fit], object]) -> Fit:
    """What a call runs with. more: what decides beside the call; rehearse: its launches.

    Raises:
        DoesNotFit: and says what is in the way.
    """
    width, dim, dtype = call.value.shape[-1], call.query.shape[-1], call.query.dtype
    card = plan.find_card(call.query.device)
    if card is None:
        return Fit(plan.value_part(dim, dtype))
    key = describe_kind(call), more
    found = FITS.get(key)
    if found is None:
        if len(FITS) >= MOST:
            FITS.clear()
        found = FITS[key] = try_parts(call, width, list(list_parts(width, dim, dtype)), card, rehearse)
    if isinstance(found, str):
        raise DoesNotFit(found)
    return found


def list_parts(width: int, dim: int, dtype: torch.dtype) -> Iterator[int]:
    """Numbers of channels to try, as a kernel would work with them: half as many each time."""
    part = min(plan.pad_value_dim(width, dim), plan.value_part(dim, dtype))
    while part >= plan.pad_value_dim(1, dim):
        yield part
        part //= 2


def try_parts(
    call: Call, width: int, parts: Sequence[int], card: Card, rehearse: Callable[[Call, Fit], object]
) -> Fit | str:
    reason = ""
    for part in parts:
        rehearsal = Rehearsal(part, card, compile_and_look)
        try:
            rehearse(call if width <= part else call.narrow(slice(part)), rehearsal)
        except DoesNotFit as lack:
            reason = reason or str(lack)
        else:
            return Fit(part, rehearsal.settings, rehearsal.again)
    return reason
