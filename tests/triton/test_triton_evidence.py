"""The evidence read in the kernels: outputs, states and every gradient equal the eager back end's in float64, which its
own tests hold to the dense definition."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.call_options import cover_pairs
from helpers.evidence_cases import Case, build, check
from helpers.replaying import count_played, forget_played
from helpers.tensors import normal, relative_error
from helpers.triton_cases import BACKEND, DEVICE, GPU, MARKS, only_triton
from helpers.untyped import lln_attention
from lln.kernels import eager
from lln.naive import naive_evidence

pytestmark = MARKS
OPTIONS: dict[str, list[Any]] = {
    "directions": [None, "signed", 40],
    "packed": [False, True],
    "group": [1, 2],
    "block_size": [None, 16, 48],
    "mask": ["none", "holes", "left", "dead sample"],
    "beta": ["number", "[B, H]", "[H, D]"],
    "mix": ["number", "[H]", "wide pair"],
    "value_dim": [16, 24],
    "scale": [None, 0.8],
}
LENGTHS = {False: (40, 40), True: (65, 0, 7)}
# What reaches the kernels' programs in the same way as with the paper's read need not meet everything again.
MEETING = {"directions", "packed", "group", "block_size"}
COUNTED = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) & MEETING]
FIXED: dict[str, list[Any]] = {"is_causal": [False], "state": [False], "return_state": [False]}
CASES = [
    Case(LENGTHS[options["packed"]], heads=3 - options["group"], **{name: options[name] for name in OPTIONS})
    for options in cover_pairs(OPTIONS | FIXED, COUNTED)
]
CAUSAL = OPTIONS | {"block_size": [None], "mix": ["number"]}
CASES += [
    Case(LENGTHS[options["packed"]], heads=3 - options["group"], is_causal=True, **{n: options[n] for n in OPTIONS})
    for options in cover_pairs(CAUSAL | FIXED, [pair for pair in COUNTED if not {"block_size", "mix"} & set(pair)])
]
if GPU:
    CASES += [dataclasses.replace(c, lengths=(700, 0, 500) if c.packed else (1100, 1100), dim=64) for c in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_options(case: Case) -> None:
    check(case)


MORE = {
    "cross": Case((33, 33), key_lengths=(80, 80), directions="signed", group=2, scale=0.8),
    "cross packed": Case((20, 30), key_lengths=(0, 70), packed=True),
    "state": Case((40, 40), state=True, return_state=True, beta="[H, D]", value_dim=24),
    "state signed": Case((20, 20), state=True, return_state=True, directions="signed", mask="left"),
    "returned": Case((40, 40), return_state=True, beta="[B, H]", mask="dead sample"),
    "no queries": Case((0, 0), key_lengths=(40, 40), return_state=True),
    "no keys": Case((40, 40), key_lengths=(0, 0), state=True),
    "nothing": Case((20, 20), key_lengths=(0, 0)),
    "narrow": Case(dim=5, value_dim=3, directions="signed"),
    "several sets": Case((50, 50), directions=150, group=2, block_size=16, mask="holes", mix="wide pair"),
    "several sets packed": Case((40, 0, 9), directions=130, packed=True, beta="[B, H]", return_state=True),
    "directions, state": Case((40, 40), directions=20, state=True, return_state=True, beta="[H, D]", mask="left"),
    "directions, state goes in": Case((40, 40), directions=20, state=True),
    "directions, no queries": Case((0, 0), key_lengths=(40, 40), directions=20, return_state=True),
    "directions, no keys": Case((40, 40), key_lengths=(0, 0), directions=20, state=True),
    "directions, narrow": Case(dim=5, value_dim=3, directions=7),
    "directions, large": Case(directions=24, beta="[H, D]", size=30.0),
    "directions, far": Case(directions=70, shift=50.0, beta="[H, D]"),
    "causal, splits": Case((200,), is_causal=True, heads=1, mask="left", return_state=True),
    "causal, splits, signed": Case((130,), is_causal=True, heads=1, directions="signed", state=True),
    "causal, state": Case((40, 40), is_causal=True, state=True, return_state=True, beta="[H, D]", value_dim=24),
    "causal, state signed": Case(
        (20, 20), is_causal=True, state=True, return_state=True, directions="signed", mask="left"
    ),
    "causal, returned": Case(
        (70, 0, 5), is_causal=True, packed=True, return_state=True, directions=20, mask="dead sample"
    ),
    "causal, a token": Case((1, 1), is_causal=True, state=True, return_state=True, directions=140),
    "causal, nothing": Case((0, 0), is_causal=True, state=True, return_state=True),
    "causal, narrow": Case((20, 20), is_causal=True, dim=5, value_dim=3, directions="signed"),
    "causal, large": Case((66,), is_causal=True, heads=1, group=2, beta="[H, D]", size=30.0, mask="holes"),
    "causal, large, state": Case(
        (12,), is_causal=True, heads=1, beta="[H, D]", size=30.0, directions=20, state=True, return_state=True
    ),
    "causal, far": Case((130,), is_causal=True, heads=1, shift=50.0, directions="signed", beta="[H, D]"),
    "large": Case(beta="[H, D]", size=30.0),
    "far": Case(shift=50.0, directions="signed", beta="[H, D]"),
    "far, blocks": Case((100, 100), shift=50.0, block_size=32),
    "bfloat16": Case(dtype=torch.bfloat16, dim=32),
    "bfloat16 far": Case(dtype=torch.bfloat16, dim=32, shift=50.0, directions="signed", beta="[H, D]"),
    "bfloat16 causal": Case((100, 100), is_causal=True, dtype=torch.bfloat16, dim=32, beta="[H, D]"),
    "bfloat16 causal far": Case((70, 70), is_causal=True, dtype=torch.bfloat16, dim=32, shift=50.0),
    "float16 causal": Case((70, 70), is_causal=True, dtype=torch.float16, dim=32, directions=40, group=2),
    "bfloat16 directions": Case(dtype=torch.bfloat16, dim=32, directions=130, beta="[H, D]"),
    "bfloat16 directions, blocks": Case(dtype=torch.bfloat16, dim=32, directions=70, group=2, block_size=16),
    "bfloat16 directions, far": Case(dtype=torch.bfloat16, dim=32, directions=70, shift=50.0),
    "float16 directions": Case(dtype=torch.float16, dim=32, directions=70, block_size=16, mask="left"),
    "float16": Case(dtype=torch.float16, dim=32, directions="signed", group=2, block_size=16),
    "float16 far": Case(dtype=torch.float16, dim=32, shift=50.0, beta="[H, D]"),
}
SLOW = {"causal, large", "several sets packed"}  # seconds each in the interpreter


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=name, marks=pytest.mark.long if name in SLOW else ()) for name, one in MORE.items()]
)
def test_other_calls(case: Case) -> None:
    check(case)


def test_outputs_and_gradients_equal_the_dense_definition() -> None:
    given = build(Case((37, 37), directions="signed", beta="[H, D]", group=2))
    ways = []
    for attention, place in ((naive_evidence, ("cpu", torch.float64)), (attend_by_kernels, (DEVICE, torch.float32))):
        q, k, v, beta = (given[n].to(*place).requires_grad_() for n in ("query", "key", "value", "beta"))
        out = attention(q, k, v, beta=beta, directions="signed")
        grads = torch.autograd.grad(out, (q, k, v, beta), normal(3, *out.shape).to(out))
        ways.append([t.detach().cpu().double() for t in (out, *grads)])
    for theirs, ours in zip(*ways, strict=True):
        assert relative_error(ours, theirs) <= 2e-5


def attend_by_kernels(*qkv: Tensor, **options: Any) -> Any:
    return lln_attention(*qkv, read="evidence", backend=BACKEND, **options)


def test_a_sample_without_a_key_gives_zeros_and_no_nan() -> None:
    q, k, v = (normal(i, 2, 1, 40, 16).float().to(DEVICE).requires_grad_() for i in range(3))
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    out = attend_by_kernels(q, k, v, beta=1.3, directions="signed", key_mask=mask)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[0].any()
    assert all(not g[0].any() and bool(g.isfinite().all()) for g in grads)
    assert out[1].any()


@pytest.mark.parametrize(("channels", "is_causal"), [(None, False), (70, False), (None, True)])
def test_dropout_leaves_what_it_keeps_unbiased_and_its_gradients_are_those_of_one_mask(
    channels: int | None, is_causal: bool
) -> None:
    q, k, v = (normal(i, 1, 1, 64, 16).float().to(DEVICE).requires_grad_() for i in range(3))
    way = None if channels is None else 0.5 * normal(9, channels, 16).float().to(DEVICE)
    attend = functools.partial(attend_by_kernels, directions=way, is_causal=is_causal)
    dense = attend(q, k, v, beta=1.3)
    torch.manual_seed(0)
    several = torch.stack([attend(q, k, v, beta=1.3, dropout_p=0.3) for _ in range(24)])
    assert not torch.equal(several[0], several[1])
    assert relative_error(several.mean(0).double(), dense.double()) < 0.25
    torch.manual_seed(1)
    out = attend(q, k, v, beta=1.3, dropout_p=0.3)
    g = normal(5, *out.shape).to(out)
    (dv,) = torch.autograd.grad(out, v, g)
    torch.manual_seed(1)
    # The output is linear in the values.
    others = normal(6, *v.shape).to(v)
    again = attend(q, k, others, beta=1.3, dropout_p=0.3)
    assert_sums_agree(again * g, others * dv, 1e-4)
    torch.manual_seed(1)
    (dq,) = torch.autograd.grad(attend(q, k, v, beta=1.3, dropout_p=0.3), q, g)
    step = 1e-2 * normal(7, *q.shape).to(q)
    ends = []
    for sign in (1.0, -1.0):
        torch.manual_seed(1)
        ends.append((attend(q + sign * step, k, v, beta=1.3, dropout_p=0.3) * g).double())
    assert_sums_agree((ends[0] - ends[1]) / 2, dq * step, 1e-2)


def assert_sums_agree(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Relative to what is summed: of terms with both signs little may be left."""
    a, b = a.detach().double(), b.detach().double()
    assert float((a.sum() - b.sum()).abs()) <= tolerance * float(b.abs().sum())


@only_triton
def test_a_key_far_larger_than_all_before_it_leaves_these_as_they_are() -> None:
    """What is before it in its own split would vanish beside it, and is done again row by row; other splits are not."""
    given = [normal(i, 1, 1, 132, 16) for i in range(3)]
    given[1][:, :, 130] *= 60.0
    g, found = normal(5, 1, 1, 132, 16), []
    for backend, place in (("eager", ("cpu", torch.float64)), (BACKEND, (DEVICE, torch.float32))):
        leaves = [t.to(*place).requires_grad_() for t in given]
        out = lln_attention(*leaves, beta=2.0, read="evidence", is_causal=True, backend=backend)
        found.append([t.detach().cpu().double() for t in (out, *torch.autograd.grad(out, leaves, g.to(out)))])
    assert float(found[0][1][:, :, 128:130].abs().max()) > 1e-3
    for expected, ours in zip(*found, strict=True):
        assert relative_error(ours, expected) <= 2e-5
        assert relative_error(ours[:, :, 128:130], expected[:, :, 128:130]) <= 1e-4


@only_triton
def test_what_has_no_kernels_is_refused_in_a_sentence_and_auto_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(i, 1, 1, 8, 16).float().to(DEVICE) for i in range(3))
    wide = torch.cat([v] * 9, -1)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"is_causal": True, "block_size": 4},
            "with block_size where is_causal is set for mix='evidence' alone",
        ),
        ({"is_causal": True, "directions": normal(4, 130, 16).to(DEVICE)}, "with up to 128 channels where is_causal"),
        (
            {"mix": "evidence", "block_size": 200},
            "with mix='evidence' for windows of up to 128 keys, and these are 200",
        ),
        ({"value": wide}, "with head dims up to 128, and these are 16 and 144"),
        ({"block_size": 4, "scale": -1.0}, "with blocks that fit into a program"),
    ]
    for options, message in cases:
        given = {"value": v, "beta": 1.3} | options
        with pytest.raises(ValueError, match=message):
            attend_by_kernels(q, k, **given)
        assert lln_attention(q, k, **given, read="evidence", backend="auto").isfinite().all()
    ran: list[str] = []
    monkeypatch.setattr(eager, "attend", lambda call: ran.append("eager"))
    assert attend_by_kernels(q, k, v, beta=1.3).isfinite().all()
    assert ran == []


@only_triton
@pytest.mark.usefixtures("playable")
@pytest.mark.parametrize(("directions", "is_causal"), [(None, False), ("signed", False), (20, False), (None, True)])
def test_a_call_that_comes_again_is_played_and_gives_the_same_bits(directions: Any, is_causal: bool) -> None:
    if isinstance(directions, int):
        directions = normal(9, directions, 16).float().to(DEVICE)
    for seed in range(2):
        q, k, v = (normal(3 * seed + i, 1, 2, 40, 16).float().to(DEVICE).requires_grad_() for i in range(3))

        def call(*given: Tensor) -> list[Tensor]:
            out = attend_by_kernels(*given, beta=1.3, directions=directions, is_causal=is_causal)
            return [out, *torch.autograd.grad(out, given, normal(7, *out.shape).to(out))]

        found = call(q, k, v)
        with forget_played():
            assert all(torch.equal(a, b) for a, b in zip(found, call(q, k, v), strict=True))
    assert count_played() == 2


@only_triton
def test_there_is_no_second_derivative() -> None:
    q, k, v = (normal(i, 1, 1, 8, 16).float().to(DEVICE).requires_grad_() for i in range(3))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attend_by_kernels(q, k, v, beta=1.3).sum(), q, create_graph=True)
