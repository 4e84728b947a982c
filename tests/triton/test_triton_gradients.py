"""backend="triton": every gradient for every pair of options, through states, of one argument alone, with dropout."""

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.call_options import cover_pairs
from helpers.tensors import normal, relative_error
from helpers.triton_cases import (
    BACKEND,
    DEVICE,
    GPU,
    MARKS,
    Case,
    assemble,
    attend,
    build_arguments,
    check,
    errors,
    evaluate,
)
from helpers.untyped import lln_attention
from lln import LLNState
from lln.kernels.triton import op, recognise

pytestmark = MARKS

SHAPES = ["number", "[]", "[H]", "[B, H]", "[H, D]", "[B, H, D]"]
COEFFICIENTS: dict[str, list[Any]] = {
    "alpha": SHAPES,
    "beta": SHAPES,
    "mix": ["number", "[H]", "[H, D]", "[B, H, D]", "pair", "wide pair", "half pair"],
}
STRUCTURE: dict[str, list[Any]] = {"is_causal": [False, True], "packed": [False, True], "group": [1, 2, 3]}
OTHERS: dict[str, list[Any]] = {
    "block_size": [None, 16, 48, 100],
    "mask": ["none", "holes", "left", "right", "dead sample"],
    "state": [False, True],
    "return_state": [False, True],
    "value_dim": [16, 24],
    "scale": [None, 0.8],
}
OPTIONS = COEFFICIENTS | STRUCTURE | OTHERS
# The shape of a coefficient meets the structure of the call; that it meets every mask as well would tell nothing new.
COUNTED = [p for p in itertools.combinations(OPTIONS, 2) if not set(p) & set(COEFFICIENTS) or set(p) & set(STRUCTURE)]


def make_case(options: dict[str, Any]) -> Case:
    lengths = (65, 0, 7) if options["packed"] else (40, 40)
    return Case(lengths, key_heads=2 if options["group"] == 1 else 1, **options)


CASES = [make_case(options) for options in cover_pairs(OPTIONS, COUNTED)]
if GPU:
    CASES += [
        dataclasses.replace(
            c,
            lengths=(700, 0, 500) if c.packed else (1100, 1100),
            dim=64,
            value_dim=64 if c.value_dim == 16 else c.value_dim,
        )
        for c in CASES
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_options(case: Case) -> None:
    check(case)


EVERYTHING: dict[str, Any] = {"alpha": "[B, H]", "beta": "[H, D]", "key_heads": 1, "value_dim": 24}
ALONE = {
    "bidirectional": Case((20, 20), state=True, return_state=True, **EVERYTHING),
    "causal blocks": Case(
        (20, 20), is_causal=True, block_size=16, mix="wide pair", state=True, return_state=True, **EVERYTHING
    ),
}
LEAVES = [
    (mode, name) for mode, case in ALONE.items() for name, x in build_arguments(case).items()
    if isinstance(x, Tensor) and x.is_floating_point()
]  # fmt: skip


@pytest.mark.parametrize(("dim", "dtype"), [(130, torch.float32), (256, torch.float16), (128, torch.float32)])
def test_masks_that_causal_kernels_have_no_room_for(dim: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    case = Case((20,), key_heads=1, dim=dim, value_dim=16, is_causal=True, mask="left", dtype=dtype)
    check(case)
    monkeypatch.setattr(op, "apply", None)  # the kernels
    monkeypatch.setattr(recognise, "KNOWN", {})  # a call like an earlier one would not come so far
    with contextlib.nullcontext() if dim > 128 else pytest.raises(TypeError):
        evaluate(case)


@pytest.mark.parametrize(("mode", "name"), LEAVES)
def test_exactly_what_requires_grad_gets_it(mode: str, name: str) -> None:
    case = ALONE[mode]
    given = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in build_arguments(case).items()}
    given[name].requires_grad_()
    result = lln_attention(**assemble(given), backend=BACKEND)
    g = normal(30, *result.shape).to(result)
    result.backward(g)
    expected = evaluate(case, "eager", wide=True, of=("out",))[f"d {name}"]
    grad = given[name].grad
    assert grad is not None
    assert relative_error(grad.cpu(), expected) <= 2e-5
    assert all(x.grad is None for n, x in given.items() if isinstance(x, Tensor) and n != name)


@pytest.mark.parametrize("mode", ALONE)
def test_without_any_gradient_there_is_no_graph_and_the_same_output(mode: str) -> None:
    given = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in build_arguments(ALONE[mode]).items()}
    out = lln_attention(**assemble(given), backend=BACKEND)
    assert not out.requires_grad
    for guard in (torch.no_grad, torch.inference_mode):
        leaves = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
        leaves["query"].requires_grad_()
        with guard():
            assert torch.equal(lln_attention(**assemble(leaves), backend=BACKEND), out)
    assert torch.equal(lln_attention(**assemble(leaves), backend=BACKEND), out)


@pytest.mark.parametrize("of", ["out", "log_sum", "mean_value"])
@pytest.mark.parametrize(("is_causal", "block_size"), [(False, None), (True, None), (True, 16)])
def test_each_result_gives_its_own_gradient(is_causal: bool, block_size: int | None, of: str) -> None:
    """A result that nobody used has no gradient, which is not a gradient of garbage."""
    case = Case((20, 20), is_causal=is_causal, block_size=block_size, state=True, return_state=True, **EVERYTHING)
    check(case, of=(of,))


# Sequences in pieces.


def attend_whole(is_causal: bool, block_size: int | None, length: int = 70) -> tuple[Case, dict[str, Tensor]]:
    """A case, and what float64 makes of it in one piece."""
    options: dict[str, Any] = {"is_causal": is_causal, "block_size": block_size, "alpha": "[H]", "beta": "[H]"}
    case = Case((length, length), key_heads=1, group=2, mask="left", value_dim=8, return_state=is_causal, **options)
    return case, evaluate(case, "eager", wide=True, of=("out", "log_sum", "mean_value"))


def attend_in_pieces(case: Case, cuts: list[int]) -> dict[str, Tensor]:
    """The same case, handed over piece by piece with the state in between; gradients flow back through it."""
    given = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in build_arguments(case).items()}
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    state: Any = None
    outs = []
    for rows in itertools.pairwise([0, *cuts, case.lengths[0]]):
        piece = {n: given[n][..., slice(*rows), :] for n in ("query", "key", "value")}
        piece["key_mask"] = given["key_mask"][:, slice(*rows)]
        arguments = assemble(given) | piece
        out, state = lln_attention(**arguments, state=state, return_state=True, backend=BACKEND)
        outs.append(out)
    found = {"out": torch.cat(outs, -2), "log_sum": state.log_sum, "mean_value": state.mean_value}
    weights = [normal(30 + s, *x.shape).to(x) for s, x in enumerate(found.values())]
    if case.block_size is not None:
        found |= {"block_key": state.block_key, "block_value": state.block_value}
    grads = torch.autograd.grad(list(found.values())[:3], list(leaves.values()), weights)
    found |= {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach().cpu().double() for n, x in found.items()}


@pytest.mark.parametrize(
    ("cuts", "block_size"), [([17, 64], None), ([1], 16), ([0, 35, 35, 69], 16), ([17, 64], 48)], ids=str
)
def test_a_prompt_may_be_cut_anywhere(cuts: list[int], block_size: int | None) -> None:
    case, expected = attend_whole(True, block_size)
    assert max(errors(attend_in_pieces(case, cuts), expected).values()) <= 2e-5


@pytest.mark.parametrize("block_size", [None, 4])
def test_token_by_token_is_the_whole(block_size: int | None) -> None:
    length, prompt = (500, 100) if GPU else (16, 12)
    case, expected = attend_whole(True, block_size, length)
    found = attend_in_pieces(case, list(range(prompt, length)))
    assert max(errors(found, expected).values()) <= 2e-5
    # Every key comes in as the exponential of a float32, whose own rounding shows.
    assert (found["log_sum"] - expected["log_sum"]).abs().max() <= 2e-6


def test_states_of_two_sets_of_keys_merge_and_pass_gradients_on() -> None:
    case, expected = attend_whole(False, None)
    given = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in build_arguments(case).items()}
    leaves = {n: given[n].requires_grad_() for n in ("query", "key", "value", "alpha", "beta")}
    query, alpha, beta = given["query"], given["alpha"], given["beta"]
    nothing = query[:, :, :0]
    states: list[LLNState] = []
    for rows in (slice(0, 30), slice(30, None)):
        key, value, key_mask = given["key"][:, :, rows], given["value"][:, :, rows], given["key_mask"][:, rows]
        states.append(attend(nothing, key, value, alpha, beta, key_mask=key_mask, return_state=True)[1])
    empty = [given[n][:, :, :0] for n in ("key", "value")]
    out = attend(query, *empty, alpha, beta, state=states[0].merge(states[1]))
    grads = torch.autograd.grad(out, list(leaves.values()), normal(30, *out.shape).to(out))
    found = {"out": out} | {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}
    assert max(errors({n: x.detach().cpu().double() for n, x in found.items()}, expected).values()) <= 2e-5


# Dropout: its weights are drawn by a seed, so that for one seed everything above must hold of what is kept.

DROPOUT: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal blocks": {"is_causal": True, "block_size": 16, "mix": (0.7, 0.6)},
    "packed blocks": {
        "block_size": 48,
        "key_mask": torch.arange(70)[None] != 9,
        "cu_seqlens": torch.tensor([0, 1, 1, 70], dtype=torch.int32),
    },
}


def attend_with_dropout(leaves: list[Tensor], mode: str, seed: int = 1) -> Tensor:
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in DROPOUT[mode].items()}
    torch.manual_seed(seed)
    return attend(*leaves, dropout_p=0.3, **options)


def dropout_leaves() -> list[Tensor]:
    q, k, v = (normal(s, 1, heads, 70, 16) for s, heads in enumerate((2, 1, 1)))
    leaves = [q, k, v, torch.tensor([1.2, 1.5]), torch.tensor([1.4])]
    return [x.to(DEVICE, torch.float32).requires_grad_() for x in leaves]


@pytest.mark.parametrize("mode", DROPOUT)
def test_dropout_has_the_gradient_of_what_it_kept(mode: str) -> None:
    leaves = dropout_leaves()
    out = attend_with_dropout(leaves, mode)
    g = normal(30, *out.shape).to(out)
    grads = torch.autograd.grad(out, leaves, g)
    # Linear in the values: exactly their gradient times them.
    exact = (out.double() * g.double()).sum()
    assert (grads[2].double() * leaves[2].double()).sum().item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-4)
    # Of all else a central difference, along a random direction for each.
    for moving in ((0,), (1,), (3, 4)):
        directions = {i: normal(40 + i, *leaves[i].shape).to(leaves[i]) for i in moving}
        sides = []
        for step in (0.01, -0.01):
            moved = [x + step * directions[i] if i in moving else x for i, x in enumerate(leaves)]
            sides.append((attend_with_dropout(moved, mode).double() * g).sum().item())
        slope = sum((grads[i].double() * x).sum().item() for i, x in directions.items())
        assert slope == pytest.approx((sides[0] - sides[1]) / 0.02, rel=5e-3, abs=2e-2)


@pytest.mark.parametrize(
    ("mode", "use_reentrant"), [("causal blocks", False), ("causal blocks", True), ("packed blocks", False)]
)
def test_checkpointing_repeats_dropout_and_gradients_exactly(mode: str, use_reentrant: bool) -> None:
    found = []
    for kept in (True, False):
        leaves = dropout_leaves()
        torch.manual_seed(1)

        def call(*leaves: Tensor) -> Tensor:
            options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in DROPOUT[mode].items()}
            return attend(*leaves, dropout_p=0.3, **options)

        out = call(*leaves) if kept else checkpoint(call, *leaves, use_reentrant=use_reentrant)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_two_channels_with_a_factor_each_do_not_share_one(is_causal: bool) -> None:
    check(Case((20, 20, 20), dim=2, beta="[H, D]", is_causal=is_causal))
