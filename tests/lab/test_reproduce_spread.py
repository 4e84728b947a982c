"""The paper's numbers are the paper's, and what is said about noise is what statistics says."""

import random

import numpy as np
import pytest
import scipy.stats

from lln.lab.paper import published
from lln.lab.paper.spread import find_difference, find_spread

# Rows as printed in the paper; "-": no number.
PRINTED1 = """
softmax 80.3 87.2 89.9 90.6 87.0
reformer 35.4 - 63.2 50.9 49.8
performer 58.8 63.4 79.1 81.4 70.6
elu 74.8 82.5 86.9 87.2 82.8
longformer 77.2 - 85.5 88.6 83.7
transformer_ls 77.0 84.8 86.8 90.2 84.7
tnn 76.72 85.06 88.3 90.6 85.17
transnormer_t2 77.28 85.39 88.56 90.71 85.48
cosformer 76.7 - 89.2 91 85.6
transnormer_t1 79.06 87.0 88.61 91.17 86.46
flash 79.45 87.1 88.83 90.71 86.52
nystromformer 80.9 88.7 86.3 91.4 86.8
lln 77.0 85.1 88.9 90.6 85.4
lln_diag 80.0 86.5 89.7 91.6 86.9
"""
PRINTED5 = """
softmax 60.41 38.05 79.95 71.3 37.2 57.38
reformer 61.27 37.05 78.74 67.23 44.04 57.67
performer 57.85 37.8 80.5 62.58 37.56 55.26
skyformer 60.88 39.36 81.54 70.23 32.64 56.93
lln_diag 60.72 38.91 81.21 69.81 38.65 57.86
"""


def read_printed(text: str) -> dict[str, list[float | None]]:
    rows = [line.split() for line in text.split("\n") if line]
    return {name: [None if v == "-" else float(v) for v in values] for name, *values in rows}


@pytest.mark.parametrize(
    ("table", "text", "columns"),
    [
        (published.TABLE1, PRINTED1, ["mnli", "qnli", "qqp", "sst2", "average"]),
        (published.TABLE5, PRINTED5, ["text", "listops", "retrieval", "pathfinder", "image", "average"]),
    ],
)
def test_the_papers_numbers_are_the_papers(table: published.Numbers, text: str, columns: list[str]) -> None:
    assert {name: list(row.values()) for name, row in table.items()} == read_printed(text)
    for name, row in table.items():
        assert list(row) == columns
        held = [v for c, v in row.items() if c != "average" and v is not None]
        # A slip in one number would show in the average, which the paper prints, too.
        assert row["average"] == pytest.approx(np.mean(held), abs=0.12), name


def test_table_3_is_the_papers() -> None:
    assert published.TABLE3 == {
        "softmax": {"accuracy": 81.37}, "lln_diag": {"accuracy": 81.72}, "linformer": {"accuracy": 79.89}
    }  # fmt: skip


def test_tables_4_and_5_name_the_same_things() -> None:
    assert list(published.TABLE5) == list(published.PAPER4)
    assert published.COLUMNS5[:-1] == published.TASKS4


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_mean_and_deviation_are_numpys(n: int) -> None:
    values = [random.Random(n).gauss(80, 3) for _ in range(n)]
    found = find_spread(values)
    assert found.n == n
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-12)


def test_one_seed_has_no_spread() -> None:
    assert find_spread([3.0]).deviation is None
    said = find_difference([3.0], [1.0, 1.1])
    assert said.difference == pytest.approx(1.95)
    assert said.noise is None
    assert said.beyond is None
    with pytest.raises(ValueError, match="at least one value"):
        find_spread([])


def test_the_rule_is_welchs_test_at_five_percent() -> None:
    draw = random.Random(0)
    for _ in range(400):
        sizes = draw.randint(2, 6), draw.randint(2, 6)
        far = draw.choice([0.0, 2.0, 6.0])
        a = [draw.gauss(0, draw.choice([0.5, 2])) for _ in range(sizes[0])]
        b = [draw.gauss(far, 1) for _ in range(sizes[1])]
        said = find_difference(a, b)
        p = scipy.stats.ttest_ind(a, b, equal_var=False).pvalue
        assert said.difference == pytest.approx(np.mean(a) - np.mean(b))
        assert said.beyond == (p < 0.05)


def test_seeds_that_agree_to_the_last_digit_have_no_noise() -> None:
    assert find_difference([1.0, 1.0], [1.0, 1.0]).beyond is False
    assert find_difference([1.0, 1.0], [2.0, 2.0]).beyond is True
