"""The sections of docs/found.md about training runs. Where a sentence says more than its numbers, an assert beside it
says what it rests on, so that the page stops rather than lies when other results are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.lab.core.tables import markdown_table
from lln.lab.data.sources import KNOWN
from lln.lab.paper.analysis import WORDS
from lln.lab.paper.run_tables import show_cell, tell_differences

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "paper"

Table = dict[str, Any]
CONVOLVED = "value_convolution=5"


def load(path: Path) -> Table:
    found: Table = json.loads(path.read_text(encoding="utf-8"))
    return found


def load_stored(name: str, scale: str) -> Table:
    """Of our own experiments."""
    return load(ROOT / "results" / name / scale / f"{name}.json")


def losses(table: Table) -> tuple[dict[str, Table], dict[str, float]]:
    """(cells by attention, the mean MLM loss of each)"""
    rows = {row["attention"]: row["cells"] for row in table["rows"]}
    return rows, {name: cells["MLM loss"]["mean"] for name, cells in rows.items()}


def list_known(table: Table) -> list[Table]:
    """Differences between two ways for one attention, with more than one seed each."""
    found: list[Table] = table["differences"]
    return [d for d in found if d["noise"] is not None and d["a"].split(":")[0] == d["b"].split(":")[0]]


def grid(titles: list[str], rows: list[list[str]]) -> list[str]:
    """A table: what the rows are about, then numbers."""
    return [*markdown_table(titles, rows), ""]


def column(table: Table, name: str, digits: int) -> list[str]:
    return grid(["attention", name], [[r["attention"], show_cell(r["cells"][name], digits)] for r in table["rows"]])


def describe_beyond(table: Table) -> list[str]:
    """What can be said of softmax or LLN+Diag and another attention in spite of the noise."""
    said, within = (tell_differences(table)[which] for which in (True, False))
    every = f"{len(said) + len(within)} differences against softmax and LLN+Diag that have a noise"
    if not said:
        return [f"Of {every} none is beyond it.", ""]
    return [f"Of {every}, these are beyond it (one in twenty is by chance):", "", *(f"- {text}" for text in said), ""]


def accuracy() -> list[str]:
    table = load(RESULTS / "mini" / "table1.json")
    (rows, loss), marks = losses(table), table["marks"]["MLM loss"]
    columns = {"MLM loss": 3, "sst2": 1, "mnli": 1, "qqp": 1, "qnli": 1}
    guess = {run["column"]: next(iter(run["guess"].values())) for run in table["runs"]}
    behind = {name: value - loss["softmax"] for name, value in loss.items()}
    assert 0 < behind["lln_diag"] < behind["block_diagonal"] < 0.2
    again = [d for d in table["differences"] if {d["a"], d["b"]} == {"lln_diag", "softmax"} and d["noise"] is not None]
    assert {d["column"] for d in again if not d["beyond"]} == {"MLM loss", "mnli", "sst2"}
    four = ("lln_diag", "lln", "softmax", "block_diagonal")
    means = {task: [rows[name][task]["mean"] for name in four] for task in list(columns)[1:]}
    for task in ("qqp", "qnli"):
        assert {rows[name][task]["unit"] for name in four} == {"fine-tunings of one pre-training"}
        assert means[task] == sorted(means[task])
    assert all(values[-1] == max(values) for values in means.values())
    assert max(means["qnli"]) < 58  # %, where a guess has 50.5
    last = [" and ".join(f"{means[task][i]:.1f}" for task in ("qqp", "qnli")) for i in range(len(four))]
    peers = {"cosformer": "cosFormer", "hedgehog": "Hedgehog", "performer": "Performer", "elu": "ELU"}
    others = sorted(peers, key=loss.__getitem__)
    assert min(behind["lln"], *(behind[name] for name in others)) > 2
    assert others.index("elu") == 3  # of these peers LLN is ahead of ELU alone
    assert loss[others[2]] < loss["lln"] < loss["elu"]
    assert 0.5 < behind["nystromformer"] < 1
    return [
        "## Does a model learn as well with it?", "",
        f"Masked language modelling on Wikipedia text, then fine-tuning. {' '.join(marks['model'] + marks['budget'])} "
        "Mean ± standard deviation (number) over pre-trainings, each the mean of up to three fine-tunings; where there "
        "is one pre-training, as of QQP and QNLI, over its fine-tunings. Accuracies in %; but for SST-2 the data are "
        "parts of GLUE's, or built.", "",
        *grid(["attention", "MLM loss", "SST-2", "MNLI", "QQP", "QNLI"], [
            *([name, *(show_cell(cells.get(c), d) for c, d in columns.items())] for name, cells in rows.items()),
            ["a guess", f"{guess['mlm']:.3f}", *(f"{100 * guess[c]:.1f}" for c in list(columns)[1:])],
        ]),
        *describe_beyond(table),
        f"LLN+Diag comes within {behind['lln_diag']:.2f} of softmax's loss, its blocks alone within "
        f"{behind['block_diagonal']:.2f}: in sequences of four blocks the linear part has little to add. With "
        f"{rows['softmax']['MLM loss']['n']} pre-trainings of each, nothing between LLN+Diag and softmax is beyond the "
        "noise, neither the loss nor SST-2 nor MNLI. Blocks alone have the highest mean of the first four on all "
        "tasks, whose sequences are two blocks long. On QQP and QNLI, with one pre-training each, LLN+Diag is the last "
        f"of these four: {last[0]}, LLN alone {last[1]}, softmax {last[2]}, blocks alone {last[3]}. QNLI is hardly "
        "learned by any, and other pre-trainings would have to say whether that stays. "
        f"LLN alone stays {behind['lln']:.1f} behind softmax's loss and shows no steep fall within the run (Fig. 8). "
        "Peers that are linear and "
        "have no blocks are there, too, with one pre-training each: behind softmax by "
        + ", ".join(f"{behind[name]:.1f} ({peers[name]})" for name in others)
        + f". Nystromformer, with its landmarks, is {behind['nystromformer']:.1f} behind. With blocks ELU is "
        f"{behind['elu_diag']:.2f} behind.", "",
    ]  # fmt: skip


def vision() -> list[str]:
    table, fixed = (load(RESULTS / "mini" / f"{name}.json") for name in ("table3", "fig10"))
    marks = table["marks"]["accuracy"]
    assert min(run["metrics"]["loss"] for run in table["runs"]) > 1.0  # a guess has 0.69
    small = load(RESULTS / "tiny" / "fig10.json")
    (seeds,) = {row["seeds"] for row in small["rows"]}
    return [
        "## Does it work for images?", "",
        f"Dogs vs Cats (Table 3), a part of it. {' '.join(marks['model'] + marks['budget'] + marks['data'])} "
        "Accuracy in %, mean ± standard deviation (seeds):", "",
        *column(table, "accuracy", 1),
        *describe_beyond(table),
        "Few images and no pre-training: all overfit, with losses on the test images far above a guess's. Fixed alpha "
        "and beta (Fig. 10a):", "",
        *(f"- {WORDS[v['holds']]}: {v['claim']} {v['sentence']}" for v in fixed["verdicts"]), "",
        f"The same with {seeds} seeds at scale tiny (digits of 8 by 8 pixels, where everything is learned):", "",
        *(f"- {WORDS[v['holds']]}: {v['claim']} {v['sentence']}" for v in small["verdicts"]), "",
    ]  # fmt: skip


def matching() -> list[str]:
    table = load_stored("matching", "mini")
    rows, loss = losses(table)
    ways = list(dict.fromkeys(name.partition(":")[2] for name in loss))
    kinds = ("lln_diag", "lln")
    lines = [
        "## Which matching, which statistics?", "",
        f"The same pre-training with fewer steps. {' '.join(table['marks']['MLM loss']['budget'])} Loss on held-out "
        "text, mean ± standard deviation (seeds), and accuracy on SST-2 of one fine-tuning. The plain row is paper "
        "matching with statistics of the batch, as in the paper's code; alpha is fixed, and beta with it, in the rows "
        "that name it.", "",
    ]  # fmt: skip
    cells = []
    for way in ways:
        both = [rows.get(":".join(filter(None, (kind, way))), {}) for kind in kinds]
        cells.append(
            [way or "plain", *(show_cell(c.get(n), d) for c in both for n, d in (("MLM loss", 3), ("sst2", 1)))]
        )
    lines += grid(["way", "LLN+Diag", "SST-2", "LLN", "SST-2"], cells)
    best = [min((name for name in loss if name.split(":")[0] == kind), key=loss.__getitem__) for kind in kinds]
    lowest = [f"{name} ({show_cell(rows[name]['MLM loss'], 2)})" for name in best]
    gains = []
    for kind in kinds:
        plain, entropy = (rows[name]["MLM loss"]["values"] for name in (kind, f"{kind}:matching=entropy"))
        gains.append(", ".join(f"{entropy[seed] - plain[seed]:+.3f}" for seed in entropy))
    sizes = [d["noise"] for d in list_known(table)]
    return [
        *lines,
        f"The lowest losses are those of {' and '.join(lowest)}. Entropy matching less the paper's, seed by seed: "
        f"{gains[0]} (LLN+Diag); {gains[1]} (LLN). Statistics of a sample alone do not let one sequence see another; "
        "they were tried once. Runs with entropy or variance matching were not compiled, the others were. Of "
        f"{len(sizes)} differences between two ways for one attention that have a noise to be compared with "
        f"({min(sizes):.2f} to {max(sizes):.2f}), {sum(d['beyond'] for d in list_known(table))} exceed it: "
        "two seeds decide little.", "",
        *small_matching(),
    ]  # fmt: skip


def small_matching() -> list[str]:
    """The same with several seeds, where they are cheap."""
    table = load_stored("matching", "tiny")
    apart = [f"{d['a']} - {d['b']} = {d['difference']:+.3f} ({d['column']})" for d in list_known(table) if d["beyond"]]
    return [
        f"With several seeds, at scale tiny. {' '.join(table['marks']['MLM loss']['budget'])} Loss, mean ± standard "
        "deviation (seeds):", "",
        *column(table, "MLM loss", 3),
        f"Of {len(list_known(table))} differences between two ways for one attention, these are beyond the noise (one "
        f"in twenty is by chance): {'; '.join(apart) or 'none'}.", "",
    ]  # fmt: skip


def variants() -> list[str]:
    table = load_stored("variants", "mini")
    rows, loss = losses(table)
    convolved = [name for name in ("softmax", "lln", "lln_diag") if f"{name}:convolution=5" in loss]
    gains = {name: loss[f"{name}:convolution=5"] - loss[name] for name in convolved}
    first = {name: cells["MLM loss"]["values"]["seed 0"] for name, cells in rows.items()}
    fixed = losses(load_stored("matching", "mini"))[0]["lln:alpha=2"]["MLM loss"]["values"]["seed 0"]
    assert abs(first["lln:alpha=2:learnable=channel"] - fixed) < 0.01
    assert -0.1 < first["lln:feature_map=linear:statistics=fixed"] - fixed < 0
    passed, ahead = 3250, load(RESULTS / "mini" / "fig8.json")["rows"]
    at = {r["series"]: r["value"] for r in ahead if r["chart"] == "a-validation" and r["step"] == passed}
    assert at["softmax"] < at["lln_diag"]
    gap, left = (loss[f"lln{end}"] - loss[f"softmax{end}"] for end in ("", ":convolution=5"))
    assert loss["lln_diag"] < loss["softmax"]
    judged = {d["a"]: d for d in list_known(table) if d["column"] == "MLM loss" and d["b"] == f"{d['a']}:convolution=5"}
    assert {name: judged[name]["beyond"] for name in convolved} == {"softmax": True, "lln": True, "lln_diag": False}
    assert max(gains.values()) < -0.3
    tuned = {name: rows[f"{name}:convolution=5"]["sst2"]["mean"] - rows[name]["sst2"]["mean"] for name in convolved}
    assert all(value > 0 for value in tuned.values())
    assert {rows[name]["sst2"]["n"] for name in rows if "sst2" in rows[name]} == {1}
    assert loss["lln:convolution=5"] < loss["softmax"] < loss["lln"]
    assert loss["softmax:convolution=5"] < loss["lln_diag:convolution=5"] < loss["lln:convolution=5"]
    assert -0.2 < loss["lln_diag:overlap=true"] - loss["lln_diag"] < 0
    return [
        "## What makes it better?", "",
        "The models and the text of Table 1 at scale mini, fewer steps. "
        f"{' '.join(table['marks']['MLM loss']['budget'])} Loss on held-out text, mean ± standard deviation (seeds), "
        "and accuracy on SST-2 of one fine-tuning, %:", "",
        *grid(["attention", "MLM loss", "SST-2"], [
            [name, show_cell(rows[name]["MLM loss"], 3), show_cell(rows[name].get("sst2"), 1)]
            for name in sorted(loss, key=loss.__getitem__)
        ]),
        "**A short convolution** over queries, keys and values that starts at zero (`convolution=5`) changes the loss "
        f"of LLN alone by {gains['lln']:.2f} (noise {judged['lln']['noise']:.2f}), more than the gap of {gap:.2f} to "
        f"softmax without one; that of softmax by {gains['softmax']:.2f} ({judged['softmax']['noise']:.2f}); that of "
        f"LLN+Diag by {gains['lln_diag']:.2f}, which is within the noise ({judged['lln_diag']['noise']:.2f}). Where "
        f"both have it, LLN is {left:.2f} behind softmax. On SST-2 models with it are ahead by "
        f"{', '.join(f'{value:.1f} ({name})' for name, value in tuned.items())}: one fine-tuning each, judged on "
        f"{KNOWN['nyu-mll/glue/sst2']['rows']['validation']} sentences. Alpha and beta learned for each channel do no "
        "better than the fixed alpha = beta = 2 that they "
        f"start from ({first['lln:alpha=2:learnable=channel']:.2f} and {fixed:.2f}, the first seed), a learned feature "
        f"map a little ({first['lln:feature_map=linear:statistics=fixed']:.2f}, one seed); overlapping windows in "
        "place of blocks change LLN+Diag by "
        f"{loss['lln_diag:overlap=true'] - loss['lln_diag']:.2f} (one seed). Runs this "
        "short end before attention has done its work: here LLN+Diag is ahead of softmax, in the longer runs of Table "
        f"1 softmax has passed it by step {passed:,} (Fig. 8).", "",
        *small_variants(), *decaying_channels(),
    ]  # fmt: skip


def from_scratch() -> list[str]:
    """What a convolution of the values brings to each attention."""
    table = load_stored("pretraining", "mini")
    name = "MLM loss, best rate"
    loss = {row["attention"]: row["cells"][name]["mean"] for row in table["rows"]}
    assert {row["cells"][name]["n"] for row in table["rows"]} == {1}
    plain = [attention for attention in loss if ":" not in attention]
    gains = {one: loss[f"{one}:{CONVOLVED}"] - loss[one] for one in plain}
    near, far = (loss[f"lln_diag:{CONVOLVED}"], loss[f"softmax:{CONVOLVED}"])
    assert far < near < loss["softmax"] < loss["block_diagonal"] < loss["lln_diag"] < loss["lln"]
    assert near < loss[f"block_diagonal:{CONVOLVED}"] < loss[f"lln:{CONVOLVED}"]
    assert max(gains.values()) < -0.25
    rows = [
        [one, f"{loss[one]:.3f}", f"{loss[f'{one}:{CONVOLVED}']:.3f}", f"{gain:+.3f}"] for one, gain in gains.items()
    ]
    run = table["runs"][0]["provenance"]
    return [
        "## What does a convolution of the values bring?", "",
        "Masked language models from scratch on Wikipedia text, each attention with and without `value_convolution=5`. "
        f"{' '.join(table['marks'][name]['budget'])} Loss on held-out text, **one seed**:", "",
        *grid(["attention", "without", "with", "difference"], rows),
        f"`lln reproduce pretraining --scale mini`, {run['device']}, commit {run['commit']}.", "",
        "Seeds differ by a standard deviation of up to "
        f"{max(c['MLM loss']['deviation'] or 0 for c in losses_of_table1()):.2f} in Table 1, on 256 tokens, so "
        "the smaller of these gains may be chance. LLN alone gains most: without the convolution it has not left the "
        "plateau with which training begins, with it it comes to "
        f"{loss[f'lln:{CONVOLVED}']:.2f}. LLN+Diag with it is ahead of softmax without it, by "
        f"{loss['softmax'] - near:.2f}, and {near - far:.2f} behind softmax with it. Its linear part is worth "
        f"{loss[f'block_diagonal:{CONVOLVED}'] - near:.2f} beside the blocks alone where both have the convolution, "
        "which one seed cannot decide; without it blocks alone are ahead. Other learning rates, further seeds and the "
        "evidence read were not run.", "",
    ]  # fmt: skip


def losses_of_table1() -> list[Table]:
    return [row["cells"] for row in load(RESULTS / "mini" / "table1.json")["rows"]]


def small_variants() -> list[str]:
    """The same with several seeds, where they are cheap."""
    table = load_stored("variants", "tiny")
    rows, loss = losses(table)
    learned = min(loss[name] for name in loss if name.startswith("lln:") and "convolution" not in name)
    apart = {d["b"]: d for d in list_known(table) if d["column"] == "MLM loss" and d["b"] == f"{d['a']}:convolution=5"}
    said = [f"{d['a']} by {d['difference']:.2f} (noise {d['noise']:.2f})" for d in apart.values()]
    assert len(said) == 3
    assert all(d["difference"] > 1 for d in apart.values())
    assert abs(learned - loss["lln"]) < 0.1 > abs(loss["lln_diag:overlap=true"] - loss["lln_diag"])
    assert loss["block_diagonal"] < min(loss["softmax"], loss["lln_diag"])
    assert rows["block_diagonal"]["MLM loss"]["n"] == 1
    for name, d in apart.items():
        assert rows[name]["sst2"]["mean"] < rows[d["a"]]["sst2"]["mean"]
    return [
        f"With three seeds of the convolution, at scale tiny. {' '.join(table['marks']['MLM loss']['budget'])} Loss, "
        "and accuracy of fine-tuning on a stand-in for SST-2, %:", "",
        *grid(["attention", "MLM loss", "SST-2"], [
            [name, show_cell(rows[name]["MLM loss"], 3), show_cell(rows[name].get("sst2"), 1)]
            for name in sorted(loss, key=loss.__getitem__)
        ]),
        f"It lowers the loss of {', of '.join(said)}; the best of what is learned otherwise has {learned:.2f}. Two "
        f"layers and a small text: the gap between LLN and softmax is {loss['lln'] - loss['softmax']:.2f} here, blocks "
        f"alone, with one seed, have {loss['block_diagonal']:.2f}, and fine-tuned models are no better for the "
        "convolution.", "",
    ]  # fmt: skip


def decaying_channels() -> list[str]:
    """An experiment that the package has no part of."""
    held = json.loads((ROOT / "benchmarks" / "results" / "decaying_channels.json").read_text())["rows"]
    loss: dict[str, list[float]] = {}
    for row in sorted(held, key=lambda row: row["seed"]):
        loss.setdefault(row["attention"], []).append(row["metrics"]["loss"])
    shown = {name: " and ".join(f"{value:.2f}" for value in values) for name, values in loss.items()}
    near, far, both = (loss[n] for n in ("lln:value_convolution=5", "decay_mean", "decay_mean:value_convolution=5"))
    assert [len(values) for values in loss.values() if len(values) > 1] == [2] * 5
    assert all(a < b < c < d for a, b, c, d in zip(both, far, near, loss["lln"], strict=True))
    gains = [
        " and ".join(f"{one - other:.2f}" for one, other in zip(*pair, strict=True))
        for pair in ((near, far), (far, both))
    ]
    return [
        "**Channels that decay with distance**, a third of them to the left and a third to the right, with reaches of "
        "1 to 8 tokens, are no part of the package; `benchmarks/decaying_channels.py` computes them densely. Two "
        "layers, 64 tokens, 800 steps of 1,024 tokens, two seeds: LLN alone ends at a loss of "
        f"{shown['lln']}, with the convolution of the values at {shown['lln:value_convolution=5']}, with decaying "
        f"channels at {shown['decay_mean']}, with both at {shown['decay_mean:value_convolution=5']}; softmax at "
        f"{shown['softmax']}. So they bring LLN further than the convolution does here, by {gains[0]}; what the "
        f"convolution adds to them, {gains[1]}, two seeds cannot decide. And all these models are still on the plateau "
        f"with which training begins (a guess has {held[0]['guess']['loss']:.2f}): this says which leaves it first, "
        "not which ends lower. A channel's keys must be averaged by the weights of their distances: where they are "
        f"summed, channels of few keys start with next to no weight, and the loss is {shown['decay_sum']} (one seed).",
        "",
    ]  # fmt: skip


def needles() -> list[str]:
    lines = [
        "## Does the linear part earn its keep?", "",
        "Needles in text: a question names a key, and its value stands somewhere in the sequence. Models of a longer "
        "sequence go on from those of a shorter one. Accuracy in %.", "",
    ]  # fmt: skip
    for scale in ("mini", "tiny"):
        result = load_stored("lengths", scale)
        lengths, found = result["lengths"], {(c["attention"], c["length"]): c["accuracy"] for c in result["cells"]}
        p, seeds = result["runs"][0]["provenance"], found["lln_diag", lengths[0]]["n"]
        guesses = [result["guess"][str(n)] for n in lengths]
        lines += [
            *grid(["tokens", *(f"{n:,}" for n in lengths)], [
                *([name, *(f"{found[name, n]['mean']:.1f}" for n in lengths)] for name in result["attentions"]),
                ["a guess", *(f"{guess:.1f}" for guess in guesses)],
            ]),
            f"`lln reproduce lengths --scale {scale}`, {seeds} seed{'s' if seeds > 1 else ''}, {p['device']}, commit "
            f"{p['commit']}.", "",
        ]  # fmt: skip
        last = lengths[-1]
        assert found["softmax", last]["mean"] > 99.9
        assert min(found["lln_diag", last]["mean"], found["lln", last]["mean"]) > 95
        assert found["block_diagonal", last]["mean"] < guesses[-1] + 3
    chart = ROOT / "results" / "lengths" / "mini" / "lengths-accuracy-against-length.svg"
    return [
        *lines,
        "For needles it does: beyond their own block, blocks alone find nothing, and LLN+Diag nearly everything, much "
        "as LLN alone does. Softmax finds all of it, at a cost that grows. The task is made for this; in Table 1, with "
        "its short sequences, nothing shows it.", "",
        f"![accuracy against length](../{chart.relative_to(ROOT).as_posix()})", "",
    ]  # fmt: skip
