"""What docs/found.md quotes: what the stored results say about the paper's claims, and what to use."""

from __future__ import annotations

import itertools
from typing import Any

from found_arena import arena
from found_runs import (
    RESULTS,
    ROOT,
    accuracy,
    from_scratch,
    grid,
    list_known,
    load,
    load_stored,
    matching,
    needles,
    variants,
    vision,
)
from lln.lab.core.tables import markdown_table
from paper_page import HOLDS

BENCH = ROOT / "benchmarks" / "results"
MATTERS = 0.05  # nats: differences of a loss below it change no advice

MISSING = """## What is missing

No training was done at the paper's scale. At scale mini, which separates mechanisms, these were not measured:

- Table 1: a second pre-training of all but the first four; QNLI and QQP of all but the first four, and of these with a
  second pre-training; two of three fine-tunings of Performer and Nystromformer on SST-2, and theirs on MNLI; a few
  fine-tunings of ELU and blocks alone.
- Matching: second seeds of most ways; SST-2 of all but the paper's and entropy matching; statistics of a sample with
  matchings other than the paper's.
- Variants: alpha and beta learned for each head; second seeds of the feature map and of overlapping windows, and their
  SST-2 and that of learned alpha and beta; blocks alone with the convolution, and the convolution in longer runs.
- From scratch with a convolution of the values: second seeds, other rates, the evidence read, 2,048 tokens, and
  the peers of today.
- Figures: the loss scale of Fig. 10b, and of Fig. 8b more than one run of each; second seeds of Fig. 10a and of LLN's
  vision transformer in Fig. 9.
- Long Range Arena: Image and Text of Reformer and Skyformer, Pathfinder of all but softmax and LLN+Diag, second seeds.
- Needles: second seeds.
- Training steps under `torch.compile`: lengths other than 1,024, 16,384 and 65,536, attentions other than torch's and
  LLN+Diag, batches of one.
- Attention calls with large batches of short sequences were timed before the kernels changed for them.
"""


def list_missing() -> str:
    """The list, which is written: it stops here where what it says is no longer so."""
    assert {n for _, n in step_times("table2-16384-tokens-compiled")} == {1024, 16384, 65536}
    assert {name for name, _ in step_times("table2-16384-tokens-compiled")} == {"torch", "lln_diag"}
    rows = load(RESULTS / "mini" / "table1.json")["rows"]
    again = [row["attention"] for row in rows if row["cells"]["MLM loss"]["n"] > 1]
    assert (
        again
        == ["softmax", "lln", "lln_diag", "block_diagonal"]
        == [r["attention"] for r in rows if "qqp" in r["cells"]]
    )
    scaled = [row["chart"] for row in load(RESULTS / "mini" / "fig10.json")["rows"] if row["chart"] != "a-accuracy"]
    assert not scaled
    assert {r["seeds"] for r in load(RESULTS / "mini" / "fig8.json")["rows"] if r["chart"] == "b-loss-scale"} == {1}
    table = load(RESULTS / "mini" / "table5.json")
    empty = {(row["attention"], c) for row in table["rows"] for c in table["columns"][:-1] if c not in row["cells"]}
    assert empty == {
        *itertools.product(("reformer", "skyformer"), ("text", "image", "pathfinder")), ("performer", "pathfinder")
    }  # fmt: skip
    assert {cell["accuracy"]["n"] for cell in load_stored("lengths", "mini")["cells"]} == {1}
    return MISSING


def verdicts(title: str, *names: str) -> list[str]:
    """The claims of these figures, and what the numbers say."""
    rows = [
        [name.split("/")[-1].removeprefix("fig"), v["claim"], HOLDS[v["holds"]], v["sentence"]]
        for name in names
        for v in load(RESULTS / f"{name}.json")["verdicts"]
    ]
    table = markdown_table(["Fig.", "the paper's claim", "holds", "the numbers"], rows, "l")
    return [f"## {title}", "", *table, ""]


def step_times(name: str, what: str = "ms") -> dict[tuple[str, int], Any]:
    """Of (attention, length): median, low and high in milliseconds; or bytes."""
    rows = load(RESULTS / "paper" / f"{name}.json")["rows"]
    return {(row["attention"], row["length"]): row[what] for row in rows if row["ms"]}


def wins(ms: dict[tuple[str, int], Any]) -> int:
    """From which length on LLN+Diag is faster than torch's attention, whatever the scatter of the repeats."""
    lengths = sorted({length for _, length in ms})
    faster = [ms["lln_diag", n]["high"] <= ms["torch", n]["low"] for n in lengths]
    assert faster[-1]
    return next(n for i, n in enumerate(lengths) if all(faster[i:]))


def use() -> list[str]:
    """Five bullets that a practitioner can act on."""
    many, one = (wins(step_times(name)) for name in ("table2-16384-tokens", "table2"))
    eager, compiled = (step_times(f"table2-16384-tokens{end}") for end in ("", "-compiled"))
    parts = [value["median"] / eager[place]["median"] for place, value in compiled.items() if place[0] == "lln_diag"]
    assert len(parts) == 3
    saved = f"{min(parts):.2f} to {max(parts):.2f}"
    gains = {n: f"{eager['torch', n]['median'] / eager['lln_diag', n]['median']:.1f}" for n in (2048, 16384, 65536)}
    assert many == min(n for _, n in eager)
    ways = {row["attention"]: row["cells"]["MLM loss"]["values"] for row in load_stored("matching", "mini")["rows"]}
    assert all(value < ways["lln"][seed] for seed, value in ways["lln:matching=entropy"].items())
    tables = (load_stored("matching", scale) for scale in ("mini", "tiny"))
    assert not [d for t in tables for d in list_known(t) if d["beyond"] and abs(d["difference"]) > MATTERS]
    loss = {
        row["attention"]: row["cells"]["MLM loss"]["mean"] for row in load(RESULTS / "mini" / "table1.json")["rows"]
    }
    kept = load(BENCH / "conversion.json")["sets"]["wikipedia-2014"]["rows"]
    made = load_stored("pretraining", "mini")
    assert "5,500 steps" in made["marks"]["MLM loss, best rate"]["budget"][0]
    scratch = {row["attention"]: row["cells"]["MLM loss, best rate"]["mean"] for row in made["rows"]}
    return [
        "## In five bullets", "",
        "- **Use LLN+Diag, not LLN alone.** Its blocks draw the local patterns that a matrix of low rank cannot draw. "
        "A language model trained from scratch on sequences of 256 tokens ends at a loss of "
        f"{loss['lln_diag']:.2f} with it, {loss['lln']:.2f} with LLN alone and {loss['softmax']:.2f} with softmax; the "
        "difference between LLN+Diag and softmax is within the noise of seeds. On sequences of 512 tokens it is "
        f"{scratch['lln_diag'] - scratch['softmax']:.2f} (one seed).",
        "- **Use it for long sequences.** In batches of 16k tokens a training step of RoBERTa-base is "
        f"{gains[2048]} times as fast as with torch's attention at 2,048 tokens, {gains[16384]} times at 16,384 and "
        f"{gains[65536]} times at 65,536. One sequence at a time, it is faster from {one:,} tokens on. Below that, "
        f"keep torch's softmax attention. With `torch.compile` a step takes {saved} of its time without.",
        '- **In a new model, set `matching="entropy"`** and try `value_convolution=5`. Entropy matching follows '
        "softmax over the widest range. In training no matching differs from another beyond the noise, so the default "
        "stays the paper's. The convolution of the values lowers the loss of LLN+Diag after 5,500 steps of "
        "pre-training from "
        f"{scratch['lln_diag']:.2f} to {scratch['lln_diag:value_convolution=5']:.2f}; softmax ends at "
        f"{scratch['softmax']:.2f} without it and at {scratch['softmax:value_convolution=5']:.2f} with it (one seed "
        "each).",
        "- **Convert a pretrained model with `lln convert`, never by name alone.** A converted MiniLM keeps the order "
        "of its similarities with a rank correlation of "
        f"{kept['distilled']['spearman']:.2f}. Switched by name it keeps {kept['paper']['spearman']:.2f}, less than "
        f"its blocks without LLN ({kept['blocks']['spearman']:.2f}). On a GPU, the attention that it gives a "
        "causal language model is [slower than softmax](limits.md#converted-models-on-a-gpu) at a few thousand tokens.",
        "- **Do not take it for softmax attention.** It finds needles that blocks alone cannot find, but what lies "
        "outside a block is seen through a matrix of low rank, and nothing was trained at the paper's scale yet.", "",
    ]  # fmt: skip


def speed() -> list[str]:
    device = load(RESULTS / "paper" / "table2-16384-tokens.json")["provenance"]["device"]
    ms, alone, compiled = (step_times(f"table2{end}") for end in ("-16384-tokens", "", "-16384-tokens-compiled"))
    largest = max(length for name, length in ms if name == "softmax")
    assert max(step_times("table2", "steps").values()) == 8
    for name in ("table2-16384-tokens", "table2-16384-tokens-compiled"):
        held = step_times(name, "bytes")
        assert max(step_times(name, "steps").values()) <= 8
        assert all(0.99 < held["lln_diag", n] / held["torch", n] < 1 for _, n in held)
    first = min(length for _, length in ms)
    assert wins(ms) == first
    return [
        "## Is it faster, and does it save memory?", "",
        f"- **Linear time holds.** A training step of RoBERTa-base with LLN+Diag on an {device} with 16k tokens a "
        f"batch, or one longer sequence, is faster than with torch's attention at every length from {first:,} tokens "
        f"on. In a batch of one it is slower below {wins(alone):,} tokens. Up to eight steps are timed at once, as "
        "training issues them.", "",
        *ratios({"eager": ms, "torch.compile": compiled}),
        "- **Memory is no reason any more.** The paper's softmax keeps its matrix, and runs out of memory here above "
        f"{largest:,} tokens with batches of 16k; torch's attention does not keep it. LLN+Diag needs as much, less by "
        "under a hundredth at every length of these batches.",
        "- How near the kernels are to the memory limit, and where they are not: [Benchmarks](benchmarks.md).", "",
        "![time of a training step against length](../results/paper/paper/table2-16384-tokens-time.svg)", "",
        "A step has 16,384 tokens, and beyond that length one sequence: from there on it grows for that reason alone "
        "where time is linear.", "",
    ]  # fmt: skip


def ratios(kinds: dict[str, dict[tuple[str, int], Any]]) -> list[str]:
    """How many times as fast as with torch's attention a step with LLN+Diag is, length by length."""
    lengths = sorted({length for ms in kinds.values() for _, length in ms})
    rows = []
    for kind, ms in kinds.items():
        found = [n for n in lengths if ("torch", n) in ms]
        shown = {n: f"{ms['torch', n]['median'] / ms['lln_diag', n]['median']:.2f}" for n in found}
        rows.append([kind, *(shown.get(n, "") for n in lengths)])
    return grid(["times as fast as torch's, tokens:", *(f"{n:,}" for n in lengths)], rows)


def conversion() -> list[str]:
    lines = ["## Does a pretrained model survive the conversion?", ""]
    for name, one in load(BENCH / "conversion.json")["sets"].items():
        found = {row: f"{held['spearman']:.3f}" for row, held in one["rows"].items()}
        said = {
            "paper": "{} with the paper's read as it comes, which is worse than blocks of softmax attention alone",
            "blocks": "{} with these blocks alone",
            "fit": "{} with the evidence read after a fit without gradients",
            "distilled": "**{}** after distillation",
            "mean_distilled": "{} of blocks and the plain mean of all values distilled likewise",
        }
        if "paper" in one["rows"]:
            assert one["rows"]["paper"]["spearman"] < one["rows"]["blocks"]["spearman"]
        parts = [text.format(found[row]) for row, text in said.items() if row in found]
        lines.append(
            f"- MiniLM converted to LLN+Diag keeps the order of similarities of passages of {one['how']['length']} "
            f"tokens ({name}) with a Spearman correlation of {', '.join(parts)}."
        )
    return [*lines, ""]


def markdown() -> str:
    parts = [
        use(), speed(), needles(), accuracy(), vision(), arena(), matching(), from_scratch(), variants(), conversion(),
        verdicts("What happens while a model trains?", "mini/fig1", "mini/fig8", "mini/fig9"),
        verdicts("Does the analysis of the paper hold?", "fig2", "fig5a", "fig5b", "fig6a", "fig6b", "fig7"),
    ]  # fmt: skip
    return "\n".join(line for part in parts for line in part) + "\n" + list_missing()
