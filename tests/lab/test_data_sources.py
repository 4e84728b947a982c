"""A data set is what its name says, from wherever it comes; what is missing is named."""

import fnmatch
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from helpers.command import run_command
from helpers.mirror import write_card, write_set, write_split
from lln.lab.core.errors import DataError, need
from lln.lab.core.seeds import fingerprint, generator, permutation
from lln.lab.data import embedded
from lln.lab.data.made_once import SPLITS
from lln.lab.data.sources import AAN, KNOWN, list_splits, read


def sentences(n: int, start: int = 0) -> dict[str, list]:
    return {"sentence": [f"sentence {start + i}" for i in range(n)], "label": [i % 2 for i in range(n)]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_set(tmp_path, "some/set", "sst2", {"train": sentences(50), "test": sentences(7, 100)}, pieces=3)
    return tmp_path


def test_rows_come_in_order_from_all_pieces_of_a_split(root: Path) -> None:
    rows = read("some/set", "train", config="sst2", data_root=root)
    assert rows.columns == ["sentence", "label"]
    assert rows.strings("sentence") == sentences(50)["sentence"]
    assert rows.labels("label", 2).tolist() == sentences(50)["label"]
    assert read("some/set", "test", data_root=root).strings("sentence")[0] == "sentence 100"  # the only configuration
    assert "A few rows, made for a test." in rows.notes[-1]
    assert list_splits("some/set", data_root=root) == ["test", "train"]


@pytest.mark.parametrize("inner", ["", "data/", "plain/"])
def test_a_folder_without_a_card_is_read_by_the_names_of_its_files(tmp_path: Path, inner: str) -> None:
    for split in ("train", "validation_matched", "validation_mismatched"):
        write_split(tmp_path / "a/b", inner + split, sentences(4, len(split)))
    config = inner.strip("/") if inner == "plain/" else None
    for split in ("train", "validation_matched", "validation_mismatched"):
        got = read("a/b", split, config=config, data_root=tmp_path).strings("sentence")
        assert got == sentences(4, len(split))["sentence"]


def test_the_environment_names_the_root_and_the_argument_wins(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLN_DATA_ROOT", str(root))
    assert len(read("some/set", "train")) == 50
    other = tmp_path / "other"
    write_set(other, "some/set", "sst2", {"train": sentences(3)})
    assert len(read("some/set", "train", data_root=other)) == 3


def fake_hub(source: Path, cache: Path) -> Any:
    """What snapshot_download does, from a folder: only files that match, in a folder named by the commit."""

    def snapshot_download(name: str, *, repo_type: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert repo_type == "dataset"
        assert revision in (None, "c0ffee")
        target = cache / name / "c0ffee"
        for path in (source / name).rglob("*"):
            relative = path.relative_to(source / name).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(relative, pattern) for pattern in allow_patterns):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / relative)
        return str(target)

    return mock.patch("huggingface_hub.snapshot_download", snapshot_download)


@pytest.mark.parametrize("card", [True, False])
def test_the_hub_and_a_mirror_of_it_give_the_same_rows_and_identity(
    root: Path, tmp_path: Path, card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)
    if not card:
        (root / "some/set/README.md").unlink()
    with fake_hub(root, tmp_path / "cache"):
        fetched = read("some/set", "train", config="sst2")
    local = read("some/set", "train", config="sst2", data_root=root)
    assert fetched.table.equals(local.table)
    assert fetched.identity == local.identity
    assert not list((tmp_path / "cache").rglob("test-*"))  # nothing is fetched that was not asked for


def test_without_a_network_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)
    with (
        mock.patch("huggingface_hub.snapshot_download", side_effect=FileNotFoundError("no route\nmore")),
        pytest.raises(DataError, match=r"^nyu-mll/glue could not be .* \(no route\);.*--data-root or LLN_DATA_ROOT"),
    ):
        read("nyu-mll/glue", "train", config="sst2")


@pytest.mark.parametrize(
    ("figure", "tasks", "missing"),
    [
        ("table1", ["--tasks", "sst2"], ["Salesforce/wikitext", "nyu-mll/glue"]),
        ("table3", [], ["microsoft/cats_vs_dogs"]),
        ("table5", ["--tasks", "text"], ["stanfordnlp/imdb"]),
        ("table5", ["--tasks", "image"], ["uoft-cs/cifar10"]),
        ("fig8", [], ["Salesforce/wikitext"]),
    ],
)
def test_without_a_network_a_set_is_named_that_needs_none(
    figure: str, tasks: list[str], missing: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the command that is told of it goes on."""
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)
    command = ["reproduce", figure, "--scale", "mini", "--dry-run", "--out", tmp_path, *tasks]
    with mock.patch("huggingface_hub.snapshot_download", side_effect=FileNotFoundError("no route")):
        for name in missing:
            done = run_command(*command, columns=1000)
            assert done.exit_code == 2
            assert f"{name} could not be fetched" in done.stderr
            named = re.search(r"--set (\S+) \(`lln reproduce`\)", done.stderr)
            assert named is not None
            command += ["--set", named[1]]
        assert run_command(*command).exit_code == 0


def test_what_is_missing_is_named(root: Path) -> None:
    def fails(message: str, name: str = "some/set", split: str = "train", **options: Any) -> None:
        with pytest.raises(DataError) as caught:
            read(name, split, data_root=options.pop("data_root", root), **options)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    fails(f"expected the folder {root / 'nyu-mll/glue'}", "nyu-mll/glue")
    fails(f"The data root {root / 'nowhere'} is not a folder", data_root=root / "nowhere")
    fails(f"no split 'validation'; in {root / 'some/set'} there are: test, train", split="validation")
    fails("no configuration 'cola'; there are: sst2", config="cola")
    write_card(root / "two", {"a": {"train": "a/*"}, "b": {"train": "b/*"}})
    fails("several configurations, so one must be named: a, b", "two")
    fails("no file a/*", "two", config="a")
    (root / "empty").mkdir()
    fails("has no parquet file", "empty")
    broken = root / "broken"
    broken.mkdir()
    (broken / "train.parquet").write_bytes(b"PAR1 no")
    fails(f"A parquet file of broken in {broken} cannot be read", "broken")
    (broken / "README.md").write_text("---\nconfigs: [\n---\n")
    fails("README.md cannot be read", "broken")
    next((root / "some/set/sst2").glob("train-00001-*")).unlink()
    fails("holds 2 of 3 files of this split")
    fails("no embedded set 'embedded/poems'; there are: embedded/digits", "embedded/poems")
    fails("no split 'dev'; there are: train, validation, test", "embedded/prose", "dev")


def test_what_is_on_no_hub_is_not_asked_for_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)
    with mock.patch("huggingface_hub.snapshot_download") as hub:
        for data_root in (None, root):
            with pytest.raises(
                DataError, match=r"aan is not here: .* not on the Hub; .* text1, text2 .*--set data.name="
            ):
                read(AAN, "train", data_root=data_root)
        assert not hub.called
    write_set(root, AAN, "default", {"train": {"text1": ["a"], "text2": ["b"], "label": [1]}})
    assert len(read(AAN, "train", data_root=root)) == 1


def test_columns_and_labels_are_checked(root: Path) -> None:
    rows = read("some/set", "train", data_root=root)
    with pytest.raises(DataError, match="no column 'text'; there are: sentence, label"):
        rows.column("text")
    with pytest.raises(DataError, match="column 'label' must hold text; row 0 holds 0"):
        rows.strings("label")
    with pytest.raises(DataError, match="column 'sentence' must hold whole numbers"):
        rows.labels("sentence")
    with pytest.raises(DataError, match="column 'label' must hold 0 to 0; row 1 holds 1"):
        rows.labels("label", 1)
    write_set(root, "hidden", "x", {"test": {"label": [0, -1]}})
    with pytest.raises(DataError, match=r"row 1 holds -1 .* the publisher keeps the label"):
        read("hidden", "test", data_root=root).labels("label", 2)


def test_the_identity_follows_the_content_and_not_the_place(root: Path, tmp_path: Path) -> None:
    before = read("some/set", "train", data_root=root).identity
    copy = tmp_path / "copy"
    shutil.copytree(root / "some", copy / "some")
    assert read("some/set", "train", data_root=copy).identity == before
    write_set(copy, "some/set", "sst2", {"train": sentences(50, 1)}, pieces=3)
    assert fingerprint(read("some/set", "train", data_root=copy).identity) != fingerprint(before)


def test_a_held_out_part_and_the_rest_are_the_whole(root: Path) -> None:
    train = read("some/set", "train", data_root=root, hold_out=0.2)
    validation = read("some/set", "validation", data_root=root, hold_out=0.2)
    a, b = train.strings("sentence"), validation.strings("sentence")
    assert (len(a), len(b)) == (40, 10)
    assert sorted(a + b) == sorted(sentences(50)["sentence"])
    assert b != sentences(50)["sentence"][:10]  # by chance, since some sets are sorted by label
    assert train.identity != validation.identity
    assert "10 of 50 training rows are held out" in validation.notes[0]
    assert len(read("some/set", "test", data_root=root, hold_out=0.2)) == 7
    with pytest.raises(DataError, match="validation split of its own"):
        read("embedded/prose", "train", hold_out=0.2)
    with pytest.raises(DataError, match="leaves no rows on one side"):
        read("some/set", "train", data_root=root, hold_out=0.001)
    with pytest.raises(ValueError, match="hold_out must be at least 0 and below 1; got 1"):
        read("some/set", "train", data_root=root, hold_out=1)


def test_a_limit_takes_rows_at_random_and_says_so(root: Path) -> None:
    few = read("some/set", "train", data_root=root, limit=8)
    again = read("some/set", "train", data_root=root, limit=8)
    assert few.table.equals(again.table)
    assert len(set(few.strings("sentence"))) == 8
    assert few.strings("sentence") != sentences(8)["sentence"]
    assert "a random 8 of 50 rows" in few.notes[0]
    assert (
        read("some/set", "train", data_root=root, limit=99).identity
        == read("some/set", "train", data_root=root).identity
    )
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read("some/set", "train", data_root=root, limit=0)


def test_a_partial_copy_of_a_published_set_says_so(tmp_path: Path) -> None:
    write_set(tmp_path, "nyu-mll/glue", "sst2", {"train": sentences(5), "extra": sentences(2)})
    note = read("nyu-mll/glue", "train", config="sst2", data_root=tmp_path).notes[0]
    published = KNOWN["nyu-mll/glue/sst2"]["rows"]["train"]
    assert note == f"nyu-mll/glue sst2 train: 5 rows; the published set has {published}."
    note = read("nyu-mll/glue", "extra", config="sst2", data_root=tmp_path).notes[0]
    assert note.endswith("the published set has no such split.")
    images = {"image": [b""], "labels": [0]}
    write_set(tmp_path, "microsoft/cats_vs_dogs", "default", {"train": images})
    assert "published set has 23410" in read("microsoft/cats_vs_dogs", "train", data_root=tmp_path).notes[0]


@pytest.mark.parametrize("name", sorted(embedded.SETS))
def test_embedded_sets_need_nothing_and_their_splits_share_nothing(name: str) -> None:
    with mock.patch.dict(os.environ, {"LLN_DATA_ROOT": "/nowhere"}):
        parts = {split: read(name, split) for split in SPLITS}
    first = parts["train"].columns[0]
    values = {split: [str(v) for v in rows.column(first)] for split, rows in parts.items()}
    assert len(values["train"]) > 3 * len(values["validation"]) > 0
    seen = [set(v) for v in values.values()]
    # Among 1,797 drawn digits no two are equal in every pixel, or this would fail too.
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    if "label" in parts["train"].columns:
        labels = parts["train"].labels("label")
        assert np.bincount(labels).min() > 0.05 * len(labels)
        assert np.bincount(labels).max() <= 0.5 * len(labels)


def test_a_sentence_of_many_paragraphs_is_in_one_split_alone() -> None:
    """Which sentences repeat depends on the Python whose documentation it is."""
    same = " ".join(f"same{i}" for i in range(embedded.WORDS))

    def write(number: int) -> str:
        own = [f"own{number}-{i}" for i in range(2 * embedded.STRIDE)]
        return " ".join([*own[: embedded.STRIDE], same, *own[embedded.STRIDE :]])

    paragraphs = tuple(("abcd"[i // 80], write(i)) for i in range(320))
    with mock.patch.object(embedded, "list_paragraphs", return_value=paragraphs):
        topics = {split: embedded.make_columns("embedded/topics", split)["sentence"] for split in SPLITS}
        halves = {split: embedded.make_columns("embedded/halves", split) for split in SPLITS}
    assert [same in topics[split] for split in SPLITS] == [True, False, False]
    texts = [{*halves[split]["text1"], *halves[split]["text2"]} for split in SPLITS]
    assert all(texts)
    assert not texts[0] & (texts[1] | texts[2])
    assert not texts[1] & texts[2]


@pytest.mark.parametrize(("name", "words"), [("embedded/pairs", 18), ("embedded/passages", 96)])
def test_embedded_pairs_share_their_words_as_labelled(name: str, words: int) -> None:
    rows = read(name, "train")
    for one, two, label in zip(*(rows.column(c) for c in ("text1", "text2", "label")), strict=True):
        missing = Counter(two.split()) - Counter(one.split())
        assert bool(missing) != bool(label)
        assert len(two.split()) == words


def test_the_identity_of_an_embedded_set_follows_its_content() -> None:
    before = read("embedded/topics", "train").identity
    with mock.patch.object(embedded, "WORDS", 20):
        assert read("embedded/topics", "train").identity != before
    assert read("embedded/topics", "train").identity == before


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(DataError, match=r"no_such_module is missing.*pip install 'lln-attention\[train\]'"):
        need("no_such_module.part")


def test_seeded_numbers_depend_on_the_key_alone() -> None:
    assert sorted(permutation(100, "a", 1)) == list(range(100))
    assert permutation(100, "a", 1).tolist() == permutation(100, "a", 1).tolist()
    assert permutation(100, "a", 1).tolist() != permutation(100, "a", 2).tolist()
    assert permutation(0, "a").shape == (0,)
    assert generator("a", 1).random() != generator("a1").random()
    # Fixed for all machines and versions: numpy promises the raw stream of PCG64.
    assert permutation(8, "fixed", 0).tolist() == [1, 4, 5, 2, 3, 7, 6, 0]
    assert fingerprint({"b": 1, "a": [2]}) == fingerprint({"a": [2], "b": 1})
