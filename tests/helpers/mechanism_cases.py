"""Every mechanism on q, k, v as a plain function, small enough to be checked densely."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lln
from helpers.tensors import make_inputs
from helpers.untyped import attention, mechanism

HEADS, KEY_HEADS, DIM, VALUE_DIM, LENGTH = 4, 2, 6, 5, 37
ON_QKV = [name for name, m in lln.mechanisms().items() if m.kind != "mixer"]
MIXERS = [name for name, m in lln.mechanisms().items() if m.kind == "mixer"]
KERNELS = [name for name, m in lln.mechanisms().items() if m.kind == "kernel"]
# Sizes that make several blocks, windows, landmarks out of LENGTH tokens.
OPTIONS: dict[str, dict[str, Any]] = {
    "performer": {"features": 7},
    "rfa": {"features": 33},
    "linformer": {"rank": 7},
    "nystromformer": {"landmarks": 5},
    "skyformer": {"landmarks": 10},
    "longformer": {"window": 4, "global_tokens": 2},
    "bigbird": {"block": 4, "random_blocks": 2},
    "reformer": {"chunk": 4},
    "transformer_ls": {"window": 6, "rank": 3},
}
BLOCK_SIZES = {"lln_diag": 8, "block_diagonal": 8}


def list_supporting(*features: Any, names: list[str] = ON_QKV) -> list[str]:
    return [name for name in names if all(lln.mechanisms()[name].supports(f) for f in features)]


def make_attention(name: str, key_heads: int = HEADS, **options: Any) -> Any:
    """The mechanism with its small options, as a function of q, k, v and the arguments of a call."""
    entry = lln.mechanisms()[name]
    options = {**OPTIONS.get(name, {}), **options}
    options.setdefault("block_size", BLOCK_SIZES.get(name))
    if options["block_size"] is None:
        del options["block_size"]
    if not entry.parameters:
        return lambda q, k, v, **call: attention(name, q, k, v, **options, **call)
    torch.manual_seed(7)
    module = mechanism(
        name,
        num_heads=HEADS,
        head_dim=DIM,
        max_length=LENGTH + 11,
        num_key_heads=key_heads,
        dtype=torch.float64,
        **options,
    )
    with torch.no_grad():
        for parameter in module.parameters():  # away from identities and zeros
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def draw_inputs(
    seed: int,
    batch: int = 2,
    length: int = LENGTH,
    key_length: int | None = None,
    key_heads: int = HEADS,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    # transformer_ls normalises keys and values alike, and a convolution is built for the channels of the queries.
    value_dim = DIM if name in ("transformer_ls", "convolved_softmax", "value_convolved_softmax") else VALUE_DIM
    return make_inputs(batch, HEADS, key_heads, length, DIM, value_dim, key_length=key_length, seed=seed)


def split_heads(projected: Tensor, heads: int) -> Tensor:
    """[B, N, H * D] -> [B, H, N, D]"""
    return projected.reshape(*projected.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(out: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H * D]"""
    return out.transpose(1, 2).flatten(2)


def slope(counts: list[int], error: Callable[[int, int], float], seeds: int = 6) -> float:
    """Of log error against log count, the error a root mean square over seeds."""
    x = torch.tensor(counts).double().log()
    y = torch.tensor([math.sqrt(sum(error(n, s) ** 2 for s in range(seeds)) / seeds) for n in counts]).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
