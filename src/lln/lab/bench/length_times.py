"""Time and memory against length: torch's softmax attention, LLN and LLN+Diag on the same inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.functional import lln_attention
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Timing, Work, peak_memory, time_calls

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ALPHA = BETA = 2.1354772  # eq. (10) of the paper with its constants, for queries and keys of unit variance
ATTENTIONS: dict[str, Attention] = {
    "softmax": scaled_dot_product_attention,
    "LLN": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA),
    "LLN+Diag": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA, block_size=64),
}


@dataclasses.dataclass(frozen=True)
class Row:
    attention: str
    length: int
    forward: Timing
    training: Timing  # forward and backward
    forward_bytes: int
    training_bytes: int


def check(heads: int, dim: int, device: torch.device) -> None:
    """No time is reported for a wrong result: LLN against eq. (8), written out in float64."""
    q, k, v = (torch.randn(1, heads, 257, dim, dtype=torch.float64, device=device) for _ in range(3))
    a, b = (ALPHA * q).exp(), (BETA * k).exp()
    p = a @ b.transpose(-1, -2)
    expected = p @ v / p.sum(-1, keepdim=True)
    error = float((ATTENTIONS["LLN"](q.float(), k.float(), v.float()) - expected).norm() / expected.norm())
    if not error <= 1e-5:
        raise RuntimeError(f"LLN attention is off by {error:.1e} from eq. (8) on {device}; nothing was timed.")


def measure(
    lengths: Sequence[int],
    *,
    heads: int = 12,
    dim: int = 64,
    repeats: int = 5,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The rows and how they were made, ready for JSON. `progress` hears of each step: two for every length."""
    device = device or torch.device("cpu")
    torch.manual_seed(seed)
    check(heads, dim, device)
    rows: list[Row] = []
    for length in lengths:
        q, k, v = (torch.randn(1, heads, length, dim, device=device, requires_grad=True) for _ in range(3))
        g = torch.randn(1, heads, length, dim, device=device)

        def forward(attention: Attention, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Work:
            def work() -> Tensor:
                with torch.no_grad():
                    return attention(q, k, v)

            return work

        def training(attention: Attention, q: Tensor = q, k: Tensor = k, v: Tensor = v, g: Tensor = g) -> Work:
            return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), g)

        progress(f"time at length {length}")
        forwards = {name: forward(attention) for name, attention in ATTENTIONS.items()}
        trainings = {name: training(attention) for name, attention in ATTENTIONS.items()}
        times = time_calls(forwards, repeats=repeats, device=device)
        training_times = time_calls(trainings, repeats=repeats, device=device)
        progress(f"memory at length {length}")
        for name in ATTENTIONS:
            bytes_ = peak_memory(forwards[name], device), peak_memory(trainings[name], device)
            rows.append(Row(name, length, times[name], training_times[name], *bytes_))
    return {
        "what": "time and peak extra memory of one attention call, float32, batch 1",
        "heads": heads,
        "dim": dim,
        "provenance": provenance(seed, device),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
