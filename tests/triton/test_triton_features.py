"""backend="triton" among the features of PyTorch: dropout, autocast, transforms, memory for backward."""

import copy
import warnings
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.tensors import normal, relative_error
from helpers.triton_cases import BACKEND, DEVICE, GPU, MARKS, MODES, attend, extras, gradients, only_triton, tensors
from helpers.untyped import lln_attention
from lln import LLNAttention
from lln.kernels.triton import op
from lln.kernels.triton.parts import draw_kept

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch.compile's own

modes = pytest.mark.parametrize("mode", MODES)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])


# Dropout.


def draw(seed: int, leaves: list[Tensor], p: float = 0.3, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return attend(*leaves, 1.2, 1.4, dropout_p=p, **options)


@modes
def test_dropout_follows_the_seed_and_everything_dropped_is_zero(mode: str) -> None:
    leaves = tensors(40)
    first, again, other = (draw(seed, leaves, **MODES[mode]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(draw(1, leaves, 0.0, **MODES[mode]), attend(*leaves, 1.2, 1.4, **MODES[mode]))
    nothing = draw(1, leaves, 1.0, **MODES[mode])
    assert not nothing.any()
    assert not any(g.any() for g in gradients(nothing, leaves))


@modes
def test_dropout_keeps_the_mean(mode: str) -> None:
    """Each row draws for itself: over rows and seeds the deviations are independent, and zero on average."""
    q, k, v = tensors(130)
    leaves = [q.detach(), k.detach(), v.detach() + 1]  # away from zero: a wrong scale would shift the mean
    plain = lln_attention(*leaves, 1.2, 1.4, **MODES[mode], backend="eager")
    off = torch.cat([draw(seed, leaves, **MODES[mode]) - plain for seed in range(3)], 2).flatten(1, 2)[0].double()
    assert off.std(0).min() > 0
    assert (off.mean(0) / off.std(0) * len(off) ** 0.5).abs().max() <= 4.5


@causal_or_not
@pytest.mark.parametrize("part", ["channels", "block"])
def test_dropout_drops_whole_weights_and_rescales_the_rest(part: str, is_causal: bool) -> None:
    """With one channel its softmax is 1, with blocks of one key so is theirs: a weight is then 0 or 1 / (1 - p)."""
    options = {"is_causal": is_causal} | ({"block_size": 1, "mix": (0.0, 1.0)} if part == "block" else {})
    leaves = [1 + x.detach().abs() for x in tensors(200, dim=1, batch=2)]
    ratio = draw(0, leaves, 0.25, **options) / lln_attention(*leaves, 1.2, 1.4, **options, backend="eager")
    kept = ratio > 0.5
    assert (ratio[kept] - 1 / 0.75).abs().max() <= 1e-5
    assert not ratio[~kept].any()
    assert abs(kept.double().mean().item() - 0.75) <= 4 * (0.25 * 0.75 / kept.numel()) ** 0.5
    streams = kept.reshape(4, 200).double().cpu()  # of each sample and head: independent, as are neighbouring rows
    assert (torch.corrcoef(streams) - torch.eye(4)).abs().max() <= 4.5 / 200**0.5
    rows = streams - streams.mean()
    assert abs((rows[:, 1:] * rows[:, :-1]).mean().item()) <= 4.5 * 0.25 * 0.75 / rows.numel() ** 0.5


def test_dropout_of_the_channels_and_of_the_blocks_is_independent() -> None:
    leaves = [1 + x.detach().abs() for x in tensors(200, dim=1)]
    options: dict[str, Any] = {"block_size": 1, "is_causal": True}
    parts = [draw(0, leaves, 0.5, mix=mix, **options) > 0 for mix in ((1.0, 0.0), (0.0, 1.0))]
    correlation = torch.corrcoef(torch.stack([x.flatten().double() for x in parts]))[0, 1].abs().item()
    assert correlation <= 4.5 / parts[0].numel() ** 0.5


@triton.jit
def mask_kernel(SEED, OUT, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    stream = tl.program_id(0)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = OUT + stream * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(place, draw_kept(SEED, stream, rows, columns, COLUMNS, dropout))


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_the_mask_of_dropout_passes_for_independent_draws(seed: int) -> None:
    streams, n, m, p = 48, 128, 64, 0.1
    out = torch.empty(streams, n, m, device=DEVICE)
    mask_kernel[(streams,)](torch.tensor(seed, device=DEVICE), out, p, n, m)
    kept = (out.double() * (1 - p)).cpu()
    assert torch.equal(kept > 0.5, kept > 0)
    off = (kept.round() - (1 - p)) / (p * (1 - p)) ** 0.5  # mean 0, variance 1

    def measure_distance(total: Tensor, count: int) -> float:
        """How many standard deviations a sum of so many independent numbers lies from 0."""
        return abs(float(total)) / count**0.5

    assert measure_distance(off.sum(), off.numel()) <= 4.5
    pairs = [(off[:-1], off[1:])]  # neighbouring streams, then neighbours at distances of a tile's or a block's
    pairs += [(off[:, :-d], off[:, d:]) for d in (1, 2, 16, 64)] + [(off[..., :-d], off[..., d:]) for d in (1, 2, 32)]
    for a, b in pairs:
        assert measure_distance((a * b).sum(), a.numel()) <= 4.5
    for dim in (0, 1, 2):  # sums over a dimension spread as much as sums of independent draws
        sums = off.sum(dim) / off.shape[dim] ** 0.5
        assert abs(float(sums.square().mean()) - 1) <= 6 * (2 / sums.numel()) ** 0.5


# Autocast, transforms, derivatives of derivatives.


@modes
def test_autocast_narrows_the_inputs_and_nothing_inside(mode: str) -> None:
    leaves, dtype = tensors(40), torch.float16 if mode == "causal" else torch.bfloat16
    with torch.autocast(DEVICE, dtype):
        out = attend(*leaves, 1.2, 1.4, **MODES[mode])
        grads = gradients(out, leaves)  # the backward pass, too, may run under autocast
    narrow = [x.detach().to(dtype).requires_grad_() for x in leaves]
    expected = attend(*narrow, 1.2, 1.4, **MODES[mode])
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    for got, wanted in zip(grads, gradients(expected, narrow), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted.float())


def attend_exactly(*leaves: Tensor, **options: Any) -> Tensor:
    return lln_attention(*(x.cpu().double() for x in leaves), 1.2, 1.4, **options, backend="eager")


def transform(kind: str, call: Any, *qkv: Tensor, step: float | None = None) -> Tensor:
    """A torch.func transform of the call; with `step` its value without torch.func."""
    q, k, v = qkv
    if kind == "grad":

        def loss(q: Tensor) -> Tensor:
            return call(q, k, v).square().sum()

        return torch.func.grad(loss)(q) if step is None else torch.autograd.grad(loss(q), q)[0]
    direction = normal(7, *q.shape).to(q)
    if kind == "jvp":
        if step is None:
            return torch.func.jvp(lambda q: call(q, k, v), (q,), (direction,))[1]
        return (call(q + step * direction, k, v) - call(q - step * direction, k, v)) / (2 * step)
    batched = torch.stack([q, direction])
    if step is None:
        return torch.func.vmap(lambda q: call(q, k, v))(batched)
    return torch.stack([call(x, k, v) for x in batched])


@pytest.mark.parametrize("kind", ["grad", "jvp", "vmap"])
@modes
def test_function_transforms_are_right_or_refused(mode: str, kind: str) -> None:
    leaves = tensors(20)
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    expected = transform(kind, lambda *x: attend_exactly(*x, **MODES[mode]), *wide, step=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a slow fallback is right, too
        try:
            found = transform(kind, lambda *x: attend(*x, 1.2, 1.4, **MODES[mode]), *(x.detach() for x in leaves))
        except (RuntimeError, ValueError) as refusal:
            assert len(str(refusal)) > 20  # noqa: PT017 - it need not raise
        else:
            assert relative_error(found.cpu(), expected) <= 1e-4


@only_triton
@pytest.mark.parametrize("compiled", [False, True])
@modes
def test_a_second_derivative_is_refused_with_the_remedy(mode: str, compiled: bool) -> None:
    torch.compiler.reset()
    leaves = tensors(20)

    def call(*given: Tensor) -> Tensor:
        return attend(*given, 1.2, 1.4, **MODES[mode])

    if compiled:  # backend "eager": the others refuse it themselves
        call = torch.compile(call, backend="eager")

    def differentiate_twice() -> None:
        first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad([g.square().sum() for g in first], leaves)

    with pytest.raises(RuntimeError, match="backend='eager'"):
        differentiate_twice()


@only_triton
@modes
def test_compiled_transforms_are_refused(mode: str) -> None:
    torch.compiler.reset()
    q, k, v = (x.detach() for x in tensors(20))

    def tangent(q: Tensor) -> Tensor:
        return torch.func.jvp(lambda q: attend(q, k, v, 1.2, 1.4, **MODES[mode]), (q,), (q,))[1]

    with pytest.raises(RuntimeError, match=r"torch\.func|functorch"):
        torch.compile(tangent, backend="eager")(q)


# Around it.


@modes
def test_an_empty_batch_gives_an_empty_output(mode: str) -> None:
    leaves = tensors(20, batch=0)
    out = attend(*leaves, 1.2, 1.4, **MODES[mode])
    assert out.shape == (0, 2, 20, 16)
    assert [g.shape for g in gradients(out, leaves)] == [x.shape for x in leaves]


@pytest.mark.parametrize("block_size", [None, 16])
def test_the_module_uses_it(block_size: int | None) -> None:
    attention = LLNAttention(2, 16, num_key_heads=1, block_size=block_size, backend=BACKEND).to(DEVICE).eval()
    wide = copy.deepcopy(attention).cpu().double()
    wide.backend = "eager"
    leaves = tensors()
    found, expected = attention(*leaves), wide(*(x.detach().cpu().double() for x in leaves))
    assert relative_error(found.cpu(), expected) <= 2e-5


KEPT: dict[str, dict[str, Any]] = MODES | {
    "padded causal blocks": {"block_size": 64, "is_causal": True},
    "packed": {},
    "dropout": {"dropout_p": 0.3, "block_size": 64},
}


@pytest.mark.parametrize("length", [130, 1024 if not GPU else 16384])
@pytest.mark.parametrize("mode", KEPT)
def test_only_query_key_and_value_wait_for_backward(mode: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than a float for each row, which is what softmax kernels keep, and the sums of the keys."""
    monkeypatch.setattr(op, "FREE", 0)
    dim = 16
    leaves = [x.detach()[:, :1].requires_grad_() for x in tensors(length, dim)]
    alpha, beta = (torch.full((1, dim), 1.5, device=DEVICE, requires_grad=True) for _ in range(2))
    options = KEPT[mode] | extras(mode.split()[0], length)
    owned = {x.untyped_storage().data_ptr() for x in (*leaves, alpha, beta, *options.values()) if isinstance(x, Tensor)}
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(*leaves, alpha, beta, **options)
    assert kept, "nothing was saved through autograd: this test would see nothing"
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    extra = sum(nbytes for address, nbytes in storages.items() if address not in owned)
    masks = 2 * (length + 64) if "key_mask" in options else 0  # a byte a token for each part
    small = 256  # factors, a seed
    assert extra <= (4 * length + 3 * 8 * dim if length > dim * dim else 0) + masks + small
