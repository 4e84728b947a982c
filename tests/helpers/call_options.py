"""Options of a call of attention, drawn by the words that cases name them with."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.tensors import State, normal


def is_legal(case: dict[str, Any], usual_mix: str) -> bool:
    if case["block_size"] is None:
        return case["mix"] == usual_mix and case["scale"] is None
    return case["is_causal"] or not (case["state"] or case["return_state"])  # an open block is causal only


def cover_pairs(
    options: dict[str, list[Any]], counted: Sequence[tuple[str, str]] | None = None
) -> list[dict[str, Any]]:
    """Few cases that together contain every legal pair of values of two options (greedy, always the same list).
    counted: the pairs of options that have to meet, all unless they are named. The first `mix` is the usual one."""
    names = list(itertools.combinations(options, 2)) if counted is None else counted
    rng = random.Random(0)
    cases: list[dict[str, Any]] = []
    covered: set[tuple] = set()

    def list_pairs(case: dict[str, Any]) -> set[tuple]:
        return {(a, case[a], b, case[b]) for a, b in names}

    for first, second in names:
        for x, y in itertools.product(options[first], options[second]):
            if (first, x, second, y) in covered:
                continue
            drawn = [{n: rng.choice(c) for n, c in options.items()} | {first: x, second: y} for _ in range(300)]
            if legal := [case for case in drawn if is_legal(case, options["mix"][0])]:  # otherwise the pair is illegal
                cases.append(max(legal, key=lambda case: len(list_pairs(case) - covered)))
                covered |= list_pairs(cases[-1])
    return cases


def mask_keys(kind: str, lengths: Sequence[int]) -> Tensor:
    """The key masks of sequences of these lengths, end to end: none, holes, left, right, dead sample."""
    masks = [torch.ones(n, dtype=torch.bool) for n in lengths]
    for s, mask in enumerate(masks):
        n = len(mask)
        if kind == "holes":
            mask &= normal(20 + s, n) > 0
        elif kind == "left":
            mask[: n // (s + 2)] = False
        elif kind == "right":
            mask[n - n // (s + 2) :] = False
        elif kind == "dead sample" and s == 0:
            mask[:] = False
    return torch.cat(masks)


def make_offsets(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    """`cu_seqlens` of sequences packed end to end."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def draw_coefficient(
    kind: str, seed: int, batch: int, heads: int, width: int, dtype: torch.dtype = torch.float64
) -> Any:
    """A coefficient near 1.2: a number, or a tensor of the shape that `kind` names, like [B, H, D]."""
    sizes = {"B": batch, "H": heads, "D": width}
    shape = () if kind == "number" else tuple(sizes[s] for s in kind.strip("[]").split(", ") if s)
    x = 1.2 + normal(seed, *shape).clamp(-2, 2) / 4
    return x.item() if kind == "number" else x.to(dtype)


def draw_mix(kind: str, batch: int, heads: int, width: int, dtype: torch.dtype = torch.float64) -> Any:
    """One weight of the kind of a coefficient, or two of them: pair, wide pair, half pair, of which one is a number."""
    pairs = {"pair": ("[H]", "[]"), "wide pair": ("[H, D]", "[B, H, D]"), "half pair": ("number", "[B, H]")}
    if kind in pairs:
        return tuple(draw_coefficient(k, 5 + i, batch, heads, width, dtype) for i, k in enumerate(pairs[kind]))
    return draw_coefficient(kind, 5, batch, heads, width, dtype) / 2


def draw_state(batch: int, heads: int, dim: int, value_dim: int, block_size: int | None = None) -> State:
    """A state nobody computed: the last sample and one channel have no past, and open blocks are filled differently,
    with numbers that nobody may see beyond their ends."""
    log_sum, mean_value = normal(8, batch, heads, dim), normal(9, batch, heads, dim, value_dim)
    for empty in (slice(batch - 1, None), (0, 0, 0)):
        log_sum[empty], mean_value[empty] = -torch.inf, 0
    if block_size is None:
        return State(log_sum, mean_value)
    count = torch.tensor([2 * block_size + 5, block_size, 3, 7])[:batch]
    count[batch - 1] = 0
    block_mask = torch.arange(block_size) < (count % block_size)[:, None]
    block_mask[0, 2:3] = False  # a masked key inside the open block
    keys, values = normal(10, batch, heads, block_size, dim), normal(11, batch, heads, block_size, value_dim)
    return State(log_sum, mean_value, count, keys, values, block_mask)
