"""The instruments by their definitions, on dense float64 matrices with numpy and scipy: the standard for the fast ones.

Padded rows and hidden keys are cut out of P before anything is measured."""

from typing import Any

import numpy as np
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

from lln.naive import expand_per_head, log_similarity, masked_softmax


def find_visible(rows: int, keys: int, is_causal: bool, key_mask: Tensor | None, batch: int) -> Tensor:
    """[B, 1, N, M]"""
    seen = torch.ones(batch, keys, dtype=torch.bool) if key_mask is None else key_mask
    allowed = seen[:, None, None, :].expand(batch, 1, rows, keys)
    return allowed & torch.ones(rows, keys, dtype=torch.bool).tril() if is_causal else allowed


def repeat_keys(k: Tensor, heads: int) -> Tensor:
    return k.double().repeat_interleave(heads // k.shape[1], 1)


def softmax_matrix(
    q: Tensor, k: Tensor, scale: float | None = None, is_causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """[B, H, N, M]"""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * q.double() @ repeat_keys(k, q.shape[1]).transpose(-1, -2)
    return masked_softmax(scores, find_visible(q.shape[2], k.shape[2], is_causal, key_mask, len(q)))


def lln_matrix(
    q: Tensor, k: Tensor, alpha: Any, beta: Any, block_size: int | None = None, mix: Any = 0.5,
    scale: float | None = None, is_causal: bool = False, key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, _, dim = q.shape
    allowed = find_visible(q.shape[2], k.shape[2], is_causal, key_mask, batch)
    aq = expand_per_head(alpha, batch, heads, dim)[:, :, None] * q.double()
    bk = expand_per_head(beta, batch, k.shape[1], dim)[:, :, None] * k.double()
    p = masked_softmax(log_similarity(aq, repeat_keys(bk, heads)), allowed)
    if block_size is None:
        return p
    first = torch.zeros(batch, dtype=torch.long) if key_mask is None else key_mask.int().argmax(-1)
    block = (torch.arange(q.shape[2]) - first[:, None]).div(block_size, rounding_mode="floor")
    same = block[:, None, :, None] == block[:, None, None, :]
    scale = dim**-0.5 if scale is None else scale
    blocks = masked_softmax(scale * q.double() @ repeat_keys(k, heads).transpose(-1, -2), allowed & same)
    r, s = mix if isinstance(mix, tuple) else (mix, 1 - mix)
    r, s = (expand_per_head(x, batch, heads, 1)[:, :, None] for x in (r, s))
    return r * p + s * blocks


def kernel_matrix(fq: Tensor, fk: Tensor, is_causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    n = fq.double() @ repeat_keys(fk, fq.shape[1]).transpose(-1, -2)
    n = n * find_visible(fq.shape[2], fk.shape[2], is_causal, key_mask, len(fq))
    return (n / n.sum(-1, keepdim=True)).nan_to_num(0.0)  # a row that sees no key


class Matrix:
    """One head's P [rows that count, keys that are seen], and how many of its keys each row may attend to."""

    def __init__(self, p: Tensor, sample: int, head: int, is_causal: bool = False, key_mask: Any = None,
                 query_mask: Any = None) -> None:  # fmt: skip
        rows, keys = p.shape[2:]
        seen = torch.ones(keys, dtype=torch.bool) if key_mask is None else key_mask[sample]
        if query_mask is None and rows == keys:
            query_mask = key_mask
        live = torch.ones(rows, dtype=torch.bool) if query_mask is None else query_mask[sample]
        allowed = find_visible(rows, keys, is_causal, seen[None], 1)[0, 0]
        live = live & allowed.any(1)
        self.p = p[sample, head][live][:, seen].numpy()
        self.allowed = allowed[live][:, seen].numpy()

    def entropy(self) -> float:
        return float(np.mean([scipy.stats.entropy(row / row.sum(), base=2) for row in self.p]))

    def gap(self) -> float:
        values = np.sort(np.abs(scipy.linalg.eigvals(self.p)))[::-1]
        return 1.0 - float(values[1]) if len(values) > 1 else 1.0

    def principal_std(self) -> float:
        return float(scipy.linalg.svdvals(self.p - self.p.mean(0))[0])

    def variance(self) -> float:
        return float(np.mean([np.var(row[seen]) for row, seen in zip(self.p, self.allowed, strict=True)]))

    def logs(self) -> np.ndarray:
        return np.log(self.p[self.allowed])

    def within(self) -> float:
        rows = [np.log(row[seen]) for row, seen in zip(self.p, self.allowed, strict=True)]
        return float(np.mean([np.var(row, ddof=1) for row in rows if len(row) > 1]))


def measure_each(p: Tensor, what: Any, **masks: Any) -> Tensor:
    """what(Matrix) for each [batch, head]."""
    return torch.tensor(
        [[what(Matrix(p, b, h, **masks)) for h in range(p.shape[1])] for b in range(p.shape[0])], dtype=torch.float64
    )


def score_variance(q: Tensor, k: Tensor, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """Over all pairs, [B, H]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * q.double() @ repeat_keys(k, q.shape[1]).transpose(-1, -2)
    allowed = find_visible(q.shape[2], k.shape[2], is_causal, None, len(q))[0, 0]
    return scores[:, :, allowed].var(-1, unbiased=False)
