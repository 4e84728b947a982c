"""LLNAttention: who may be seen by the statistics, what is stored and when, what is learned."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

from helpers.tensors import make_inputs
from helpers.untyped import lln_attention, match_moments
from lln import LLNAttention

draw_inputs = functools.partial(make_inputs, 2, 4, 2, 30, 8, 6)


def module(**options: Any) -> LLNAttention:
    return LLNAttention(4, 8, num_key_heads=2, value_dim=6, **options).double()


@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
def test_sample_statistics_are_those_of_each_sample_and_head_group(matching: str) -> None:
    q, k, v = draw_inputs()
    out = module(matching=matching)(q, k, v)
    sigma_q = q.unflatten(1, (2, 2)).flatten(2).std(-1)
    alpha, beta = match_moments(sigma_q, k.flatten(2).std(-1), 8, matching, length=30)
    expected = lln_attention(q, k, v, alpha.repeat_interleave(2, 1), beta)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_batch_statistics_are_one_number_over_everything_as_in_the_released_code() -> None:
    q, k, v = draw_inputs()
    out = module(statistics="batch").eval()(q, k, v)
    alpha, beta = match_moments(q.std().item(), k.std().item(), 8)
    torch.testing.assert_close(out, lln_attention(q, k, v, alpha, beta), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block_size", [None, 7])
@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
def test_batch_mates_are_invisible_exactly(matching: str, block_size: int | None) -> None:
    attention = module(matching=matching, block_size=block_size)
    q, k, v = draw_inputs()
    mate = [torch.cat([t[:1], 50 * u[1:]]) for t, u in zip((q, k, v), draw_inputs(seed=1), strict=True)]
    assert torch.equal(attention(*mate)[0], attention(q, k, v)[0])
    packed = [t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (q, k, v)]
    other = [torch.cat([t[:, :, :30], 50 * t[:, :, 30:]], 2) for t in packed]
    offsets = torch.tensor([0, 30, 60])
    first, second = (attention(*t, cu_seqlens=offsets)[:, :, :30] for t in (packed, other))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[0], attention(q, k, v)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("matching", ["paper", "entropy"])
def test_padding_is_invisible_to_the_statistics(left: bool, matching: str) -> None:
    attention = module(matching=matching, block_size=7)
    q, k, v = draw_inputs()
    noise = [100 * t[:, :, :5] for t in draw_inputs(seed=2)]
    padded = [torch.cat([n, t] if left else [t, n], 2) for t, n in zip((q, k, v), noise, strict=True)]
    mask = torch.ones(2, 35, dtype=torch.bool)
    mask[:, :5] = not left
    mask[:, 30:] = left
    out = attention(*padded, key_mask=mask)
    out = out[:, :, 5:] if left else out[:, :, :30]
    torch.testing.assert_close(out, attention(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
@pytest.mark.parametrize("statistics", ["sample", "batch"])
def test_a_factor_moved_from_keys_to_queries_changes_nothing(matching: str, statistics: str) -> None:
    attention = module(matching=matching, statistics=statistics)
    q, k, v = draw_inputs()
    torch.testing.assert_close(attention(3 * q, k / 3, v), attention(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("statistics", ["sample", "batch"])
def test_statistics_over_all_tokens_are_refused_where_they_would_show_the_future(statistics: str) -> None:
    with pytest.raises(ValueError, match=f"statistics='{statistics}' looks at all tokens.*'running' or 'fixed'"):
        module(statistics=statistics)(*draw_inputs(), is_causal=True)
    with pytest.raises(ValueError, match="in decoders"):
        module(statistics=statistics, decoder=True)(*draw_inputs())


def test_statistics_carry_no_gradient() -> None:
    q, k, _ = (t.requires_grad_() for t in draw_inputs())
    alpha, beta = module().coefficients(q, k)
    assert not alpha.requires_grad
    assert not beta.requires_grad


def test_running_statistics_lag_one_step_and_freeze_in_eval() -> None:
    attention = module(statistics="running", momentum=0.25)
    first, second = draw_inputs(seed=1), [2 * t for t in draw_inputs(seed=2)]
    variances = [[t[1].transpose(0, 1).flatten(1).var(-1) for t in (first, second)]]
    out = attention(*first)
    usual = match_moments(1.0, 1.0, 8)
    torch.testing.assert_close(out, lln_attention(*first, *usual))  # the buffers as they stood: sigma = 1
    assert attention.running_count == 0
    attention(*second)  # commits the first
    torch.testing.assert_close(attention.running_variance_k, variances[0][0].float())
    attention.eval()  # commits the second
    expected = 0.75 * variances[0][0] + 0.25 * variances[0][1]
    torch.testing.assert_close(attention.running_variance_k, expected.float())
    before = copy.deepcopy(attention.state_dict())
    attention(*first)
    assert all(torch.equal(t, before[name]) for name, t in attention.state_dict().items())
    assert attention.running_count == 2


def test_saving_commits_and_loading_discards_what_is_pending() -> None:
    attention, other = module(statistics="running"), module(statistics="running")
    attention(*draw_inputs(seed=1))
    saved = attention.state_dict()
    assert saved["running_count"] == 1
    other(*draw_inputs(seed=2))
    other.load_state_dict(saved)
    other.eval()
    assert torch.equal(other.running_variance_q, attention.running_variance_q)
    assert other.running_count == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_running_statistics_is_bit_equal_and_updates_once_a_step(use_reentrant: bool) -> None:
    results = []
    for checkpointed in (False, True):
        attention = module(statistics="running", block_size=7, mix="scales")
        for step in range(3):
            q, k, v = (t.requires_grad_() for t in draw_inputs(seed=step))
            attention.zero_grad()
            call = lambda q, k, v: attention(q, k, v, is_causal=True)  # noqa: B023, E731
            out = checkpoint(call, q, k, v, use_reentrant=use_reentrant) if checkpointed else call(q, k, v)
            out.square().sum().backward()
        grads = [t.grad for t in (q, k, v, *attention.parameters())]
        results.append([*grads, *attention.state_dict().values()])
        assert attention.running_count == 3
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def train_on_one_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    attention = module(statistics="running")
    for step in range(3):
        attention(*(t[rank : rank + 1] * (step + 1) for t in draw_inputs(seed=step)))
    if rank == 0:  # saving on one rank alone must not wait for the other
        attention.state_dict()
    attention.eval()
    torch.save(dict(attention.state_dict()), Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_hold_the_buffers_of_one_with_both_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(train_on_one_rank, (folder,), nprocs=2)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2))
    whole = module(statistics="running")
    for step in range(3):
        whole(*(t * (step + 1) for t in draw_inputs(seed=step)))
    for name, expected in whole.eval().state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected)


def test_nothing_is_stored_unless_it_is_learned_or_running() -> None:
    for options in ({}, {"statistics": "batch"}, {"statistics": "fixed"}, {"block_size": 4}):
        assert list(module(**options).state_dict()) == []
    running = module(statistics="running").state_dict()
    assert list(running) == ["running_count", "running_variance_q", "running_variance_k"]
    assert list(module(statistics="fixed", learnable="head").state_dict()) == ["log_alpha", "log_beta"]
    assert list(module(block_size=4, mix="ratio").state_dict()) == ["mix_logit"]
    assert list(module(block_size=4, mix="scales").state_dict()) == ["lln_scale", "block_scale"]


@pytest.mark.parametrize("learnable", ["head", "channel"])
def test_learned_alpha_and_beta_start_where_they_are_told_and_learn(learnable: str) -> None:
    q, k, v = draw_inputs()
    attention = module(statistics="fixed", alpha=1.5, beta=torch.tensor([1.2, 0.7]), learnable=learnable)
    beta = torch.tensor([1.2, 0.7]).double()
    torch.testing.assert_close(attention(q, k, v), lln_attention(q, k, v, 1.5, beta), rtol=1e-6, atol=1e-6)
    assert attention.log_alpha.shape == ((4, 8) if learnable == "channel" else (4, 1))
    attention(q, k, v).square().sum().backward()
    for parameter in attention.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().min() > 0


@pytest.mark.parametrize("mix", ["ratio", "scales"])
def test_learned_mixes_start_at_the_average_and_learn(mix: str) -> None:
    q, k, v = draw_inputs()
    attention, plain = module(block_size=7, mix=mix), module(block_size=7)
    torch.testing.assert_close(attention(q, k, v), plain(q, k, v))
    attention(q, k, v).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in attention.parameters())


def test_dropout_is_for_training_only() -> None:
    attention = module(dropout=0.5)
    assert not torch.equal(attention(*draw_inputs()), attention(*draw_inputs()))
    attention.eval()
    assert torch.equal(attention(*draw_inputs()), attention(*draw_inputs()))


def test_a_causal_sequence_goes_on_from_its_state() -> None:
    attention = module(statistics="running", block_size=7).eval()
    q, k, v = draw_inputs()
    whole = attention(q, k, v, is_causal=True)
    cut = [t.split([11, 19], 2) for t in (q, k, v)]
    first, state = attention(*(t[0] for t in cut), is_causal=True, return_state=True)
    second = attention(*(t[1] for t in cut), is_causal=True, state=state)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)


def test_constant_inputs_and_half_precision_stay_finite() -> None:
    attention = LLNAttention(4, 8, num_key_heads=2, block_size=4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ones = [torch.ones_like(t, dtype=dtype, requires_grad=True) for t in draw_inputs()]
        out = attention(*ones)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out.sum(), ones)
        assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matching": "mean"}, "matching must be 'paper', 'variance' or 'entropy'; got 'mean'"),
        ({"statistics": "token"}, "statistics must be 'sample', .* or 'fixed'; got 'token'"),
        ({"alpha": 2.0}, "alpha, beta and learnable go with statistics='fixed'; got statistics='sample'"),
        ({"statistics": "fixed", "learnable": "row"}, "learnable must be None, 'head' or 'channel'; got 'row'"),
        ({"statistics": "fixed", "alpha": -1.0}, "alpha must be positive; got -1.0"),
        ({"mix": "ratio"}, "mix weighs LLN against the blocks and needs block_size"),
        ({"mix": "sum", "block_size": 4}, "mix must be a number, 'ratio', 'scales' or 'evidence'; got 'sum'"),
        ({"mix": 2.0, "block_size": 4}, "mix must lie between 0 and 1; got 2.0"),
        ({"num_key_heads": 3}, "num_heads must be a multiple of num_key_heads; got 4 and 3"),
    ],
)
def test_wrong_options_are_named_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLNAttention(4, 8, **options)


def test_a_head_dim_without_curves_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="cover head_dim 8 to 256; got 4"):
        LLNAttention(4, 4, matching="entropy")
