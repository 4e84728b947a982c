"""The cells of a comparison. A cell that cannot be filled says why, in a word or two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lln
from lln.instruments import dense_map, entropy, spectral_gap
from lln.lab.bench.comparison_plan import SLOWEST_MS, Plan, sigma_of
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import peak_memory, time_calls
from lln.peers import attention_matrix, mechanisms

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Progress = Callable[[str], None]
Store = Callable[[dict[str, Any]], None]


def measure(
    plan: Plan, *, store: Store = lambda result: None, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """The result, ready for JSON; `store` gets it after each mechanism."""
    result: dict[str, Any] = {
        "what": "time and peak extra memory of attention, its entropy and spectral gap, and its distance from softmax",
        "settings": settings(plan),
        "provenance": provenance(plan.seed, plan.device),
        "finished": False,
        "costs": [],
        "concentration": [],
    }
    for name in plan.names:
        result["costs"] += costs(plan, name, progress)
        result["concentration"] += concentrations(plan, name, progress)
        store(result)
    result["finished"] = True
    store(result)
    return result


def settings(plan: Plan) -> dict[str, Any]:
    found = dataclasses.asdict(plan)
    return found | {
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
        "matrix_length": plan.matrix_length,
    }


def build(plan: Plan, name: str, length: int) -> Attend:
    """The mechanism as a function of q, k, v; a module where it learns something. A mixer replaces the projections too:
    its hidden states are q with the heads side by side."""
    entry = mechanisms()[name]
    if entry.function is not None:
        return lambda q, k, v: lln.attention(name, q, k, v, is_causal=plan.causal)
    torch.manual_seed(plan.seed)
    module = lln.mechanism(
        name, num_heads=plan.heads, head_dim=plan.dim, max_length=length, device=plan.device, dtype=plan.dtype
    )
    if entry.kind != "mixer":
        return functools.partial(module, is_causal=plan.causal)

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden: Tensor = module(q.transpose(1, 2).flatten(2), is_causal=plan.causal)
        out: Tensor = hidden.unflatten(2, (plan.heads, plan.dim)).transpose(1, 2)
        return out

    return mix


def costs(plan: Plan, name: str, progress: Progress) -> list[dict[str, Any]]:
    rows = []
    last = 0.0
    for length in sorted(plan.lengths):
        progress(f"{name}: {length}")
        row: dict[str, Any] = {"mechanism": name, "length": length, "forward_ms": None, "training_ms": None,
                               "training_bytes": None, "note": None}  # fmt: skip
        rows.append(row)
        if last > SLOWEST_MS:
            row["note"] = "too slow"
            continue
        try:
            row |= cost(plan, name, length)
            last = row["training_ms"]["median"]
        except torch.OutOfMemoryError:
            row["note"] = "out of memory"
            last = float("inf")
        except ValueError as error:
            row["note"] = "unsupported"
            row["reason"] = str(error)
        except RuntimeError as error:  # a CPU's allocator says it in words
            if "allocate memory" not in str(error):
                raise
            row["note"] = "out of memory"
            last = float("inf")
    return rows


def cost(plan: Plan, name: str, length: int) -> dict[str, Any]:
    attend = build(plan, name, length)
    q, k, v, g = plan.inputs(length)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def training() -> None:
        torch.autograd.grad(attend(q, k, v), leaves, g, allow_unused=True)

    found = time_calls({"forward": forward, "training": training}, repeats=plan.repeats, device=plan.device)
    return {
        "forward_ms": dataclasses.asdict(found["forward"]),
        "training_ms": dataclasses.asdict(found["training"]),
        "training_bytes": peak_memory(training, plan.device),
    }


def concentrations(plan: Plan, name: str, progress: Progress) -> list[dict[str, Any]]:
    """At each temperature, on Gaussian queries and keys."""
    rows = []
    for temperature in plan.temperatures:
        progress(f"{name}: temperature {temperature:g}")
        q, k, v, _ = plan.inputs(plan.matrix_length, sigma_of(temperature))
        rows.append({"mechanism": name, "temperature": temperature, **concentration(name, q, k, v, plan.causal)})
    return rows


def concentration(
    name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None
) -> dict[str, Any]:
    """Entropy and gap of P where there is one, and how far the output is from softmax's; in float64."""
    found: dict[str, Any] = {"entropy": None, "gap": None, "error": None, "note": None}
    entry = mechanisms()[name]
    if entry.function is None:
        return found | {"note": "learned"}  # before training it says nothing about the mechanism
    q, k, v = q.double(), k.double(), v.double()
    try:
        out = lln.attention(name, q, k, v, is_causal=is_causal, scale=scale)
    except ValueError as error:
        return found | {"note": "unsupported", "reason": str(error)}
    exact = lln.attention("softmax", q, k, v, is_causal=is_causal, scale=scale)
    found["error"] = float((out - exact).norm() / exact.norm())
    if not entry.matrix:
        return found | {"note": "no matrix"}
    try:
        p = dense_map(attention_matrix(name, q, k, is_causal=is_causal, scale=scale))
    except ValueError:
        return found | {"note": "not stochastic"}  # negative entries, or rows that do not sum to 1: no entropy
    return found | {"entropy": float(entropy(p).mean()), "gap": float(spectral_gap(p).mean())}


def on_model(
    plan: Plan, model: Any, tokenizer: Any, progress: Progress = lambda text: None, texts: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The same on the queries and keys of a pretrained model's layers, a text at a time; values are Gaussian. Layers
    that attend to another sequence or with a bias of single pairs are left out."""
    from lln.lab.inspect.inspection import TEXTS, encode, run

    rows = []
    for number, batch in enumerate(encode(model, tokenizer, list(texts or TEXTS), plan.matrix_length, 1)):
        seen = [one for _, one in run(model, batch) if not one.cross and one.bias is None]
        for name in plan.names:
            progress(f"{name}: text {number + 1}")
            for one in seen:
                generator = torch.Generator().manual_seed(plan.seed)
                shape = (*one.key.shape[:3], one.query.shape[3])
                v = torch.randn(shape, dtype=torch.float64, generator=generator).to(one.key.device)
                place = {"mechanism": name, "text": number, "layer": one.layer}
                rows.append(place | concentration(name, one.query, one.key, v, one.is_causal, one.scale))
    return rows
