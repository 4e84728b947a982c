"""Heads on several ranks: outputs, gradients, statistics and checkpoints are those of one process."""

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.processes import Processes
from helpers.split_heads import attempt_split, compare_split, drop_heads

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "settings",
    [
        {
            "statistics": "running",
            "is_causal": True,
            "block_size": 8,
            "value_convolution": 3,
            "mix": "scales",
            "mask": "left",
        },
        {"statistics": "batch", "matching": "entropy", "mask": "holes", "value_convolution": 5},
        {"statistics": "sample", "block_size": 8, "mix": "scales"},
        {
            "statistics": "fixed",
            "learnable": "channel",
            "feature_map": "linear",
            "value_convolution": 3,
            "is_causal": True,
        },
        {"statistics": "fixed", "read": "evidence", "directions": 5, "block_size": 8, "mix": "evidence"},
        {"statistics": "fixed", "alpha": [1.0, 1.5] * 4, "beta": [1.2, 2.0] * 2, "block_size": 8},
    ],
    ids=str,
)
def test_a_module_learns_and_keeps_as_one_process_does(processes: Processes, settings: dict[str, Any]) -> None:
    for found in processes.run(2, compare_split, settings):
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


def test_heads_of_every_rank_drop_out_by_numbers_of_their_own(processes: Processes) -> None:
    one, two = processes.run(2, drop_heads)
    assert one["same"]
    assert two["same"]
    assert one["rows"] != two["rows"]
    assert one["after"] == two["after"]  # what is drawn afterwards is the same again


def test_heads_that_cannot_be_split_are_refused_in_a_sentence(processes: Processes) -> None:
    words = {
        "odd": "the number of heads, 3, must be divisible by the 2 ranks",
        "keys": "the number of key heads, 1, must be divisible by the 2 ranks",
        "twice": "the heads of this model are split already",
        "none": "Linear has no LLN attention",
        "peer": "of all mechanisms only LLN attention can",
        "joined": "MultiheadAttention projects all heads at once",
        "whole": "must have 2 and 2 heads of 8, of heads that lie on 2 ranks; got query [1, 4, 6, 8]",
        "few": "lln.distributed.split_heads(model, mesh)",
    }
    for found in processes.run(2, attempt_split):
        assert found.keys() == words.keys()
        for name, message in found.items():
            assert words[name] in message
