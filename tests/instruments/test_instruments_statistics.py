"""Estimates cover the truth, fits agree with scipy, published facts come out, wrong input is named."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.instruments_reference import Matrix, softmax_matrix
from helpers.tensors import normal
from helpers.untyped import match_moments
from lln.instruments import (
    AttentionMap,
    dense_map,
    entropy,
    gaussian_fit,
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
from lln.instruments.fits import null_distances
from lln.instruments.spectrum import largest_eigenvalue
from lln.lab.core.timing import peak_memory


def pair(seed: int, length: int = 1024, dim: int = 64, sigma: float = 1.0) -> tuple[Tensor, Tensor]:
    return sigma * normal(2 * seed, 1, 1, length, dim), sigma * normal(2 * seed + 1, 1, 1, length, dim)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "quadratic": torch.square,
    "elu1": lambda t: torch.nn.functional.elu(t) + 1,
}


def make(name: str, q: Tensor, k: Tensor) -> AttentionMap:
    if name == "softmax":
        return softmax_map(q, k)
    if name in FEATURES:
        return kernel_map(FEATURES[name](q), FEATURES[name](k))
    alpha, beta = (1.0, 1.0) if name == "lln_unmatched" else match_moments(1.0, 1.0, 64)
    return lln_map(q, k, alpha, beta)


# Independent Gaussian q and k of unit variance, N = 1024, d = 64: mean and standard deviation of a single draw, from
# twenty draws of another generator.
FACTS = {
    "softmax": {
        "H": (9.280728, 0.005531), "gap": (0.956796, 0.001558), "var": (1.008313, 0.007704),
        "within": (1.000845, 0.007488), "mean": (-7.431082, 0.003708), "sv1": (0.176356, 0.00497),
    },
    "lln_paper": {
        "H": (8.80178, 0.08379), "gap": (0.909673, 0.015182), "var": (0.870591, 0.019446),
        "within": (0.832263, 0.016696), "mean": (-7.521571, 0.024246), "sv1": (1.402296, 0.548847),
    },
    "lln_unmatched": {
        "H": (9.956772, 0.001274), "gap": (0.993327, 0.000471), "var": (0.053861, 0.001297),
        "within": (0.053858, 0.001297), "mean": (-6.959799, 0.000746), "sv1": (0.041121, 0.005129),
    },
    "relu": {"H": (9.923123, 0.001146), "gap": (0.991148, 0.000536)},
    "quadratic": {"H": (9.937721, 0.000802), "gap": (0.991952, 0.00051)},
    "elu1": {"H": (9.992346, 0.000202), "gap": (0.99811, 6.8e-05)},
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_the_published_facts_come_out(name: str) -> None:
    seeds, found = 2, dict.fromkeys(FACTS[name], 0.0)
    for seed in range(seeds):
        p = make(name, *pair(seed))
        moments = log_moments(p)
        measured: dict[str, Any] = {
            "H": entropy(p), "gap": spectral_gap(p), "var": moments.variance, "within": moments.within,
            "mean": moments.mean, "sv1": principal_std(p) if "sv1" in FACTS[name] else None,
        }  # fmt: skip
        for fact in found:
            found[fact] += measured[fact].item() / seeds
    for fact, (mean, spread) in FACTS[name].items():
        tolerance = 5 * spread / math.sqrt(seeds) + 4 * spread / math.sqrt(20)
        assert abs(found[fact] - mean) < tolerance, (fact, found[fact], mean, tolerance)


@pytest.mark.parametrize("name", ["relu", "quadratic"])
def test_homogeneous_kernels_do_not_know_the_temperature(name: str) -> None:
    q, k = pair(0, 256)
    (h1, g1), (h2, g2) = ((entropy(p), spectral_gap(p)) for p in (make(name, q, k), make(name, 7.3 * q, 0.2 * k)))
    assert (h1 - h2).abs().max() < 1e-9
    assert (g1 - g2).abs().max() < 1e-9


def test_theorem_3_3_has_a_counterexample() -> None:
    """|lambda_2| = 0 while the rows spread by 1/sqrt(3) along their first principal component."""
    third = 1 / 3
    p = dense_map(
        torch.tensor([[0.5, 0.5, 0], [0.5 * third, 0.5 * third, 2 * third], [third] * 3], dtype=torch.float64)
    )
    assert spectral_gap(p).item() == pytest.approx(1.0, abs=1e-6)
    assert principal_std(p).item() == pytest.approx(1 / math.sqrt(3), abs=1e-12)


@given(st.floats(0.05, 20), st.floats(1.05, 3), st.integers(0, 2**16), st.booleans())
@settings(max_examples=60, deadline=None)
def test_theorems_3_2_and_3_4_hold(tau: float, factor: float, seed: int, is_causal: bool) -> None:
    """With the temperature of softmax attention its entropy rises and its variance falls, whatever q and k are."""
    q, k = normal(seed, 1, 1, 19, 4).exp() - 1, normal(seed + 1, 1, 1, 19, 4)
    cold, warm = (softmax_map(q, k, scale=1 / t, is_causal=is_causal) for t in (tau, tau * factor))
    assert (entropy(warm) > entropy(cold)).all()
    assert (variance(warm) < variance(cold)).all()
    assert torch.allclose(temperature(warm), factor * temperature(cold))


@given(st.integers(2, 12), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_what_is_left_of_theorem_3_3_holds(size: int, seed: int) -> None:
    """|lambda_2| <= sigma_1 for every stochastic matrix."""
    p = dense_map((3 * normal(seed, 1, 1, size, size)).softmax(-1))
    assert (1 - spectral_gap(p) <= principal_std(p) + 1e-9).all()


SAMPLED: dict[str, Callable[[Tensor, Tensor], AttentionMap]] = {
    "LLN": lambda q, k: lln_map(q, k, 2.0, 2.0),
    "kernel": lambda q, k: kernel_map(q.square(), k.square()),
    "LLN, masked": lambda q, k: lln_map(q, k, 2.0, 2.0, key_mask=torch.arange(q.shape[2])[None] % 5 > 0),
    "softmax": softmax_map,
    "softmax, masked": lambda q, k: softmax_map(q, k, key_mask=torch.arange(q.shape[2])[None] > 40),
    "LLN, causal": lambda q, k: lln_map(q, k, 2.0, 2.0, is_causal=True),
    "LLN+Diag": lambda q, k: lln_map(q, k, 2.0, 2.0, 16),
    "signed features": lambda q, k: kernel_map(
        torch.cat([q.exp(), q.sin()], -1), torch.cat([k.exp(), 0.01 * k.sin()], -1)
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_intervals_cover_the_exact_entropy_as_often_as_they_say(name: str) -> None:
    q, k = pair(0, 240, 12, 1.2)
    p = SAMPLED[name](q, k)
    exact, tries = entropy(p), 200
    inside = apart = 0.0
    for seed in range(tries):
        value, low, high = entropy(p, samples=100, confidence=0.8, seed=seed)
        assert low < value < high
        inside += ((low <= exact) & (exact <= high)).item()
        apart += (value - exact).item() / tries
        typical = (high - low).item() / 2.56
    assert 0.8 * tries - 25 < inside < 0.8 * tries + 25  # more than four standard deviations either side
    assert abs(apart) < 5 * typical / math.sqrt(tries)  # unbiased


@pytest.mark.parametrize("name", SAMPLED)
def test_an_interval_is_as_narrow_as_asked(name: str) -> None:
    p = SAMPLED[name](*pair(1, 240, 12))
    value, low, high = entropy(p, width=0.05)
    assert (high - low <= 0.05).all()
    assert (value - entropy(p)).abs().max() < 0.1
    wide = entropy(p, width=1.0, confidence=0.5)
    assert (wide.high - wide.low).max() > 0 or name not in ("LLN", "kernel")


def test_all_rows_leave_no_error() -> None:
    q, k = pair(0, 60, 8)
    p = softmax_map(q, k, key_mask=torch.arange(60)[None] < 50)
    value, low, high = entropy(p, samples=50)
    assert torch.allclose(value, entropy(p), atol=1e-14)
    assert torch.equal(low, high)


def test_the_log_normal_fit_is_that_of_scipy() -> None:
    q, k = normal(0, 2, 2, 70, 9), normal(1, 2, 1, 70, 9)
    mask = torch.arange(70)[None].expand(2, 70) < torch.tensor([[70], [51]])
    fit = lognormal_fit(softmax_map(q, k, key_mask=mask))
    dense = softmax_matrix(q, k, key_mask=mask)
    for sample in range(2):
        for head in range(2):
            logs = Matrix(dense, sample, head, key_mask=mask).logs()
            expected = scipy.stats.kstest(logs, scipy.stats.norm(logs.mean(), logs.std(ddof=1)).cdf).statistic
            assert fit.distance[sample, head].item() == pytest.approx(expected, rel=1e-10)
            assert fit.skewness[sample, head].item() == pytest.approx(scipy.stats.skew(logs), rel=1e-10)
            (_, _), (_, _, r) = scipy.stats.probplot(logs)
            assert fit.qq_r2[sample, head].item() == pytest.approx(r**2, abs=1e-4)  # other plotting positions


def test_a_sample_of_entries_fits_like_all_of_them() -> None:
    cases: list[dict[str, Any]] = [{}, {"is_causal": True}]
    for options in cases:
        p = softmax_map(*pair(0, 700, 16), **options)
        every, some = lognormal_fit(p), lognormal_fit(p, entries=50_000)
        assert not torch.equal(every.distance, some.distance)
        assert (every.distance - some.distance).abs().max() < 0.01
        assert (every.skewness - some.skewness).abs().max() < 0.1


def test_p_values_are_uniform_where_p_is_log_normal_and_small_where_not() -> None:
    values = [lognormal_fit(softmax_map(*pair(seed, 256, 64, 0.5))).p_value.item() for seed in range(60)]
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    assert lognormal_fit(lln_map(*pair(0, 512), 4.0, 4.0)).p_value.item() < 0.01


def test_the_null_distribution_is_that_of_lilliefors() -> None:
    # The 5 % critical value for estimated mean and variance is .886 / sqrt(n), that for known ones 1.358 / sqrt(n).
    assert torch.quantile(null_distances(400), 0.95).item() == pytest.approx(0.886 / 20, rel=0.06)


def test_the_gaussian_fit_is_that_of_scipy() -> None:
    q, k = normal(0, 2, 2, 40, 6).exp(), 3 + 2 * normal(1, 2, 1, 40, 6)
    mask = torch.arange(40)[None].expand(2, 40) >= torch.tensor([[0], [11]])
    spoilt = torch.where(mask[:, None, :, None], q, torch.nan)
    query, key = gaussian_fit(spoilt, k, key_mask=mask)
    assert key.mean.shape == (2, 1)
    for sample in range(2):
        for fit, t, head in ((query, q, 0), (query, q, 1), (key, k, 0)):
            x = t[sample, head, mask[sample]].flatten().numpy()
            normal_cdf = scipy.stats.norm(x.mean(), x.std(ddof=1)).cdf
            wanted = {
                "mean": x.mean(), "std": x.std(ddof=1), "skewness": scipy.stats.skew(x),
                "distance": scipy.stats.kstest(x, normal_cdf).statistic,
                "anderson_darling": anderson_darling(x),
            }  # fmt: skip
            for name, value in wanted.items():
                assert getattr(fit, name)[sample, head].item() == pytest.approx(value, rel=1e-9)
    assert (key.qq_r2 > 0.98).all()
    assert (query.qq_r2 < 0.9).all()


def anderson_darling(x: Any) -> float:
    z = sorted((x - x.mean()) / x.std(ddof=1))
    terms = [
        (2 * i + 1) * (scipy.stats.norm.logcdf(z[i]) + scipy.stats.norm.logsf(z[len(z) - 1 - i])) for i in range(len(z))
    ]
    return -len(z) - sum(terms) / len(z)


def test_numbers_without_spread_fit_nothing() -> None:
    flat = torch.ones(1, 1, 8, 4)
    assert all(t.isnan().all() for t in gaussian_fit(flat, flat).query[1:])
    assert lognormal_fit(softmax_map(flat, flat)).distance.isnan().all()


def test_an_iteration_that_cannot_settle_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lln.instruments.spectrum.BASIS", (6, 6))
    monkeypatch.setattr("lln.instruments.spectrum.RESTARTS", 2)
    circle = torch.linalg.qr(normal(0, 60, 60))[0]  # all eigenvalues on one circle
    with pytest.raises(RuntimeError, match=r"did not settle: residual .*, wanted 1.0e-09; give .* a larger tolerance"):
        largest_eigenvalue(lambda x: circle @ x, normal(1, 60, 2), 1e-9)


def test_an_iteration_from_nothing_finds_nothing() -> None:
    assert largest_eigenvalue(lambda x: x, torch.zeros(9, 2, dtype=torch.float64), 1e-9) == 0.0


Q, K = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 5, 8)
MASK = torch.ones(2, 5, dtype=torch.bool)
# Without their types: what is wrong here a type checker would say.
ENTROPY: Any = entropy
FIT: Any = lognormal_fit
MAP: Any = softmax_map
TEMPERATURE: Any = temperature
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: MAP([1], K), TypeError, r"q must be a tensor; got \[1\]"),
    (lambda: softmax_map(Q, K[0]), ValueError, r"k must have 4 dimensions.*\[2, 5, 8\]"),
    (lambda: softmax_map(Q.long(), K), TypeError, "q must be float32, .*got a int64 tensor"),
    (lambda: softmax_map(Q, K[..., :3]), ValueError, "q and k must agree in batch and dim"),
    (lambda: softmax_map(Q[:, :3], K), ValueError, "the number of q heads must be a multiple of the number of k heads"),
    (lambda: softmax_map(Q, K, key_mask=MASK[:, :4]), ValueError, r"key_mask must have shape.*\[2, 5\]; got \[2, 4\]"),
    (lambda: softmax_map(Q, K, query_mask=MASK), ValueError, r"query_mask must have shape.*\[2, 6\]; got \[2, 5\]"),
    (lambda: softmax_map(Q, K, key_mask=MASK.float()), TypeError, "key_mask must be bool"),
    (lambda: softmax_map(Q, K, is_causal=True), ValueError, "is_causal needs q and k of equal length; got 6 and 5"),
    (lambda: MAP(Q, Q, is_causal=1), TypeError, "is_causal must be True or False"),
    (lambda: softmax_map(Q, K, scale=math.nan), ValueError, "scale must be finite; got nan"),
    (lambda: lln_map(Q, K, -1.0, 1.0), ValueError, "alpha must be positive; got -1.0"),
    (lambda: lln_map(Q, K, 1.0, torch.ones(4)), ValueError, "beta must be a number or a tensor of shape"),
    (lambda: lln_map(Q, K, 1.0, 1.0, 4), ValueError, "block_size must be None in cross attention"),
    (lambda: lln_map(Q, Q, 1.0, 1.0, 0), ValueError, "block_size must be a positive int"),
    (lambda: lln_map(Q, Q, 1.0, 1.0, mix=0.3), ValueError, "mix weighs LLN against the blocks and needs block_size"),
    (lambda: kernel_map(Q, K[..., :3]), ValueError, "fq and fk must agree"),
    (lambda: entropy(kernel_map(Q, K)), ValueError, "fq and fk must give every row a positive sum of weights.*got 0"),
    (lambda: dense_map(torch.eye(3)[0]), ValueError, r"p must be \[rows, keys\] or .*got shape \[3\]"),
    (lambda: dense_map(2 * torch.eye(3)), ValueError, "every row summing to 1.*off 1 by 1"),
    (lambda: dense_map(torch.eye(3) * math.nan), ValueError, "p must be an attention matrix"),
    (lambda: dense_map(torch.tensor([[1.5, -0.5]])), ValueError, "got a smallest entry of -0.5"),
    (lambda: dense_map(torch.eye(3), key_mask=MASK), ValueError, "key_mask must have shape .batch, keys of p"),
    (lambda: entropy(softmax_map(Q, K), samples=1), ValueError, "samples must be an int of at least 2; got 1"),
    (lambda: entropy(softmax_map(Q, K), width=0.0), ValueError, "width must be positive, in bits; got 0.0"),
    (lambda: ENTROPY(softmax_map(Q, K), samples=9, width=1.0), ValueError, "give samples or width, and not both"),
    (lambda: entropy(softmax_map(Q, K), samples=9, confidence=95), ValueError, "confidence must lie between 0 and 1"),
    (lambda: log_moments(softmax_map(Q, K), rows=0), ValueError, "rows must be a positive int; got 0"),
    (lambda: FIT(softmax_map(Q, K), entries=1.5), ValueError, "entries must be an int of at least 2"),
    (lambda: spectral_gap(softmax_map(Q, Q), tolerance=0), ValueError, "tolerance must be positive; got 0"),
    (lambda: TEMPERATURE(Q), TypeError, "temperature takes a map, or q and k; got q alone"),
    (lambda: temperature(Q, K, 1.0), TypeError, "alpha and beta go together"),
    (lambda: TEMPERATURE(softmax_map(Q, K), K), TypeError, "temperature of a map takes no k"),
    (lambda: gaussian_fit(Q, K, key_mask=MASK[:1]), ValueError, "key_mask must have shape"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG)
def test_wrong_input_is_named(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_negative_weights_have_no_entropy_but_a_spectrum() -> None:
    fq, fk = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.5], [1.0, -2.0]])
    p = kernel_map(fq[None, None], fk[None, None])
    with pytest.raises(ValueError, match="must give no negative weight"):
        entropy(p)
    dense = (fq @ fk.T) / (fq @ fk.T).sum(1, keepdim=True)
    beside_one = dense.diagonal().sum().item() - 1
    assert 1 - spectral_gap(p).item() == pytest.approx(abs(beside_one), rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4)])
def test_empty_inputs_have_empty_or_no_results(shape: tuple[int, ...]) -> None:
    t = torch.zeros(shape)
    for p in (softmax_map(t, t), lln_map(t, t, 1.0, 1.0), lln_map(t, t, 1.0, 1.0, 2), kernel_map(t, t)):
        for instrument in (entropy, variance, spectral_gap, principal_std):
            found = instrument(p)
            assert found.shape == shape[:2]
            assert found.isnan().all()
        assert log_moments(p).mean.shape == shape[:2]
        assert p.dense().shape == (*shape[:3], shape[2])
    assert gaussian_fit(t, t).query.distance.shape == shape[:2]


@pytest.mark.parametrize("name", ["softmax", "LLN", "LLN+Diag"])
def test_no_instrument_holds_the_matrix(name: str) -> None:
    length = 3584
    q, k = normal(0, 1, 1, length, 8), normal(1, 1, 1, length, 8)
    p = {"softmax": softmax_map(q, k), "LLN": lln_map(q, k, 1.5, 1.5), "LLN+Diag": lln_map(q, k, 1.5, 1.5, 32)}[name]
    works: list[Callable[[], Any]] = [lambda: entropy(p), lambda: spectral_gap(p, tolerance=1e-3)]
    for work in works:
        assert peak_memory(work, torch.device("cpu")) < 0.6 * 8 * length**2
