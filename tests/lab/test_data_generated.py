"""ListOps against an evaluator of its own; Pathfinder by following the dashes in the image."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lln.lab.core.errors import DataError
from lln.lab.core.seeds import generator
from lln.lab.data import listops, pathfinder
from lln.lab.data.listops import CLOSE, TOKENS, Grammar, evaluate, generate_expressions, load_listops, to_text
from lln.lab.data.pathfinder import DIFFICULTY, Scene, draw, load_pathfinder

SHORT = Grammar(min_length=8, max_length=60)


def evaluate_text(words: list[str]) -> int:
    """By recursive descent over the text."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    values = []
    while words[0] != "]":
        values.append(evaluate_text(words))
    words.pop(0)
    calls: dict[str, Callable[[list[int]], int]]
    calls = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(statistics.median(v)), "[SM": lambda v: sum(v) % 10}
    return calls[word](values)


def read_ids(text: str) -> list[int]:
    return [TOKENS.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 4 [MAX 5 1 ] 3 ]", 3),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 2 ]", 1),  # 1.5 rounds down
        ("[MED 9 1 5 ]", 5),
        ("[MED 8 9 3 4 ]", 6),
        ("[SM 9 9 4 ]", 2),
        ("[SM [SM 5 5 ] [MED 7 7 ] ]", 7),
        ("7", 7),
    ],
)
def test_values_by_hand(text: str, value: int) -> None:
    assert evaluate(read_ids(text)) == value
    assert to_text(read_ids(text)) == text


@pytest.mark.parametrize("text", ["[MIN 4 5", "]", "[MIN ]", "<pad>", ""])
def test_what_is_no_expression_has_no_value(text: str) -> None:
    with pytest.raises(ValueError, match="ids "):
        evaluate(read_ids(text))


@pytest.mark.parametrize("grammar", [SHORT, Grammar()], ids=["short", "published"])
def test_expressions_follow_the_grammar(grammar: Grammar) -> None:
    made = list(islice(generate_expressions("train", grammar, 0), 1500 if grammar is SHORT else 120))
    labels = []
    for ids in made:
        words = to_text(ids).split()
        assert grammar.min_length <= len(words) <= grammar.max_length
        labels.append(evaluate_text(words))
        assert words == []  # one whole expression
        assert evaluate(ids) == labels[-1]
        depth = 0
        arguments: list[int] = []
        for token in ids.tolist():
            if token == CLOSE:
                assert 2 <= arguments.pop() <= grammar.max_args
                depth -= 1
                continue
            if arguments:
                arguments[-1] += 1
            if token >= listops.FIRST_OPERATOR:
                depth += 1
                arguments.append(0)
                assert depth < grammar.max_depth  # a digit may stand one deeper
    share = np.bincount(labels, minlength=10) / len(labels)
    assert share.min() > (0.04 if grammar is SHORT else 0)
    assert share.max() < 0.3


def test_nodes_are_drawn_as_published() -> None:
    """Where no length is refused, a node below the root is an operator one time in four, with 2 to 10 arguments."""
    free = Grammar(min_length=4, max_length=10**6, max_depth=3)
    trees = [tree for i in range(4) for tree in listops._grow(generator("free", i), free)]
    assert len(trees) == 4 * listops.TRIALS
    inner = total = 0
    roots, operators = [], []
    for ids in trees:
        depth = 0
        counts: dict[int, int] = {}
        for token in ids.tolist():
            if token == CLOSE:
                depth -= 1
                continue
            counts[depth] = counts.get(depth, 0) + 1
            if token >= listops.FIRST_OPERATOR:
                operators.append(token - listops.FIRST_OPERATOR)
                inner += depth == 1
                depth += 1
        roots.append(counts[1])
        total += counts[1]
    assert abs(inner / total - 0.25) < 5 * (0.1875 / total) ** 0.5
    share = np.bincount(roots, minlength=11)[2:] / len(roots)
    assert len(share) == 9
    assert abs(share - 1 / 9).max() < 5 * (1 / 9 * 8 / 9 / len(roots)) ** 0.5
    kinds = np.bincount(operators) / len(operators)
    assert abs(kinds - 0.25).max() < 5 * (0.1875 / len(operators)) ** 0.5


def test_splits_share_no_expression_and_a_larger_count_begins_the_same(tmp_path: Path) -> None:
    grammar = Grammar(min_length=4, max_length=5)  # so few that they would meet
    splits = "train", "test"
    data: Any = {s: load_listops(s, count=150, grammar=grammar, cache_dir=tmp_path) for s in splits}
    texts = {split: [to_text(item["input_ids"]) for item in d] for split, d in data.items()}
    assert all(len(set(t)) == 150 for t in texts.values())
    assert not set(texts["train"]) & set(texts["test"])
    more: Any = load_listops("train", count=200, grammar=grammar, cache_dir=tmp_path)
    assert [to_text(more[i]["input_ids"]) for i in range(150)] == texts["train"]
    assert data["train"].fingerprint != data["test"].fingerprint
    other: Any = load_listops("train", count=150, grammar=grammar, seed=1, cache_dir=tmp_path)
    assert [to_text(item["input_ids"]) for item in other] != texts["train"]


def test_a_listops_set_has_its_values_as_labels(tmp_path: Path) -> None:
    data: Any = load_listops("validation", count=50, grammar=SHORT, cache_dir=tmp_path)
    assert (len(data), data.vocab_size, data.num_labels, data.length) == (50, 16, 10, 60)
    for item in data:
        assert int(item["labels"]) == evaluate_text(to_text(item["input_ids"]).split())
    again: Any = load_listops("validation", count=50, grammar=SHORT, cache_dir=tmp_path / "new")
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(data, again, strict=True))


def test_wrong_listops_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"min_length must be at least 4 .*; got 9 and 8"):
        Grammar(9, 8)
    with pytest.raises(ValueError, match="max_depth must be an int of at least 2"):
        Grammar(max_depth=1)
    with pytest.raises(ValueError, match="split must be 'train', 'validation' or 'test'; got 'dev'"):
        load_listops("dev", count=1)
    with pytest.raises(ValueError, match="count must be a positive int; got 0"):
        load_listops("train", count=0)
    monkeypatch.setattr(listops, "HOPELESS", 3)
    with pytest.raises(DataError, match="none was a new expression of 5000 to 5001 tokens for train, after 0"):
        load_listops("train", count=1, grammar=Grammar(5000, 5001, max_depth=2), cache_dir=tmp_path)


def find_dots(image: np.ndarray) -> list[tuple[int, int]]:
    """Centres of the full 3 x 3 squares; where a path runs past a dot there may be two in a row, which is one dot."""
    on = image > 0
    size = len(image)
    full = [(y, x) for y in range(1, size - 1) for x in range(1, size - 1) if on[y - 1 : y + 2, x - 1 : x + 2].all()]
    dots: list[tuple[int, int]] = []
    for y, x in full:
        if not any(max(abs(y - a), abs(x - b)) <= 2 for a, b in dots):
            dots.append((y, x))
    return dots


def is_connected(image: np.ndarray, start: tuple[int, int], end: tuple[int, int], reach: int) -> bool:
    """Follow what is drawn from dot to dot, over gaps."""
    pixels = {(int(y), int(x)) for y, x in np.argwhere(image)}
    seen, waiting = {start}, deque([start])
    while waiting:
        y, x = waiting.popleft()
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                near = (y + dy, x + dx)
                if near in pixels and near not in seen:
                    seen.add(near)
                    waiting.append(near)
    return end in seen


SCENES = {**DIFFICULTY, "large": Scene(size=64, dashes=12, distractors=6, dash=3, gap=2), "bare": Scene(distractors=0)}


@pytest.mark.parametrize("name", SCENES)
def test_following_the_dashes_gives_the_label(name: str) -> None:
    scene = SCENES[name]
    for index in range(40):
        drawing = draw(scene, "train", 0, index)
        dots = find_dots(drawing.image)
        assert len(dots) == 2, "two dots can be seen"
        assert drawing.label == index % 2
        assert is_connected(drawing.image, dots[0], dots[1], scene.reach) == bool(drawing.label)
        assert len(drawing.paths) == 2 + scene.distractors
        # Without stepping over gaps nothing hangs together: the paths are dashed.
        assert not is_connected(drawing.image, dots[0], dots[1], 1)


@pytest.mark.parametrize("name", DIFFICULTY)
def test_paths_keep_apart_and_their_own_gaps_are_small(name: str) -> None:
    scene = DIFFICULTY[name]
    for index in range(10):
        paths = draw(scene, "test", 1, index).paths
        for i, path in enumerate(paths):
            steps = [max(abs(a - c), abs(b - d)) for (a, b), (c, d) in pairwise(path)]
            assert max(steps) <= 1
            for other in paths[i + 1 :]:
                gap = min(max(abs(a - c), abs(b - d)) for a, b in path for c, d in other)
                assert gap > scene.reach
        assert len(paths[0]) == len(paths[1]) == scene.dashes * (scene.dash + scene.gap) - scene.gap


def test_what_is_easy_to_see_does_not_tell_the_classes_apart() -> None:
    """Ink, and the distance between the dots: as scores they must order the classes hardly better than a coin."""
    drawings = [draw(DIFFICULTY["easy"], "train", 5, index) for index in range(400)]
    for score in (lambda d: int((d.image > 0).sum()), lambda d: math.dist(*d.dots)):
        one, other = ([score(d) for d in drawings if d.label == label] for label in (0, 1))
        wins = sum((a > b) + 0.5 * (a == b) for a in one for b in other) / (len(one) * len(other))
        assert 0.35 < wins < 0.65


def test_pathfinder_is_a_sequence_of_pixels(tmp_path: Path) -> None:
    data: Any = load_pathfinder("train", count=9, cache_dir=tmp_path)
    assert (data.length, data.vocab_size, data.num_labels) == (1024, 256, 2)
    assert [int(item["labels"]) for item in data] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    for index, item in enumerate(data):
        expected = draw(DIFFICULTY["easy"], "train", 0, index).image
        assert item["input_ids"].tolist() == expected.reshape(-1).tolist()
    test = load_pathfinder("test", count=9, cache_dir=tmp_path)
    assert not test[0]["input_ids"].equal(data[0]["input_ids"])
    more = load_pathfinder("train", count=12, cache_dir=tmp_path)
    assert more[8]["input_ids"].equal(data[8]["input_ids"])


def test_wrong_pathfinders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="size must be an int of at least 12; got 8"):
        Scene(size=8)
    with pytest.raises(ValueError, match="split must be 'train', 'validation' or 'test'; got 'dev'"):
        load_pathfinder("dev", count=1)
    with pytest.raises(ValueError, match="count must be a positive int; got 0"):
        load_pathfinder("train", count=0)
    monkeypatch.setattr(pathfinder, "SCENE_TRIES", 2)
    with pytest.raises(DataError, match="two paths of 40 dashes and 2 distractors do not fit into 16 x 16 pixels"):
        draw(Scene(size=16, dashes=40), "train", 0, 0)
