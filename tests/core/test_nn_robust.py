"""LLNAttention in rough use: odd batches, casts, meta construction, loading, wrong input, compilation."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import make_inputs
from helpers.untyped import lln_attention, match_moments
from lln import LLNAttention, MultiheadAttention
from lln.matching import curves

draw_inputs = functools.partial(make_inputs, 2, 2, 2, 30, 8, dtype=torch.float32)


def make_running(**options: Any) -> LLNAttention:
    return LLNAttention(2, 8, statistics="running", **options)


def variance(t: Tensor) -> Tensor:
    return t.transpose(0, 1).flatten(1).var(-1)


def test_a_batch_without_tokens_changes_nothing() -> None:
    attention = make_running()
    attention(*draw_inputs(seed=0), key_mask=torch.zeros(2, 30, dtype=torch.bool))
    q, k, v = draw_inputs(seed=1, spread=3.0)
    attention(q, k, v)
    attention.eval()
    assert attention.running_count == 1
    torch.testing.assert_close(attention.running_variance_k, variance(k))  # the first real batch counts in full


def test_one_overflowing_batch_does_not_spoil_the_averages() -> None:
    attention = make_running()
    first, second = draw_inputs(seed=0), draw_inputs(seed=1)
    attention(*first)
    second[1][0, 0, 0, 0] = torch.inf
    attention(*second)
    attention.eval()
    torch.testing.assert_close(attention.running_variance_k, variance(first[1]))


def test_a_call_that_fails_is_not_counted() -> None:
    attention = make_running()
    q, k, v = draw_inputs(spread=100.0)
    with pytest.raises(TypeError, match="state must be"):
        attention(q, k, v, state="nothing")
    assert attention.eval().running_count == 0


def test_copies_and_pickles_keep_what_is_pending() -> None:
    attention = make_running()
    attention(*draw_inputs(seed=0))
    copies = [copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))]
    attention.eval()
    for other in copies:
        assert torch.equal(other.eval().running_variance_q, attention.running_variance_q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casting_a_module_leaves_its_statistics_alone(dtype: torch.dtype) -> None:
    attention = make_running(momentum=0.5).to(dtype)
    attention(*(torch.ones(2, 2, 30, 8, dtype=dtype) for _ in range(3)))
    attention.eval()
    assert attention.running_variance_q.dtype == torch.float32
    alpha, beta = attention.coefficients(*draw_inputs()[:2])
    assert alpha.isfinite().all()
    assert beta.isfinite().all()
    fixed = LLNAttention(2, 8, statistics="fixed").to(dtype)
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    assert fixed.coefficients(q, q)[0].item() == pytest.approx(2.135477234978229, abs=1e-12)


@pytest.mark.parametrize("options", [{"matching": "entropy"}, {"statistics": "running"}, {"statistics": "fixed"}])
def test_a_module_can_be_built_on_the_meta_device(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        attention = LLNAttention(2, 40, **options)
    attention = attention.to_empty(device="cpu")
    if options.get("statistics") != "running":  # running buffers are then for load_state_dict to fill
        assert attention(*(torch.randn(1, 2, 5, 40) for _ in range(3))).isfinite().all()


def test_given_tensors_are_saved_and_given_numbers_are_not() -> None:
    alpha = torch.tensor([1.5, 0.7])
    first = LLNAttention(2, 8, statistics="fixed", alpha=alpha, beta=1.1)
    assert list(first.state_dict()) == ["fixed_alpha"]
    second = LLNAttention(2, 8, statistics="fixed", alpha=torch.ones(2), beta=1.1)
    second.load_state_dict(first.state_dict())
    q, k, v = draw_inputs()
    assert torch.equal(second(q, k, v), lln_attention(q, k, v, alpha, 1.1))


def test_weights_without_running_statistics_load_into_a_module_with_them() -> None:
    theirs = torch.nn.MultiheadAttention(16, 2)
    ours = MultiheadAttention(16, 2, statistics="running")
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert torch.equal(ours.attention.running_variance_q, torch.ones(2))


def test_the_padding_of_a_memory_is_not_that_of_the_queries() -> None:
    """Cross attention with equal lengths by chance."""
    attention = MultiheadAttention(16, 2, batch_first=True, add_bias_kv=False)
    query, memory = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
    hidden = torch.tensor([[False] * 6 + [True] * 2])
    out, _ = attention(query, memory, memory, key_padding_mask=hidden)
    trimmed, _ = attention(query, memory[:, :6], memory[:, :6])
    torch.testing.assert_close(out, trimmed)


def test_scale_and_length_reach_the_matching() -> None:
    q, k, _ = draw_inputs()
    for scale in (None, 0.7):
        alpha, beta = LLNAttention(2, 8, scale=scale).coefficients(q, k)
        expected = match_moments(q.flatten(2).std(-1), k.flatten(2).std(-1), 8, scale=scale)
        torch.testing.assert_close(alpha[..., 0].double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(beta[..., 0].double(), expected[1], rtol=1e-5, atol=1e-5)
    for statistics in ("running", "fixed"):
        short, long = (
            LLNAttention(2, 8, statistics=statistics, matching="entropy", scale=0.9, length=n).coefficients(q, k)[0]
            for n in (64, 16384)
        )
        assert not torch.allclose(short, long, rtol=1e-3)


def test_packed_cross_attention_takes_a_pair_of_offsets() -> None:
    q, k, v = (t[:1] for t in draw_inputs())
    offsets = torch.tensor([0, 10, 30]), torch.tensor([0, 25, 30])
    attention = LLNAttention(2, 8)
    first = attention(q[:, :, :10], k[:, :, :25], v[:, :, :25])
    for pair in (offsets, list(offsets)):
        torch.testing.assert_close(attention(q, k, v, cu_seqlens=pair)[:, :, :10], first)


def test_between_measured_lengths_the_curve_lies_between() -> None:
    low, middle, high = (match_moments(1.7, 1.7, 64, "entropy", length=n)[0] for n in (256, 512, 1024))
    assert min(low, high) < middle < max(low, high)


def test_matching_carries_no_gradient() -> None:
    spread = torch.ones(2, requires_grad=True)
    assert not any(t.requires_grad for t in match_moments(spread, spread, 64, "variance"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.randn(2, 2, 30)}, "query must have 4 dimensions"),
        ({"query": torch.randn(2, 2, 30, 16), "key": torch.randn(2, 2, 30, 16)}, "must have 2 and 2 heads of 8; got"),
        ({"key_mask": torch.ones(2, 30)}, "key_mask must be bool"),
        ({"key_mask": torch.ones(1, 30, dtype=torch.bool)}, "key_mask must have shape"),
        ({"query_mask": torch.ones(2, 1, dtype=torch.bool)}, "query_mask must have shape"),
        ({"cu_seqlens": [0, 30]}, "cu_seqlens must be an int32 tensor"),
    ],
)
def test_wrong_input_is_named_before_statistics_stumble_over_it(changed: dict[str, Any], message: str) -> None:
    given = dict(zip(("query", "key", "value"), draw_inputs(), strict=True)) | changed
    with pytest.raises((ValueError, TypeError), match=message):
        LLNAttention(2, 8)(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.5}, "momentum must lie between 0 and 1; got 1.5"),
        ({"dropout": -0.1}, "dropout must lie between 0 and 1; got -0.1"),
        ({"length": 0}, "length must be a positive int; got 0"),
        ({"scale": 0.0}, "scale must be positive; got 0.0"),
        ({"block_size": 2.5}, "block_size must be a positive int"),
        ({"num_key_heads": 0}, "num_key_heads must be a positive int; got 0"),
        ({"backend": "fast"}, "backend must be 'auto', 'eager' or 'triton'; got 'fast'"),
        (
            {"statistics": "fixed", "alpha": torch.ones(2, 8), "learnable": "head"},
            "is per channel; use learnable='channel'",
        ),
    ],
)
def test_wrong_numbers_are_named_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLNAttention(2, 8, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
@pytest.mark.parametrize("statistics", ["sample", "batch", "running", "fixed"])
def test_a_module_compiles_as_one_graph(matching: Any, statistics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(curves, "MADE", {})  # nothing was computed before
    attention = LLNAttention(2, 8, matching=matching, statistics=statistics, block_size=8)
    other = copy.deepcopy(attention)
    # With the decompositions of inductor: some of them read a value on the host.
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager_decomp_partition")
    for step in range(2):  # in training: running averages move from the first step to the second
        tensors = draw_inputs(seed=step, spread=1.5)
        torch.testing.assert_close(compiled(*tensors), other(*tensors), rtol=1e-4, atol=1e-5)
