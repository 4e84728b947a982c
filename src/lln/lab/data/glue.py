"""Sentences and pairs of sentences with a label: the GLUE tasks of the paper, and two embedded ones of their shape."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lln.lab.data import embedded
from lln.lab.data.cache import build_once
from lln.lab.data.examples import Sequences, flatten, id_type, load_array, save_arrays
from lln.lab.data.sources import read
from lln.lab.data.tokenizer import TextTokenizer

GLUE = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    name: str  # of the data set
    config: str | None
    columns: tuple[str, ...]  # one: sentences; two: pairs
    labels: tuple[str, ...]
    validation: tuple[str, ...] = ("validation",)  # what a model is scored on
    test: tuple[str, ...] = ("test",)
    hidden: bool = True  # test labels are -1


def tasks() -> dict[str, Task]:
    return {
        "mnli": Task(
            GLUE,
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("validation_matched", "validation_mismatched"),
            ("test_matched", "test_mismatched"),
        ),
        "qnli": Task(GLUE, "qnli", ("question", "sentence"), ("entailment", "not_entailment")),
        "qqp": Task(GLUE, "qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        "sst2": Task(GLUE, "sst2", ("sentence",), ("negative", "positive")),
        "topics": Task("embedded/topics", None, ("sentence",), tuple(embedded.chapters()), hidden=False),
        # Whether two texts belong together (embedded/pairs) takes longer to learn than a tiny model has.
        "pairs": Task("embedded/halves", None, ("text1", "text2"), tuple(embedded.chapters()), hidden=False),
    }


def load_glue(
    task: str,
    split: str,
    tokenizer: TextTokenizer,
    *,
    length: int = 128,
    name: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Sequences:
    """A split of a task by GLUE's name (mnli, qnli, qqp, sst2) or an embedded one (topics, pairs).

    Splits are the Hub's: MNLI has validation_matched and validation_mismatched. Where the publisher keeps the labels
    (test), items have no `labels`. `name`: another set with the same configurations and columns. The rest as in `read`.
    """
    known = tasks()
    if task not in known:
        raise ValueError(f"task must be one of {', '.join(known)}; got {task!r}.")
    if length < 8:
        raise ValueError(f"length must be at least 8, to leave room beside the special tokens; got {length}.")
    chosen = known[task]
    rows = read(name or chosen.name, split, config=chosen.config, data_root=data_root, hold_out=hold_out, limit=limit)
    kept = chosen.hidden and split in chosen.test and set(rows.column("label")) == {-1}
    labels = None if kept else rows.labels("label", len(chosen.labels))
    identity = {"rows": rows.identity, "task": task, "tokenizer": tokenizer.identity, "length": length}

    def build(folder: Path) -> None:
        columns = [rows.strings(column) for column in chosen.columns]
        encoded = list(tokenizer.encode_examples(columns, length))
        ids, offsets = flatten(encoded, id_type(tokenizer.vocab_size))
        save_arrays(folder, ids=ids, offsets=offsets)

    folder = build_once("glue", {**identity, "form": 1}, build, cache_dir)
    return Sequences(
        [(load_array(folder, "ids"), load_array(folder, "offsets"))],
        labels,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        length=length,
        label_names=chosen.labels,
        identity=identity,
        notes=rows.notes,
    )
