"""alpha and beta: the paper's numbers, what matching is for (equal variance, equal entropy), and who may be seen.

Statistical facts are means over seeds; tolerances are 5 seed standard deviations over sqrt(seeds) plus 4 standard
errors of the stored mean.
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import normal
from helpers.untyped import lln_attention, match_moments
from lln import match_data
from lln.kernels.common import PAPER_A, PAPER_B
from lln.lab.calibration import CurvePlan, invert_entropy, lln_entropy, measure, softmax_entropy, within_row_variance
from lln.lab.core.seeds import number_key
from lln.matching.curves import interpolate, pchip, read_curves
from lln.matching.moments import moments, sigma

CPU = torch.device("cpu")
N, D, SEEDS = 1024, 64, 8
wide_normal = functools.partial(normal, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sigma_q", "sigma_k", "alpha", "beta"),
    [
        (0.5, 0.5, 2.3704832120295825, 2.3704832120295825),
        (1.0, 1.0, 2.135477234978229, 2.135477234978229),
        (2.0, 2.0, 3.709707155720588, 3.709707155720588),
        (0.5, 2.0, 4.270954469956458, 1.0677386174891146),
    ],
)
def test_the_paper_matching_is_equation_10(sigma_q: float, sigma_k: float, alpha: float, beta: float) -> None:
    assert match_moments(sigma_q, sigma_k, D) == pytest.approx((alpha, beta), abs=1e-9)
    as_tensors = match_moments(torch.tensor([sigma_q], dtype=torch.float64), sigma_k, D)
    assert [t.item() for t in as_tensors] == pytest.approx((alpha, beta), abs=1e-9)


def test_the_target_is_the_variance_of_the_softmax_scores() -> None:
    """A scale of c / sqrt(d) is as good as queries c times as spread."""
    for matching in ("paper", "variance", "entropy"):
        scaled = match_moments(1.0, 1.0, D, matching, scale=1.5 / math.sqrt(D))
        spread = match_moments(1.5, 1.0, D, matching)
        assert scaled[0] == pytest.approx(1.5 * spread[0], rel=1e-12)
        assert scaled[1] == pytest.approx(spread[1], rel=1e-12)


def maps(kind: str, seed: int, alpha: float = 1.0) -> Tensor:
    """P [N, N] of Gaussian q, k of unit variance, in float64."""
    q, k = wide_normal(2 * seed, N, D), wide_normal(2 * seed + 1, N, D)
    if kind == "softmax":
        return (q @ k.T / math.sqrt(D)).softmax(-1)
    eye = torch.eye(N, dtype=torch.float64)
    return lln_attention(q[None, None], k[None, None], eye[None, None], alpha, alpha)[0, 0]


@pytest.mark.parametrize(
    ("kind", "alpha", "facts"),
    [
        ("softmax", 0.0, {"H": (9.280728, 0.005531), "var": (1.008313, 0.007704), "mean": (-7.431082, 0.003708)}),
        (
            "lln",
            2.135477234978229,
            {"H": (8.80178, 0.08379), "var": (0.870591, 0.019446), "mean": (-7.521571, 0.024246)},
        ),
        ("lln", 1.0, {"H": (9.956772, 0.001274), "var": (0.053861, 0.001297), "mean": (-6.959799, 0.000746)}),
    ],
)
def test_gaussian_attention_has_the_known_entropy_and_moments(kind: str, alpha: float, facts: dict) -> None:
    measured: dict[str, list[float]] = {name: [] for name in facts}
    for seed in range(SEEDS):
        p = maps(kind, seed, alpha)
        measured["H"].append((torch.special.entr(p).sum(-1).mean() / math.log(2)).item())
        measured["var"].append(p.log().var().item())
        measured["mean"].append(p.log().mean().item())
    for name, (mean, deviation) in facts.items():
        found = sum(measured[name]) / SEEDS
        assert abs(found - mean) < 5 * deviation / math.sqrt(SEEDS) + 4 * deviation / math.sqrt(20), (name, found)


@pytest.mark.parametrize(
    ("dim", "s2", "value"), [(32, 2, 0.092850), (32, 10, 1.230891), (64, 2, 0.053631), (64, 10, 0.960404)]
)
def test_the_shipped_variance_curve_has_the_known_values(dim: int, s2: float, value: float) -> None:
    curve = pchip(
        torch.tensor(read_curves()["s2"]).log(), torch.tensor(read_curves()["variance"][str(dim)]["value"]).log()
    )
    assert interpolate(torch.tensor([math.log(s2)]), *curve).exp().item() == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("dim", [8, 64, 256])
def test_the_shipped_curves_are_what_calibrate_measures(dim: int) -> None:
    """A few points again, with other seeds, within five standard errors of the difference."""
    runs = [
        torch.stack([
            within_row_variance(wide_normal(900 + run, 256, dim), wide_normal(950 + run, 2048, dim), s2)
            for s2 in read_curves()["s2"][8:40:8]
        ])
        for run in range(10)
    ]  # fmt: skip
    values = torch.stack(runs)
    curve = read_curves()["variance"][str(dim)]
    error = (values.std(0).square() / len(runs) + torch.tensor(curve["se"][8:40:8]).square()).sqrt()
    assert ((values.mean(0) - torch.tensor(curve["value"][8:40:8])).abs() < 5 * error).all()
    plan = CurvePlan(entropy_seeds=24, t=tuple(read_curves()["t"][6:30:6]))
    again, shipped = (
        invert_entropy(plan, dim, 256, 77, CPU, lambda text: None),
        read_curves()["entropy"][str(dim)]["256"],
    )
    for i, place in enumerate(range(6, 30, 6)):
        allowed = 5 * math.hypot(again["se"][i], shipped["se"][place])
        assert abs(again["s2"][i] - shipped["s2"][place]) < allowed


def test_the_seeds_of_the_shipped_curves_do_not_depend_on_python() -> None:
    """They were hashes of tuples, which CPython is free to change: the first draws of the curves, and a few more."""
    known = {
        (0, 8, 0, 0): 3311492739671872531,
        (0, 8, 0, 0, 1): 8087904071707488575,
        (0, 256, 16384, 511, 1): 2568607685863919285,
    }
    assert {key: number_key(*key) for key in known} == known
    assert len({number_key(seed, dim, run) for seed in range(5) for dim in range(5) for run in range(40)}) == 1000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the curves were drawn on a GPU")
@pytest.mark.parametrize(("dim", "length"), [(8, 8), (64, 256)])
def test_a_gpu_draws_the_shipped_curves_again(dim: int, length: int) -> None:
    plan, device = CurvePlan(head_dims=(dim,), lengths=(length,)), torch.device("cuda")
    again, shipped = measure(plan, 0, device, lambda text: None), read_curves()
    for key in ("value", "se"):
        assert again["variance"][dim][key] == pytest.approx(shipped["variance"][str(dim)][key], rel=1e-9)
    for key in ("s2", "se"):
        assert again["entropy"][dim][length][key] == pytest.approx(
            shipped["entropy"][str(dim)][str(length)][key], rel=1e-6
        )


def test_the_shipped_curves_say_where_they_come_from() -> None:
    assert read_curves()["provenance"]["command"].startswith("lln calibrate")
    assert read_curves()["provenance"]["commit"]
    assert read_curves()["settings"]["variance_seeds"] >= 20
    assert (read_curves()["head_dims"][0], read_curves()["head_dims"][-1]) == (8, 256)
    for dim in read_curves()["head_dims"]:
        curve = read_curves()["variance"][str(dim)]
        assert all(se < 0.01 * value for se, value in zip(curve["se"], curve["value"], strict=True))


@pytest.mark.parametrize("dim", [16, 20, 32, 64, 100, 128])
@pytest.mark.parametrize("spread", [0.25, 0.5, 1.0, 1.5, 2.0])
def test_after_variance_matching_the_variance_is_that_of_softmax(dim: int, spread: float) -> None:
    alpha, _ = match_moments(spread, spread, dim, "variance")
    s2 = 2 * (alpha * spread) ** 2
    seeds = range(12)
    found = [within_row_variance(wide_normal(s, 192, dim), wide_normal(s + 50, 2048, dim), s2) for s in seeds]
    assert torch.stack(found).mean().item() == pytest.approx(spread**4, rel=0.03)


@pytest.mark.parametrize("dim", [16, 32, 64, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("length", [256, 1024, pytest.param(4096, marks=pytest.mark.long)])
def test_after_entropy_matching_the_entropy_is_that_of_softmax(dim: int, length: int) -> None:
    for spread in (0.25, 0.5, 1.0, 1.5, 2.0):
        alpha, _ = match_moments(spread, spread, dim, "entropy", length=length)
        differences = []
        for seed in range(24 if spread < 1.2 else 200):
            z_q, z_k = (wide_normal(10 * seed + i, rows, dim) for i, rows in ((0, 8), (1, length)))
            lln = lln_entropy(z_q, z_k, 2 * (alpha * spread) ** 2)
            differences.append((lln - softmax_entropy(z_q, z_k, spread**4)).item())
        found = torch.tensor(differences)
        # The bar is .1 bit; what the finite number of seeds leaves open is added, twice.
        assert abs(found.mean().item()) < 0.1 + 2 * found.std().item() / math.sqrt(len(found)), (spread, found.mean())


def test_matching_does_not_depend_on_the_split_of_a_factor_between_q_and_k() -> None:
    for matching in ("paper", "variance", "entropy"):
        first, second = match_moments(0.7, 1.3, D, matching), match_moments(0.7 * 5, 1.3 / 5, D, matching)
        assert second == pytest.approx((first[0] / 5, first[1] * 5), rel=1e-12)


def test_curves_go_on_smoothly_beyond_their_ends() -> None:
    sigmas = torch.tensor([1e-3, 1e-2, 0.1, 0.2, 4.0, 8.0, 50.0], dtype=torch.float64)
    for matching in ("variance", "entropy"):
        s2 = 2 * (match_moments(sigmas, sigmas, 24, matching)[0] * sigmas).square()
        assert s2.isfinite().all()
        assert (s2.diff() > 0).all()


def test_wrong_matching_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="matching must be 'paper', 'variance' or 'entropy'; got 'mean'"):
        match_moments(1.0, 1.0, D, "mean")
    with pytest.raises(ValueError, match=r"sigma_q must be positive and finite; got 0\.0"):
        match_moments(0.0, 1.0, D)
    with pytest.raises(ValueError, match=r"sigma_q must be standard deviations, like q\.std\(\)"):
        match_moments(torch.randn(2, 3, 5, D), torch.randn(2, 3, 5, D), D)  # queries and keys themselves
    with pytest.raises(ValueError, match=r"scale must be positive and finite; got 0\.0"):
        match_moments(1.0, 1.0, D, scale=0.0)
    with pytest.raises(ValueError, match="length must be at least 1; got 0"):
        match_moments(1.0, 1.0, D, "entropy", length=0)
    with pytest.raises(ValueError, match=r"head_dim must be a positive int; got 64\.5"):
        match_moments(1.0, 1.0, 64.5)
    with pytest.raises(ValueError, match="rows must be a positive int; got 0"):
        match_data(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4), rows=0)
    with pytest.raises(ValueError, match="the curves cover head_dim 8 to 256; got 300"):
        match_moments(1.0, 1.0, 300, "variance")
    with pytest.raises(ValueError, match="target must be 'entropy' or 'variance'; got 'gap'"):
        match_data(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4), target="gap")  # type: ignore[arg-type]


def test_a_constant_or_single_element_input_gives_a_finite_sigma() -> None:
    for t in (torch.ones(1, 1, 5, 4), torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 0, 4)):
        found = sigma(*moments(t, 1, None, None))
        assert (found > 0).all()
        assert all(t.isfinite().all() for t in match_moments(found, found, 4))


def test_sigma_is_the_unbiased_standard_deviation_of_what_is_valid() -> None:
    torch.manual_seed(0)
    t = torch.randn(2, 4, 9, 3) + 100.0
    mask = torch.rand(2, 9) > 0.4
    found = sigma(*moments(t, 2, mask, None))
    for sample in range(2):
        for head in range(2):
            valid = t[sample, 2 * head : 2 * head + 2, mask[sample]].double()
            assert found[sample, head].item() == pytest.approx(valid.std().item(), rel=1e-5)
    packed = sigma(*moments(t[:1], 4, None, torch.tensor([0, 3, 3, 9])))
    assert packed[2, 1].item() == pytest.approx(t[0, 1, 3:].double().std().item(), rel=1e-5)


def entropies(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor) -> tuple[float, float]:
    eye = torch.eye(k.shape[2], dtype=q.dtype)[None, None]
    lln = lln_attention(q, k, eye, alpha.to(q.dtype), beta.to(q.dtype))
    softmax = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return tuple((torch.special.entr(p).sum(-1).mean() / math.log(2)).item() for p in (lln, softmax))


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "outlier channel", "means"])
def test_data_matching_gives_the_entropy_of_softmax_on_real_inputs(kind: str) -> None:
    q, k = wide_normal(1, 1, 1, 512, 32), wide_normal(2, 1, 1, 512, 32)
    if kind == "laplace":
        q, k = (t.sign() * t.abs().square() for t in (q, k))
    if kind == "outlier channel":
        q, k = (t * torch.tensor([6.0] + [1.0] * 31, dtype=t.dtype) for t in (q, k))
    if kind == "means":
        k = k + 2 * wide_normal(3, 32)
    lln, softmax = entropies(q, k, *match_data(q, k))
    assert abs(lln - softmax) < 0.15
    paper, _ = entropies(q, k, *match_moments(q.std().view(1, 1), k.std().view(1, 1), 32))
    assert abs(lln - softmax) < abs(paper - softmax)


def test_data_matching_for_variance_meets_the_exact_score_variance() -> None:
    q, k = wide_normal(1, 1, 4, 300, 16), wide_normal(2, 1, 2, 300, 16) * torch.linspace(0.2, 2, 16)
    alpha, beta = match_data(q, k, target="variance", rows=300)
    assert (alpha.shape, beta.shape) == ((1, 4), (1, 2))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4
    log_n = (
        (alpha[..., None, None] * q).exp() @ (beta[..., None, None] * k).exp().repeat_interleave(2, 1).transpose(-1, -2)
    ).log()
    for group in (slice(0, 2), slice(2, 4)):
        wanted, found = scores[:, group].var(-1).mean(), log_n[:, group].var(-1).mean()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_data_matching_does_not_see_padding() -> None:
    q, k = wide_normal(1, 1, 2, 60, 8), wide_normal(2, 1, 2, 60, 8)
    mask = torch.ones(1, 80, dtype=torch.bool)
    mask[:, 60:] = False
    padded = [torch.cat([t, 100 * wide_normal(9, 1, 2, 20, 8)], 2) for t in (q, k)]
    for options in ({}, {"target": "variance"}, {"is_causal": True}):
        whole = match_data(q, k, rows=1000, **options)
        for got, wanted in zip(match_data(*padded, key_mask=mask, rows=1000, **options), whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)


def test_data_matching_does_not_see_batch_mates() -> None:
    q, k = wide_normal(1, 3, 2, 60, 8), wide_normal(2, 3, 2, 60, 8)
    whole = match_data(q, k, rows=20)
    for sample in range(3):
        alone = match_data(q[sample : sample + 1], k[sample : sample + 1], rows=20)
        for got, wanted in zip(alone, whole, strict=True):
            assert torch.equal(got[0], wanted[sample])


def test_data_matching_follows_causality_and_scale() -> None:
    q, k = wide_normal(1, 1, 1, 300, 16), wide_normal(2, 1, 1, 300, 16)
    alpha, beta = match_data(q, k, is_causal=True, scale=0.4, rows=300)
    eye, later = torch.eye(300, dtype=q.dtype)[None, None], torch.ones(300, 300, dtype=torch.bool).triu(1)
    lln = lln_attention(q, k, eye, alpha, beta, is_causal=True)
    softmax = (0.4 * q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf).softmax(-1)
    found, wanted = (torch.special.entr(p).sum(-1).mean().item() for p in (lln, softmax))
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("target", ["entropy", "variance"])
def test_data_matching_without_data_falls_back_to_equation_10(target: Any) -> None:
    for q in (torch.randn(1, 1, 1, 4), torch.ones(1, 1, 5, 4), torch.zeros(1, 1, 0, 4)):
        spread = sigma(*moments(q, 1, None, None))
        for got, wanted in zip(match_data(q, q, target=target), match_moments(spread, spread, 4), strict=True):
            torch.testing.assert_close(got, wanted)


def test_the_line_of_the_paper_never_lets_s2_go_below_its_root() -> None:
    alpha, _ = match_moments(1e-3, 1e-3, D)
    assert 2 * (alpha * 1e-3) ** 2 == pytest.approx(-PAPER_B / PAPER_A, rel=1e-6)
