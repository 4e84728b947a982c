"""What attention must be whatever the numbers: distributions, blind to padding, batch mates and the future,
and a fold whose parts may be computed anywhere and merged."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.tensors import make_inputs, normal, relative_error
from helpers.untyped import lln_attention
from lln import LLNState

SEEDS = st.integers(0, 10**6)
LENGTHS = st.integers(1, 140)

pytestmark = pytest.mark.usefixtures("short_chunks_throughout")
BLOCKS = st.sampled_from([None, 1, 5, 64, 200])
EXACT = 1e-12


def holds_for(*strategies: Any) -> Callable[[Callable], Callable]:
    """The same 25 examples every time: a failure here is a bug of the op, never bad luck."""
    rules = settings(deadline=None, max_examples=25, derandomize=True, database=None)
    return lambda test: rules(given(*strategies)(test))


draw_inputs = functools.partial(make_inputs, batch=1, heads=4, key_heads=2, dim=4, value_dim=3, exact=True)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return lln_attention(q, k, v, 1.25, 1.75, **options)


@holds_for(SEEDS, LENGTHS, BLOCKS, st.booleans(), st.sampled_from([1.0, 50.0]))
def test_each_row_is_a_distribution_over_keys(
    seed: int, length: int, block_size: int | None, is_causal: bool, size: float
) -> None:
    q, k, _ = draw_inputs(seed=seed, length=length)
    identity = torch.eye(length, dtype=torch.float64).expand(1, 2, -1, -1)  # then the output is P itself
    p = attend(size * q, size * k, identity, block_size=block_size, is_causal=is_causal)
    assert p.min() >= 0
    assert (p.sum(-1) - 1).abs().max() <= EXACT
    ones = attend(size * q, size * k, torch.ones(1, 2, length, 2).double(), block_size=block_size, is_causal=is_causal)
    assert (ones - 1).abs().max() <= EXACT
    if is_causal:
        assert not p.triu(1).any()


@holds_for(SEEDS, LENGTHS)
def test_the_order_of_keys_is_invisible(seed: int, length: int) -> None:
    q, k, v = draw_inputs(seed=seed, length=length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    assert relative_error(attend(q, k[:, :, order], v[:, :, order]), attend(q, k, v)) <= EXACT


@holds_for(SEEDS, LENGTHS, BLOCKS, st.booleans(), st.integers(0, 70), st.integers(0, 70))
def test_padding_is_invisible(
    seed: int, length: int, block_size: int | None, is_causal: bool, left: int, right: int
) -> None:
    plain = [x.requires_grad_() for x in draw_inputs(seed=seed, length=length)]
    rows = slice(left, left + length)
    padded = [100 * normal(seed + s, *x.shape[:2], left + length + right, x.shape[3]) for s, x in enumerate(plain)]
    for x, y in zip(padded, plain, strict=True):
        x[:, :, rows] = y.detach()
        x.requires_grad_()
    key_mask = torch.zeros(1, left + length + right, dtype=torch.bool)
    key_mask[:, rows] = True
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    expected, out = attend(*plain, **options), attend(*padded, **options, key_mask=key_mask)[:, :, rows]
    assert relative_error(out, expected) <= EXACT
    weight = normal(seed, *expected.shape)
    wanted = torch.autograd.grad((weight * expected).sum(), plain)
    found = torch.autograd.grad((weight * out).sum(), padded)
    floor = 1e-3 * max(x.norm().item() for x in wanted)
    for actual, gradient in zip(found, wanted, strict=True):
        assert relative_error(actual[:, :, rows], gradient, floor) <= 1e-10
        assert not actual[:, :, :left].any()
        assert not actual[:, :, left + length :].any()


@holds_for(SEEDS, LENGTHS, BLOCKS, st.booleans())
def test_batch_mates_are_invisible(seed: int, length: int, block_size: int | None, is_causal: bool) -> None:
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    batch = draw_inputs(seed=seed, length=length, batch=3)
    for x in batch:
        x[1:] *= 1e3
    key_mask = normal(seed, 3, length) > 0
    key_mask[0] = True
    out = attend(*batch, **options, key_mask=key_mask)
    assert relative_error(out[:1], attend(*(x[:1] for x in batch), **options)) <= EXACT


@holds_for(SEEDS, st.integers(2, 140), st.data(), BLOCKS)
def test_prefixes_do_not_see_the_future(seed: int, length: int, data: st.DataObject, block_size: int | None) -> None:
    now = data.draw(st.integers(1, length - 1))
    q, k, v = (x.float() for x in draw_inputs(seed=seed, length=length))
    before = attend(q, k, v, is_causal=True, block_size=block_size)
    for x in (q, k, v):
        x[:, :, now:] *= 1e3
    after = attend(q, k, v, is_causal=True, block_size=block_size)
    assert relative_error(after[:, :, :now], before[:, :, :now]) <= 1e-6
    prefix = attend(q[:, :, :now], k[:, :, :now], v[:, :, :now], is_causal=True, block_size=block_size)
    assert relative_error(after[:, :, :now], prefix) <= 1e-5


@holds_for(SEEDS, LENGTHS, st.sampled_from([0.01, 0.5, 30.0]), BLOCKS, st.booleans())
def test_only_the_products_alpha_q_and_beta_k_matter(
    seed: int, length: int, c: float, block_size: int | None, is_causal: bool
) -> None:
    q, k, v = draw_inputs(seed=seed, length=length)
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    rescaled = lln_attention(c * q, k / c, v, 1.25 / c, 1.75 * c, **options)
    assert relative_error(rescaled, attend(q, k, v, **options)) <= EXACT


def fold(k: Tensor, v: Tensor, **options: Any) -> LLNState:
    """The state of these keys: attention with no query."""
    return attend(k.repeat_interleave(2, dim=1)[:, :, :0], k, v, return_state=True, **options)[1]


def draw_cuts(data: st.DataObject, length: int) -> list[int]:
    return [0, *sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=4))), length]


@holds_for(SEEDS, LENGTHS, st.data())
def test_merged_parts_are_the_whole(seed: int, length: int, data: st.DataObject) -> None:
    q, k, v = draw_inputs(seed=seed, length=length, batch=2)
    key_mask = normal(seed, 2, length) > -0.5
    cuts = draw_cuts(data, length)
    state = LLNState.empty(2, 2, 4, 3, dtype=torch.float64)
    for a, b in itertools.pairwise(cuts):
        state = state.merge(fold(k[:, :, a:b], v[:, :, a:b], key_mask=key_mask[:, a:b]))
    read = attend(q, k[:, :, :0], v[:, :, :0], state=state)
    assert relative_error(read, attend(q, k, v, key_mask=key_mask)) <= EXACT


@holds_for(SEEDS, LENGTHS, BLOCKS, st.integers(0, 70), st.data())
def test_a_causal_sequence_may_be_cut_anywhere(
    seed: int, length: int, block_size: int | None, left: int, data: st.DataObject
) -> None:
    """Outputs and all gradients through the carried state; one sample left padded, with a hole further on."""
    q, k, v = leaves = [x.requires_grad_() for x in draw_inputs(seed=seed, length=length, batch=2)]
    key_mask = torch.ones(2, length, dtype=torch.bool)
    key_mask[1, : min(left, length - 1)] = False
    key_mask[1, length // 2 : length // 2 + 2] = False
    options: dict[str, Any] = {"is_causal": True, "block_size": block_size}
    whole, end = attend(q, k, v, key_mask=key_mask, return_state=True, **options)
    cuts, parts = draw_cuts(data, length), []
    state: Any = None
    for a, b in itertools.pairwise(cuts):
        part = (x[:, :, a:b] for x in leaves)
        out, state = attend(*part, key_mask=key_mask[:, a:b], state=state, return_state=True, **options)
        parts.append(out)
    out = torch.cat(parts, 2)
    assert relative_error(out, whole) <= EXACT
    assert relative_error(state.mean_value, end.mean_value) <= EXACT
    assert torch.allclose(state.log_sum, end.log_sum, rtol=EXACT, atol=EXACT)
    if block_size is not None:
        assert torch.equal(state.count, end.count)
    weight = normal(seed, *whole.shape)
    wanted = torch.autograd.grad((weight * whole).sum() + end.mean_value.sum(), leaves)
    found = torch.autograd.grad((weight * out).sum() + state.mean_value.sum(), leaves)
    floor = 1e-3 * max(x.norm().item() for x in wanted)
    assert max(relative_error(a, b, floor) for a, b in zip(found, wanted, strict=True)) <= 1e-10


@holds_for(SEEDS, st.lists(st.integers(0, 80), min_size=1, max_size=4), BLOCKS, st.data())
def test_packed_causal_sequences_may_be_cut_anywhere(
    seed: int, lengths: list[int], block_size: int | None, data: st.DataObject
) -> None:
    samples = [draw_inputs(seed=seed + s, length=n) for s, n in enumerate(lengths)]
    cuts = [data.draw(st.integers(0, n)) for n in lengths]

    def pack(parts: Sequence[Sequence[Tensor]], state: LLNState | None) -> tuple[list[Tensor], LLNState]:
        sizes = [x[0].shape[2] for x in parts]
        cu_seqlens = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
        packed = (torch.cat([x[i] for x in parts], 2) for i in range(3))
        out, state = attend(
            *packed,
            cu_seqlens=cu_seqlens,
            is_causal=True,
            block_size=block_size,
            state=state,
            return_state=True,
        )
        return list(out.split(sizes, 2)), state

    whole, _ = pack(samples, None)
    heads, state = pack([[x[:, :, :c] for x in sample] for sample, c in zip(samples, cuts, strict=True)], None)
    tails, _ = pack([[x[:, :, c:] for x in sample] for sample, c in zip(samples, cuts, strict=True)], state)
    for expected, head, tail in zip(whole, heads, tails, strict=True):
        assert relative_error(torch.cat([head, tail], 2), expected) <= EXACT


def agree(a: LLNState, b: LLNState) -> bool:
    close = torch.allclose(a.log_sum, b.log_sum, rtol=EXACT, atol=EXACT)
    return close and relative_error(a.mean_value, b.mean_value) <= EXACT


@holds_for(SEEDS, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.sampled_from([1.0, 100.0]))
def test_merge_is_associative_commutative_and_has_an_identity(seed: int, lengths: list[int], size: float) -> None:
    a, b, c = (
        fold(size * k, v, key_mask=normal(seed + s, 2, n) > 0)  # some samples end up empty
        for s, n in enumerate(lengths)
        for _, k, v in [draw_inputs(seed=seed + s, length=n, batch=2)]
    )
    empty = LLNState.empty(2, 2, 4, 3, dtype=torch.float64)
    assert agree(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert agree(a.merge(b), b.merge(a))
    assert agree(a.merge(empty), a)
    assert agree(empty.merge(a), a)
    assert agree(empty.merge(empty), empty)


def test_a_hundred_thousand_single_tokens_merge_to_one_pass() -> None:
    count = 100_000
    k, v = normal(0, 1, 1, count, 4), normal(1, 1, 1, count, 4)
    x = 1.5 * k
    expected = x.softmax(2).transpose(-1, -2) @ v  # the definition of mean_value
    exponents = x.unbind(2)  # each [1, 1, D]
    values = v.float()[..., None, :].expand(-1, -1, -1, 4, -1).unbind(2)  # each [1, 1, D, Dv]: one token's mean
    with torch.no_grad():
        state = LLNState.empty(1, 1, 4, 4)
        for log_sum, mean_value in zip(exponents, values, strict=True):
            state = state.merge(LLNState(log_sum, mean_value))
    assert state.mean_value.dtype == torch.float32
    assert relative_error(state.mean_value, expected) <= 2e-5
    assert torch.allclose(state.log_sum, x.logsumexp(2), rtol=1e-12)


def test_open_blocks_do_not_merge() -> None:
    q, k, v = draw_inputs(seed=0, length=6)
    _, state = attend(q, k, v, is_causal=True, block_size=4, return_state=True)
    with pytest.raises(ValueError, match="block"):
        state.merge(state)
    with pytest.raises(ValueError, match="block"):
        state.merge(fold(k, v))
    with pytest.raises(ValueError, match="causal"):
        attend(*draw_inputs(seed=1, length=6), block_size=4, state=state)  # bidirectional


def test_a_detached_state_stops_the_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in draw_inputs(seed=0, length=6))
    for block_size in (None, 4):
        _, state = attend(q, k, v, is_causal=True, block_size=block_size, return_state=True)
        more = draw_inputs(seed=1, length=6)
        later = attend(*more, is_causal=True, block_size=block_size, state=state)
        assert all(g.any() for g in torch.autograd.grad(later.sum(), (k, v)))
        assert not attend(*more, is_causal=True, block_size=block_size, state=state.detach()).requires_grad
