"""What JAX users do with lln.jax: transform it, pack rows, shard lengths, train modules, bring weights from PyTorch."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import lln
import lln.jax
from helpers.command import run_python
from helpers.ports import make_case
from helpers.untyped import lln_attention as attend_in_torch
from helpers.untyped import match_moments as match_torch_moments
from lln.jax import (
    LLNAttention,
    LLNState,
    MultiHeadAttention,
    convolve_values,
    fold_keys,
    gather_states,
    read_torch_weights,
    write_torch_weights,
)
from lln.matching import moments

lln_attention: Any = lln.jax.lln_attention
match_moments: Any = lln.jax.match_moments
match_samples: Any = lln.jax.match_samples
match_torch_samples: Any = moments.match_samples


@pytest.fixture(autouse=True, scope="module")
def short_jax_chunks() -> Iterator[None]:
    """Small inputs cross several, and there is less to compile."""
    with mock.patch("lln.jax.scanning.CHUNK", 16):
        yield


def run(function: Any, *given: Any) -> Any:
    """Compiled: operation by operation takes longer."""
    return jax.jit(function)(*given)


def call(module: Any, *given: Any, **options: Any) -> Any:
    """What a module gives, compiled; what it has measured it keeps."""
    graph, state = nnx.split(module)

    def attend(state: Any, *given: Any) -> Any:
        merged = nnx.merge(graph, state)
        out = merged(*given, **options)
        return out, nnx.state(merged)

    out, state = run(attend, state, *given)
    nnx.update(module, state)
    return out


def furthest(first: Any, second: Any) -> float:
    return float(abs(np.asarray(first) - np.asarray(second)).max())


def test_importing_it_brings_no_torch_and_lln_brings_no_jax() -> None:
    code = "import lln, sys; lln.lln_attention; print({'jax', 'flax'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"
    code = "from lln.jax import LLNAttention, read_torch_weights; import sys; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize(
    ("package", "asked", "sentence"),
    [
        ("jax", "import lln.jax", "lln.jax needs jax; install it with: pip install 'lln-attention[jax]'"),
        ("flax", "from lln.jax import LLNAttention", "need flax; install it with: pip install 'lln-attention[jax]'"),
        ("mindspore", "import lln.mindspore", "install it with: pip install 'lln-attention[mindspore]'"),
    ],
)
def test_what_is_missing_is_named_in_a_sentence(package: str, asked: str, sentence: str) -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *more: None if name == {package!r} else find(name, *more)\n"
        f"try:\n    {asked}\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    assert run_python(code).strip().endswith(sentence)


@pytest.mark.parametrize("options", [{}, {"block_size": 8}, {"read": "evidence"}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_rows_are_their_sequences_alone(options: dict[str, Any], is_causal: bool) -> None:
    """Against PyTorch's packing, with keys hidden in it; a like id further on is another sequence."""
    with jax.enable_x64(True):
        q, k, v, mask = make_case()
        ids = np.repeat([[5, 1, 5], [2, 3, 4]], [3, 40, 27], axis=1)
        alpha = None if "read" in options else 1.3

        def attend(*given: Any) -> Any:
            *rows, hidden, packed = given
            return lln_attention(*rows, alpha, 1.7, key_mask=hidden, segment_ids=packed, is_causal=is_causal, **options)

        found = run(attend, q, k, v, mask, ids)
    offsets = torch.tensor([0, 3, 43, 70], dtype=torch.int32)
    for sample in range(2):
        rows = [torch.tensor(t[sample : sample + 1]) for t in (q, k, v)]
        here = torch.tensor(mask[sample : sample + 1])
        expected = attend_in_torch(
            *rows, alpha, 1.7, key_mask=here, cu_seqlens=offsets, is_causal=is_causal, backend="eager", **options
        )
        assert furthest(found[sample], expected[0]) < 1e-12


def test_gradients_of_packed_rows_are_those_of_the_sequences() -> None:
    with jax.enable_x64(True):
        q, k, v, _ = make_case(30)
        ids = jnp.repeat(jnp.array([1, 2]), jnp.array([11, 19]), total_repeat_length=30)[None].repeat(2, 0)
        weights = np.random.default_rng(3).standard_normal((*q.shape[:3], v.shape[3]))

        def weigh(*given: Any) -> Any:
            return (lln_attention(*given, 1.3, 1.7, segment_ids=ids) * weights).sum()

        found = run(jax.grad(weigh, (0, 1, 2)), q, k, v)
    leaves = [torch.tensor(t[:1], requires_grad=True) for t in (q, k, v)]
    offsets = torch.tensor([0, 11, 30], dtype=torch.int32)
    out = attend_in_torch(*leaves, 1.3, 1.7, cu_seqlens=offsets, backend="eager")
    expected = torch.autograd.grad((out * torch.tensor(weights[:1])).sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        assert furthest(ours[:1], theirs) < 1e-12


def test_it_can_be_mapped_and_scanned() -> None:
    with jax.enable_x64(True):
        q, k, v, _ = make_case(24)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return lln_attention(q, k, v, 1.3, 1.7, is_causal=True, block_size=8)

        whole = run(attend, q, k, v)
        mapped = run(jax.vmap(lambda *rows: attend(*(t[None] for t in rows))[0]), q, k, v)
        assert furthest(whole, mapped) < 1e-14

        def step(state: Any, token: Any) -> Any:  # decoding, in memory that does not grow
            rows = (t[:, :, None] for t in token)
            out, state = lln_attention(*rows, 1.3, 1.7, is_causal=True, block_size=8, state=state, return_state=True)
            return state, out[:, :, 0]

        def decode(q: Any, k: Any, v: Any) -> Any:
            start = LLNState.empty(2, 2, 8, 6, block_size=8, dtype="float64")
            return jax.lax.scan(step, start, tuple(jnp.moveaxis(t, 2, 0) for t in (q, k, v)))[1]

        assert furthest(jnp.moveaxis(run(decode, q, k, v), 0, 2), whole) < 1e-13


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
import lln.jax.scanning
from lln.jax import fold_keys, gather_states, lln_attention

jax.config.update("jax_enable_x64", True)
lln.jax.scanning.CHUNK = 8
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("length",), axis_types=(jax.sharding.AxisType.Auto,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 32, 8))
k = k * 3
split = PartitionSpec(None, None, "length")
for options in ({"alpha": 1.3}, {"alpha": 1.3, "is_causal": True}, {"read": "evidence"}):
    causal = "is_causal" in options
    read = {"read": options["read"]} if "read" in options else {}

    def attend(q, k, v):
        state = gather_states(fold_keys(k, v, 1.7, **read), "length", before=causal)
        keys = (k, v) if causal else (k[:, :, :0], v[:, :, :0])
        return lln_attention(q, *keys, beta=1.7, state=state, **options)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)

    def whole(q, k, v):
        return lln_attention(q, k, v, beta=1.7, **options)

    def weigh(function):
        def lose(*given):
            out = function(*given)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out
        return jax.value_and_grad(lose, (0, 1, 2), has_aux=True)

    found, expected = (jax.jit(weigh(f))(q, k, v) for f in (sharded, whole))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert abs(ours - theirs).max() < 1e-12, options
print("the same")
"""


def test_a_length_over_four_devices_is_the_whole_and_so_are_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run_python(SHARDED).strip() == "the same"


def test_states_that_are_gathered_from_nobody_but_oneself_are_the_same() -> None:
    mesh = jax.make_mesh((1,), ("length",), axis_types=(jax.sharding.AxisType.Auto,))
    k, v = (jnp.asarray(t, "float32") for t in make_case(8)[1:3])
    here = jax.sharding.PartitionSpec()

    def gather(k: Any, v: Any) -> Any:
        state = fold_keys(k, v, 1.7)
        return jax.tree.map(lambda t: t[None], (state, gather_states(state, "length", before=True)))

    split = jax.sharding.PartitionSpec("length")
    state, before = run(jax.shard_map(gather, mesh=mesh, in_specs=here, out_specs=split), k, v)
    assert (before.log_sum == -jnp.inf).all()  # nobody is before the first device
    assert state.log_sum.shape == (1, 2, 2, 8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_value_convolution_adds_neighbours(is_causal: bool) -> None:
    with jax.enable_x64(True):
        q, k, v, mask = make_case(20)
        ids = np.repeat([[1, 2]], [7, 13], axis=1).repeat(2, 0)
        taps = np.random.default_rng(4).standard_normal((2, 6, 5))

        def attend(taps: Any) -> Any:
            return lln_attention(
                q, k, v, 1.3, 1.7, key_mask=mask, segment_ids=ids, is_causal=is_causal, value_convolution=taps
            )

        near = run(attend, taps) - run(attend, 0 * taps)
        shown, expected = np.where(mask[:, None, :, None], v, 0), np.zeros_like(v)
        for i in range(20):
            for w in range(5):
                j = i + w - (4 if is_causal else 2)
                if 0 <= j < 20 and ids[0, i] == ids[0, j]:
                    expected[:, :, i] += taps[:, :, w] * shown[:, :, j]
        expected = np.where(mask[:, None, :, None], expected, 0)
        assert furthest(near, expected.repeat(2, 1)) < 1e-12
        assert furthest(convolve_values(v, taps, is_causal=is_causal, key_mask=mask, segment_ids=ids), expected) < 1e-12


def test_a_causal_value_convolution_goes_on_from_a_state() -> None:
    q, k, v, mask = make_case(20, "float32")
    options: dict[str, Any] = {"is_causal": True, "value_convolution": np.ones((2, 6, 3), "float32")}

    def attend(q: Any, k: Any, v: Any, mask: Any, state: Any) -> Any:
        return lln_attention(q, k, v, 1.3, 1.7, key_mask=mask, state=state, return_state=True, **options)

    whole, _ = run(attend, q, k, v, mask, None)
    state: Any = LLNState.empty(2, 2, 8, 6, value_convolution=3)
    outs = []
    for part in (slice(1), slice(1, 20)):
        rows = [t[:, :, part] for t in (q, k, v)]
        out, state = run(attend, *rows, mask[:, part], state)
        outs.append(out)
    assert furthest(np.concatenate(outs, 2), whole) < 1e-5


@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
def test_matching_finds_what_pytorch_finds(matching: str) -> None:
    assert match_moments(0.7, 1.4, 40, matching, 0.2, length=300) == pytest.approx(
        match_torch_moments(0.7, 1.4, 40, matching, 0.2, length=300), rel=1e-14
    )
    q, k, _, mask = make_case()
    data = torch.tensor(q), torch.tensor(k), 2, torch.tensor(mask), torch.tensor(mask), None, None
    expected = match_torch_samples(data, matching, None, "eager")
    with jax.enable_x64(True):
        found = run(lambda *t: match_samples(t[0], t[1], matching, key_mask=t[2]), q, k, mask)
        for ours, theirs in zip(found, expected, strict=True):
            assert furthest(ours, theirs) < 1e-12
        # Of packed sequences each has its own, at each of its tokens.
        ids = np.repeat([[1, 2]], [30, 40], axis=1).repeat(2, 0)
        packed = run(lambda *t: match_samples(t[0], t[1], matching, key_mask=t[2], segment_ids=ids), q, k, mask)
        given = q[:, :, 30:], k[:, :, 30:], mask[:, 30:]
        alone = run(lambda *t: match_samples(t[0], t[1], matching, key_mask=t[2]), *given)
        for ours, theirs in zip(packed, alone, strict=True):
            assert furthest(ours[:, :, 30:, 0], theirs) < 1e-12


MODULES: list[dict[str, Any]] = [
    {"block_size": 8, "mix": "ratio", "matching": "entropy"},
    {"statistics": "batch", "matching": "variance"},
    {"statistics": "fixed", "learnable": "channel", "block_size": 8, "mix": "scales"},
    {"statistics": "fixed", "read": "evidence", "directions": 20, "value_convolution": 3},
    {"read": "evidence", "directions": "signed", "matching": "entropy"},
]


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_weights_go_from_pytorch_and_back(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = lln.MultiheadAttention(32, 4, batch_first=True, **options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ours = MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), **options)
    read_torch_weights(ours, theirs.state_dict())
    x, mask = torch.randn(2, 30, 32), torch.ones(2, 30, dtype=torch.bool)
    mask[0, :7] = False
    found = call(ours, x.numpy(), key_mask=mask.numpy())
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
    assert furthest(found, expected.detach()) < 1e-5
    back = write_torch_weights(ours)
    state = theirs.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(torch.from_numpy(back[name]), state[name]) for name in state)
    del back["out_proj.weight"]
    with pytest.raises(ValueError, match=r"out_proj\.weight is missing"):
        read_torch_weights(ours, back)


def test_running_averages_move_as_pytorchs_do() -> None:
    torch.manual_seed(0)
    theirs = lln.LLNAttention(4, 8, num_key_heads=2, statistics="running")
    ours = LLNAttention(4, 8, num_key_heads=2, statistics="running")
    for spread in (1, 3, 2):
        q, k, v = torch.randn(2, 4, 16, 8) * spread, *(torch.randn(2, 2, 2, 16, 8) * spread)
        assert (
            furthest(call(ours, *(t.numpy() for t in (q, k, v)), is_causal=True), theirs(q, k, v, is_causal=True))
            < 1e-5
        )
    state, found = theirs.eval().state_dict(), write_torch_weights(ours)
    for name, theirs_held in state.items():
        held = torch.from_numpy(found[name])
        assert (held.shape, held.dtype) == (theirs_held.shape, theirs_held.dtype)
        assert torch.allclose(held, theirs_held)
    ours.eval()
    before = np.asarray(ours.running_variance_q[...])
    call(ours, *(t.numpy() for t in (q, k, v)), is_causal=True)
    assert (before == ours.running_variance_q[...]).all()


def test_it_takes_the_place_of_flaxs_attention() -> None:
    softmax = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(1))
    ours = MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), value_convolution=3)
    nnx.update(ours, nnx.state(softmax, nnx.Param))
    assert (ours.query.kernel[...] == softmax.query.kernel[...]).all()
    x = np.random.default_rng(0).standard_normal((2, 12, 32)).astype("float32")
    mask = np.arange(12) < np.array([[12], [7]])
    assert furthest(call(ours, x, mask=mask[:, None, None]), call(ours, x, key_mask=mask)) == 0
    with pytest.raises(ValueError, match=r"mask must be \[batch, 1, 1, key length\].*Use is_causal"):
        ours(x, mask=nnx.make_causal_mask(x[..., 0]))
    graph, state = nnx.split(ours)
    gradients = run(jax.grad(lambda state: (nnx.merge(graph, state)(x) ** 2).sum()), state)
    for g in (gradients.attention.value_taps[...], gradients.query.kernel[...]):
        assert np.isfinite(g).all()
        assert np.any(g)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"alpha": None}, "alpha is missing"),
    ({"alpha": -1.0}, r"alpha must be a number that is positive and finite; got -1\.0\. lln\.jax\.match_moments"),
    ({"alpha": np.ones(3, "float32")}, r"alpha must be a number or an array of shape \[heads\]"),
    ({"directions": "signed"}, "directions are .* need read='evidence'.*Set read='evidence', or leave directions out"),
    ({"read": "evidence"}, "alpha must be left out with read='evidence'.* use read='paper'"),
    ({"block_size": 0}, "block_size must be a positive int"),
    ({"block_size": 4, "mix": (1, 2, 3)}, r"a pair \(r, p\), which gives r \* lln \+ p \* diag; got 3 values"),
    (
        {"state": 3},
        r"state must be an lln\.jax\.LLNState, as return_state=True or LLNState\.empty gives one; got 3 \(int",
    ),
    ({"mix": 0.3}, "mix weighs LLN against the blocks and needs block_size.*Set block_size"),
    ({"mix": "evidence", "block_size": 4}, "is supported only in PyTorch, by lln.lln_attention"),
    ({"block_size": 4, "return_state": True}, "block_size with state or return_state is causal only"),
    ({"key_mask": np.ones((2, 9), bool)}, r"key_mask must have shape \[batch, length\] = \[2, 8\]"),
    ({"key_mask": np.ones((2, 8))}, r"key_mask must be bool.*Use key_mask\.astype"),
    (
        {"segment_ids": np.ones((2, 8), int), "return_state": True},
        "segment_ids: a state is of one sequence, .*leave out state and return_state",
    ),
    ({"value_convolution": np.ones((2, 6, 4))}, "value_convolution must be an array"),
    (
        {"value_convolution": np.ones((2, 6, 3)), "return_state": True},
        "value_convolution looks at later tokens too without is_causal=True",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(options: dict[str, Any], sentence: str) -> None:
    q, k, v, _ = make_case(8, "float32")
    with pytest.raises((ValueError, TypeError), match=sentence):
        lln_attention(q, k, v, **{"alpha": 1.3, "beta": 1.7} | options)


def test_bfloat16_is_computed_in_float32() -> None:
    q, k, v = (jnp.asarray(t, "bfloat16") for t in make_case(8)[:3])
    found, state = run(lambda *t: lln_attention(*t, 1.3, 1.7, return_state=True), q, k, v)
    assert (found.dtype, state.mean_value.dtype) == (jnp.bfloat16, jnp.float32)
    exact = run(lambda *t: lln_attention(*t, 1.3, 1.7), *(t.astype("float32") for t in (q, k, v)))
    assert (found == exact.astype("bfloat16")).all()
