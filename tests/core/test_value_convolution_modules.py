"""Modules add the convolution of the values to what they give without it, and cut sequences with a state."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lln
from helpers.tensors import make_inputs, relative_error
from helpers.untyped import attention, mechanism
from lln.naive import naive_lln_diag, naive_value_convolution
from lln.nn.image_grid import Patches
from lln.nn.tiles import TiledAttention
from lln.nn.value_convolution import convolve_patches

WIDE = torch.float64
OFFSETS = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)


def shake(module: Any) -> Any:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("value_taps"):
                draw = torch.Generator().manual_seed(1)
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=WIDE))
    return module.eval()


def make_module(heads: int = 4, key_heads: int = 2, dim: int = 6, width: Any = 5, **options: Any) -> Any:
    return shake(lln.LLNAttention(heads, dim, num_key_heads=key_heads, value_convolution=width, dtype=WIDE, **options))


@pytest.mark.parametrize(("heads", "key_heads", "value_dim"), [(3, 3, 6), (4, 2, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_and_the_neighbours_are_added(heads: int, key_heads: int, value_dim: int, is_causal: bool) -> None:
    q, k, v = make_inputs(2, heads, key_heads, 13, 6, value_dim)
    mask = torch.arange(13) < torch.tensor([[13], [9]])
    options: dict[str, Any] = {"block_size": 4, "mix": 0.3, "value_dim": value_dim, "backend": "eager"}
    module = make_module(heads, key_heads, statistics="fixed", **options)
    near = naive_value_convolution(v, module.value_taps.detach(), is_causal=is_causal, key_mask=mask)
    alpha, beta = module.coefficients(q, k, key_mask=mask, is_causal=is_causal)
    want = naive_lln_diag(q, k, v, alpha, beta, 4, mix=0.3, key_mask=mask, is_causal=is_causal)
    want = want + near.repeat_interleave(heads // key_heads, 1)
    assert relative_error(module(q, k, v, key_mask=mask, is_causal=is_causal), want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("statistics", ["sample", "batch", "running", "fixed"])
def test_it_starts_at_nothing_to_the_last_bit(statistics: Any, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in make_inputs(2, 4, 2, 9, 8))
    options: dict[str, Any] = {"num_key_heads": 2, "statistics": statistics, "block_size": 4, "dtype": dtype}
    near, plain = (lln.LLNAttention(4, 8, **options, value_convolution=width) for width in (5, None))
    for mask in (None, torch.arange(9) < torch.tensor([[9], [6]])):
        assert torch.equal(near(q, k, v, key_mask=mask), plain(q, k, v, key_mask=mask))


@pytest.mark.parametrize("statistics", ["sample", "fixed"])
def test_padding_packing_and_batch_mates_are_invisible(statistics: Any) -> None:
    module = make_module(statistics=statistics, block_size=4)
    q, k, v = make_inputs(2, 4, 2, 17, 6)
    alone = module(q[:1, :, 3:14], k[:1, :, 3:14], v[:1, :, 3:14])
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[0, 3:14], mask[1] = True, True
    for loud in (1.0, 50.0):
        noisy = [t.clone() for t in (q, k, v)]
        for t in noisy:
            t[0, :, :3] *= loud
            t[0, :, 14:] *= loud
            t[1] *= loud
        assert relative_error(module(*noisy, key_mask=mask)[:1, :, 3:14], alone) < 1e-13
    plain = lln.LLNAttention(4, 6, num_key_heads=2, statistics=statistics, block_size=4)
    padded = ~mask[:1, None, :, None].expand(1, 4, 17, 6)
    # Rows of padding get what attention alone gives them.
    assert torch.equal(module(q, k, v, key_mask=mask)[:1][padded], plain(q, k, v, key_mask=mask)[:1][padded])
    q, k, v = make_inputs(1, 4, 2, 13, 6)
    whole = module(q, k, v, cu_seqlens=OFFSETS)
    for start, end in [(0, 5), (5, 12), (12, 13)]:
        part = module(*(t[:, :, start:end] for t in (q, k, v)))
        assert relative_error(whole[:, :, start:end], part) < 1e-13


@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"block_size": 4, "mix": "scales"}, {"read": "evidence"}])
def test_a_sequence_is_cut_anywhere(options: Any) -> None:
    module = make_module(statistics="fixed", **options)
    q, k, v = make_inputs(2, 4, 2, 13, 6)
    mask = torch.arange(13) >= torch.tensor([[0], [4]])  # padding on the left, as in generation
    whole = module(q, k, v, is_causal=True, key_mask=mask)
    for cuts in ((1, 13), (3, 3, 4, 13), (6, 7, 8, 9, 13)):
        state, found, start = None, [], 0
        for end in cuts:
            rows = [t[:, :, start:end] for t in (q, k, v)]
            given = {"key_mask": mask[:, start:end], "state": state, "return_state": True}
            out, state = module(*rows, is_causal=True, **given)
            found.append(out)
            start = end
        assert relative_error(torch.cat(found, 2), whole) < 1e-12
    assert state is not None
    assert state.last_value is not None
    assert torch.equal(state.last_value, v[:, :, 9:])
    begun = lln.LLNState.empty(2, 2, 6, dtype=WIDE, value_convolution=5, **{
        name: options[name] for name in ("block_size", "read") if name in options
    })  # fmt: skip
    assert relative_error(module(q, k, v, is_causal=True, key_mask=mask, state=begun), whole) < 1e-12


def test_packed_sequences_go_on_from_their_states() -> None:
    module = make_module(statistics="fixed", block_size=4)
    q, k, v = make_inputs(1, 4, 2, 13, 6)
    first, state = module(q, k, v, is_causal=True, cu_seqlens=OFFSETS, return_state=True)
    later = make_inputs(1, 4, 2, 13, 6, seed=5)
    then = torch.tensor([0, 1, 7, 7, 13], dtype=torch.int32)
    out = module(*later, is_causal=True, cu_seqlens=then, state=state)
    for number in range(4):
        before, after = (slice(int(cu[number]), int(cu[number + 1])) for cu in (OFFSETS, then))
        rows = [torch.cat([a[:, :, before], b[:, :, after]], 2) for a, b in zip((q, k, v), later, strict=True)]
        if not rows[0].shape[2]:
            continue
        whole = module(*rows, is_causal=True)
        cut = before.stop - before.start
        assert torch.allclose(whole[:, :, :cut], first[:, :, before], rtol=0, atol=1e-12)
        assert torch.allclose(whole[:, :, cut:], out[:, :, after], rtol=0, atol=1e-12)


def test_a_state_moves_and_reorders_with_its_values() -> None:
    module = make_module(statistics="fixed")
    q, k, v = make_inputs(2, 4, 2, 7, 6)
    _, state = module(q, k, v, is_causal=True, return_state=True)
    assert "value_convolution=5" in repr(state)
    assert torch.equal(state.index_select(torch.tensor([1, 0])).last_value, state.last_value.flip(0))
    assert state.to(torch.bfloat16).last_value.dtype == torch.bfloat16
    assert state.clone().last_value.data_ptr() != state.last_value.data_ptr()
    with pytest.raises(ValueError, match="states with the last values of a value convolution do not merge"):
        state.merge(state)
    with pytest.raises(ValueError, match="state holds the last values of a value convolution"):
        lln.lln_attention(q, k, v, 1.0, 1.0, is_causal=True, state=state)
    with pytest.raises(ValueError, match="state is for values of another dtype"):
        module(q, k, v, is_causal=True, state=state.to(torch.float32))
    bare = lln.LLNState.empty(2, 2, 6, dtype=WIDE)
    with pytest.raises(ValueError, match="state must hold the last 4 values of 2 heads for value_convolution=5"):
        module(q, k, v, is_causal=True, state=bare)


def test_gradients_go_through_a_state() -> None:
    module = make_module(2, 1, 3, 3, statistics="fixed")

    def run(q: Tensor, k: Tensor, v: Tensor, taps: Tensor) -> Tensor:
        given = torch.func.functional_call(
            module, {"value_taps": taps}, tuple(t[:, :, :2] for t in (q, k, v)),
            {"is_causal": True, "return_state": True},
        )  # fmt: skip
        rest = tuple(t[:, :, 2:] for t in (q, k, v))
        out: Tensor = torch.func.functional_call(
            module, {"value_taps": taps}, rest, {"is_causal": True, "state": given[1]}
        )
        return torch.cat([given[0], out], 2)

    inputs = [t.requires_grad_() for t in make_inputs(1, 2, 1, 4, 3)]
    assert torch.autograd.gradcheck(run, (*inputs, module.value_taps.detach().clone().requires_grad_()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_autocast_and_a_compiled_graph_give_the_same() -> None:
    q, k, v = (t.float() for t in make_inputs(2, 4, 2, 24, 8))
    module = make_module(4, 2, 8, block_size=8).float()
    mask = torch.arange(24) < torch.tensor([[24], [17]])
    want = module(q, k, v, key_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = module(q, k, v, key_mask=mask)
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow, want) < 2e-2
    narrow.sum().backward()
    assert module.value_taps.grad.dtype == torch.float32
    torch.compiler.reset()
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(q, k, v, key_mask=mask), want) < 1e-6


def test_p_does_not_have_the_neighbours() -> None:
    x = make_inputs(2, 4, 4, 9, 6)[0].transpose(1, 2).flatten(2)
    made = lln.MultiheadAttention(24, 4, batch_first=True, value_convolution=3, dtype=WIDE)
    before, p = made(x, x, x)
    after, same = shake(made)(x, x, x)
    assert relative_error(after, before) > 1e-2
    assert torch.equal(p, same)
    causal = shake(lln.MultiheadAttention(24, 4, batch_first=True, value_convolution=3, statistics="fixed", dtype=WIDE))
    whole = causal(x, x, x, is_causal=True, need_weights=False)[0]
    part = (x[:, :5],) * 3
    assert relative_error(causal(*part, is_causal=True, need_weights=False)[0], whole[:, :5]) < 1e-12


def test_calls_without_neighbours_are_refused_in_one_sentence() -> None:
    q, k, v = make_inputs(2, 4, 2, 6, 6)
    module = make_module(statistics="fixed")
    pair = torch.tensor([0, 6], dtype=torch.int32)
    wrong: Any
    for wrong in ({"state": lln.LLNState.empty(2, 2, 6, dtype=WIDE)}, {"return_state": True}):
        with pytest.raises(ValueError, match="without is_causal=True it looks at later tokens too"):
            module(q, k, v, **wrong)
    for tensors, wrong in (((q[:, :, :3], k, v), {}), ((q[:1], k[:1], v[:1]), {"cu_seqlens": (pair, pair)})):
        with pytest.raises(ValueError, match="value_convolution: it runs over one sequence, so cross attention"):
            module(*tensors, **wrong)
    with pytest.raises(ValueError, match=r"value_convolution must be a tensor \[key heads, value dim, width\]"):
        module(q, k, v[..., :3])
    with pytest.raises(ValueError, match="value_convolution: the model does not cut an image into patches"):
        make_module(width="3x3")(q, k, v)
    with pytest.raises(ValueError, match="add_zero_attn appends a value that stands beside no token"):
        lln.MultiheadAttention(24, 4, add_zero_attn=True, value_convolution=3)
    with pytest.raises(ValueError, match="value_convolution must be an odd int here"):
        lln.MultiheadAttention(24, 4, value_convolution="3x3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"empty: value_convolution must be an odd int of 3 or more; got 4\."):
        lln.LLNState.empty(1, 1, 4, value_convolution=4)


def test_patches_have_rows_and_columns() -> None:
    attention = shake(TiledAttention(2, 6, value_convolution="3x3", dtype=WIDE))
    plain = TiledAttention(2, 6, dtype=WIDE)
    attention.patches = Patches("ViT", prefix=1, grids={12: (3, 4)})
    q, k, v = make_inputs(2, 2, 2, 13, 6)
    want = plain(q, k, v) + convolve_patches(v, attention.value_taps.detach(), (3, 4), 1)
    assert relative_error(attention(q, k, v), want) < 1e-13
    with pytest.raises(
        ValueError, match="value_convolution: the 12 tokens of ViT are not 1 special tokens and the patches of an image"
    ):
        attention(*(t[:, :, :12] for t in (q, k, v)))
    with pytest.raises(ValueError, match="value_convolution: an image is seen as a whole"):
        attention(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 13], dtype=torch.int32))


@pytest.mark.parametrize("name", ["softmax", "block_diagonal", "elu", "nystromformer", "value_convolved_softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_mechanisms_have_it_too(name: str, is_causal: bool) -> None:
    if is_causal and not lln.mechanisms()[name].supports("causal"):
        return
    q, k, v = make_inputs(2, 4, 2, 13, 6)
    mask = torch.arange(13) < torch.tensor([[13], [9]])
    sizes = {"num_heads": 4, "num_key_heads": 2, "head_dim": 6, "dtype": WIDE}
    module = shake(mechanism(name, **sizes, value_convolution=3))
    plain = mechanism(name.removeprefix("value_convolved_"), **sizes)
    near = naive_value_convolution(v, module.value_taps.detach(), is_causal=is_causal, key_mask=mask)
    where = {"key_mask": mask, "is_causal": is_causal}
    want = plain(q, k, v, **where) + near.repeat_interleave(2, 1)
    assert relative_error(module(q, k, v, **where), want) < 1e-12
    assert torch.equal(module.attend_alone(q, k, v, **where), plain(q, k, v, **where))
    if not lln.mechanisms()[name].parameters:
        found = attention(name, q, k, v, **where, value_convolution=module.value_taps.detach())
        assert relative_error(found, want) < 1e-12
        with pytest.raises(ValueError, match="value_convolution must be a tensor"):
            attention(name, q, k, v, value_convolution=5)
        with pytest.raises(ValueError, match=r"it runs over one sequence|support cross attention"):
            attention(name, q[:, :, :5], k, v, value_convolution=module.value_taps.detach())


def test_the_convolution_before_attention_names_its_successor() -> None:
    with pytest.warns(DeprecationWarning, match="convolution= of queries, keys and values is deprecated .* use value_"):
        lln.LLNAttention(2, 8, convolution=3)
    with pytest.warns(DeprecationWarning, match="convolution= of queries, keys and values is deprecated .* use value_"):
        lln.mechanism("convolved_softmax", num_heads=2, head_dim=8)
