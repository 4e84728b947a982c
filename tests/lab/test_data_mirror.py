"""GLUE from a local mirror in the Hub's layout: the same code as for the Hub, and results say what the data is."""

import json
from pathlib import Path

from helpers.command import run_command
from helpers.mirror import write_set
from lln.lab.data.labelled import GLUE

GOOD, BAD = ["warm", "witty", "rare"], ["dull", "flat", "empty"]


def reviews(count: int) -> dict[str, list]:
    words = [(BAD, GOOD)[i % 2][i // 2 % 3] for i in range(count)]
    return {"sentence": [f"a {word} film number {i}" for i, word in enumerate(words)],
            "label": [i % 2 for i in range(count)], "idx": list(range(count))}  # fmt: skip


def test_sst2_trains_from_a_mirror_and_learns(tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    test = reviews(6) | {"label": [-1] * 6}
    write_set(root, GLUE, "sst2", {"train": reviews(96), "validation": reviews(24), "test": test})
    command = ["train", "glue", "--name", "sst2", "--preset", "mini", "--data-root", str(root), "--device", "cpu"]
    command += ["--out", str(tmp_path / "run"), "--json", "--attention", "lln_diag"]
    for change in (
        "model.layers=1", "model.width=32", "model.heads=2", "model.inner=64", "data.length=16", "data.vocabulary=300",
        "optimisation.steps=60", "optimisation.batch=16", "optimisation.rate=5e-3", "optimisation.warmup=5",
        "log_every=20", "save_every=60", "evaluate_every=60", "record_every=0", "precision=float32", "graph=no",
    ):  # fmt: skip
        command += ["--set", change]
    done = run_command(*command, environment={"LLN_CACHE": str(tmp_path / "cache")})
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["metrics"]["accuracy"] >= 0.9
    assert result["guess"]["accuracy"] == 0.5
    assert any("nyu-mll/glue sst2 train: 96 rows; the published set has 67349" in note for note in result["notes"])
    assert any("made for a test" in note for note in result["notes"])  # the card
    assert result["config"]["data"]["name"] == GLUE
