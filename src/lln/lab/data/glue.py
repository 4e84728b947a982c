"""Sentences and pairs of sentences with a label: the GLUE tasks of the paper, and two embedded ones of their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from lln.lab.data import embedded
from lln.lab.data.examples import Sequences, choose_id_type, flatten
from lln.lab.data.made_once import Place, build_arrays
from lln.lab.data.sources import Selection, read
from lln.lab.data.tokenizer import TextTokenizer

GLUE = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    name: str  # of the data set
    config: str | None
    columns: tuple[str, ...]  # one: sentences; two: pairs
    labels: tuple[str, ...]
    validation: tuple[str, ...] = ("validation",)  # what a model is scored on


def list_tasks() -> dict[str, Task]:
    matched = ("validation_matched", "validation_mismatched")
    chapters = tuple(embedded.list_chapters())
    return {
        "mnli": Task(
            GLUE, "mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), validation=matched
        ),
        "qnli": Task(GLUE, "qnli", ("question", "sentence"), ("entailment", "not_entailment")),
        "qqp": Task(GLUE, "qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        "sst2": Task(GLUE, "sst2", ("sentence",), ("negative", "positive")),
        "topics": Task("embedded/topics", None, ("sentence",), chapters),
        # Whether two texts belong together (embedded/pairs) takes longer to learn than a tiny model has.
        "pairs": Task("embedded/halves", None, ("text1", "text2"), chapters),
    }


def load_glue(
    task: str,
    split: str,
    tokenizer: TextTokenizer,
    *,
    length: int = 128,
    name: str | None = None,
    cache_dir: Place = None,
    **selection: Unpack[Selection],
) -> Sequences:
    """A split of a task by GLUE's name (mnli, qnli, qqp, sst2) or an embedded one (topics, pairs).

    Splits are the Hub's: MNLI has validation_matched and validation_mismatched. Where the publisher keeps the labels
    (test), items have no `labels`. length: tokens at most, special ones included. name: another set with the same
    configurations and columns. selection: data_root, hold_out and limit, as in `read`.

    >>> import tempfile
    >>> from lln.lab.data.tokenizer import train_tokenizer
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     tokenizer = train_tokenizer(read("embedded/prose", "test"), vocab_size=300, cache_dir=cache)
    ...     data = load_glue("topics", "test", tokenizer, length=16, limit=3, cache_dir=cache)
    >>> data.num_labels, [len(item["input_ids"]) for item in data]
    (4, [16, 16, 16])
    """
    known = list_tasks()
    if task not in known:
        raise ValueError(f"task must be one of {', '.join(known)}; got {task!r}.")
    if length < 8:
        raise ValueError(f"length must be at least 8, to leave room beside the special tokens; got {length}.")
    chosen = known[task]
    rows = read(name or chosen.name, split, config=chosen.config, **selection)
    hidden = split.startswith("test") and set(rows.column("label")) == {-1}
    identity = {"rows": rows.identity, "task": task, "tokenizer": tokenizer.identity, "length": length}
    arrays = build_arrays(
        "glue",
        identity,
        lambda: flatten(
            list(tokenizer.encode_examples([rows.strings(column) for column in chosen.columns], length)),
            choose_id_type(tokenizer.vocab_size),
        ),
        cache_dir,
    )
    return Sequences(
        [(arrays["ids"], arrays["offsets"])],
        None if hidden else rows.labels("label", len(chosen.labels)),
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        length=length,
        label_names=list(chosen.labels),
        identity=identity,
        notes=rows.notes,
    )
