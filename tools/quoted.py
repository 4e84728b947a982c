"""What written pages quote from stored results, between marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks_page
import found_page
from campaigns_table import campaigns
from cards_table import cards
from lln.files import put_between
from lln.lab.core.tables import markdown_table, show_number
from paper_page import index
from spread_tables import cutting, plan, traffic

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


def load_matching(scale: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "matching" / scale / "matching.json").read_text())
    return found


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


def choice() -> str:
    """Which matching to take, and the figures that say so."""
    softmax = index_by_sigma("fig2", "entropy", "softmax")
    worst = {
        kind: max(abs(bits - softmax[sigma]) for sigma, bits in index_by_sigma("fig2", "entropy", kind).items())
        for kind in ("paper", "entropy")
    }
    losses = []
    for title, name in (("LLN+Diag", "lln_diag"), ("LLN", "lln")):
        rows = {row["attention"]: row["cells"] for row in load_matching("mini")["rows"]}
        paper, entropy = (rows[label]["MLM loss"]["mean"] for label in (name, f"{name}:matching=entropy"))
        assert entropy < paper
        losses.append(f"{entropy:.2f} instead of {paper:.2f} with {title}")
    for scale in ("mini", "tiny"):  # found_page says the same of all ways
        for d in load_matching(scale)["differences"]:
            if {d["a"], d["b"]} in [{n, f"{n}:matching=entropy"} for n in ("lln", "lln_diag")]:
                assert not d["beyond"]
    kept = json.loads((BENCHMARKS / "conversion.json").read_text())["sets"]["wikipedia-2014"]["rows"]
    agreement, blocks = read_agreement()
    advice = [
        [
            "a new model, or a call of your own", '`matching="entropy"`',
            f"It follows softmax over the widest range. In the table below it is off by {worst['entropy']:.2f} bits at "
            f"worst, the paper's matching by {worst['paper']:.2f}. In training, the loss was {' and '.join(losses)}; "
            "these differences are within the noise of seeds.",
        ],
        [
            "a model that was trained with softmax attention", "[`lln convert`](conversion.md), and no matching",
            f"It finds everything on your text. MiniLM keeps a rank correlation of {agreement:.3f} in this way. "
            f"With the paper's matching alone it keeps "
            f"{kept['paper']['spearman']:.3f}, which is worse than its softmax blocks without LLN ({blocks:.3f}).",
        ],
        ["the paper's experiments to repeat", '`matching="paper"`, the default', "It is eq. (10) of the paper."],
        [
            "a trained model to look at", "`lln inspect`",
            "Its queries and keys are not Gaussian, so no rule of two standard deviations is right. The page shows how "
            "far each matching is off for every head.",
        ],
    ]  # fmt: skip
    return "\n".join([*markdown_table(["you have", "take", "because"], advice, "l"), ""])


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


BENCHMARKS = ROOT / "benchmarks" / "results"


def read_times(part: str, batch: int, length: int) -> tuple[float, float]:
    """Milliseconds of torch's attention and of LLN+Diag in a whole model."""
    rows = json.loads((BENCHMARKS / "models.json").read_text())[part]["rows"]
    at = (batch, length)
    (row,) = (r for r in rows if (r["batch"], r["length"]) == at and r["mode"] in ("eager", "compiled-graph"))
    softmax, ours = (row["times"][name]["median"] for name in ("sdpa", "lln_diag"))
    return softmax, ours


def read_agreement() -> tuple[float, float]:
    """Of MiniLM after `lln convert` with what it was, and of its blocks of softmax attention alone."""
    kept = json.loads((BENCHMARKS / "conversion.json").read_text())["sets"]["wikipedia-2014"]["rows"]
    return kept["distilled"]["spearman"], kept["blocks"]["spearman"]


def read_attention(part: str, kind: str) -> dict[str, float]:
    """Milliseconds of each attention in a part of benchmarks/gpu.py, of 16 times 4,096 tokens, by kind: forward or
    training."""
    path = max(BENCHMARKS.glob(f"*-h200/{part}/bench.json"))
    rows = [row for row in json.loads(path.read_text())["rows"] if (row["batch"], row["length"]) == (16, 4096)]
    return {row["attention"]: row["device_ms"][kind]["median"] for row in rows}


def read_converted(kind: str) -> tuple[dict[int, tuple[float, float]], int]:
    """Of a whole MiniLM as it was and converted so, by length: milliseconds of a batch; and the first length at which
    it is faster converted."""
    rows = json.loads((BENCHMARKS / "conversion_quality" / "speed.json").read_text())["rows"]
    found = {
        int(name.split("/")[1]): tuple(row["model"][way]["median"] for way in ("softmax", kind))
        for name, row in rows.items()
        if name.startswith("speed/")
    }
    return found, min(length for length, (softmax, ours) in found.items() if ours < softmax)


def compare_mix(part: str) -> tuple[list[float], list[float], int]:
    """What `mix="evidence"` takes, forward and in training: how many times as long as softmax attention it
    takes, how many times as fast as plain PyTorch it is, and the length from which on it is faster than softmax."""
    times = [read_attention(part, kind) for kind in ("forward", "training")]
    slower = [t["evidence-mix"] / t["cudnn"] for t in times]
    faster = [t["evidence-mix-eager"] / t["evidence-mix"] for t in times]
    # One time grows with the length, the other with its square.
    return slower, faster, int(round(4096 * max(slower), -3))


def converted() -> str:
    """What a converted model takes on a GPU, and what a cheaper mix would."""
    (slower, _, _), (slower_causal, faster_causal, even_causal) = map(
        compare_mix, ("evidence-mix", "evidence-mix-causal")
    )
    agreement, blocks = read_agreement()
    (times, first), (_, first_mix) = read_converted("distilled"), read_converted("weighed_distilled")
    slow, fast = (
        f"{max(times[length]) / min(times[length]):.1f} times as {'fast' if length >= first else 'slow'} at {length:,}"
        for length in (512, 16384)
    )
    return (
        '**Encoders** mix the linear part and the blocks by two learned factors a channel (`mix="scales"`). On an '
        f"H200, in batches of 65,536 tokens, a whole MiniLM that was converted in this way is faster than before from "
        f"{first:,} tokens on: {slow}, {fast}. It keeps a rank correlation of {agreement:.2f} (with its softmax blocks "
        f"alone: {blocks:.2f}).\n\n"
        "**Causal language models** need more to keep what they know: each query weighs its block against everything "
        'outside it (`mix="evidence"`). Their attention takes '
        f"{slower_causal[0]:.1f} times as long as softmax attention in inference, and {slower_causal[1]:.1f} times as "
        f"long in training. The kernels are {faster_causal[0]:.0f} and {faster_causal[1]:.0f} times as fast as plain "
        "PyTorch. Encoders can have the same with `--mix evidence`, which keeps a little more of a model. There it "
        f"takes {slower[0]:.1f} and {slower[1]:.1f} times as long as softmax attention at 4,096 tokens "
        f"([Benchmarks](benchmarks.md#what-each-query-weighs)), and the whole MiniLM is faster from {first_mix:,} "
        "tokens on.\n\n"
        "The time of LLN attention grows with the length, and that of softmax attention with its square. A causal "
        f"language model should therefore be faster from about {even_causal:,} tokens on. This is calculated from the "
        "times at 4,096 tokens, and not measured.\n"
    )


def pitch() -> str:
    """What the first screen of the README promises, in figures."""
    times = {at: read_times("encoder", *at) for at in ((1, 16384), (8, 2048), (32, 512))}
    faster = {at: f"{softmax / ours:.1f}" for at, (softmax, ours) in times.items()}
    assert faster[32, 512] == "1.0"
    # What limits.md and the head of the benchmarks say of one sequence of 4,096 tokens.
    for part, wins in (("encoder", True), ("training", False)):
        before, ours = read_times(part, 1, 4096)
        assert (ours < before) == wins
    softmax, ours = read_times("compiled", 16, 32768)
    agreement, blocks = read_agreement()
    converted, first = read_converted("distilled")
    before, after = converted[8192]
    return (
        f"On an NVIDIA H200, a RoBERTa-base with it reads a text of 16,384 tokens **{faster[1, 16384]} times** as fast "
        f"as with torch's softmax attention, and eight texts of 2,048 tokens {faster[8, 2048]} times as fast; with 32 "
        "texts of 512 tokens the two are equally fast. A Llama writes the token after 32,768 others "
        f"{softmax / ours:.1f} times as fast. These are new models, with the paper's formula. A model that was trained "
        "with softmax needs another formula to keep what it knows. A MiniLM converted with `lln convert` ranks pairs "
        f"of passages almost as before (rank correlation **{agreement:.2f}**; with softmax inside blocks and nothing "
        f"else: {blocks:.2f}). In batches of 65,536 tokens it is faster than before from {first:,} on, at 8,192 "
        f"{before / after:.1f} times as fast.\n"
    )


def numbers() -> str:
    """What the README says of speed and quality: where LLN+Diag wins, and where it does not."""
    agreement, blocks = read_agreement()
    table = load_stored("mini/table1")
    loss = {row["attention"]: row["cells"]["MLM loss"]["mean"] for row in table["rows"]}
    (near,) = (
        d for d in table["differences"] if d["column"] == "MLM loss" and {d["a"], d["b"]} == {"softmax", "lln_diag"}
    )
    assert not near["beyond"]
    timed = {
        "RoBERTa-base, 1 text of 16,384 tokens": ("encoder", 1, 16384),
        "RoBERTa-base, 8 texts of 2,048 tokens": ("encoder", 8, 2048),
        "RoBERTa-base, 32 texts of 512 tokens": ("encoder", 32, 512),
        "Llama, 16 texts: the token after 32,768": ("compiled", 16, 32768),
    }
    rows = []
    for title, place in timed.items():
        softmax, ours = read_times(*place)
        rows.append(
            [title, f"{show_number(softmax)} ms", f"{show_number(ours)} ms", f"{softmax / ours:.2f} times as fast"]
        )
    rows += [
        [
            "MiniLM, converted: rank correlation", "1", f"{agreement:.3f}",
            f"softmax blocks alone: {blocks:.3f}",
        ],
        [
            "Language model from scratch: loss", f"{loss['softmax']:.2f}", f"{loss['lln_diag']:.2f}",
            f"within the noise; LLN alone: {loss['lln']:.2f}",
        ],
    ]  # fmt: skip
    lines = markdown_table(["Measured", "softmax", "LLN+Diag", "In short"], rows, "l")
    return "\n".join([*lines, ""])


# What the README calls a claim, the stored figure or table, how its claims there begin, and the numbers in a few words.
CLAIMS = [
    ("Softmax attention is log-normal", "fig7", "Softmax attention", "Kolmogorov-Smirnov distance {distance:.3f}"),
    ("LLN attention is log-normal", "fig7", "LLN attention", "distance {distance:.3f}, skewness {skewness:.2f}"),
    (
        "Moment matching concentrates like softmax", "fig2", "With moment matching (paper)",
        "up to {most_bits:+.1f} bits off below temperature {follows_from:.1f}",
    ),
    (
        "The same with our entropy matching", "fig2", "With moment matching (entropy)",
        "gap up to {most_gap:+.2f} off below temperature {follows_from:.2f}",
    ),
    (
        "A kernel like ELU + 1 cannot concentrate", "fig2", "The ELU kernel",
        "its entropy moves by {moved_bits:.2f} bits in all",
    ),
    (
        "Attention concentrates while a model trains", "mini/fig1", "The temperature decreases",
        "entropy {entropy_first:.1f} bits at the start, {entropy_last:.1f} at the end",
    ),
    (
        "Alpha and beta stay between 2 and 2.2", "mini/fig9", "alpha and beta",
        "in training they lie between {lowest:.1f} and {highest:.1f}",
    ),
    (
        "LLN alone trains like softmax", "mini/fig8", "The loss of lln follows",
        "final loss {difference:+.2f}, noise of seeds {noise:.2f}",
    ),
    (
        "LLN+Diag trains like softmax", "mini/fig8", "The loss of lln_diag",
        "final loss {difference:+.2f}, noise of seeds {noise:.2f}",
    ),
]  # fmt: skip
SAID = {True: "yes", False: "**no**", None: "undecided"}


def claims() -> str:
    """The scoreboard of the README."""
    rows = []
    for title, name, start, words in CLAIMS:
        found = [v for v in load_stored(name)["verdicts"] if v["claim"].startswith(start)]
        if len({v["holds"] for v in found}) != 1:
            raise ValueError(f"{name}: one verdict on {start!r} is needed, or several that agree; got {found}")
        numbers = dict(found[0]["numbers"])
        for key, pick in (("lowest", min), ("highest", max)):
            if key in numbers:
                numbers[key] = pick(v["numbers"][key] for v in found)
        rows.append([title, SAID[found[0]["holds"]], words.format(**numbers)])
    return "\n".join([*markdown_table(["The paper's claim", "Holds?", "In numbers"], rows, "l"), ""])


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


EXAMPLES = {  # what each shows, what it needs
    "finetune_encoder": ("fine-tunes a pretrained MiniLM for classification, with softmax and with LLN+Diag", "hf"),
    "long_documents": ("trains a small BERT to classify documents of 8,192 tokens", "hf"),
    "streaming_generation": ("trains a small Llama and writes 4,000 tokens with a cache of fixed size", "hf"),
    "vision_transformer": ("compares time and memory of a vision transformer of timm at growing resolution", "timm"),
    "image_transformer": ("compares time and memory of diffusion transformers at growing resolution", "diffusers"),
}


def examples() -> str:
    """The index of the examples, with how long each takes where that was measured."""
    assert set(EXAMPLES) == {path.stem for path in (ROOT / "examples").glob("*.py")}
    timed = json.loads((ROOT / "results" / "examples.json").read_text())["rows"]
    rows = []
    for name, (shows, extra) in EXAMPLES.items():
        seconds = timed[name]["seconds"] if name in timed else None
        told = "not timed" if seconds is None else f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        rows.append([f"[{name}.py]({name}.py)", shows, f"`{extra}`", told])
    return "\n".join([*markdown_table(["program", "what it does", "extra", "time"], rows, "l"), ""])


QUOTES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"pitch": pitch, "numbers": numbers, "claims": claims},
    DOCS / "matching.md": {"choice": choice, "matching": matching},
    DOCS / "mechanism.md": {"convolved": convolution},
    ROOT / "examples" / "README.md": {"examples": examples},
    DOCS / "gpu.md": {"cards": cards},
    DOCS / "hardening.md": {"campaigns": campaigns},
    DOCS / "found.md": {"found": found_page.markdown},
    DOCS / "paper.md": {"index": index},
    DOCS / "limits.md": {"converted": converted, "line": line, "lognormal": lognormal},
    DOCS / "tutorial-long-documents.md": {"speeches": benchmarks_page.speeches},
    DOCS / "distributed.md": {"traffic": traffic, "plan": plan, "cutting": cutting},
}


def pages() -> dict[Path, str]:
    found = {}
    for page, parts in QUOTES.items():
        text = page.read_text(encoding="utf-8")
        for mark, make in parts.items():
            text = put_between(text, (f"<!-- {mark} -->\n", f"<!-- /{mark} -->"), make())
        found[page] = text
    return found
