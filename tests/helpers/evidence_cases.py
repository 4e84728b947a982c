"""Calls with the evidence read: how they are described and built, and the kernels' answer held to that of the eager
back end in float64, which its own tests hold to the dense definition."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from helpers.call_options import draw_coefficient, draw_mix, make_offsets, mask_keys
from helpers.tensors import normal
from helpers.triton_cases import BACKEND, DEVICE, GPU, errors, find_tolerance
from helpers.untyped import lln_attention
from lln import LLNState

STATE = ("log_sum", "mean_value", "mean_key", "entropy")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call in words."""

    lengths: tuple[int, ...] = (70, 70)
    key_lengths: tuple[int, ...] | None = None
    packed: bool = False
    directions: str | int | None = None  # a number: so many learned ones
    heads: int = 2  # of keys
    group: int = 1
    dim: int = 16
    value_dim: int = 16
    beta: str = "number"
    is_causal: bool = False
    block_size: int | None = None
    mix: str = "number"
    overlap: bool = False
    mask: str = "none"
    state: bool = False
    return_state: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    shift: float = 0.0  # of all keys
    size: float = 1.0  # of the exponents

    def __str__(self) -> str:
        given = ((f.name, f.default, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join(f"{name}={x}" for name, usual, x in given if x != usual).replace(", ", ",")


def build(case: Case) -> dict[str, Any]:
    batch, key_lengths = len(case.lengths), case.key_lengths or case.lengths
    rows, n, m = (1, sum(case.lengths), sum(key_lengths)) if case.packed else (batch, case.lengths[0], key_lengths[0])
    given: dict[str, Any] = {
        "query": normal(0, rows, case.heads * case.group, n, case.dim).to(case.dtype),
        "key": (normal(1, rows, case.heads, m, case.dim) + case.shift).to(case.dtype),
        "value": normal(2, rows, case.heads, m, case.value_dim).to(case.dtype),
    }
    channels = case.dim
    if isinstance(case.directions, int):
        channels = case.directions
        given["directions"] = 0.5 * normal(5, case.heads, channels, case.dim).float()
    given["beta"] = draw_coefficient(case.beta, 4, batch, case.heads, channels, torch.float32)
    if isinstance(given["beta"], Tensor):
        given["beta"] = given["beta"] * case.size
    if case.mix == "evidence":
        given["evidence_offset"] = normal(6, batch, case.heads * case.group).float()
    elif case.block_size is not None:
        mix = draw_mix(case.mix, batch, case.heads * case.group, case.value_dim, torch.float32)
        given |= {f"mix {i}": x for i, x in enumerate(mix if isinstance(mix, tuple) else (mix,))}
    if case.state:
        widths = case.dim, case.value_dim
        keys, values = (normal(20 + i, batch, case.heads, 30, width).float() for i, width in enumerate(widths))
        held = lln_attention(
            keys[:, :, :0], keys, values, beta=given["beta"], read="evidence", directions=name_directions(case, given),
            return_state=True, backend="eager",
        )[1]  # fmt: skip
        given |= {f"state {name}": getattr(held, name) for name in STATE}
    return given


def name_directions(case: Case, given: dict[str, Any]) -> Any:
    return given.get("directions", case.directions)


def evaluate(case: Case, backend: str = BACKEND, wide: bool = False) -> dict[str, Tensor]:
    """Output, returned state, and as "d name" the gradients of a random sum of all of them."""
    device = "cpu" if wide else DEVICE
    leaves, given = {}, build(case)
    for name, x in given.items():
        if isinstance(x, Tensor):
            given[name] = leaves[name] = x.to(device, torch.float64 if wide else x.dtype).requires_grad_()
    options: dict[str, Any] = {n: x for n, x in given.items() if " " not in n}
    options |= {"directions": name_directions(case, given), "scale": case.scale, "is_causal": case.is_causal}
    options["return_state"] = case.return_state
    mix = tuple(x for n, x in given.items() if n.startswith("mix"))
    if case.mix == "evidence":
        options |= {"block_size": case.block_size, "mix": case.mix, "overlap": case.overlap}
    elif case.block_size is not None:
        options |= {"block_size": case.block_size, "mix": mix[0] if len(mix) == 1 else mix}
    if case.state:
        held = {name: given[f"state {name}"] for name in STATE}
        options["state"] = LLNState(**held)
    if case.mask != "none":
        lengths = case.key_lengths or case.lengths
        options["key_mask"] = mask_keys(case.mask, lengths).reshape(given["key"].shape[0], -1).to(device)
    if case.packed:
        offsets = make_offsets(case.lengths, device)
        options["cu_seqlens"] = (offsets, make_offsets(case.key_lengths, device)) if case.key_lengths else offsets
    result = lln_attention(**options, read="evidence", backend=backend)
    out, state = result if case.return_state else (result, None)
    assert wide or out.dtype == case.dtype
    found = {"out": out} | ({} if state is None else {name: getattr(state, name) for name in STATE})
    weights = [normal(30 + i, *x.shape).to(x).masked_fill(x == -torch.inf, 0) for i, x in enumerate(found.values())]
    graph = [(x, g) for x, g in zip(found.values(), weights, strict=True) if x.requires_grad]
    outputs, factors = zip(*graph, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), factors, allow_unused=True)
    found |= {
        f"d {n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {n: x.detach().cpu().double() for n, x in found.items()}


def check(case: Case) -> None:
    """Float32 is right to 2e-5; a narrower type to twice what the eager back end makes of it, as are large
    numbers."""
    cut_off = case.dtype == torch.bfloat16 and not GPU  # where a GPU rounds, the interpreter does that
    tolerance = 4e-3 if cut_off else 2e-5
    expected = evaluate(case, "eager", wide=True)
    found = errors(evaluate(case), expected)
    limits = dict.fromkeys(found, tolerance)
    if case.dtype != torch.float32 or case.shift or case.size != 1.0:
        eager_errors = errors(evaluate(case, "eager"), expected)
        limits = {n: find_tolerance(n, case.dtype, e, tolerance) for n, e in eager_errors.items()}
    assert all(e <= limits[n] for n, e in found.items()), {n: (e, limits[n]) for n, e in found.items()}
