"""The section on moment matching says what its data says."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lln.checks import MATCHINGS
from lln.kernels.common import PAPER_A, PAPER_B
from lln.lab.core.page import Section, write_page
from lln.lab.core.palette import CURVES, MATCHED
from lln.lab.page import moments_section as moments
from lln.matching.curves import read_curves
from lln.matching.moments import match_moments

SMALL = moments.MomentsPlan(sigmas=(0.25, 1.0, 1.5), seeds=3, rows=16)
SIGMAS = (0.5, 1.0, 1.5)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return moments.measure(SMALL, seed=0)


@pytest.fixture(scope="module")
def made(measured: dict[str, Any]) -> Section:
    return moments.make_section(measured)


def set_gaps(measured: dict[str, Any], gaps: dict[str, list[float]]) -> dict[str, Any]:
    """The same result, but LLN is this many bits above softmax at the three sigmas, with hardly any spread."""

    def row(kind: str, sigma: float, alpha: float | None, gap: float) -> dict[str, Any]:
        return moments.summarize_entropy(
            kind, sigma, alpha, [8 - sigma + gap + 1e-4 * i * (gap != 0) for i in range(3)]
        )

    rows = [row("softmax", sigma, None, 0) for sigma in SIGMAS]
    rows += [row(kind, sigma, 2.5, gap) for kind in gaps for sigma, gap in zip(SIGMAS, gaps[kind], strict=True)]
    return measured | {"entropy": rows}


def test_the_worst_matching_is_named_first_with_its_sigma_and_direction(measured: dict[str, Any]) -> None:
    gaps: dict[str, list[float]]
    gaps = {"paper": [0, 0.25, -0.5], "variance": [0, 0.75, 0], "entropy": [0, -3, 2], "unmatched": [0.125, 0, 0]}
    said = moments.write_sentences(set_gaps(measured, gaps), [])[3]
    order = [said.index(f"{name} matching") for name in ("entropy", "variance", "paper", "no")]
    assert order == sorted(order)
    assert "3.00 ± 0.00 bits with entropy matching (at sigma = 1, too concentrated)" in said
    assert "0.75 ± 0.00 bits with variance matching (at sigma = 1, too even)" in said
    assert "0.50 ± 0.00 bits with paper matching (at sigma = 1.5, too concentrated)" in said


def test_a_gap_within_its_error_is_called_chance(measured: dict[str, Any]) -> None:
    result = set_gaps(measured, {kind: [0.0, 0.0, 0.0] for kind in moments.LLN_KINDS})
    next(row for row in result["entropy"] if row["series"] == "entropy")["bits"][:] = [7.4, 7.6, 7.56]
    assert "bits with entropy matching (at sigma = 0.5, no more than chance)" in moments.write_sentences(result, [])[3]


def test_over_concentration_at_small_sigma_is_claimed_only_where_it_is(measured: dict[str, Any]) -> None:
    said = moments.write_sentences(measured, [])[2]
    assert f"below -b/a = {-PAPER_B / PAPER_A:.3g}" in said
    assert "over-concentrated" in said
    even = set_gaps(measured, {kind: [0.25, 0, 0] for kind in moments.LLN_KINDS})
    assert "over-concentrated" not in moments.write_sentences(even, [])[2]


def test_the_line_holds_where_it_is_near_the_curve_and_only_there(measured: dict[str, Any]) -> None:
    curves = measured["curves"]
    inside = moments.find_where_line_holds(measured)
    for s2, value in zip(curves["s2"], curves["variance"]["64"]["value"], strict=True):
        near = abs(PAPER_A * s2 + PAPER_B - value) <= moments.TOLERANCE * value
        assert near == any(low <= s2 <= high for low, high in inside)
    straight = {"value": [PAPER_A * s2 for s2 in curves["s2"]], "se": curves["variance"]["64"]["se"]}
    exact = measured | {"curves": curves | {"variance": curves["variance"] | {"64": straight}}}
    exact["line"] = {"a": PAPER_A, "b": 0.0}
    assert moments.find_where_line_holds(exact) == [pytest.approx((curves["s2"][0], curves["s2"][-1]))]
    exact["line"] = {"a": 2 * PAPER_A, "b": 0.0}
    assert moments.find_where_line_holds(exact) == []
    assert "nowhere" in moments.write_sentences(exact, [])[1]


def test_the_table_shows_the_data(measured: dict[str, Any], made: Section) -> None:
    assert [row[0] for row in made.table] == ["0.25", "1", "1.5"]
    for cells in made.table:
        assert len(cells) == len(made.header)
        shown = dict(zip(made.header, cells, strict=True))
        for row in (row for row in measured["entropy"] if f"{row['sigma']:g}" == shown["sigma"]):
            assert shown[row["series"]] == f"{row['mean']:.2f} ± {row['spread']:.2f}"
            if row["series"] in MATCHINGS:
                expected = match_moments(row["sigma"], row["sigma"], 64, row["series"], length=512)
                assert row["alpha"] == expected[0]
                assert shown[f"{row['series']}, alpha"] == f"{row['alpha']:.2f}"


def test_the_entropies_are_those_of_attention_matrices(measured: dict[str, Any]) -> None:
    # An independent way: P written out from q and k that have this sigma.
    from lln.lab.core.seeds import normal

    cpu, sigma = torch.device("cpu"), 1.5
    q = sigma * normal((0, 64, 512, 0), 16, 64, device=cpu)
    k = sigma * normal((0, 64, 512, 0, 1), 512, 64, device=cpu)
    for row in (row for row in measured["entropy"] if row["sigma"] == sigma):
        n = (q @ k.T / 8).exp() if row["alpha"] is None else (row["alpha"] * q).exp() @ (row["alpha"] * k).exp().T
        p = n / n.sum(-1, keepdim=True)
        assert row["bits"][0] == pytest.approx(-(p * p.log2()).sum(-1).mean().item(), rel=1e-9)


def test_charts_show_every_series_and_say_what_they_show(made: Section) -> None:
    variance, alpha, entropy = made.charts
    for chart, names in ((variance, CURVES), (alpha, MATCHINGS), (entropy, MATCHED)):
        for name in names:
            assert f">{name}</text>" in chart.svg
            styles = CURVES | MATCHED
            assert styles[name].colour.lower() in chart.svg.lower()
        assert re.fullmatch(r"[^.]+(\.\d[^.]*)*\.", chart.caption)  # one sentence
    for styles in (CURVES, MATCHED):
        for sign in ("colour", "dash", "shape"):
            assert len({getattr(style, sign) for style in styles.values()}) == len(styles)


def test_the_data_holds_what_is_plotted_and_where_the_curves_come_from(made: Section) -> None:
    data = json.loads(json.dumps(made.data, allow_nan=False))
    assert data["curves"]["provenance"] == read_curves()["provenance"]
    assert data["curves"]["variance"]["64"] == read_curves()["variance"]["64"]
    assert {row["series"] for row in data["entropy"]} == set(MATCHED)
    assert {row["series"] for row in data["alpha"]} == set(MATCHINGS)
    assert all(math.isfinite(row["mean"]) and len(row["bits"]) == SMALL.seeds for row in data["entropy"])
    assert data["provenance"]["seed"] == 0


def test_the_seed_decides_and_threads_are_put_back(measured: dict[str, Any]) -> None:
    steps: list[str] = []
    threads = torch.get_num_threads()
    again = moments.measure(SMALL, seed=0, progress=steps.append)
    assert torch.get_num_threads() == threads
    assert len(steps) == SMALL.seeds
    assert again["entropy"] == measured["entropy"]
    other = moments.measure(SMALL, seed=1)
    assert other["entropy"] != measured["entropy"]
    assert other["alpha"] == measured["alpha"]


def test_a_page_of_both_sections_stands_alone_and_captions_each_table(tmp_path: Path, made: Section) -> None:
    from helpers.pages import Page, make_times
    from lln.lab.page import lengths_section as lengths

    first = lengths.make_section(
        make_times({"softmax": [1.0, 4.0], "LLN": [2.0, 3.0], "LLN+Diag": [1.0, 1.0]}, [8, 16])
    )
    text = write_page(tmp_path, [first, made], {"seed": 0}).read_text()
    page = Page(text)
    assert page.open == []
    assert page.find_outside(tmp_path) == []
    assert "url(http" not in text
    captions = re.findall("<summary>(.*?)</summary>", text)
    assert ["quartiles" in caption for caption in captions] == [True, False]
    assert text.index(first.title) < text.index(made.title)
