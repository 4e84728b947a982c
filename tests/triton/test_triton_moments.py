"""Statistics by the GPU kernels: what float64 gives, for every mask, packing and layout, and nothing that is hidden."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.tensors import normal
from helpers.untyped import match_moments
from lln import LLNAttention
from lln.kernels.common import SIGMA_FLOOR
from lln.kernels.triton import moments as gpu
from lln.matching.moments import both_moments, find_kernel, has_kernels, moments, sigma
from lln.nn.statistics import Where

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["whole", "split"])
def cut(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program for each sample and head, or splits of few rows that a second launch merges."""
    if request.param == "whole":
        yield
        return
    with mock.patch.multiple(gpu, LEAST=2048, LANE=4):
        yield


def draw_rows(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    return (normal(sum(shape), *shape).float() + mean).to(DEVICE, dtype)


def draw_mask(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) > 0.4).to(DEVICE)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def compute_expected(
    t: Tensor, heads: int, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(count, mean, standard deviation or 0) [samples, heads], from the elements themselves in float64."""
    batch, _, length, _ = t.shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    for sample in range(batch):
        for first, last in pairwise(bounds):
            seen = torch.ones(last - first, dtype=torch.bool) if mask is None else mask[sample, first:last].cpu()
            for part in t[sample, :, first:last].cpu().double().unflatten(0, (heads, -1)):
                x = part[:, seen].flatten()
                spread = x.std() if x.numel() > 1 else x.new_zeros(())
                rows.append(torch.stack([x.new_tensor(x.numel()), x.sum() / max(x.numel(), 1), spread]))
    count, mean, spread = torch.stack(rows).view(-1, heads, 3).unbind(-1)
    return count, mean, spread


def check(query: Tensor, key: Tensor, heads: int, *where: Tensor | None) -> None:
    """Both forms of the result against the elements."""
    both: Any = both_moments
    masks, packing = where[:2] or (None, None), where[2:] or (None, None)
    found = both(query, key, heads, *masks, *packing, backend="triton").cpu()
    wanted = [compute_expected(t, heads, *w) for t, *w in zip((query, key), masks, packing, strict=True)]
    for (count, total, squares), (number, mean, spread) in zip(found, wanted, strict=True):
        assert torch.equal(count, number)
        scale = 3e-7 * (mean.abs() + spread)
        assert ((total / count.clamp_min(1) - mean).abs() <= scale).all()
        torch.testing.assert_close(sigma(count, total, squares), spread.clamp_min(SIGMA_FLOOR), rtol=2e-6, atol=1e-9)
    alpha, beta = find_kernel("paper_coefficients")(query, key, heads, *masks, *packing, 1.7)
    spreads = [spread.clamp_min(SIGMA_FLOOR) for _, _, spread in wanted]
    dim = query.shape[-1]
    for got, want in zip((alpha, beta), match_moments(*spreads, dim, scale=(1.7 / dim) ** 0.5), strict=True):
        many = want.repeat_interleave(got.shape[1] // heads, 1)
        torch.testing.assert_close(got[..., 0].cpu().double(), many, rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, torch.float32), (7, torch.float16), (64, torch.bfloat16), (100, torch.float32), (256, torch.float16)],
)
def test_heads_that_share_a_key_head_are_pooled(dtype: torch.dtype, dim: int, cut: None) -> None:
    check(draw_rows(1, 4, 40, dim, dtype=dtype), draw_rows(1, 1, 23, dim, dtype=dtype, mean=3.0), 1)


@pytest.mark.parametrize("masks", ["both", "queries", "keys"])
def test_masks_hide_what_may_be_anything(masks: str, cut: None) -> None:
    query, key = draw_rows(2, 4, 70, 20), draw_rows(2, 2, 50, 20)
    query_mask, key_mask = draw_mask(2, 70), draw_mask(2, 50)
    key_mask[1] = False  # nothing at all
    query = query.masked_fill(~query_mask[:, None, :, None], torch.nan) if masks != "keys" else query
    key = key.masked_fill(~key_mask[:, None, :, None], torch.inf) if masks != "queries" else key
    check(query, key, 2, query_mask if masks != "keys" else None, key_mask if masks != "queries" else None)


@pytest.mark.parametrize(("masked", "dtype"), [(False, torch.int64), (True, torch.int32)])
def test_packed_sequences_are_samples(masked: bool, dtype: torch.dtype, cut: None) -> None:
    cu_query = offsets(0, 0, 37, 38, 38, 90, 90, dtype=dtype)
    cu_key = offsets(0, 1, 1, 20, 61, 61, 62, dtype=dtype)
    masks = (draw_mask(1, 90), draw_mask(1, 62)) if masked else (None, None)
    check(draw_rows(1, 4, 90, 12), draw_rows(1, 2, 62, 12), 2, *masks, cu_query, cu_key)


def test_every_packing_has_room_for_its_splits() -> None:
    """Lengths around the size of a split, and many sequences of all lengths, zero included."""
    generator = torch.Generator().manual_seed(0)
    with mock.patch.multiple(gpu, LEAST=16, LANE=1, PROGRAMS=10**6):  # splits of 64 rows of 4
        lengths = 32 * torch.randint(0, 5, (12,), generator=generator)
        lengths += torch.randint(-1, 2, (12,), generator=generator)
        cu = torch.nn.functional.pad(lengths.clamp_min(0).cumsum(0), (1, 0)).int().to(DEVICE)
        total = int(cu[-1])
        check(draw_rows(1, 1, total, 4), draw_rows(1, 1, total, 4, mean=1.0), 1, None, None, cu, cu)


def test_offsets_on_a_device_cannot_lead_out_of_the_tensors(cut: None) -> None:
    """They are not checked there; what is not in the tensor does not count."""
    query, key = draw_rows(1, 2, 90, 8), draw_rows(1, 2, 90, 8)
    found = both_moments(query, key, 2, None, None, offsets(-5, 400), offsets(0, 90), "triton")
    assert torch.equal(found[0, 0].cpu(), torch.full((1, 2), 720.0, dtype=torch.float64))


def test_any_strides_will_do(cut: None) -> None:
    def transpose(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    query, key = draw_rows(2, 4, 40, 12, dtype=torch.bfloat16), draw_rows(2, 2, 40, 12, dtype=torch.bfloat16)
    check(transpose(query), transpose(key), 2)
    check(query[:, :, 3:37:2, 1:8], key[:, :, 5:, 4:11], 2)
    check(query.mT.contiguous().mT, key.flip(2)[:, :, :, ::2].repeat_interleave(2, 3), 2)
    check(query[:1, :, :1].expand(3, 4, 30, 12), key[:, :1].expand(2, 2, 40, 12)[:1].expand(3, 2, 40, 12), 2)
    check(query, key, 2, draw_mask(1, 40).expand(2, 40), draw_mask(40, 2).T)
    check(query[:1], key[:1], 2, None, None, offsets(0, 9, 7, 9, 40)[::2], offsets(0, 20, 40))


def test_a_common_offset_costs_no_digits(cut: None) -> None:
    for mean in (1e3, -1e3):
        query, key = draw_rows(1, 4, 90, 16, mean=mean), draw_rows(1, 2, 60, 16)
        check(query, key, 2)
        found = sigma(*both_moments(query, key, 2, backend="triton")[0]).cpu()
        torch.testing.assert_close(found, compute_expected(query, 2, None, None)[2], rtol=1e-6, atol=0)


def test_without_a_spread_the_floor_stands(cut: None) -> None:
    for value in (0.0, 0.1, 3.0, 1e4):
        t = torch.full((2, 2, 70, 12), value, device=DEVICE)
        found = both_moments(t, t[:, :1, :1, :], 1, backend="triton")
        assert (sigma(*found.unbind(1)) <= max(SIGMA_FLOOR, 1e-6 * value)).all()
    nothing = t[:, :, :0]
    assert not both_moments(nothing, nothing, 2, backend="triton").any()
    assert both_moments(t[:0], t[:0], 2, backend="triton").shape == (2, 3, 0, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_what_is_not_finite_shows() -> None:
    for value in (torch.nan, torch.inf):
        query = draw_rows(1, 2, 70, 12)
        query[0, 1, 30, 2] = value
        found = both_moments(query, query, 2, backend="triton")
        assert not found[:, 2, 0, 1].isfinite().any()
        assert found[:, :, 0, 0].isfinite().all()
        alpha, _ = find_kernel("paper_coefficients")(query, query, 2, None, None, None, None, 1.0)
        assert alpha[0, :, 0].isfinite().tolist() == [True, False]


@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_is_read_that_nobody_wrote(cut: None) -> None:
    query, key = draw_rows(1, 4, 90, 12), draw_rows(1, 2, 90, 12)
    cu = offsets(0, 0, 37, 38, 38, 90)
    check(query, key, 2)
    check(query, key, 2, None, None, cu, cu)
    check(query[:, :, :0], key[:, :, :1], 2)


def test_repeated_runs_are_bit_equal_and_neighbours_invisible(cut: None) -> None:
    query, key = draw_rows(3, 4, 90, 12), draw_rows(3, 2, 60, 12)
    first, again = (both_moments(query, key, 2, backend="triton") for _ in range(2))
    assert torch.equal(first, again)
    mates = both_moments(torch.cat([query[:1], 50 * query[1:]]), torch.cat([key[:1], 50 * key[1:]]), 2, None, None,
                         backend="triton")  # fmt: skip
    assert torch.equal(mates[:, :, 0], first[:, :, 0])
    # A packed sequence is cut from its own beginning, wherever it lies.
    lone, other = query[:1, :, :50], query[1:2, :, :40]
    cuts = offsets(0, 50, 90), offsets(0, 40, 90)
    ahead, behind = torch.cat([lone, other], 2), torch.cat([other, lone], 2)
    ahead, behind = (
        both_moments(t, t, 4, None, None, cu, cu, "triton") for t, cu in ((ahead, cuts[0]), (behind, cuts[1]))
    )
    assert torch.equal(ahead[:, :, 0], behind[:, :, 1])


def test_it_is_what_plain_torch_gives() -> None:
    query, key, mask = draw_rows(2, 4, 70, 12), draw_rows(2, 2, 50, 12, mean=2.0), draw_mask(2, 50)
    found = both_moments(query, key, 2, None, mask, backend="triton")
    plain = both_moments(query.double(), key.double(), 2, None, mask, backend="triton")
    assert torch.equal(
        plain, torch.stack([torch.stack(moments(t.double(), 2, m, None)) for t, m in ((query, None), (key, mask))])
    )
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-4)


def module(statistics: Any = "sample", **options: Any) -> LLNAttention:
    attention = LLNAttention(4, 12, num_key_heads=2, statistics=statistics, **options).to(DEVICE)
    attention.backend = "triton"
    return attention


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("matching", ["paper", "entropy"])
@pytest.mark.parametrize("statistics", ["sample", "batch", "running"])
def test_a_module_finds_the_alpha_and_beta_of_plain_torch(statistics: str, matching: str, scale: float | None) -> None:
    query, key, mask = draw_rows(2, 4, 70, 12), 2 * draw_rows(2, 2, 70, 12), draw_mask(2, 70)
    attention, plain = (module(statistics, matching=matching, scale=scale) for _ in range(2))
    plain.backend = "eager"
    if statistics == "running":
        for t in (attention, plain):
            t.pending.copy_(t.sum_moments(query, key, Where(key_mask=mask)))
            t.eval()
        torch.testing.assert_close(attention.running_variance_q, plain.running_variance_q, rtol=1e-6, atol=0)
    got, want = (t.coefficients(query.requires_grad_(), key, key_mask=mask) for t in (attention, plain))
    for a, b in zip(got, want, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_only_what_the_kernels_can_run_goes_to_them() -> None:
    t = draw_rows(1, 2, 5, 8)
    assert has_kernels(t, t, "triton")
    assert has_kernels(t, t, "auto") == t.is_cuda
    assert not has_kernels(t, t, "eager")
    for other in (t.double(), draw_rows(1, 1, 1, 257), t.to("meta")):
        assert not has_kernels(other, other, "triton")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.func's own
def test_functional_transforms_are_left_to_torch() -> None:
    query, key = draw_rows(3, 1, 4, 30, 12), draw_rows(3, 1, 2, 30, 12)
    attention = module()
    for got, want in zip(
        torch.func.vmap(attention.coefficients)(query, key),
        attention.coefficients(query[:, 0], key[:, 0]),
        strict=True,
    ):
        torch.testing.assert_close(got[:, 0], want, rtol=1e-6, atol=0)


def test_the_ops_are_registered_correctly() -> None:
    query, key, mask, cu = draw_rows(1, 4, 30, 12), draw_rows(1, 2, 30, 12), draw_mask(1, 30), offsets(0, 11, 30)
    for where in ((None, None, None, None), (mask, None, cu, cu)):
        torch.library.opcheck(torch.ops.lln.both_moments.default, (query, key, 2, *where))
        torch.library.opcheck(torch.ops.lln.paper_coefficients.default, (query, key, 2, *where, 1.0))
    variance = torch.rand(2, device=DEVICE)
    torch.library.opcheck(torch.ops.lln.paper_match.default, (variance, variance, 4, 1.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize(("statistics", "dynamic"), [("sample", True), ("batch", False), ("running", True)])
def test_compiled_as_one_graph_it_gives_the_same(statistics: str, dynamic: bool) -> None:
    torch.compiler.reset()
    attention = module(statistics).eval()

    def call(query: Tensor, key: Tensor, mask: Tensor, cu: Tensor) -> Tensor:
        padded = attention.coefficients(query, key, key_mask=mask)
        packed = attention.coefficients(query[:1], key[:1], cu_seqlens=cu)
        return torch.cat([t.flatten() for t in (*padded, *packed)])

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (30, 41):
        query, key = draw_rows(2, 4, length, 12).requires_grad_(), draw_rows(2, 2, length, 12)
        arguments = query, key, draw_mask(2, length), offsets(0, 11, length)
        assert torch.equal(compiled(*arguments), call(*arguments))
