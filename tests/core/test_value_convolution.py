"""The convolution of the values is its formula written out, and its state cuts sequences anywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.tensors import make_inputs, relative_error
from lln.naive import naive_value_convolution
from lln.nn.value_convolution import add_near, convolve_patches, convolve_values, keep_last, read_width

WIDE = torch.float64
OFFSETS = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)


def draw_taps(heads: int, dim: int, *sides: int) -> Tensor:
    return torch.randn(heads, dim, *sides, dtype=WIDE, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "width"), [(13, 5), (7, 3), (4, 9), (1, 3), (0, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula_written_out(length: int, width: int, is_causal: bool, masked: bool) -> None:
    v, taps = make_inputs(2, 3, 3, length, 4)[2], draw_taps(3, 4, width)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
    found = convolve_values(v, taps, is_causal=is_causal, key_mask=mask)
    want = naive_value_convolution(v, taps, is_causal=is_causal, key_mask=mask)
    assert found.shape == v.shape
    assert torch.allclose(found, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_do_not_reach_into_one_another(is_causal: bool, masked: bool) -> None:
    v, taps = make_inputs(1, 2, 2, 13, 3)[2], draw_taps(2, 3, 5)
    mask = torch.rand(1, 13, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
    found = convolve_values(v, taps, is_causal=is_causal, key_mask=mask, cu_seqlens=OFFSETS)
    want = naive_value_convolution(v, taps, is_causal=is_causal, key_mask=mask, cu_seqlens=OFFSETS)
    assert torch.allclose(found, want, rtol=0, atol=1e-13)
    for start, end in [(0, 5), (5, 12), (12, 13)]:
        shown = None if mask is None else mask[:, start:end]
        alone = convolve_values(v[:, :, start:end], taps, is_causal=is_causal, key_mask=shown)
        assert torch.equal(found[:, :, start:end], alone)


@pytest.mark.parametrize("masked", [False, True])
def test_split_equals_whole(masked: bool) -> None:
    """Pieces shorter and longer than the window, and none at all."""
    v, taps = make_inputs(2, 2, 2, 13, 3)[2], draw_taps(2, 3, 5)
    mask = torch.rand(2, 13, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
    whole = convolve_values(v, taps, is_causal=True, key_mask=mask)
    past, outs = None, []
    for start, end in [(0, 1), (1, 3), (3, 3), (3, 10), (10, 13)]:
        piece, shown = v[:, :, start:end], None if mask is None else mask[:, start:end]
        outs.append(convolve_values(piece, taps, is_causal=True, key_mask=shown, past=past))
        past = keep_last(piece, 4, key_mask=shown, past=past)
    assert torch.allclose(torch.cat(outs, 2), whole, rtol=0, atol=1e-13)
    assert past is not None
    assert torch.equal(past, keep_last(v, 4, key_mask=mask))


def test_packed_sequences_go_on_from_their_own_pasts() -> None:
    v, taps = make_inputs(1, 2, 2, 13, 3)[2], draw_taps(2, 3, 5)
    before = make_inputs(4, 2, 2, 4, 3)[2]
    found = convolve_values(v, taps, is_causal=True, cu_seqlens=OFFSETS, past=before)
    kept = keep_last(v, 4, cu_seqlens=OFFSETS, past=before)
    assert torch.equal(keep_last(v, 4, cu_seqlens=OFFSETS)[0, :, :], v[0, :, 1:5])
    for number, (start, end) in enumerate([(0, 5), (5, 5), (5, 12), (12, 13)]):
        piece, past = v[:, :, start:end], before[number : number + 1]
        assert torch.equal(found[:, :, start:end], convolve_values(piece, taps, is_causal=True, past=past))
        assert torch.equal(kept[number : number + 1], keep_last(piece, 4, past=past))


def test_a_class_token_lies_nowhere_among_the_patches() -> None:
    v, taps = make_inputs(2, 2, 2, 14, 3)[2], draw_taps(2, 3, 3, 3)
    found = convolve_patches(v, taps, (3, 4), 2)
    want = torch.zeros_like(found)
    for y in range(3):
        for x in range(4):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < 3 and 0 <= x + dx < 4:
                        tap = taps[:, :, dy + 1, dx + 1]
                        want[:, :, 2 + y * 4 + x] += tap * v[:, :, 2 + (y + dy) * 4 + x + dx]
    assert torch.allclose(found, want, rtol=0, atol=1e-13)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, 7] = False
    loud = v.clone()
    loud[0, :, 7] *= 100
    hidden = convolve_patches(loud, taps, (3, 4), 2, mask)
    assert torch.equal(hidden, convolve_patches(v, taps, (3, 4), 2, mask))
    assert not hidden[0, :, 7].any()
    assert hidden[1, :, 7].all()


@pytest.mark.parametrize("kind", ["symmetric", "causal", "packed", "past", "packed past", "patches"])
def test_gradients(kind: str) -> None:
    v, taps = make_inputs(1, 2, 2, 7, 3)[2], draw_taps(2, 3, 5)
    mask = torch.arange(7)[None] != 2
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32) if "packed" in kind else None
    past = make_inputs(1 if offsets is None else 2, 2, 2, 4, 3)[2].requires_grad_() if "past" in kind else None

    def run(v: Tensor, taps: Tensor, *before: Tensor) -> Tensor:
        if kind == "patches":
            return convolve_patches(v, taps, (2, 3), 1, mask)
        given: dict[str, Any] = {"key_mask": mask, "cu_seqlens": offsets, "past": before[0] if before else None}
        return convolve_values(v, taps, is_causal=kind != "symmetric", **given)

    if kind == "patches":
        taps = draw_taps(2, 3, 3, 3)
    given = (v.requires_grad_(), taps.requires_grad_(), *([] if past is None else [past]))
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offsets", [None, OFFSETS])
def test_those_who_take_it_apart_get_the_same(is_causal: bool, offsets: Tensor | None) -> None:
    """torch.func, forward-mode derivatives and compilers, for which it is composed of other operations."""
    v, taps = make_inputs(1, 2, 2, 13, 3)[2], draw_taps(2, 3, 5)
    dv, dtaps = torch.randn_like(v), torch.randn_like(taps)

    def run(v: Tensor, taps: Tensor) -> Tensor:
        return convolve_values(v, taps, is_causal=is_causal, cu_seqlens=offsets)

    out, moved = torch.func.jvp(run, (v, taps), (dv, dtaps))  # type: ignore[misc]  # two, without has_aux
    assert torch.allclose(out, run(v, taps), rtol=0, atol=1e-13)
    assert torch.allclose(moved, run(dv, taps) + run(v, dtaps), rtol=0, atol=1e-13)
    both = torch.func.vmap(run, (0, None))(torch.stack([v, dv]), taps)
    assert torch.allclose(both[1], run(dv, taps), rtol=0, atol=1e-13)
    found = torch.func.grad(lambda *given: run(*given).square().sum(), (0, 1))(v, taps)
    wanted = torch.autograd.grad(run(v.requires_grad_(), taps.requires_grad_()).square().sum(), (v, taps))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_rounds_as_little_as_torch(dtype: torch.dtype) -> None:
    """Forward and backward; torch: out + conv1d(v) in the same dtype."""
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=draw) for shape in ((2, 4, 96, 8), (2, 8, 5), (2, 4, 96, 8), (2, 2, 96, 8))]
    results = []
    for kind in ("exact", "ours", "torch"):
        wanted = torch.float64 if kind == "exact" else dtype
        attended, taps, g, v = (t.to(dtype).to(wanted) for t in exact)
        v.requires_grad_()
        taps.requires_grad_()
        if kind == "torch":
            rows = v.transpose(2, 3).flatten(1, 2)  # [B, H E, N]
            near = functional.conv1d(rows, taps.flatten(0, 1).unsqueeze(1), padding=2, groups=16)
            out = attended + near.unflatten(1, (2, 8)).transpose(2, 3).repeat_interleave(2, 1)
        else:
            out = add_near(attended, convolve_values(v, taps, is_causal=False))
        assert out.dtype == wanted
        out.backward(g)
        results.append((out.detach(), v.grad, taps.grad))
    for want, ours, plain in zip(*results, strict=True):
        assert relative_error(ours, want) <= 2 * relative_error(plain, want)


@pytest.mark.parametrize("wrong", [4, 1, 0, -3, True, 5.0, "5", "3x", "3x4", "3x3x3", "axb", (3, 3)])
def test_wrong_widths_are_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"value_convolution must be an odd int of 3 or more, '3x3' .*; got "):
        read_width(wrong)
