"""What every mechanism promises in its header: padding, packing, causality, grouped heads, cross attention."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import lln
from helpers import tensors
from helpers.mechanism_cases import (
    BLOCK_SIZES,
    DIM,
    HEADS,
    KERNELS,
    KEY_HEADS,
    LENGTH,
    ON_QKV,
    OPTIONS,
    draw_inputs,
    list_supporting,
    make_attention,
)
from helpers.untyped import attention, mechanism
from lln.peers import attention_matrix

# Pseudo-inverses by iteration lose some digits.
assert_close = functools.partial(tensors.assert_close, tolerance=1e-9, absolute=1e-10)


def fixed_numbers(name: str) -> dict[str, Any]:
    """LLN's alpha and beta follow the spread of q and k, without a gradient; these do not."""
    return {"alpha": 1.5, "beta": 1.25} if name.startswith("lln") else {}


@pytest.mark.parametrize("name", ON_QKV)
def test_shape_and_dtype(name: str) -> None:
    q, k, v = draw_inputs(0, name=name)
    out = make_attention(name)(q, k, v)
    assert out.shape == v.shape
    assert out.dtype == torch.float64
    assert out.isfinite().all()
    assert out.std() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list_supporting("padding"))
def test_padding_is_invisible(name: str, side: str) -> None:
    q, k, v = draw_inputs(1, name=name)
    extra = 11
    pad = (0, 0, extra, 0) if side == "left" else (0, 0, 0, extra)
    rows = slice(extra, None) if side == "left" else slice(None, LENGTH)
    mask = torch.zeros(2, LENGTH + extra, dtype=torch.bool)
    mask[:, rows] = True
    longer = [torch.nn.functional.pad(t, pad, value=3.0) for t in (q, k, v)]
    call = make_attention(name)
    assert_close(call(*longer, key_mask=mask)[:, :, rows], call(q, k, v))


@pytest.mark.parametrize("name", list_supporting("padding"))
def test_what_is_hidden_may_be_anything(name: str) -> None:
    """Holes in the mask, too: only rows of hidden tokens may differ."""
    q, k, v = draw_inputs(20, name=name)
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7
    call, hidden = make_attention(name), ~mask[:, None, :, None]
    out = call(q, k, v, key_mask=mask)
    other = call(*(torch.where(hidden, 50 * t.flip(2), t) for t in (q, k, v)), key_mask=mask)
    shown = mask[:, None].expand(2, HEADS, LENGTH)
    assert_close(other[shown], out[shown])


@pytest.mark.parametrize("name", list_supporting("padding", "causal"))
def test_padding_is_invisible_to_causal_attention(name: str) -> None:
    q, k, v = draw_inputs(2, name=name)
    mask = torch.ones(2, LENGTH + 5, dtype=torch.bool)
    mask[:, :5] = False
    longer = [torch.nn.functional.pad(t, (0, 0, 5, 0), value=3.0) for t in (q, k, v)]
    call = make_attention(name)
    out = call(*longer, key_mask=mask, is_causal=True)
    assert_close(out[:, :, 5:], call(q, k, v, is_causal=True))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ON_QKV)
def test_batch_mates_are_invisible(name: str) -> None:
    q, k, v = draw_inputs(3, name=name)
    call = make_attention(name)
    assert_close(call(q, k, v)[:1], call(q[:1], k[:1], v[:1]))


@pytest.mark.parametrize("name", list_supporting("causal"))
def test_the_future_is_invisible(name: str) -> None:
    q, k, v = draw_inputs(4, name=name)
    call = make_attention(name)
    before = call(q, k, v, is_causal=True)
    for t in (k, v) if name != "reformer" else (q, v):
        t[:, :, 20:] *= -30.0
    after = call(q, k, v, is_causal=True)
    assert_close(before[:, :, :20], after[:, :, :20])
    assert not torch.allclose(before[:, :, 20:], after[:, :, 20:])


@pytest.mark.parametrize(
    ("name", "causal"),
    [(n, False) for n in list_supporting("packing")] + [(n, True) for n in list_supporting("packing", "causal")],
)
def test_packed_is_one_by_one(name: str, causal: bool) -> None:
    q, k, v = draw_inputs(5, name=name, batch=1)
    offsets = torch.tensor([0, 9, 9, 36, 37], dtype=torch.int32)
    call = make_attention(name)
    parts = [
        call(*(t[:, :, a:b] for t in (q, k, v)), is_causal=causal)
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if b > a
    ]
    assert_close(call(q, k, v, is_causal=causal, cu_seqlens=offsets), torch.cat(parts, 2))


def repeat_heads(parameter: Tensor) -> Tensor:
    """[key heads, ...] or, for a norm over all of them, [key heads * dim]."""
    by_head = parameter.unflatten(0, (KEY_HEADS, -1))
    return by_head.repeat_interleave(HEADS // KEY_HEADS, 0).flatten(0, 1)


@pytest.mark.parametrize("name", list_supporting("grouped"))
def test_grouped_heads_are_repeated_heads(name: str) -> None:
    q, k, v = draw_inputs(6, name=name, key_heads=KEY_HEADS)
    repeated = [t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v)]
    entry = lln.mechanisms()[name]
    # LLN pools the spread of a group's queries.
    shared, each = make_attention(name, KEY_HEADS, **fixed_numbers(name)), make_attention(name, **fixed_numbers(name))
    if isinstance(shared, torch.nn.Module) and isinstance(each, torch.nn.Module):
        own = dict(each.named_parameters())
        for key, parameter in shared.named_parameters():
            of_heads = parameter.shape != own[key].shape
            own[key].data = repeat_heads(parameter.data) if of_heads else parameter.data
    for causal in (False, True) if entry.supports("causal") else (False,):
        assert_close(shared(q, k, v, is_causal=causal), each(q, *repeated, is_causal=causal))


@pytest.mark.parametrize("name", list_supporting("cross"))
def test_cross_attention_has_its_own_length(name: str) -> None:
    q, k, v = draw_inputs(7, name=name, length=13, key_length=LENGTH)
    out = make_attention(name)(q, k, v)
    assert out.shape == (2, HEADS, 13, v.shape[3])
    offsets = torch.tensor([0, 13]), torch.tensor([0, LENGTH])
    if lln.mechanisms()[name].supports("packing"):
        assert_close(make_attention(name)(q[:1], k[:1], v[:1], cu_seqlens=offsets), out[:1])


@pytest.mark.parametrize("name", list_supporting("padding"))
def test_nothing_to_attend_to_gives_zeros_and_zero_gradient(name: str) -> None:
    tensors = [t.requires_grad_() for t in draw_inputs(8, name=name)]
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0] = False
    causal = (False, True) if lln.mechanisms()[name].supports("causal") else (False,)
    for is_causal in causal:
        out = make_attention(name)(*tensors, key_mask=mask, is_causal=is_causal)
        assert (out[0] == 0).all()
        assert out[1].abs().sum() > 0
        grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=name == "reformer")
        for g in grads:
            if g is not None:
                assert g.isfinite().all()
                assert (g[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ON_QKV)
def test_narrow_types_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in draw_inputs(9, name=name))
    call = make_attention(name)
    expected = call(q.double(), k.double(), v.double())
    out = call(q, k, v)
    assert out.dtype == dtype
    # Half a unit in the last place of each entry, and float32 inside.
    error = (out.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 3e-5, torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype], error


@pytest.mark.parametrize("factor", [0.0, 1e-6, 1e3])
@pytest.mark.parametrize("name", ON_QKV)
def test_tiny_and_huge_scores_stay_finite(name: str, factor: float) -> None:
    q, k, v = (t.float() for t in draw_inputs(21, name=name))
    tensors = [t.requires_grad_() for t in (factor * q, factor * k, v)]
    for causal in (False, True) if lln.mechanisms()[name].supports("causal") else (False,):
        out = make_attention(name)(*tensors, is_causal=causal)
        assert out.isfinite().all()
        for g in torch.autograd.grad(out.square().sum(), tensors, allow_unused=name == "reformer"):
            assert g is None or g.isfinite().all()


@pytest.mark.parametrize("name", ON_QKV)
def test_autocast_narrows_the_inputs_and_not_the_sums(name: str) -> None:
    q, k, v = (t.float() for t in draw_inputs(19, name=name))
    call = make_attention(name)
    expected = call(*(t.bfloat16() for t in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ON_QKV)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    tensors = [t.requires_grad_() for t in draw_inputs(10, name=name, batch=1, length=11)]
    mask = torch.ones(1, 11, dtype=torch.bool)
    mask[:, -2:] = False
    entry = lln.mechanisms()[name]
    where = {"key_mask": mask} if entry.supports("padding") else {}
    call = make_attention(name, **fixed_numbers(name))
    for causal in (False, True) if entry.supports("causal") else (False,):
        torch.autograd.gradcheck(
            lambda *t, causal=causal: call(*t, is_causal=causal, **where), tensors, atol=1e-6, fast_mode=True
        )


@pytest.mark.parametrize("name", ON_QKV)
def test_dropout_is_applied_and_repeats_with_the_seed(name: str) -> None:
    q, k, v = draw_inputs(11, name=name)
    entry = lln.mechanisms()[name]
    if entry.parameters:
        call = make_attention(name, dropout=0.5)
        plain = call(q, k, v)
        call.train()

        def attend_with_dropout(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return call(q, k, v)
    else:
        call = make_attention(name)
        plain = call(q, k, v)

        def attend_with_dropout(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return call(q, k, v, dropout_p=0.5)

    first = attend_with_dropout(0)
    assert not torch.allclose(first, plain)
    assert_close(first, attend_with_dropout(0))
    if not name.startswith("transnormer"):  # its norm comes after the dropout
        mean = torch.stack([attend_with_dropout(seed) for seed in range(200)]).mean(0)
        assert (mean - plain).norm() < 0.3 * (first - plain).norm()


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("block_diagonal", "lln_diag")])
def test_blocks_are_added_to_any_kernel(name: str) -> None:
    q, k, v = draw_inputs(12, name=name)
    call = make_attention(name)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :5] = False
    diag = attention("block_diagonal", q, k, v, block_size=8, key_mask=mask)
    for mix, weights in ((0.25, (0.25, 0.75)), ((0.5, 2.0), (0.5, 2.0))):
        if lln.mechanisms()[name].parameters and not isinstance(mix, float):
            continue
        out = make_attention(name, block_size=8, mix=mix)(q, k, v, key_mask=mask)
        assert_close(out, weights[0] * call(q, k, v, key_mask=mask) + weights[1] * diag)


@pytest.mark.parametrize("name", ON_QKV)
def test_what_is_refused_is_said_in_one_sentence(name: str) -> None:
    entry = lln.mechanisms()[name]
    q, k, v = draw_inputs(13, name=name)
    calls: dict[Any, Any] = {
        "padding": lambda f: f(q, k, v, key_mask=torch.ones(2, LENGTH, dtype=torch.bool)),
        "causal": lambda f: f(q, k, v, is_causal=True),
        "packing": lambda f: f(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 5, LENGTH])),
        "cross": lambda f: f(q[:, :, :9], k, v),
    }
    for feature, call in calls.items():
        if entry.supports(feature):
            call(make_attention(name))
        else:
            with pytest.raises(ValueError, match=rf"^{name} does not support .*\.$"):
                call(make_attention(name))
    if not entry.supports("grouped"):
        with pytest.raises(ValueError, match=r"fewer key heads"):
            make_attention(name, KEY_HEADS)(*draw_inputs(13, name=name, key_heads=KEY_HEADS))
    if entry.kind != "kernel":
        with pytest.raises(ValueError, match="block_size goes with kernel mechanisms"):
            make_attention(name, block_size=8)(q, k, v)


@pytest.mark.parametrize("name", ON_QKV)
def test_a_module_of_any_mechanism_copies_and_pickles(name: str) -> None:
    torch.manual_seed(0)
    module = mechanism(name, num_heads=HEADS, head_dim=DIM, max_length=LENGTH, dtype=torch.float64).eval()
    q, k, v = draw_inputs(14, name=name)
    out = module(q, k, v)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(q, k, v), out)
    fresh = mechanism(name, num_heads=HEADS, head_dim=DIM, max_length=LENGTH, dtype=torch.float64).eval()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(q, k, v), out)
    with pytest.raises(ValueError, match="heads of"):
        module(q[:, :1], k[:, :1], v[:, :1])


@pytest.mark.parametrize("name", ON_QKV)
def test_everything_is_made_on_the_device_of_the_inputs(name: str) -> None:
    """The meta device refuses to meet another one."""
    tensors = [t.to("meta").requires_grad_() for t in draw_inputs(16, name=name)]
    mask = torch.ones(2, LENGTH, dtype=torch.bool, device="meta")
    call = make_attention(name)
    if isinstance(call, torch.nn.Module):
        call.to("meta")
    for causal in (False, True) if lln.mechanisms()[name].supports("causal") else (False,):
        for key_mask in (None, mask):
            out = call(*tensors, is_causal=causal, key_mask=key_mask)
            assert out.device.type == "meta"
            out.sum().backward()


@pytest.mark.parametrize("name", [name for name in ON_QKV if not lln.mechanisms()[name].parameters])
def test_the_attention_matrix_makes_the_output(name: str) -> None:
    q, k, v = draw_inputs(17, key_heads=KEY_HEADS)
    options = {**OPTIONS.get(name, {}), "block_size": BLOCK_SIZES.get(name)}
    if not lln.mechanisms()[name].matrix:
        with pytest.raises(ValueError, match=f"{name} has no attention matrix"):
            attention_matrix(name, q, k)
        return
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :5] = False
    p = attention_matrix(name, q, k, key_mask=mask, **options)
    assert_close(p @ v.repeat_interleave(2, 1), attention(name, q, k, v, key_mask=mask, **options))
    assert (p[0, :, :, :5] == 0).all()
    if name not in ("skyformer", "nystromformer"):  # whose rows sum to one only in the limit
        rows = p.sum(-1)[mask[:, None].expand(2, HEADS, LENGTH)]
        if name in ("relu", "cosformer"):  # a query without a common feature gives zeros
            assert (rows == 0).double().mean() < 0.2
            rows = rows[rows != 0]
        assert_close(rows, torch.ones_like(rows))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("name", ["elu", "longformer", "linformer"])
def test_compiled_as_one_graph_it_gives_the_same(name: str) -> None:
    torch.compiler.reset()
    tensors = [t.float().requires_grad_() for t in draw_inputs(18)]
    call = make_attention(name)
    out, compiled = call(*tensors), torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, out)
    grads = (torch.autograd.grad(o.square().sum(), tensors) for o in (compiled, out))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_names_and_options_that_do_not_exist() -> None:
    q, k, v = draw_inputs(15)
    with pytest.raises(ValueError, match="Perhaps you mean 'performer'"):
        attention("Perfomer", q, k, v)
    with pytest.raises(TypeError, match="elu has no option 'features'"):
        attention("elu", q, k, v, features=3)
    with pytest.raises(TypeError, match="performer has no option 'feature'"):
        mechanism("performer", num_heads=2, head_dim=4, feature=3)
    with pytest.raises(ValueError, match=r"hedgehog learns .* build it with lln\.mechanism"):
        attention("hedgehog", q, k, v)
    with pytest.raises(ValueError, match="num_heads must be a positive int"):
        mechanism("elu", num_heads=0, head_dim=4)
    with pytest.raises(ValueError, match="needs block_size"):
        attention("elu", q, k, v, mix=0.3)
    for name in ("block_diagonal", "softmax"):
        with pytest.raises(ValueError, match=f"mix needs a kernel mechanism and block_size; got mix=.* with {name}"):
            attention(name, q, k, v, mix=0.3)
    with pytest.raises(ValueError, match="query and key must agree"):
        attention("elu", q, k[..., :3], v)


def test_the_list_is_read_only_and_says_who_learns() -> None:
    known = lln.mechanisms()
    assert known["hedgehog"].parameters
    assert mechanism("performer", num_heads=8, head_dim=64).features == 256
    assert not known["softmax"].parameters
    with pytest.raises(TypeError):
        known["mine"] = known["elu"]  # type: ignore[index]


def test_every_row_of_the_papers_tables_is_there() -> None:
    wanted = (
        "softmax lln lln_diag block_diagonal elu relu quadratic performer rfa cosformer hedgehog based linformer "
        "nystromformer skyformer longformer bigbird reformer transformer_ls transnormer_t1 transnormer_t2 flash tnn"
    )
    today = "mala rala polaformer nalaformer sla"
    assert list(lln.mechanisms()) == [*wanted.split(), *today.split(), "value_convolved_softmax", "convolved_softmax"]
    for entry in lln.mechanisms().values():
        assert entry.paper
        assert entry.cost
        assert entry.learned
        assert entry.parameters == (entry.function is None)
        assert all(reason and not reason.endswith(".") for reason in entry.refuses.values())
