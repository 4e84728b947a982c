"""Every instrument on every kind of map equals its definition on the dense matrix."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.instruments_reference import (
    Matrix,
    kernel_matrix,
    lln_matrix,
    measure_each,
    score_variance,
    softmax_matrix,
)
from helpers.tensors import assert_close, make_inputs, normal
from helpers.untyped import lln_attention
from lln.instruments import (
    AttentionMap,
    dense_map,
    entropy,
    kernel_map,
    lln_map,
    log_moments,
    lognormal_fit,
    principal_std,
    softmax_map,
    spectral_gap,
    temperature,
    variance,
)
from lln.kernels.common import PAPER_A, PAPER_B

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 4, 2, 37, 11
MIX = torch.tensor([0.2, 0.5, 0.9, 0.6], dtype=torch.float64)
ALPHA, BETA = torch.linspace(0.8, 1.9, HEADS), torch.tensor([[1.1, 0.7], [1.6, 1.2]])


def draw_pair(keys: int = LENGTH) -> tuple[Tensor, Tensor]:
    q, k, _ = make_inputs(BATCH, HEADS, KEY_HEADS, LENGTH, DIM, key_length=keys, exact=True)
    return 1.5 * q, k + 0.2


Pair = tuple[AttentionMap, Tensor]
MAPS: dict[str, Callable[..., Pair]] = {
    "softmax": lambda q, k, **o: (softmax_map(q, k, **o), softmax_matrix(q, k, **trim(o))),
    "softmax, scale": lambda q, k, **o: (softmax_map(q, k, scale=0.7, **o), softmax_matrix(q, k, 0.7, **trim(o))),
    "LLN": lambda q, k, **o: (lln_map(q, k, ALPHA, BETA, **o), lln_matrix(q, k, ALPHA, BETA, **trim(o))),
    "kernel": lambda q, k, **o: (
        kernel_map(q.square(), k.square(), **o),
        kernel_matrix(q.square(), k.square(), **trim(o)),
    ),
    "dense": lambda q, k, **o: (dense_map(softmax_matrix(q, k, **trim(o)), **o), softmax_matrix(q, k, **trim(o))),
}
ONE_SEQUENCE: dict[str, Callable[..., Pair]] = MAPS | {
    "LLN+Diag": lambda q, k, **o: (
        lln_map(q, k, 1.3, 0.9, 8, **o),
        lln_matrix(q, k, 1.3, 0.9, 8, **trim(o)),
    ),
    "LLN+Diag, mix": lambda q, k, **o: (
        lln_map(q, k, ALPHA, BETA, 5, mix=MIX, scale=0.4, **o),
        lln_matrix(q, k, ALPHA, BETA, 5, MIX, 0.4, **trim(o)),
    ),
}
# Left padding with a hole, and right padding.
MASK = torch.ones(BATCH, LENGTH, dtype=torch.bool)
MASK[0, :6], MASK[0, 20], MASK[1, 30:] = False, False, False
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"key_mask": MASK},
    "causal, masked": {"is_causal": True, "key_mask": MASK},
}
CASES = [(name, options) for name in ONE_SEQUENCE for options in OPTIONS]


def trim(options: dict[str, Any]) -> dict[str, Any]:
    """What the reference takes for P; the mask of queries is for what is measured."""
    return {name: value for name, value in options.items() if name != "query_mask"}


def spoil(t: Tensor, mask: Tensor | None) -> Tensor:
    """NaN where nobody may look."""
    return t if mask is None else torch.where(mask[:, None, :, None], t, torch.nan)


def make_map(name: str, options: dict[str, Any]) -> Pair:
    q, k = draw_pair()
    _, dense = ONE_SEQUENCE[name](q, k, **options)
    if name == "dense":
        return dense_map(spoil(dense, options.get("key_mask")), **options), dense
    mask = options.get("key_mask")
    p, _ = ONE_SEQUENCE[name](spoil(q, mask), spoil(k, mask), **options)
    return p, dense


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"], autouse=True)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the usual spans, once with a head and 16 rows at a time."""
    if request.param:
        monkeypatch.setattr("lln.instruments.heads.SPAN_ELEMENTS", {"cpu": 1})


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_map_is_the_matrix(name: str, options: str) -> None:
    p, dense = make_map(name, OPTIONS[options])
    mask = OPTIONS[options].get("key_mask")
    assert_close(p.dense(), dense if mask is None else dense * mask[:, None, :, None], 1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_entropy_variance_and_log_moments(name: str, options: str) -> None:
    p, dense = make_map(name, OPTIONS[options])
    chosen = OPTIONS[options]
    assert_close(entropy(p), measure_each(dense, Matrix.entropy, **chosen))
    assert_close(variance(p), measure_each(dense, Matrix.variance, **chosen))
    found = log_moments(p)
    assert_close(found.mean, measure_each(dense, lambda m: m.logs().mean(), **chosen))
    assert_close(found.variance, measure_each(dense, lambda m: m.logs().var(ddof=1), **chosen))
    assert_close(found.within, measure_each(dense, Matrix.within, **chosen))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("iterated", [False, True])
def test_spectral_gap_and_principal_std(name: str, options: str, iterated: bool, monkeypatch: Any) -> None:
    if iterated:
        monkeypatch.setattr("lln.instruments.spectrum.DENSE", 0)
    p, dense = make_map(name, OPTIONS[options])
    assert_close(spectral_gap(p), measure_each(dense, Matrix.gap, **OPTIONS[options]), 1e-9 if iterated else 1e-11)
    assert_close(
        principal_std(p), measure_each(dense, Matrix.principal_std, **OPTIONS[options]), 1e-9 if iterated else 1e-11
    )


@pytest.mark.parametrize("name", MAPS)
def test_cross_maps_have_everything_but_a_spectrum(name: str) -> None:
    q, k = draw_pair(keys=23)
    masks = {"key_mask": torch.rand(BATCH, 23, generator=torch.Generator().manual_seed(0)) < 0.7, "query_mask": MASK}
    p, dense = MAPS[name](q, k, **masks)
    assert_close(entropy(p), measure_each(dense, Matrix.entropy, **masks))
    assert_close(variance(p), measure_each(dense, Matrix.variance, **masks))
    assert_close(principal_std(p), measure_each(dense, Matrix.principal_std, **masks))
    with pytest.raises(ValueError, match=r"no eigenvalues.*got 37 rows and 23 keys. principal_std"):
        spectral_gap(p)


def test_rows_and_keys_of_different_tokens_have_no_spectrum() -> None:
    q, k = draw_pair()
    other = MASK.clone()
    other[1, 3] = False
    with pytest.raises(ValueError, match="37 rows and 37 keys with different masks"):
        spectral_gap(softmax_map(q, k, key_mask=MASK, query_mask=other))


@pytest.mark.parametrize("options", [o for o in OPTIONS if "mask" not in o])
def test_a_map_times_values_is_the_attention_of_the_package(options: str) -> None:
    q, k = draw_pair()
    v = normal(7, BATCH, KEY_HEADS, LENGTH, 3)
    for block_size in (None, 8):
        out = lln_attention(q, k, v, ALPHA, BETA, block_size=block_size, key_mask=MASK, **OPTIONS[options])
        p = lln_map(q, k, ALPHA, BETA, block_size, key_mask=MASK, **OPTIONS[options])
        product = p.dense() @ v.repeat_interleave(HEADS // KEY_HEADS, 1)
        assert_close(product, out * MASK[:, None, :, None], 1e-6)


def test_factors_are_factors() -> None:
    q, k = draw_pair()
    for p in (lln_map(q, k, 1.2, 0.8), kernel_map(q.relu() + 0.1, k.relu() + 0.1)):
        a, b = p.factors()
        assert_close(a @ b.transpose(-1, -2), p.dense(), 1e-14)
        # The rule: the nonzero eigenvalues of A B^T are those of B^T A, the first of them 1.
        small = torch.linalg.eigvals(b.transpose(-1, -2) @ a).abs().sort(-1, descending=True).values
        large = torch.linalg.eigvals(p.dense()).abs().sort(-1, descending=True).values[..., :DIM]
        assert_close(small, large, 1e-10)
        assert_close(small[..., 0], torch.ones(BATCH, HEADS, dtype=torch.float64), 1e-12)
    for p in (softmax_map(q, k), lln_map(q, k, 1.0, 1.0, is_causal=True)):
        with pytest.raises(ValueError, match="only bidirectional LLN and kernel maps"):
            p.factors()


def test_what_is_in_no_row_is_nan_and_one_token_has_gap_one() -> None:
    q, k = draw_pair()
    mask = MASK.clone()
    mask[0], mask[1] = False, torch.arange(LENGTH) == 4
    for p in (
        softmax_map(q, k, key_mask=mask), softmax_map(q, k, key_mask=mask, is_causal=True),
        lln_map(q, k, 1.0, 1.0, key_mask=mask), lln_map(q, k, 1.0, 1.0, 8, key_mask=mask),
    ):  # fmt: skip
        for found, alone in ((entropy(p), 0.0), (spectral_gap(p), 1.0), (principal_std(p), 0.0), (variance(p), 0.0)):
            assert found[0].isnan().all()
            assert_close(found[1], torch.full((HEADS,), alone, dtype=torch.float64), 1e-9)
        assert log_moments(p).mean[0].isnan().all()


def test_large_exponents_lose_nothing() -> None:
    q, k = (300.0 * t for t in draw_pair())
    cases: list[dict[str, Any]] = [{}, {"is_causal": True}]
    for options in cases:
        p, dense = lln_map(q, k, 1.0, 1.0, **options), lln_matrix(q, k, 1.0, 1.0, **options)
        assert torch.isfinite(log_moments(p).variance).all()
        assert_close(entropy(p), measure_each(dense, Matrix.entropy, **options), 1e-9)
        assert (
            dense.log().isinf() & (torch.ones(LENGTH, LENGTH).tril() > 0)
        ).any()  # a plain logarithm would lose some


def test_high_temperatures_keep_their_digits() -> None:
    """To first order P is 1/M + alpha beta (Cov over channels of q and k) / M, and everything else is rounding."""
    q, k = normal(0, 1, 1, 300, 12), normal(1, 1, 1, 300, 12)
    tiny = 1e-6
    p = lln_map(q, k, tiny, tiny)
    q, k = (t[0, 0] - t[0, 0].mean(-1, keepdim=True) for t in (q, k))
    first_order = tiny**2 * (q - q.mean(0)) @ (k - k.mean(0)).T / (12 * 300)
    assert principal_std(p).item() == pytest.approx(torch.linalg.svdvals(first_order)[0].item(), rel=1e-4)
    assert 1 - spectral_gap(p).item() == pytest.approx(torch.linalg.eigvals(first_order).abs().max().item(), abs=1e-15)


def test_a_later_key_does_not_change_an_earlier_row() -> None:
    q, k = draw_pair()
    k[:, :, 30] *= 1e3
    p = lln_map(q, k, 1.0, 1.0, is_causal=True)
    assert_close(
        p.dense()[:, :, :30, :30], lln_map(q[:, :, :30], k[:, :, :30], 1.0, 1.0, is_causal=True).dense(), 1e-13
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_measured_in_float64(dtype: torch.dtype) -> None:
    q, k = (t.to(dtype) for t in draw_pair())
    q.requires_grad_()
    found = entropy(softmax_map(q, k))
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert_close(found, entropy(softmax_map(q.double(), k.double())), 1e-14)


def test_at_512_tokens_dense_and_implicit_agree() -> None:
    q, k = normal(0, 1, 1, 512, 64), normal(1, 1, 1, 512, 64)
    for p, dense in (
        (softmax_map(q, k), softmax_matrix(q, k)),
        (lln_map(q, k, 2.1355, 2.1355), lln_matrix(q, k, 2.1355, 2.1355)),
        (lln_map(q, k, 2.1355, 2.1355, 64), lln_matrix(q, k, 2.1355, 2.1355, 64)),
    ):
        assert_close(entropy(p), measure_each(dense, Matrix.entropy), 1e-12)
        assert (spectral_gap(p) - measure_each(dense, Matrix.gap)).abs().max() < 1e-8
        assert_close(principal_std(p), measure_each(dense, Matrix.principal_std), 1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_temperature_of_softmax_is_eq_5(is_causal: bool) -> None:
    q, k = draw_pair()
    q += 3.0  # means that a difference of moments would trip over
    expected = score_variance(q, k, is_causal=is_causal).rsqrt()
    assert_close(temperature(q, k, is_causal=is_causal), expected)
    assert_close(temperature(softmax_map(q, k, is_causal=is_causal)), expected)
    k_all = k.repeat_interleave(2, 1)
    assert_close(
        temperature(4 * q, k_all, scale=0.1, is_causal=is_causal), score_variance(4 * q, k, 0.1, is_causal).rsqrt()
    )
    second_q, second_k = (t.transpose(-1, -2) @ t / LENGTH for t in (q, k_all))
    by_traces = (second_q * second_k).sum((-1, -2)) / DIM - (q.mean(2) * k_all.mean(2)).sum(-1).square() / DIM
    if not is_causal:
        assert_close(by_traces.rsqrt(), expected, 1e-9)


def test_the_temperature_of_lln_is_measured_not_eq_11() -> None:
    q, k = draw_pair()
    measured = measure_each(lln_matrix(q, k, 0.3, 0.4), lambda m: m.logs().var(ddof=1)).rsqrt()
    assert_close(temperature(q, k, 0.3, 0.4), measured)
    assert_close(temperature(lln_map(q, k, 0.3, 0.4)), measured)
    s2 = 0.09 * q.var((2, 3)) + 0.16 * k.var((2, 3)).repeat_interleave(2, 1)
    assert (PAPER_A * s2 + PAPER_B < 0).all()  # where eq. (11) has no real value


def test_predictions_are_those_of_the_propositions() -> None:
    q, k = draw_pair()
    softmax = log_moments(softmax_map(q, k, key_mask=MASK))
    assert softmax.predicted_variance is not None
    assert softmax.predicted_mean is not None
    for sample, n in enumerate(MASK.sum(1).tolist()):
        spread = score_variance(q[:, :, MASK[sample]], k[:, :, MASK[sample]])[sample]
        assert_close(softmax.predicted_variance[sample], spread)
        assert_close(softmax.predicted_mean[sample], -math.log(n) - spread / 2)
    lln = log_moments(lln_map(q, k, 1.3, 0.9))
    s2 = 1.69 * q.var((2, 3)) + 0.81 * k.var((2, 3)).repeat_interleave(2, 1)
    assert lln.predicted_variance is not None
    assert_close(lln.predicted_variance, PAPER_A * s2 + PAPER_B)
    assert lln.predicted_mean is None
    assert log_moments(kernel_map(q.exp(), k.exp())).predicted_variance is None


def test_log_moments_of_sampled_rows_are_near_those_of_all() -> None:
    q, k = normal(0, 1, 2, 400, 16), normal(1, 1, 2, 400, 16)
    mask = torch.arange(400)[None] < 350
    p = lln_map(q, k, 1.5, 1.5, key_mask=mask)
    every, some = log_moments(p), log_moments(p, rows=100)
    assert (some.mean - every.mean).abs().max() < 0.1
    assert (some.variance / every.variance - 1).abs().max() < 0.2
    assert not torch.equal(some.mean, every.mean)
    assert_close(log_moments(p, rows=350).variance, every.variance)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_measures_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lln.instruments.spectrum.DENSE", 8)
    for name, options in CASES:
        moved: dict[str, Any] = {
            key: o.to(device) if isinstance(o, Tensor) else o for key, o in OPTIONS[options].items()
        }
        here, _ = make_map(name, OPTIONS[options])
        q, k = draw_pair()
        if name == "softmax":
            there = softmax_map(q.to(device), k.to(device), **moved)
        elif name == "LLN+Diag":
            there = lln_map(q.to(device), k.to(device), 1.3, 0.9, 8, **moved)
        elif name == "kernel":
            there = kernel_map(q.square().to(device), k.square().to(device), **moved)
        else:
            continue
        for instrument in (entropy, variance, principal_std, spectral_gap):
            found = instrument(there)
            assert found.device.type == device
            assert_close(found.cpu(), instrument(here), 1e-9)
        assert_close(log_moments(there).variance.cpu(), log_moments(here).variance, 1e-10)
        assert_close(lognormal_fit(there).distance.cpu(), lognormal_fit(here).distance, 1e-9)
