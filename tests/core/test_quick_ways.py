"""On a CPU, rows with ordinary exponents are computed without the precautions that others need: the results are the
same, and which way a row goes is nobody else's business."""

from typing import Any

import pytest
import torch

from lln import lln_attention
from lln.kernels import causal, fold
from lln.kernels.common import fit_size
from lln.naive import naive_lln

SHAPE = 3, 4, 200, 16


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return q, k[:, :2], v[:, :2]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("factor", [1.0, 4.0, 20.0, 200.0])
def test_both_ways_give_the_same(is_causal: bool, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(0)
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[0, 150:], mask[1, :140], mask[2] = False, False, False
    given: Any = {"is_causal": is_causal, "key_mask": mask}
    out = lln_attention(factor * q, factor * k, v, 1.5, 1.5, **given)
    expected = naive_lln(factor * q, factor * k, v, 1.5, 1.5, **given)
    for module in (causal, fold):
        monkeypatch.setattr(module, "can_look", lambda t: False)
    careful = lln_attention(factor * q, factor * k, v, 1.5, 1.5, **given)
    error, allowed = ((t.double() - expected).norm() / expected.norm() for t in (out, careful))
    assert error <= 2 * allowed + 1e-7


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_head_with_large_exponents_changes_no_other(is_causal: bool) -> None:
    q, k, v = draw(1)
    before = lln_attention(q, k, v, 1.5, 1.5, is_causal=is_causal)
    q, k = q.clone(), k.clone()
    q[1, :2] *= 300.0
    k[1, 0] *= 300.0
    after = lln_attention(q, k, v, 1.5, 1.5, is_causal=is_causal)
    others = torch.ones(3, 4, dtype=torch.bool)
    others[1, :2] = False
    assert torch.equal(after[others], before[others])
    expected = naive_lln(q, k, v, 1.5, 1.5, is_causal=is_causal)
    assert (after.double() - expected).norm() < 1e-5 * expected.norm()


def test_a_key_far_above_the_earlier_ones_leaves_them_in_sight() -> None:
    q, k, v = draw(2)
    k = k.clone()
    k[:, :, 70] = 1e3  # in the first chunk
    out = lln_attention(q, k, v, 1.5, 1.5, is_causal=True)
    expected = naive_lln(q[:, :, :70], k[:, :, :70], v[:, :, :70], 1.5, 1.5, is_causal=True)
    assert (out[:, :, :70].double() - expected).norm() < 1e-6 * expected.norm()


def test_numbers_that_are_none_stay_so() -> None:
    q, k, v = draw(3)
    k = k.clone()
    k[0, 0, 5, 3] = torch.nan
    for is_causal in (False, True):
        out = lln_attention(q, k, v, 1.5, 1.5, is_causal=is_causal)
        assert out[0, :2, 5:].isnan().all()
        assert out[1:].isfinite().all()


@pytest.mark.parametrize("later", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("block_size", [None, 16])
def test_no_bit_depends_on_later_tokens(later: float, block_size: int | None) -> None:
    q, k, v = draw(4)
    first = lln_attention(q, k, v, 1.5, 1.5, is_causal=True, block_size=block_size)[:, :, :75]
    for t in (q, k, v):
        t[:, :, 75:] *= -later
    second = lln_attention(q, k, v, 1.5, 1.5, is_causal=True, block_size=block_size)[:, :, :75]
    assert torch.equal(first, second)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (31, 32), (32, 32), (33, 64), (64, 64), (100, 64)])
def test_chunks_are_no_longer_than_what_is_there(count: int, size: int) -> None:
    assert fit_size(64, count) == size
