"""backend="triton" rounds no worse than the eager back end, and holds where exponentials would overflow or vanish."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import normal, relative_error
from helpers.triton_cases import (
    BACKEND,
    DEVICE,
    GPU,
    MARKS,
    MODES,
    Case,
    Tensors,
    attend,
    check,
    errors,
    evaluate,
    find_tolerance,
    passes,
)
from helpers.untyped import lln_attention
from lln import LLNState

pytestmark = MARKS

modes = pytest.mark.parametrize("mode", MODES)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


# The interpreter cuts bfloat16 off where a GPU rounds it: only there its errors say anything.
ROUNDED = [torch.float16, torch.bfloat16] if GPU else [torch.float16]

PRECISIONS = [(dtype, 1.0, mode) for dtype in (torch.float32, *ROUNDED[1:]) for mode in MODES]
PRECISIONS += [(torch.float16, 1.0, "bidirectional"), (torch.float16, 1.0, "causal blocks")]
PRECISIONS += [(torch.float32, 20.0, "causal"), (torch.float32, 20.0, "blocks")]


@pytest.mark.parametrize(("dtype", "size", "mode"), PRECISIONS)
def test_errors_are_at_most_twice_those_of_the_eager_back_end(dtype: torch.dtype, size: float, mode: str) -> None:
    options: dict[str, Any] = {"dim": 64, "dtype": dtype, "size": size, "return_state": mode != "blocks"}
    options |= {"scale": 0.125 / size} | MODES[mode]  # ordinary softmax in the blocks
    case = Case((200,), key_heads=1, alpha="[H, D]", beta="[H, D]", **options)
    expected = evaluate(case, "eager", wide=True)
    found, eager = (errors(evaluate(case, backend), expected) for backend in (BACKEND, "eager"))
    for name in found:
        assert found[name] <= find_tolerance(name, dtype, eager[name], 1e-6), (name, found[name], eager[name])


@causal_or_not
@pytest.mark.parametrize("dtype", ROUNDED)
def test_narrow_types_with_every_option(dtype: torch.dtype, is_causal: bool) -> None:
    options: dict[str, Any] = {"mask": "holes", "mix": "wide pair", "alpha": "[B, H]", "beta": "[B, H, D]"}
    options |= {"state": is_causal, "return_state": is_causal, "value_dim": 24}
    check(
        Case((66, 0, 7), packed=True, key_heads=1, group=2, is_causal=is_causal, block_size=48, dtype=dtype, **options)
    )


def qkv(length: int = 130, dim: int = 16) -> list[Tensor]:
    return [normal(s, 1, 1, length, dim).float() for s in range(3)]


def attend_both_ways(tensors: list[Tensor], *coefficients: float, **options: Any) -> tuple[Tensors, Tensors]:
    found, exact = passes(tensors, *coefficients, **options), passes(tensors, *coefficients, wide=True, **options)
    assert [name for name, x in found.items() if not x.isfinite().all()] == []
    return found, exact


@causal_or_not
@pytest.mark.parametrize(("size", "shift"), [(10.0, 0.0), (60.0, 300.0), (60.0, -300.0), (200.0, 0.0), (400.0, 0.0)])
def test_float32_holds_at_large_exponents(size: float, shift: float, is_causal: bool) -> None:
    """max|alpha q| = max|beta k| = size; a constant added to beta k changes nothing in P."""
    q, k, v = qkv()
    alpha, beta = (size / x.abs().max().item() for x in (q, k))
    assert max(errors(*attend_both_ways([q, k + shift / beta, v], alpha, beta, is_causal=is_causal)).values()) <= 1e-3


EVERY, ONE = slice(None), slice(3, 4)  # of the channels


@pytest.mark.parametrize(
    ("place", "channels", "block_size"),
    [(20, EVERY, None), (64, ONE, None), (100, EVERY, 48), (100, ONE, None), (129, EVERY, None)],
)
def test_a_huge_later_key_leaves_earlier_rows_alone(place: int, channels: slice, block_size: int | None) -> None:
    """Also inside one chunk: a maximum that looks ahead would make the earlier weights vanish."""
    q, k, v = qkv()
    later = k.clone()
    later[..., place, channels] += 1e3
    g = normal(30, 1, 1, 130, 16)
    g[..., place:, :] = 0
    options: dict[str, Any] = {"is_causal": True, "block_size": block_size, "g": g}
    options |= {"scale": 1e-3} if block_size else {}
    without = passes([q, k, v], 1.5, 1.0, wide=True, **options)
    found, exact = attend_both_ways([q, later, v], 1.5, 1.0, **options)
    for name in without:
        assert relative_error(found[name][..., :place, :], without[name][..., :place, :]) <= 1e-5, name
        assert name == "out" or not found[name][..., place:, :].any()
    assert relative_error(found["out"], exact["out"]) <= 1e-3


@causal_or_not
@pytest.mark.parametrize("slope", [5.0, -5.0, 0.5])
def test_keys_may_grow_or_fall_steadily(slope: float, is_causal: bool) -> None:
    q, k, v = qkv()
    k = k + slope * torch.arange(130)[:, None]
    assert max(errors(*attend_both_ways([q, k, v], 1.5, 1.0, is_causal=is_causal)).values()) <= 1e-3


@causal_or_not
@pytest.mark.parametrize(("query_size", "key_size"), [(1e30, 1.0), (1.0, 1e30), (1e30, 1e30), (3.4e38, 3.4e38)])
def test_huge_numbers_stay_finite(query_size: float, key_size: float, is_causal: bool) -> None:
    q, k, v = qkv(20)
    q, k = ((size * x).clamp(-3.4e38, 3.4e38) for size, x in ((query_size, q), (key_size, k)))
    attend_both_ways([q, k, v], 1.5, 1.5, is_causal=is_causal)


@causal_or_not
@pytest.mark.parametrize("length", [0, 9])
@pytest.mark.parametrize(("level", "key_level"), [(500.0, 500.0), (-500.0, -500.0), (1e5, 0.0), (-1e5, 0.0)])
def test_a_state_keeps_its_precision_however_large_its_sum(
    level: float, key_level: float, length: int, is_causal: bool
) -> None:
    """log_sum is float64 so that the channels' differences survive a large common part, in and out."""
    rows = length if is_causal else 9
    shapes = [(rows, 16), (length, 16), (length, 16), (16, 16)]
    q, k, v, mean = (normal(s, 1, 2, *shape) for s, shape in enumerate(shapes))
    k, log_sum = (k + key_level / 1.5).float().double(), level + normal(4, 1, 2, 16)
    options: dict[str, Any] = {"is_causal": is_causal, "return_state": True}
    exact, after = lln_attention(q, k, v, 1.5, 1.5, state=LLNState(log_sum, mean), **options, backend="eager")
    q, k, v, mean = (x.to(DEVICE, torch.float32) for x in (q, k, v, mean))
    found, state = attend(q, k, v, 1.5, 1.5, state=LLNState(log_sum.to(DEVICE), mean), **options)
    rounding = 1e-4 if key_level and length else 2e-6  # of beta k in float32
    assert relative_error(found.cpu(), exact) <= rounding
    assert (state.log_sum.cpu() - after.log_sum).abs().max() <= rounding
    assert relative_error(state.mean_value.cpu(), after.mean_value) <= rounding
