"""What attention must do, by the same test functions on PyTorch, JAX and, by `make test-mindspore`, MindSpore."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from helpers.ports import CASES, OnJax, OnMindSpore, OnTorch, attend_naively, make_case

ENDS: dict[str, Any] = {"torch": OnTorch()}
if importlib.util.find_spec("jax") is not None:
    ENDS["jax"] = OnJax()
if importlib.util.find_spec("mindspore") is not None:
    ENDS |= {f"mindspore {mode}": OnMindSpore(mode) for mode in ("pynative", "graph")}
EVERY = [(end, case) for end, found in ENDS.items() for case in found.cases]
each = pytest.mark.parametrize(("end", "case"), EVERY)


def is_close(first: Any, second: Any, most: float = 1e-12) -> bool:
    return float(abs(first - second).max()) <= most


@each
def test_it_is_the_equation(end: str, case: str) -> None:
    given = make_case()
    assert is_close(ENDS[end].attend(*given, case), attend_naively(*given, case))


@each
def test_float32_is_close_to_it(end: str, case: str) -> None:
    given = make_case(dtype="float32")
    out = ENDS[end].attend(*given, case)
    assert out.dtype == np.float32
    assert is_close(out, attend_naively(*given, case), 1e-5)


@each
def test_rows_sum_to_one(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    out = ENDS[end].attend(q, k, np.ones_like(v), mask, case)
    first = mask.argmax(1) if CASES[case].get("is_causal") else [0, 0]
    if "block_size" in CASES[case]:  # rows before the first valid token are in no block
        first = mask.argmax(1)
    for sample in range(2):
        # A block whose keys are all hidden gives nothing, so a row of LLN+Diag may have LLN's part alone.
        sums = out[sample, :, first[sample] :]
        whole = abs(sums - 1) < 1e-12
        assert (whole | (abs(sums - 0.3) < 1e-12)).all() if "block_size" in CASES[case] else whole.all()
    assert is_close(out[1], 1.0)  # where nothing is hidden


@each
def test_padding_and_batch_mates_are_invisible(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    other = make_case(seed=1)
    hidden = ~mask[:, None, :, None]
    changed = [np.where(hidden, 100 * theirs, ours) for ours, theirs in zip((k, v), other[1:3], strict=True)]
    out = ENDS[end].attend(q, k, v, mask, case)
    assert is_close(out, ENDS[end].attend(q, *changed, mask, case))
    for t, theirs in zip((q, *changed), other, strict=False):
        t[1] = theirs[1]
    assert is_close(out[0], ENDS[end].attend(q, *changed, mask, case)[0])


@pytest.mark.parametrize(("end", "case"), [(end, case) for end, case in EVERY if "causal" in case])
def test_nobody_sees_the_future(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    mask[:] = True
    before = ENDS[end].attend(q, k, v, mask, case)
    later = [t.copy() for t in (q, k, v)]
    for t in later:
        t[:, :, 33:] *= 1e3
    after = ENDS[end].attend(*later, mask, case)
    assert (after[:, :, :33] == before[:, :, :33]).all()
    assert not is_close(after[:, :, 33:], before[:, :, 33:], 1.0)


@each
def test_a_sequence_in_two_pieces_is_the_whole(end: str, case: str) -> None:
    options = CASES[case]
    if "block_size" in options and (end.startswith("mindspore") or "is_causal" not in options):
        pytest.skip("a state of blocks is causal, and not in MindSpore")
    q, k, v, mask = make_case(40)
    whole = ENDS[end].attend(q, k, v, mask, case)
    cut = 20

    def take(part: slice) -> tuple[Any, ...]:
        return (*(t[:, :, part] for t in (q, k, v)), mask[:, part])

    if "is_causal" in options:
        first, state = ENDS[end].attend(*take(slice(cut)), case, keep=True)
        second, _ = ENDS[end].attend(*take(slice(cut, None)), case, state=state, keep=True)
        assert is_close(np.concatenate([first, second], 2), whole)
        return
    states = [ENDS[end].attend(*take(part), case, keep=True)[1] for part in (slice(cut), slice(cut, None))]
    both = ENDS[end].merge(*states)
    none = k[:, :, :0], v[:, :, :0], mask[:, :0]
    assert is_close(ENDS[end].attend(q, *none, case, state=both, keep=True)[0], whole)


@pytest.mark.parametrize(("end", "case"), [(end, case) for end, case in EVERY if end != "torch"])
def test_gradients_are_those_of_pytorch(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    weights = np.random.default_rng(2).standard_normal((*q.shape[:3], v.shape[3]))
    found = ENDS[end].differentiate(q, k, v, mask, weights, case)
    expected = OnTorch().differentiate(q, k, v, mask, weights, case)
    for ours, theirs in zip(found, expected, strict=True):
        assert is_close(ours, theirs, 1e-11 * abs(theirs).max())


@each
def test_large_exponents_neither_overflow_nor_vanish(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    q, k = 40 * q, 100 * k
    assert is_close(ENDS[end].attend(q, k, v, mask, case), attend_naively(q, k, v, mask, case), 1e-10)


@each
def test_a_sample_without_any_key_gives_zeros_and_no_gradient(end: str, case: str) -> None:
    q, k, v, mask = make_case()
    mask[0] = False
    assert (ENDS[end].attend(q, k, v, mask, case)[0] == 0).all()
    weights = np.ones((*q.shape[:3], v.shape[3]))
    for g in ENDS[end].differentiate(q, k, v, mask, weights, case):
        assert np.isfinite(g).all()
        assert (g[0] == 0).all()
