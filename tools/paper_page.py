"""A page for every table and figure of the paper, with what is stored about it in results/paper/, and an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lln.lab.core.documents import write_block
from lln.lab.core.provenance import drop_places
from lln.lab.core.tables import markdown_table
from lln.lab.paper import costs
from lln.lab.paper.fig5_fig7 import FAR, STRAIGHT
from lln.lab.paper.published import COLUMNS1, COLUMNS3, COLUMNS5, TABLE1, TABLE3, TABLE5, Numbers
from lln.lab.paper.run_tables import prepare_table, show_published

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "results" / "paper"
HOLDS = {True: "yes", False: "**no**", None: "not decided"}


class Item(NamedTuple):
    name: str
    title: str
    paper: str  # what the paper says
    differs: str  # why ours is different, or what to know about it
    numbers: Numbers | None = None  # of accuracy, where the paper has some
    columns: tuple[str, ...] = ()


ITEMS = (
    Item(
        "fig1", "Figure 1: temperature, entropy and spectral gap while a model trains",
        "In a small RoBERTa with softmax attention the temperature falls during training and the entropy with it; the "
        "first layers keep a high entropy, that of middle layers comes near zero; in most layers the gap shrinks.",
        "The paper's curves come from one run of a small RoBERTa with one head a layer. Ours come from `record`, which "
        "measures every head without changing the run; at scale tiny the model has 2 layers and embedded text.",
    ),
    Item(
        "fig2", "Figure 2: entropy and spectral gap against the temperature",
        "With moment matching LLN's entropy and gap are similar to softmax's at all temperatures; without it, and with "
        "ReLU, quadratic and ELU kernels, they are not.",
        "The order of the mechanisms is as the paper says. \"Similar\" is not: the variance of log P is matched by one "
        "straight line, which holds over a limited range, and log P of LLN is right-skewed, so that equal variances "
        "mean more concentration. Matching the entropy itself (`matching=\"entropy\"`) closes nearly all of it.",
    ),
    Item(
        "table1", "Table 1: GLUE after pre-training",
        "RoBERTa-base, pre-trained on WikiText-103 with masks and fine-tuned: LLN+Diag 86.9 % on average, softmax "
        "87.0, LLN alone 85.4.",
        "At scale mini the model is small, its text short, and all tasks but SST-2 are parts of the originals, or "
        "built: accuracies are far from the paper's, with one exception that says little (Performer on SST-2). LLN "
        "alone is far behind in the loss of pre-training, and shows no steep fall within the run (Fig. 8).",
        TABLE1, COLUMNS1,
    ),
    Item(
        "table2", "Table 2: time and memory of a training step against length",
        "RoBERTa-base, batch 1, an A100 of 40 GB: softmax runs out of memory at 8,192 tokens, LLN and LLN+Diag grow "
        "linearly and are faster than Nystromformer.",
        "*softmax* is the paper's, which keeps the matrix; *torch* is torch's own attention, which does not any "
        "more, so on a machine of today softmax runs out of time before memory. Up to "
        "eight steps are timed together, as training issues them (one where a step takes long). In batches of one, "
        "short sequences are bound by the host that launches kernels, and torch's attention wins; the rows of ratios "
        "say from where on LLN does. LLN+Diag needs as much memory as torch's attention, a little less with "
        "batches of 16k tokens. What single attention calls take on an "
        "H200 is under [Benchmarks](benchmarks.md).",
    ),
    Item(
        "fig5a", "Figure 5a: variance and mean of log P of softmax",
        "The measured variance and mean match Prop. 3.1 perfectly.",
        "For moderate inputs they do. At sigma = 2 the prediction leaves out that scores of one query share its norm: "
        "t + t²/2d follows the measurement.",
    ),
    Item(
        "fig5b", "Figure 5b: variance of log P before and after moment matching",
        "After matching, LLN's variance approximates softmax's.",
        "The paper's line was fitted around sigma = 1 and d = 64. Its s2 never falls below -b/a = 2.39, so for small "
        "sigma LLN is far too concentrated. `matching=\"variance\"` inverts a measured curve; what it still misses at "
        "large sigma is that it matches the variance within rows, and that softmax's exceeds t there.",
    ),
    Item(
        "fig6a", "Figure 6a: sums of log-normal variables, moderate spread",
        "Fenton's estimate, eq. (28), gives the variance of the sum, and so that of LLN's numerator.",
        "It does for independent sums. The entries of a row of LLN share their query, and within a row it does not: "
        "ln(1 + (e^s2 - e^(s2/2)) / d) is the form that does.",
    ),
    Item(
        "fig6b", "Figure 6b: sums of log-normal variables, broad spread",
        "For large s2 the variance of the sum grows linearly.",
        "Nearly: from the lower half of the range to the upper the slopes above still rise, and below the range the "
        "curve bends. One line for all s2 cannot be right.",
    ),
    Item(
        "fig7", "Figure 7: histogram of log P",
        "After moment matching the distribution of LLN closely follows softmax's; the means differ slightly.",
        "Softmax is log-normal to the eye and by every measure; LLN only roughly: its log P is skewed to the right. "
        f"Log-normal is taken to mean a distance of at most {FAR} and R² of at least {STRAIGHT}.",
    ),
    Item(
        "fig8", "Figure 8: loss and loss scale of pre-training",
        "LLN's loss follows softmax's, and its largest inverse loss scale does not exceed softmax's.",
        "In runs this short attention has to start to work first: LLN+Diag is ahead of softmax early and a little "
        "behind in the end, LLN alone shows no steep fall at all. The loss scale, of one float16 run each at scale "
        "mini, rises and hardly ever has to be lowered: in models this small the claim is not put to the test. Curves "
        "are means over those seeds that looked at a step; at scale mini not all looked at the same steps of "
        "validation.",
    ),
    Item(
        "table3", "Table 3: a vision transformer on Dogs vs Cats",
        "Softmax 81.37 %, LLN+Diag 81.72, Linformer 79.89, one run each.",
        "At scale mini there are far fewer images to learn from than the paper had, and all attentions overfit. At"
        " scale tiny they are scikit-learn's digits of 8 by 8 pixels, and what is compared is not the "
        "paper's task.",
        TABLE3, COLUMNS3,
    ),
    Item(
        "table4", "Table 4: time and memory on Long Range Arena",
        "LLN+Diag needs less of both than softmax, Reformer, Performer and Skyformer on all five tasks.",
        "`lln reproduce table4` measures training steps, table5 whole runs. Softmax here is torch's own, which "
        "does not keep the matrix: LLN+Diag needs as much memory, and at these lengths either is the faster one. The "
        "other three compute in float32 within, whatever the precision of the model.",
    ),
    Item(
        "table5", "Table 5: accuracy on Long Range Arena",
        "LLN+Diag 57.86 % on average, softmax 57.38.",
        "Spreads over seeds are not in the paper. `lln reproduce table5 --seeds 3` says which differences exceed them. "
        "At scale mini all sequences are cut to 1,024 tokens, and runs are short.",
        TABLE5, COLUMNS5,
    ),
    Item(
        "fig9", "Figure 9: alpha and beta while a vision transformer trains",
        "They stay between 2 and 2.2.",
        "The lower end of that range follows from the constants rather than from the data: with one line sqrt(alpha "
        "beta) cannot be below 2.0025 (at sigma_q sigma_k = 0.596), whatever the inputs are, and both rise where the "
        "spread of queries and keys is smaller or larger. With `matching=\"entropy\"` there is no such floor. Beside "
        "the vision transformers, as in the paper, ours at scale mini show the language models of Table 1.",
    ),
    Item(
        "fig10", "Figure 10: fixed alpha and beta, and moment matching",
        "Fixed values below 2 lose accuracy, those from 2 on do not; with 4 the gradients of float16 grow.",
        "One seed, as at scale mini, decides nothing here. The loss scale exists under float16 alone.",
    ),
)  # fmt: skip


def command(item: Item) -> str:
    return f"lln reproduce {item.name}"


def find_results(item: Item) -> list[tuple[Path, dict[str, Any]]]:
    """What is stored about it, with the largest scale first."""
    found = [p for p in RESULTS.glob("**/*.json") if p.stem.split("-")[0] == item.name]
    order = {"paper": 0, "mini": 1, "tiny": 2}
    paths = sorted(found, key=lambda p: (order.get(p.parent.name, 0), p.stem))
    return [(path, json.loads(path.read_text())) for path in paths]


def write_item(item: Item) -> str:
    found = find_results(item)
    lines = [f"# {item.title}", "", f"**The paper says:** {item.paper}", "", "## What we found", ""]
    for path, result in found:
        lines += ours(path, result)
    if not found:
        lines += ["It was not run yet; there is no stored result at any scale.", ""]
    if item.numbers is not None and not found:
        lines += tabulate_published(item)
    if item.name in costs.TABLES:
        facts = costs.prepare_costs(costs.TABLES[item.name], {"rows": []})
        lines += write_block("costs.md", "published", **facts).splitlines()
    lines += ["## What to know about it", "", item.differs, "", "## Make it yourself", "", "```sh", command(item)]
    if is_trained(item):
        lines += [f"{command(item)} --scale mini --data-root DIR  # on a GPU, with data of your own"]
    lines += ["```", "", "[All tables and figures](paper.md)"]
    return "\n".join(lines).rstrip() + "\n"


def is_trained(item: Item) -> bool:
    return any("runs" in result for _, result in find_results(item))


def list_times(item: Item) -> str:
    """How long the runs behind its results took, by scale."""
    said = []
    for _, result in find_results(item):
        if runs := result.get("runs"):
            minutes = sum(run["seconds"] for run in runs) / 60
            count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
            said.append(f"{result['scale']}: {count}, {minutes:.0f} min on {runs[0]['provenance']['device']}")
    return "; ".join(said) or "no training"


def count_verdicts(item: Item) -> str:
    """Of its claims, at the largest scale that was measured."""
    for _, result in find_results(item):
        if "verdicts" in result:
            held = [v["holds"] for v in result["verdicts"]]
            counts = {"yes": held.count(True), "no": held.count(False), "undecided": held.count(None)}
            scale = f" (scale {result['scale']})" if "scale" in result else ""
            return ", ".join(f"{count} {words}" for words, count in counts.items() if count) + scale
    return "numbers only"


def describe_origin(result: dict[str, Any]) -> str:
    p = result["provenance"]
    command = drop_places(p["command"])
    made = [run["provenance"] for run in result.get("runs", ())] or [p]  # runs may be older than the table of them
    devices, commits = (", ".join(dict.fromkeys(one[name] for one in made)) for name in ("device", "commit"))
    return f"*Made by `{command}`, {devices}, {max(one['date'] for one in made)[:10]}, commit {commits}.*"


def ours(path: Path, result: dict[str, Any]) -> list[str]:
    lines = []
    if (scale := result.get("scale", "paper")) != "paper":
        lines += [f"### Scale {scale}, not the paper's", ""]
    if "verdicts" in result:
        rows = [[v["claim"], HOLDS[v["holds"]], v["sentence"]] for v in result["verdicts"]]
        lines += [*markdown_table(["The claim", "Holds?", "The numbers"], rows, "l"), ""]
    elif result["table"] in costs.TABLES:
        facts = costs.prepare_costs(costs.TABLES[result["table"]], result)
        batches = write_block("costs.md", "batches", **facts).strip()
        lines += [f"{batches[0].upper()}{batches[1:]}.", ""]
        lines += write_block("costs.md", "measured", **facts).splitlines()
    else:
        facts = prepare_table(result)
        lines += write_block("table.md", "cells", **facts).splitlines()
        lines += ["What differs from the paper:", *write_block("table.md", "differences", **facts).splitlines()]
        lines += ["Which differences exceed the noise:", *write_block("table.md", "noise", **facts).splitlines()]
    for chart in sorted(path.parent.glob("*.svg")):
        if owner(chart) == path:
            what = chart.stem.removeprefix(path.stem).strip("-").replace("-", " ").replace("_", " ")
            alt = f"{path.stem.split('-')[0]}: {what or 'the chart'}"
            lines += [f"![{alt}](../{chart.relative_to(ROOT).as_posix()})", ""]
    for text in (*result.get("differs", ()), *result.get("missing", ())):
        lines += [f"- {text}"]
    return [*lines, "", describe_origin(result), ""]


def owner(chart: Path) -> Path | None:
    """The result that a chart shows: the one with the longest name that the chart's begins with."""
    stems = [p.stem for p in chart.parent.glob("*.json") if f"{chart.stem}-".startswith(f"{p.stem}-")]
    return chart.with_name(f"{max(stems, key=len)}.json") if stems else None


def tabulate_published(item: Item) -> list[str]:
    assert item.numbers is not None
    rows = [[name, *(show_published(row[c]) for c in item.columns)] for name, row in item.numbers.items()]
    return ["The paper's numbers, %:", "", *markdown_table(["attention", *item.columns], rows), ""]


def index() -> str:
    """Of all tables and figures, for docs/paper.md."""
    rows = [
        [f"[{item.title}](paper-{item.name}.md)", item.paper, count_verdicts(item), list_times(item)] for item in ITEMS
    ]
    return "\n".join(
        [*markdown_table(["figure", "the paper says", "claims that hold here", "time of all runs"], rows, "l"), ""]
    )


def pages() -> dict[Path, str]:
    return {DOCS / f"paper-{item.name}.md": write_item(item) for item in ITEMS}
