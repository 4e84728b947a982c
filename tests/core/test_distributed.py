"""Rows of a sequence on several processes: outputs, gradients, statistics and states are those of one process."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.call_options import cover_pairs
from helpers.processes import Processes
from helpers.shared_calls import (
    attempt,
    compare,
    compare_heads,
    compare_module,
    count_traffic,
    draw,
    drop_rows,
    lose,
    watch_order,
)  # fmt: skip
from lln.checks import check_call, check_inputs
from lln.distributed import across, split_evenly
from lln.distributed.borders import find_block_reach, find_pieces, list_shares
from lln.distributed.near import attend_by_torch
from lln.kernels.eager import attend_block_part
from lln.ranks import Ranks

TOLERANCE = 1e-10
READS = {
    "paper": {},
    "evidence": {"read": "evidence"},
    "signed": {"read": "evidence", "directions": "signed"},
    "directions": {"read": "evidence", "directions": "tensor"},
}
PAIRS = cover_pairs({
    "block_size": [None, 8],
    "mix": ["number", "tensor"],
    "scale": [None, 0.7],
    "is_causal": [False, True],
    "state": [False],
    "return_state": [False, True],
    "mask": [None, "left", "right", "holes", "dead"],
    "factors": ["number", "tensor"],
    "read": list(READS),
    "packed": [None, (0, 5, 5, 20, 47), (0, 30, 47), (0, 47)],
    "lengths": [(20, 27), (3, 26, 18), (17, 0, 2, 28), (8, 16, 16, 7)],
    "told": [False, True],
})  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes(4)
    yield made
    made.stop()


def check(found: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    worst = {f"{name} of rank {rank}": x for rank, each in enumerate(found) for name, x in each.items()}
    assert {name: x for name, x in worst.items() if not x <= tolerance} == {}


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_outputs_gradients_and_states_are_those_of_one_process(processes: Processes, case: dict[str, Any]) -> None:
    case = dict(case)
    lengths, read = case.pop("lengths"), READS[case.pop("read")]
    del case["state"]
    case["return_state"] = case["return_state"] and case["packed"] is None
    check(processes.run(len(lengths), compare, lengths, case | read))


@pytest.mark.parametrize("lengths", [(8, 16, 16, 7), (8, 1, 7, 20)])
def test_blocks_that_begin_with_a_rank_go_on_from_the_state(processes: Processes, lengths: tuple[int, ...]) -> None:
    settings = {"block_size": 8, "is_causal": True, "mix": "tensor", "factors": "tensor", "return_state": True}
    check(processes.run(4, compare, lengths, settings))
    check(processes.run(4, compare, lengths, settings | {"read": "evidence", "factors": "number", "mix": "number"}))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [5, 16, 43])
def test_torchs_own_attention_in_blocks_is_the_eager_one(length: int, is_causal: bool) -> None:
    q, k, v = (draw(n, 2, heads, length, dim) for n, heads, dim in ((1, 4, 8), (2, 2, 8), (3, 2, 6)))
    inputs = check_inputs(q, k, v, key_mask=None, cu_seqlens=None)
    call = check_call(inputs, block_size=8, is_causal=is_causal, scale=0.7).change(block_weight=None)
    torch.testing.assert_close(attend_by_torch(call), attend_block_part(call))


def test_parts_in_half_precision_are_mixed_with_one_rounding() -> None:
    q, linear, near = (draw(n, 1, 2, 64, 8).bfloat16() for n in (1, 2, 3))
    call = check_call(check_inputs(q, q, q, key_mask=None, cu_seqlens=None), block_size=8, mix=0.3)
    wide = 0.3 * linear.double() + 0.7 * near.double()
    ranks = Ranks(None, 0, 1, across.attend, (64,))
    shared = across.Shared(ranks, call, "auto", False, across.find_ratio({"mix": 0.3}))
    rounded = wide.bfloat16().double() - wide
    assert float((shared.mix(linear, near).double() - wide).norm() / rounded.norm()) < 1.01
    assert across.find_ratio({"mix": torch.ones(2)}) is None
    assert across.find_ratio({}) == 0.5


MODULES: list[dict[str, Any]] = [
    {"statistics": "sample", "mask": "left", "block_size": 8},
    {"statistics": "sample", "matching": "entropy", "mask": "right"},
    {"statistics": "sample", "packed": [0, 5, 5, 30, 47], "convolution": 5},
    {"statistics": "batch", "matching": "entropy", "mask": "holes", "read": "evidence", "directions": "signed"},
    {"statistics": "running", "is_causal": True, "block_size": 8, "mix": "scales", "convolution": 3, "mask": "left"},
    {"statistics": "running", "packed": [0, 5, 5, 30, 47], "matching": "variance", "value_convolution": 5},
    {"statistics": "running", "is_causal": True, "value_convolution": 7, "mask": "holes"},
    {"statistics": "sample", "value_convolution": 31, "mask": "left", "block_size": 8},
    {"statistics": "fixed", "learnable": "channel", "feature_map": "linear", "convolution": 7, "block_size": 4},
    {"statistics": "fixed", "read": "evidence", "directions": 5, "is_causal": True, "mask": "holes"},
]


@pytest.mark.parametrize("settings", MODULES, ids=str)
def test_a_module_learns_and_counts_as_one_process_does(processes: Processes, settings: dict[str, Any]) -> None:
    reaches = any("convolution" in name for name in settings)  # over ranks that have few rows or none, too
    check(processes.run(4, compare_module, (17, 2, 0, 28) if reaches else (3, 9, 20, 15), settings))


@pytest.mark.parametrize("lengths", [(30, 21), (6, 25, 20)])
def test_a_context_cuts_inputs_and_reaches_every_module(processes: Processes, lengths: tuple[int, ...]) -> None:
    check(processes.run(len(lengths), compare_heads, lengths))


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"block_size": 8}], ids=str)
def test_every_rank_drops_out_by_numbers_of_its_own(processes: Processes, settings: dict[str, Any]) -> None:
    found = processes.run(3, drop_rows, settings)
    assert all(each["same"] for each in found)  # a seed repeats it
    rows = [each["rows"] for each in found]
    assert rows[0] != rows[1] != rows[2] != rows[0]  # though keys, queries and seeds were the same
    mean = sum(each["mean"] for each in found) / 3
    assert mean == pytest.approx(1.0, abs=0.05)  # what is left is scaled up


SHARDS: list[dict[str, Any]] = [
    {}, {"is_causal": True}, {"block_size": 16}, {"block_size": 16, "is_causal": True, "mask": "left"},
    {"read": "evidence", "directions": "signed"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SHARDS, ids=str)
def test_what_is_sent_does_not_depend_on_the_length(processes: Processes, settings: dict[str, Any]) -> None:
    # Of 7 rows more than whole blocks, so that every border cuts one.
    short, long = (processes.run(3, count_traffic, 16 * count + 7, settings) for count in (8, 256))
    assert short == long
    assert max(calls for _, _, calls in short) <= 3  # one forward and one backward, and who has how many rows
    states = 2 * 2 * 4 * (8 + 4 * 4)  # to 2 others, 2 heads of 4 channels: log_sum float64, mean_value float32
    if not settings:
        assert [sent for sent, _, _ in short] == [states] * 3
        assert [sent for _, sent, _ in short] == [states] * 3
    if settings == {"is_causal": True}:
        assert [sent for sent, _, _ in short] == [states, states // 2, 0]
        assert [sent for _, sent, _ in short] == [0, states // 2, states]


@pytest.mark.long
def test_what_is_sent_is_the_same_for_a_million_tokens(processes: Processes) -> None:
    for settings in SHARDS[:3]:
        assert processes.run(2, count_traffic, 2**19 + 7, settings) == processes.run(2, count_traffic, 71, settings)


def test_blocks_are_computed_while_states_are_under_way(processes: Processes) -> None:
    assert processes.run(2, watch_order, (16, 8)) == [["sends", "blocks", "waits"] * 2] * 2
    # A block that a border cuts has to wait for its rows.
    assert processes.run(2, watch_order, (12, 12)) == [["sends", "waits", "blocks", "blocks", "sends", "waits"]] * 2


def test_a_rank_that_ends_takes_the_others_along_with_a_message() -> None:
    lost = Processes(3)
    begun = time.monotonic()
    lost.start(3, lose)
    found = lost.collect(2)
    assert sorted(found) == [0, 1]
    for rank, (message, error) in found.items():
        assert error is None
        assert message is not None
        assert f"rank {rank} of 3 could not exchange" in message
    assert time.monotonic() - begun < 60
    for worker in lost.workers:
        worker.kill()


def test_what_cannot_be_spread_is_refused_in_a_sentence(processes: Processes) -> None:
    words = {
        "DTensor": "query is a DTensor; context_parallel takes this rank's own rows, query.to_local()",
        "state": "state: inside lln.distributed.context_parallel a sequence begins with the first rank's rows",
        "offsets": "cu_seqlens must be offsets in all rows of all ranks",
        "cross": "a pair of cu_seqlens: packed sequences can be spread over ranks only in self attention",
        "mix": "mix='evidence' is not supported inside lln.distributed.context_parallel",
        "overlap": "overlap inside lln.distributed.context_parallel: windows that overlap are not spread over ranks",
        "weights": "need_weights inside lln.distributed.context_parallel: P has a column for the keys of every rank",
        "peer": "performer inside lln.distributed.context_parallel: of all mechanisms LLN attention alone",
        "sample": "statistics='sample' looks at all tokens",
        "torch": "LLN attention inside torch's own context_parallel, which deals tokens out from both ends",
        "order": "load_balancer must be None: rows must lie one after another",
        "lengths": "lengths must have one number for each of the 2 ranks; got [1]",
        "told": "this rank should hold 7 tokens according to lengths or buffers, and got 8",
    }
    for found in processes.run(2, attempt):
        assert found.keys() == words.keys()
        for name, message in found.items():
            assert words[name] in message


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offsets", [None, (0, 4, 4, 31, 60)])
def test_every_row_gets_its_whole_block_and_no_rank_more_rows_than_one_block_has(
    offsets: tuple[int, ...] | None, is_causal: bool
) -> None:
    size, lengths = 8, (11, 0, 1, 3, 20, 25)
    pieces = find_pieces(lengths, offsets)
    reaches = [find_block_reach(piece, size, is_causal, anywhere=False) for piece in pieces]
    ends = offsets or (0, 60)
    for taker, (piece, reach) in enumerate(zip(pieces, reaches, strict=True)):
        rows = set(range(piece.start, piece.stop))
        assert reach.before < size
        assert reach.after < size
        for giver, other in enumerate(pieces):
            for share in list_shares(other, piece, reach) if giver != taker else []:
                got = range(other.start + share.start, other.start + share.stop)
                assert got and rows.isdisjoint(got)  # noqa: PT018
                rows |= set(got)
        for row in range(piece.start, piece.stop):
            begin = max(end for end in ends if end <= row)
            end = min(end for end in ends if end > row)
            first = begin + (row - begin) // size * size
            assert rows >= set(range(first, row + 1 if is_causal else min(first + size, end)))


@pytest.mark.parametrize(("total", "ranks", "multiple"), [(10, 4, 1), (10, 4, 3), (0, 2, 1), (1, 3, 5), (100, 7, 8)])
def test_rows_are_split_evenly_and_in_whole_blocks(total: int, ranks: int, multiple: int) -> None:
    counts = split_evenly(total, ranks, multiple)
    assert sum(counts) == total
    assert len(counts) == ranks
    whole = [count for count in counts if count % multiple]
    assert len(whole) <= 1
    if multiple == 1:
        assert max(counts) - min(counts) <= 1
