"""What written pages quote from stored results, between marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.files import put_between
from lln.lab.core.tables import markdown_table

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results" / "paper"


def load_stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def index_by_sigma(name: str, what: str, series: str) -> dict[float, float]:
    return {row["sigma"]: row[what] for row in load_stored(name)["rows"] if row["series"] == series}


def settings(name: str) -> str:
    result = load_stored(name)
    plan, p = result["settings"], result["provenance"]
    shape = f"{plan['length']:,} tokens, head dim {plan['dim']}, {plan['seeds']} seeds"
    return f"{shape}; `lln reproduce {name}`, commit {p['commit']}"


def matching() -> str:
    """Entropies of softmax and of LLN by matching."""
    kinds = ("softmax", "paper", "variance", "entropy")
    found = {kind: index_by_sigma("fig2", "entropy", kind) for kind in kinds}
    header = ["sigma_q = sigma_k", "temperature", "softmax, bits", *(f'`"{kind}"`' for kind in kinds[1:])]
    rows = [
        [f"{sigma:.3g}", f"{1 / sigma**2:.2f}", *(f"{found[kind][sigma]:.2f}" for kind in kinds)]
        for sigma in sorted(found["softmax"])
    ]
    lines = markdown_table(header, rows, "r")
    return "\n".join([*lines, "", f"Entropy of P, {settings('fig2')}.", ""])


def line() -> str:
    """The variance of log P after matching over softmax's."""
    softmax = index_by_sigma("fig5b", "variance", "softmax")
    found = {kind: index_by_sigma("fig5b", "variance", kind) for kind in ("paper", "variance")}
    rows = [[f'`"{kind}"`', *(f"{x[sigma] / softmax[sigma]:.2f}" for sigma in softmax)] for kind, x in found.items()]
    lines = markdown_table(["sigma_q = sigma_k", *(f"{sigma:g}" for sigma in softmax)], rows)
    return "\n".join([*lines, "", f"Variance of log P over softmax's (1 is right), {settings('fig5b')}.", ""])


def lognormal() -> str:
    fits = {row["series"]: row for row in load_stored("fig7")["rows"] if row["kind"] == "fit"}
    softmax, lln = fits["softmax"], fits["paper"]
    moments = {v["claim"]: v["numbers"] for v in load_stored("fig5a")["verdicts"]}
    moderate = next(n["largest_deviation"] for n in moments.values() if "largest_deviation" in n)
    far = next(n["deviation_at_largest_sigma"] for n in moments.values() if "deviation_at_largest_sigma" in n)
    return (
        f"On Gaussian inputs of unit variance softmax's P is log-normal: Kolmogorov-Smirnov distance "
        f"{softmax['distance']:.3f}, Q-Q R² {softmax['qq_r2']:.4f}, skewness {softmax['skewness']:.2f}. LLN's is only "
        f"roughly: {lln['distance']:.3f}, {lln['qq_r2']:.3f} and {lln['skewness']:.2f} ({settings('fig7')}). The "
        f"variance and mean of softmax's log P are within {100 * moderate:.1f} % of the prediction up to sigma = "
        f"1.25; at sigma = 2 the variance is {100 * far:.0f} % above it (`lln reproduce fig5a`).\n"
    )


def describe_trained() -> str:
    """What the README says of models trained from scratch."""
    table = load_stored("mini/table1")
    (near,) = (
        d for d in table["differences"] if d["column"] == "MLM loss" and {d["a"], d["b"]} == {"softmax", "lln_diag"}
    )
    assert not near["beyond"]
    loss = {row["attention"]: row["cells"]["MLM loss"]["mean"] for row in table["rows"]}
    own = [
        f"{loss[name] - loss['softmax']:+.2f} with {title}"
        for name, title in (("lln_diag", "LLN+Diag (within the noise of seeds)"), ("lln", "LLN"))
    ]
    return (
        f"- Trained from scratch in miniature, a masked language model ends at a loss of {loss['softmax']:.2f} with "
        f"softmax, {' and '.join(own)}. [What we found](docs/found.md) has more, with what is missing.\n"
    )


def convolution() -> str:
    """What the convolution brought, beside what it is compared with."""
    table = json.loads((ROOT / "results" / "variants" / "mini" / "variants.json").read_text())
    cells = {row["attention"]: row["cells"]["MLM loss"] for row in table["rows"]}
    said = [
        f"{title} {cells[name]['mean']:.2f} without and {cells[f'{name}:convolution=5']['mean']:.2f} with it"
        for name, title in (("lln", "LLN"), ("lln_diag", "LLN+Diag"), ("softmax", "softmax"))
    ]
    (own,) = (
        d for d in table["differences"] if (d["a"], d["b"]) == ("lln_diag", "lln_diag:convolution=5") and d["noise"]
    )
    assert not own["beyond"]  # and of the learned ones found_runs.variants makes sure
    assert "3,000 steps" in table["marks"]["MLM loss"]["budget"][0]
    assert {cells[name + end]["n"] for name in ("lln", "lln_diag", "softmax") for end in ("", ":convolution=5")} == {2}
    return (
        f"The loss of a masked language model after 3,000 steps, means of two seeds: {'; '.join(said)}. "
        "The gain of LLN+Diag is within the noise of its seeds. Alpha and beta learned for each channel did no better "
        "than the fixed values they start from.\n"
    )


QUOTES = {
    ROOT / "README.md": {"trained": describe_trained},
    DOCS / "matching.md": {"matching": matching},
    DOCS / "mechanism.md": {"convolved": convolution},
    DOCS / "limits.md": {"line": line, "lognormal": lognormal},
}


def pages() -> dict[Path, str]:
    found = {}
    for page, parts in QUOTES.items():
        text = page.read_text(encoding="utf-8")
        for mark, make in parts.items():
            text = put_between(text, (f"<!-- {mark} -->\n", f"<!-- /{mark} -->"), make())
        found[page] = text
    return found
