"""The kernel family against its formulas, written densely in float64, and against performer-pytorch."""

import copy
import math
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lln
from helpers.mechanism_cases import draw_inputs, slope
from helpers.tensors import normal, relative_error
from helpers.untyped import attention, lln_attention, match_moments, mechanism
from lln.kernels.common import SPAN_ELEMENTS
from lln.peers.draws import draw_gaussian

Features = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def performer_pytorch() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it still asks distutils for torch's version
        import performer_pytorch
    return performer_pytorch.performer_pytorch


def attend_densely(weights: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Rows of non-negative weights, masked, normalised, times v."""
    if causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask[:, None, None]
    total = weights.sum(-1, keepdim=True)
    return torch.where(total != 0, weights @ v / torch.where(total != 0, total, 1.0), 0.0)


def taylor(x: Tensor) -> Tensor:
    x = x / x.shape[-1] ** 0.25
    second = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, second], -1)


SIMPLE: dict[str, Features] = {
    "elu": lambda x: functional.elu(x) + 1,
    "relu": functional.relu,
    "quadratic": torch.square,
    "based": taylor,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_kernels_are_their_formula(name: str, causal: bool) -> None:
    """Longer than a chunk; outputs and every gradient."""
    tensors = [normal(seed, 2, 2, 300, 5).requires_grad_() for seed in range(3)]
    q, k, v = tensors
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :40] = False
    mask[1, 280:] = False
    out = attention(name, q, k, v, is_causal=causal, key_mask=mask)
    expected = attend_densely(SIMPLE[name](q) @ SIMPLE[name](k).transpose(-1, -2), v, causal, mask)
    assert relative_error(out, expected) < 1e-12
    weight = normal(9, *out.shape)
    for got, want in zip(
        torch.autograd.grad((out * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        assert relative_error(got, want) < 1e-10


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 3, 300, 4, 3))),
    key_length=st.integers(1, 9),
    seed=st.integers(0, 999),
    masked=st.booleans(),
    causal=st.booleans(),
    span=st.sampled_from([1, 2**9, 2**20]),
)
def test_any_shape_in_any_spans(
    sizes: tuple[int, ...], key_length: int, seed: int, masked: bool, causal: bool, span: int
) -> None:
    """Signed features, grouped heads, spans of 64 rows or more: outputs and every gradient."""
    batch, key_heads, groups, length, dim, value_dim = sizes
    m = length if causal else 37 * key_length
    q, k, v = (
        normal(seed + i, *shape).requires_grad_()
        for i, shape in enumerate(
            [(batch, key_heads * groups, length, dim), (batch, key_heads, m, dim), (batch, key_heads, m, value_dim)]
        )
    )
    mask = torch.rand(batch, m, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    kept, SPAN_ELEMENTS["cpu"] = SPAN_ELEMENTS["cpu"], span
    try:
        out = attention("based", q, k, v, key_mask=mask, is_causal=causal)
        weight = normal(9, *out.shape)
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    finally:
        SPAN_ELEMENTS["cpu"] = kept
    each_k, each_v = (t.repeat_interleave(groups, 1) for t in (k, v))
    expected = attend_densely(taylor(q) @ taylor(each_k).transpose(-1, -2), each_v, causal, mask)
    assert relative_error(out, expected, floor=1e-9) < 1e-11
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for got, want in zip(grads, wanted, strict=True):
        assert relative_error(got, want, floor=1e-3) < 1e-9


def test_the_features_are_not_kept() -> None:
    """Based has D^2 / 2 features a token; between forward and backward there are q, k, v and a state."""
    q, k, v = (normal(seed, 1, 1, 512, 16).requires_grad_() for seed in range(3))
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention("based", q, k, v)
    features = 1 + 16 + 16 * 17 // 2
    assert sum(kept) <= 3 * 512 * 16 + features * 17
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention("based", q, k, v, is_causal=True)
    assert sum(kept) <= 3 * 512 * 16


def test_a_second_derivative_is_refused_not_wrong() -> None:
    q, k, v = (t.requires_grad_() for t in draw_inputs(0, length=5))
    (g,) = torch.autograd.grad(attention("elu", q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_relu_and_quadratic_are_indifferent_to_temperature() -> None:
    q, k, v = draw_inputs(1)
    for name in ("relu", "quadratic"):
        for factor in (1e-4, 30.0):
            torch.testing.assert_close(attention(name, factor * q, k, v), attention(name, q, k, v))


def test_a_query_without_a_common_feature_gives_zeros_and_zero_gradient() -> None:
    q, k, v = draw_inputs(2)
    q = -q.abs()
    q.requires_grad_()
    out = attention("relu", q, k, v)
    out.sum().backward()
    assert (out == 0).all()
    assert q.grad is not None
    assert not q.grad.any()


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_performer_pytorch(performer_pytorch: ModuleType, causal: bool) -> None:
    q, k, v = draw_inputs(3)
    projection = performer_pytorch.FastAttention(q.shape[-1], nb_features=20).projection_matrix.double()
    fq, fk = (
        performer_pytorch.softmax_kernel(t, projection_matrix=projection, is_query=is_query, eps=0.0)
        for t, is_query in ((q, True), (k, False))
    )
    if causal:
        expected = performer_pytorch.causal_linear_attention_noncuda(fq, fk, v, chunk_size=5, eps=0.0)
    else:
        expected = performer_pytorch.linear_attention(fq, fk, v)
    out = attention("performer", q, k, v, projection=projection, is_causal=causal)
    assert relative_error(out, expected) < 1e-12


def test_orthogonal_features_are_normal_and_at_right_angles() -> None:
    w = draw_gaussian(4000, 8, 5, orthogonal=True)
    unit = functional.normalize(w[:8], dim=-1)
    torch.testing.assert_close(unit @ unit.T, torch.eye(8, dtype=torch.float64))
    assert abs(w.mean()) < 5 / math.sqrt(w.numel())
    assert abs(w.square().mean() - 1) < 5 * math.sqrt(2 / w.numel())
    assert abs((w**4).mean() - 3) < 0.3


@pytest.mark.parametrize("orthogonal", [False, True])
def test_performer_converges_to_softmax(orthogonal: bool) -> None:
    q, k, v = draw_inputs(4)
    q, k = 0.6 * q, 0.6 * k  # long vectors have heavy tails: the root would show only with very many features
    expected = attention("softmax", q, k, v)

    def error(features: int, seed: int) -> float:
        out = attention("performer", q, k, v, features=features, seed=seed, orthogonal=orthogonal)
        return relative_error(out, expected)

    assert -0.65 < slope([64, 256, 1024, 4096], error, seeds=4) < -0.35
    assert error(16384, 0) < 0.06


@pytest.mark.parametrize("sigma", [0.7, 1.0])
def test_rfa_converges_to_softmax_of_cosines(sigma: float) -> None:
    q, k, v = draw_inputs(5)
    unit_q, unit_k = (functional.normalize(t, dim=-1) for t in (q, k))
    expected = attention("softmax", unit_q, unit_k, v, scale=1 / sigma**2)

    def error(features: int, seed: int) -> float:
        return relative_error(attention("rfa", q, k, v, features=features, seed=seed, sigma=sigma), expected)

    assert -0.65 < slope([512, 2048, 8192], error, seeds=4) < -0.35
    assert error(16384, 0) < 0.08


def rfa_features(x: Tensor, w: Tensor) -> Tensor:
    angle = functional.normalize(x, dim=-1) @ w.T
    return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(len(w))


def test_rfa_is_its_formula() -> None:
    q, k, v = draw_inputs(6)
    w = normal(1, 9, q.shape[-1])
    for causal in (False, True):
        weights = rfa_features(q, w) @ rfa_features(k, w).transpose(-1, -2)
        out = attention("rfa", q, k, v, projection=w, is_causal=causal)
        assert relative_error(out, attend_densely(weights, v, causal)) < 1e-9


def test_gated_rfa_is_its_recurrence() -> None:
    """S_t = g_t S_{t-1} + (1 - g_t) f(k_t) v_t^T, step by step; outputs and every gradient, over more than a chunk."""
    length = 150
    w = normal(1, 9, 4)
    q, k, v = (normal(seed, 1, 2, length, 4).requires_grad_() for seed in (2, 3, 4))
    gate = normal(5, 1, 2, length).sigmoid().requires_grad_()
    fq, fk = rfa_features(q, w), rfa_features(k, w)
    s, z, rows = torch.zeros(1, 2, 18, 4).double(), torch.zeros(1, 2, 18).double(), []
    for t in range(length):
        g = gate[:, :, t, None]
        s = g[..., None] * s + (1 - g)[..., None] * fk[:, :, t, :, None] * v[:, :, t, None, :]
        z = g * z + (1 - g) * fk[:, :, t]
        rows.append((fq[:, :, t, None] @ s).squeeze(-2) / (fq[:, :, t] * z).sum(-1, keepdim=True))
    expected = torch.stack(rows, 2)
    out = attention("rfa", q, k, v, projection=w, gate=gate, is_causal=True)
    assert relative_error(out, expected) < 1e-9
    weight = normal(9, *out.shape)
    tensors = (q, k, v, gate)
    for got, want in zip(
        torch.autograd.grad((out * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        assert relative_error(got, want) < 1e-6
    with pytest.raises(ValueError, match="needs is_causal=True"):
        attention("rfa", q, k, v, gate=gate)
    with pytest.raises(ValueError, match="gate must be"):
        attention("rfa", q, k, v, gate=gate[..., :3], is_causal=True)


def test_the_gated_module_learns_its_gate_and_padding_does_not_decay() -> None:
    torch.manual_seed(0)
    module = mechanism("rfa", num_heads=4, head_dim=6, gated=True, features=33, dtype=torch.float64)
    q, k, v = draw_inputs(7)
    out = module(q, k, v, is_causal=True)
    out.square().sum().backward()
    assert module.gate_weight.grad.abs().sum() > 0
    mask = torch.tensor([False] * 4 + [True] * q.shape[2]).expand(2, -1)
    longer = [functional.pad(t, (0, 0, 4, 0), value=2.0) for t in (q, k, v)]
    torch.testing.assert_close(module(*longer, is_causal=True, key_mask=mask)[:, :, 4:], out)


@pytest.mark.parametrize("causal", [False, True])
def test_cosformer_is_its_formula(causal: bool) -> None:
    q, k, v = draw_inputs(8)
    length = q.shape[2]
    position = torch.arange(length).double()
    for max_length in (None, 50):
        angle = math.pi / 2 * (position[:, None] - position) / (max_length or length)
        weights = functional.relu(q) @ functional.relu(k).transpose(-1, -2) * angle.cos()
        out = attention("cosformer", q, k, v, max_length=max_length, is_causal=causal)
        assert relative_error(out, attend_densely(weights, v, causal)) < 1e-12
    with pytest.raises(ValueError, match="max_length=20 is less than the length, 37"):
        attention("cosformer", q, k, v, max_length=20)


@pytest.mark.parametrize("activation", ["softmax", "exp"])
def test_hedgehog_is_its_formula(activation: str) -> None:
    q, k, v = draw_inputs(9)
    module = mechanism("hedgehog", num_heads=4, head_dim=6, activation=activation, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal(3, *parameter.shape))

    def features(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.einsum("bhnd,hed->bhne", x, weight)
        phi = torch.exp if activation == "exp" else lambda t: functional.softmax(t, -1)
        return torch.cat([phi(x), phi(-x)], -1)

    for causal in (False, True):
        weights = features(q, module.query_map) @ features(k, module.key_map).transpose(-1, -2)
        assert relative_error(module(q, k, v, is_causal=causal), attend_densely(weights, v, causal)) < 1e-12
    module(q, k, v).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("name", ["performer", "hedgehog", "elu", "based"])
def test_large_numbers_do_not_overflow(name: str) -> None:
    q, k, v = (30 * t.float() for t in draw_inputs(10))
    module = mechanism(name, num_heads=4, head_dim=6)
    for causal in (False, True):
        assert module(q, k, v, is_causal=causal).isfinite().all()


def test_performer_redraws_in_training_only_and_resumes() -> None:
    q, k, v = draw_inputs(11)

    def make() -> torch.nn.Module:
        return mechanism("performer", num_heads=4, head_dim=6, redraw_every=2, dtype=torch.float64)

    module = make()
    outs = [module(q, k, v) for _ in range(5)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[1], outs[2])
    assert torch.equal(outs[2], outs[3])
    assert not torch.allclose(outs[3], outs[4])
    saved = {key: t.clone() for key, t in module.state_dict().items()}
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))
    module.train()
    ahead = [module(q, k, v) for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(saved)
    for want in ahead:
        assert torch.equal(resumed(q, k, v), want)


def test_recomputation_in_backward_sees_the_same_features() -> None:
    q, k, v = (t.requires_grad_() for t in draw_inputs(13))
    module = mechanism("performer", num_heads=4, head_dim=6, redraw_every=1, dtype=torch.float64)
    twin = copy.deepcopy(module)
    for _ in range(3):
        out = checkpoint(module, q, k, v, use_reentrant=False)
        expected = twin(q, k, v)
        assert torch.equal(out, expected)
        got, want = (torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected))
        torch.testing.assert_close(got, want)
    assert int(module.calls) == int(twin.calls) == 3


def test_lln_by_name_is_lln_attention() -> None:
    q, k, v = draw_inputs(12)
    alpha, beta = lln.LLNAttention(4, 6).coefficients(q, k)
    torch.testing.assert_close(attention("lln", q, k, v), lln_attention(q, k, v, alpha, beta))
    out = attention("lln_diag", q, k, v, block_size=16, mix=0.3)
    expected = lln_attention(q, k, v, alpha, beta, block_size=16, mix=0.3)
    torch.testing.assert_close(out, expected)
    batch = lln.LLNAttention(4, 6, statistics="batch").coefficients(q, k)
    torch.testing.assert_close(attention("lln", q, k, v, statistics="batch"), lln_attention(q, k, v, *batch))
    unit = match_moments(1.0, 1.0, 6)
    causal = attention("lln", q, k, v, is_causal=True)
    torch.testing.assert_close(causal, lln_attention(q, k, v, *unit, is_causal=True))
    torch.testing.assert_close(
        attention("lln", q, k, v, alpha=torch.tensor(1.5), beta=0.5), lln_attention(q, k, v, 1.5, 0.5)
    )
