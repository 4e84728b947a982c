"""Near an even P hardly anything is left of it but the mean: what little there is, the instruments still see."""

import numpy as np
import pytest
import torch

from lln.instruments import lln_map, principal_std

WIDE = np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant


def measure_exactly(q: np.ndarray, k: np.ndarray, factor: float) -> float:
    """The largest singular value of the centred P of LLN attention, by iteration in extended precision."""
    q, k = q.astype(np.longdouble), k.astype(np.longdouble)
    p = np.exp(factor * q) @ np.exp(factor * k).T
    p /= p.sum(1, keepdims=True)
    apart = p - p.mean(0, keepdims=True)
    v = np.ones(len(k), np.longdouble) + np.arange(len(k))
    for _ in range(1000):
        v = apart.T @ (apart @ v)
        v /= np.sqrt((v * v).sum())
    return float(np.sqrt(((apart @ v) ** 2).sum()))


@pytest.mark.skipif(not WIDE, reason="numpy has nothing wider than float64 here")
@pytest.mark.parametrize("seed", range(4))
def test_at_high_temperatures_the_spread_of_rows_is_seen(seed: int) -> None:
    """Without a mean that is taken from the keys, too, rounding is larger than what is left: some 1e-3 to 1e-1."""
    generator = np.random.default_rng(seed)
    q, k = generator.standard_normal((12, 8)), generator.standard_normal((40, 8))
    p = lln_map(torch.from_numpy(q)[None, None], torch.from_numpy(k)[None, None], 3e-8, 3e-8)
    assert principal_std(p).item() == pytest.approx(measure_exactly(q, k, 3e-8), rel=3e-4, abs=0.0)
