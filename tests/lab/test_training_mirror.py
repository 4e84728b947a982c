"""GLUE from a local mirror in the Hub's layout: the same code as for the Hub, and results say what the data is."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.mirror import write_set, write_split
from lln.lab.cli.app import app
from lln.lab.data.glue import GLUE, load_glue
from lln.lab.data.penn import is_penn, penn
from lln.lab.data.sources import read
from lln.lab.data.tokenizer import TextTokenizer, train_tokenizer

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
    done = CliRunner().invoke(app, command, env={"LLN_CACHE": str(tmp_path / "cache")})
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["metrics"]["accuracy"] >= 0.9
    assert result["guess"]["accuracy"] == 0.5
    assert any("nyu-mll/glue sst2 train: 96 rows; the published set has 67349" in note for note in result["notes"])
    assert any("made for a test" in note for note in result["notes"])  # the card
    assert result["config"]["data"]["name"] == GLUE


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('He said "no" (twice).', "he said `` no '' -lrb- twice -rrb- ."),
        ("Isn't it Tesla's, they'll ask?", "is n't it tesla 's , they 'll ask ?"),
        ("10,000 at 14:28: 48% paid $5 [where?]", "10,000 at 14:28 : 48 % paid $ 5 -lsb- where ? -rsb-"),
        ("The U.S. cannot\u2013say Dr. Who.", "the u.s. can not -- say dr. who ."),
        ("the series' end\u2026 and/or the end", "the series ' end ... and/or the end"),
        ("\u201cCurly\u201d isn\u2019t straight.", "`` curly '' is n't straight ."),
    ],
)  # fmt: skip
def test_penn_treebank_form(text: str, wanted: str) -> None:
    assert penn(text) == wanted
    assert penn(wanted) == wanted  # nothing is left to do


def test_a_validation_split_takes_the_form_of_its_training_split(tmp_path: Path) -> None:
    train = {"question": ["who -lrb- if any -rrb- ?", "what 's new ?"], "sentence": ["he did n't .", "it is new ."],
             "label": [0, 1]}  # fmt: skip
    plain = {"question": ["Who (if any)?"], "sentence": ["He didn't."], "label": [0]}
    root = tmp_path / "mirror"
    write_set(root, GLUE, "qnli", {"train": train, "validation": plain})
    tokenizer = letters(root, tmp_path)
    found = load_glue("qnli", "validation", tokenizer, data_root=root, cache_dir=tmp_path / "cache")
    first = load_glue("qnli", "train", tokenizer, data_root=root, cache_dir=tmp_path / "cache")
    assert found[0]["input_ids"].tolist() == first[0]["input_ids"].tolist()
    assert "lower-cased and tokenised as its training split is" in found.notes[0]
    assert not any("lower-cased" in note for note in first.notes)
    # As on the Hub, where both are plain, nothing is changed.
    write_split(root / GLUE, "qnli/train", plain)
    again = load_glue("qnli", "validation", tokenizer, data_root=root, cache_dir=tmp_path / "cache")
    assert tokenizer.decode(again[0]["input_ids"].tolist()) == "<s>Who (if any)?</s></s>He didn't.</s>"
    assert not any("lower-cased" in note for note in again.notes)
    assert again.fingerprint != found.fingerprint
    assert not is_penn(["all small", "letters"])


def letters(root: Path, tmp_path: Path) -> TextTokenizer:
    rows = read(GLUE, "train", config="qnli", data_root=root)
    return train_tokenizer(rows, "sentence", vocab_size=300, cache_dir=tmp_path / "cache")
