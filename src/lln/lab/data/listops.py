"""ListOps, generated: nested lists of digits under MIN, MAX, MED and SM, the value of the whole is the label.

The grammar is the published one (Nangia and Bowman 2018, with the numbers of Long Range Arena): a node is an operator
with probability 1/4 and otherwise a digit, at the greatest depth always a digit; an operator has 2 to 10 arguments;
expressions whose length is not wanted are thrown away. Long Range Arena wants 500 to 2000 tokens.
"""

import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np

from lln.lab.core.errors import DataError
from lln.lab.core.limits import MOST
from lln.lab.core.ranges import Range, check_ranges
from lln.lab.core.seeds import generator
from lln.lab.data.examples import Sequences, flatten
from lln.lab.data.made_once import Place, choose_split, generate

TOKENS = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15
OPERATIONS: tuple[Callable[[list[int]], int], ...] = (  # in the order of their tokens
    min,
    max,
    lambda values: int(statistics.median(values)),
    lambda values: sum(values) % 10,
)
OPERATOR_PROBABILITY = 0.25
TRIALS = 512  # trees grown together
HOPELESS = 200  # rounds without one accepted tree


@dataclass(frozen=True)
class Grammar:
    """Lengths count operators, digits and closing brackets; both ends are included."""

    min_length: Annotated[int, Range(least=4, most=MOST)] = 500
    max_length: Annotated[int, Range(least=4, most=MOST)] = 2000
    max_depth: Annotated[int, Range(least=2, most=100)] = 10
    max_args: Annotated[int, Range(least=2, most=100)] = 10

    def __post_init__(self) -> None:
        check_ranges(self)
        if not 4 <= self.min_length <= self.max_length:
            raise ValueError(
                "min_length must be at least 4 (an operator with two digits) and at most max_length; "
                f"got {self.min_length} and {self.max_length}."
            )


def evaluate(ids: Sequence[int] | np.ndarray) -> int:
    """The value of an expression. MED of an even number of arguments is the mean of the middle two, rounded down; SM is
    the sum modulo 10."""
    open_lists: list[tuple[int, list[int]]] = []
    for token in np.asarray(ids).tolist():
        if FIRST_OPERATOR <= token < CLOSE:
            open_lists.append((token - FIRST_OPERATOR, []))
            continue
        if token == CLOSE:
            if not open_lists or not open_lists[-1][1]:
                raise ValueError("ids close a list that was not opened or is empty.")
            operator, values = open_lists.pop()
            value = OPERATIONS[operator](values)
        elif FIRST_DIGIT <= token < FIRST_OPERATOR:
            value = token - FIRST_DIGIT
        else:
            raise ValueError(f"ids must be between {FIRST_DIGIT} and {CLOSE}; got {token}.")
        if not open_lists:
            break
        open_lists[-1][1].append(value)
    else:
        raise ValueError("ids end before the expression does.")
    return value


def to_text(ids: Sequence[int] | np.ndarray) -> str:
    return " ".join(TOKENS[i] for i in np.asarray(ids).tolist())


def load_listops(
    split: str,
    *,
    count: int,
    grammar: Grammar | None = None,
    seed: int = 0,
    cache_dir: Place = None,
) -> Sequences:
    """Make `count` ListOps expressions of train, validation or test; a larger count begins with the same ones. No
    expression is in
    two splits: a hash of it decides where it may go. Long Range Arena has 96,000, 2,000 and 2,000.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     data = load_listops("test", count=2, grammar=Grammar(min_length=4, max_length=8), cache_dir=cache)
    >>> to_text(data[0]["input_ids"]), int(data[0]["labels"])
    ('[MAX 5 3 0 ]', 5)
    """
    grammar = grammar or Grammar()

    def pack(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
        return {**flatten(rows, np.uint8), "labels": np.array([evaluate(row) for row in rows], np.int64)}

    rows = generate_expressions(split, grammar, seed)
    arrays, identity = generate("ListOps", split, count, seed, grammar, rows, pack, cache_dir)
    return Sequences(
        [(arrays["ids"], arrays["offsets"])],
        arrays["labels"],
        vocab_size=len(TOKENS),
        length=grammar.max_length,
        label_names=list(TOKENS[FIRST_DIGIT:FIRST_OPERATOR]),
        identity=identity,
        notes=["ListOps was generated here with the published grammar; it is not the published file."],
    )


def generate_expressions(split: str, grammar: Grammar, seed: int) -> Iterator[np.ndarray]:
    """Endless: expressions of a split, each once. [n] uint8"""
    seen, idle = set[bytes](), 0
    for number in itertools.count():
        idle += 1
        for ids in _grow(generator("listops", split, seed, *asdict(grammar).values(), number), grammar):
            digest = hashlib.sha256(ids.tobytes()).digest()
            if choose_split(digest[0]) == split and digest not in seen:
                seen.add(digest)
                idle = 0
                yield ids
        if idle > HOPELESS:
            raise DataError(
                f"Of {HOPELESS * TRIALS} trees none was a new expression of {grammar.min_length} to "
                f"{grammar.max_length} tokens for {split}, after {len(seen)}; widen the lengths or ask for fewer."
            )


def _grow(draw: np.random.Generator, grammar: Grammar) -> list[np.ndarray]:
    """Grows TRIALS trees together, level by level, and returns those of a wanted length. The law of a tree is the
    grammar's, since its nodes are independent; only the root is an operator for certain, as a digit alone is too
    short."""
    owner = np.arange(TRIALS)  # the tree of each node of this level
    lengths = np.zeros(TRIALS, np.int64)
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # (token, arguments, where they start below)
    for depth in range(1, grammar.max_depth + 1):
        n = len(owner)
        inner = draw.random(n) < (1.0 if depth == 1 else OPERATOR_PROBABILITY if depth < grammar.max_depth else 0.0)
        token = np.where(inner, FIRST_OPERATOR + draw.integers(0, 4, n), FIRST_DIGIT + draw.integers(0, 10, n))
        lengths += np.bincount(owner, weights=1 + inner, minlength=TRIALS).astype(np.int64)
        inner &= lengths[owner] <= grammar.max_length  # too long already: grow no further
        arguments = np.where(inner, draw.integers(2, grammar.max_args + 1, n), 0)
        levels.append((token, arguments, np.cumsum(arguments) - arguments))
        owner = np.repeat(owner, arguments)
        if len(owner) == 0:
            break
    wanted = np.flatnonzero((lengths >= grammar.min_length) & (lengths <= grammar.max_length))
    # The root of a tree is the node of its number.
    return [np.array(_assemble(levels, tree), np.uint8) for tree in wanted.tolist()]


def _assemble(levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]], node: int, level: int = 0) -> list[int]:
    """The tokens of the tree below a node of a level."""
    token, arguments, start = (int(column[node]) for column in levels[level])
    if not arguments:
        return [token]
    inner = (_assemble(levels, start + i, level + 1) for i in range(arguments))
    return [token, *itertools.chain.from_iterable(inner), CLOSE]
