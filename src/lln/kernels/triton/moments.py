"""Launches of the kernels that take the statistics of queries and keys, and the same as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lln.kernels.triton.library import define
from lln.kernels.triton.moments_kernels import (
    LANE,
    match_kernel,
    merge_kernel,
    sample_kernel,
    settle_kernel,
    split_kernel,
)
from lln.kernels.triton.plan import use_device
from lln.kernels.triton.tape import Recording, replay, signature

PROGRAMS = 528  # four for each multiprocessor of an H100 or H200; fixed, so that results do not depend on the device
SETTLED = 1024  # numbers a program of `settle_kernel` takes
LEAST = 2**15  # elements that are worth a program, and up to twice as many a program that needs no merging


def both_moments(*data: Any) -> Tensor:
    """(count, sum, sum of squares) of queries and of keys: [2, 3, samples, key heads] in float64; data: see INPUTS."""
    return measure(data, None)[0]


def paper_coefficients(*given: Any) -> tuple[Tensor, Tensor]:
    """(alpha [samples, heads, 1], beta [samples, key heads, 1]) in float32 by eq. (10), with the score variance
    factor (sigma_q sigma_k)^2 of each sample and key head; given: INPUTS and factor."""
    *data, factor = given
    alpha, beta = measure(data, factor)
    return alpha, beta


def measure(data: Sequence[Any], factor: float | None) -> Sequence[Tensor]:
    """The moments; with a factor alpha and beta."""
    query, key, key_heads, *rows = data

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        made = allocate(data, factor)
        launch(data, factor, made, recording)
        return made

    given = query, key, *rows
    return replay(("moments", query.device, key_heads, factor, signature(given)), given, launches)


def allocate(data: Sequence[Any], factor: float | None) -> Sequence[Tensor]:
    """What `measure` returns, without values."""
    query, _, key_heads, _, _, cu_query, _ = data
    samples = query.shape[0] if cu_query is None else cu_query.shape[0] - 1
    if factor is None:
        return (query.new_empty(2, 3, samples, key_heads, dtype=torch.float64),)
    return tuple(query.new_empty(samples, n, 1, dtype=torch.float32) for n in (query.shape[1], key_heads))


def paper_match(variance_q: Tensor, variance_k: Tensor, heads: int, factor: float) -> tuple[Tensor, Tensor]:
    """(alpha [1, heads, 1], beta [1, key heads, 1]) in float32 from contiguous variances [key heads]."""
    given, key_heads = (variance_q, variance_k), variance_k.shape[0]

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        alpha, beta = allocate_match(variance_q, variance_k, heads, factor)
        with use_device(variance_q.device):
            args = (variance_q, variance_k, alpha, beta, factor, heads // key_heads)
            run(recording, (alpha, beta), match_kernel, key_heads, args, 1)
        return alpha, beta

    alpha, beta = replay(("match", variance_q.device, heads, factor, signature(given)), given, launches)
    return alpha, beta


def settle(given_q: Tensor, given_k: Tensor, learned: bool) -> tuple[Tensor, Tensor]:
    """(alpha [1, heads, 1 or dim], beta [1, key heads, 1 or dim]) in float32 from what a module keeps of them: the
    same, or where they are `learned` their logarithms. Contiguous; without a gradient."""
    given = given_q, given_k

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        made = [t.new_empty(1, *t.shape[-2:], dtype=torch.float32) for t in given]
        programs = triton.cdiv(max(t.numel() for t in given), SETTLED)
        args = (*given, *made, given_q.numel(), given_k.numel(), learned, SETTLED)
        with use_device(given_q.device):
            run(recording, made, settle_kernel, programs, args, 4)
        return made

    alpha, beta = replay(("settle", given_q.device, learned, signature(given)), given, launches)
    return alpha, beta


def run(
    recording: Recording | None, made: Sequence[Tensor], kernel: Any, programs: int, args: tuple[Any, ...],
    warps: int,
) -> None:  # fmt: skip
    """One launch; `made` are tensors that it writes to."""
    compiled = kernel[(programs,)](*args, num_warps=warps)
    if recording is not None:
        for t in made:
            recording.make(t)
        recording.launch(compiled, (programs,), args)


def allocate_match(variance_q: Tensor, variance_k: Tensor, heads: int, factor: float) -> Sequence[Tensor]:
    """What `paper_match` returns, without values."""
    return tuple(variance_q.new_empty(1, n, 1, dtype=torch.float32) for n in (heads, variance_k.shape[0]))


def launch(data: Sequence[Any], factor: float | None, made: Sequence[Tensor], recording: Recording | None) -> None:
    """Into what `allocate` made. What is launched is decided by shapes alone."""
    query, key, key_heads, query_mask, key_mask, cu_query, cu_key = data
    out, alpha, beta = (*made, None, None) if factor is None else (None, *made)
    batch, heads, length, dim = query.shape
    key_length, groups = key.shape[2], heads // key_heads
    packed = cu_query is not None
    number = cu_query.shape[0] - 1 if packed else batch
    cells = number * key_heads
    if cells == 0:
        return
    if cu_query is not None and cu_key is not None:
        cu_query, cu_key = cu_query.contiguous(), cu_key.contiguous()
    arguments = (
        *query.stride(), *key.stride(),
        *((0, 0) if query_mask is None else query_mask.stride()), *((0, 0) if key_mask is None else key_mask.stride()),
        length, key_length,
    )  # fmt: skip
    each = (groups * length + key_length) * dim  # of one sample and key head; packed: of all its sequences
    total = each * batch * key_heads
    columns = triton.next_power_of_2(dim)
    with use_device(query.device):
        if each <= (2 * LEAST if packed else max(2 * LEAST, total // PROGRAMS)):
            warps = choose_warps(cells, each // number if packed else each)
            rows = max(warps * 32 * LANE // columns, 1)
            args = (
                query, key, query_mask, key_mask, cu_query, cu_key, out, alpha, beta, *arguments, key_heads,
                factor, groups, dim, rows, columns,
            )  # fmt: skip
            run(recording, made, sample_kernel, cells, args, warps)
            return
        rows = max(8 * 32 * LANE // columns, 1)
        work = max(total // PROGRAMS, LEAST)
        chunk_q, chunk_k = (-(-work // (n * dim * rows)) * rows for n in (groups, 1))
        if packed:
            splits_q, splits_k = length // chunk_q + number, key_length // chunk_k + number
            programs_q, programs_k = key_heads * splits_q, key_heads * splits_k
        else:
            splits_q, splits_k = max(-(-length // chunk_q), 1), max(-(-key_length // chunk_k), 1)
            programs_q, programs_k = cells * splits_q, cells * splits_k
        programs = programs_q + programs_k
        parts = query.new_empty(3, programs, dtype=torch.float64)
        args = (
            query, key, query_mask, key_mask, cu_query, cu_key, parts, *arguments,
            chunk_q, chunk_k, splits_q, splits_k, number, key_heads, programs_q,
            groups, dim, rows, columns,
        )  # fmt: skip
        run(recording, (parts,), split_kernel, programs, args, 8)
        args = (
            parts, cu_query, cu_key, out, alpha, beta, chunk_q, chunk_k, splits_q, splits_k, key_heads, programs_q,
            programs, factor, groups, 128,
        )  # fmt: skip
        run(recording, made, merge_kernel, cells, args, 1)


def choose_warps(cells: int, each: int) -> int:
    """Of a program for one of so many cells of so many elements: a wide one is quicker alone, several narrow ones hide
    each other's beginnings and ends."""
    return 16 if cells < PROGRAMS // 2 and each > LEAST // 4 else 4


INPUTS = (
    "Tensor query, Tensor key, int key_heads, Tensor? query_mask, Tensor? key_mask, Tensor? cu_query, Tensor? cu_key"
)
for schema, function, fake in (
    (f"both_moments({INPUTS}) -> Tensor", both_moments, lambda *data: allocate(data, None)[0]),
    (f"paper_coefficients({INPUTS}, float factor) -> (Tensor, Tensor)", paper_coefficients,
     lambda *given: allocate(given[:-1], given[-1])),
    ("paper_match(Tensor variance_q, Tensor variance_k, int heads, float factor) -> (Tensor, Tensor)", paper_match,
     allocate_match),
):  # fmt: skip
    define(schema, function, fake, torch.Tag.flexible_layout)
