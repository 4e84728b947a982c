"""Linformer, Nystromformer and Skyformer against their packages, against transformers, and against their formulas."""

import math

import linformer
import nystrom_attention
import pytest
import torch
from torch import Tensor, nn
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from helpers.mechanism_cases import DIM, HEADS, LENGTH, draw_inputs, merge_heads, slope, split_heads
from helpers.tensors import normal, relative_error
from helpers.untyped import attention, mechanism


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("length", [16, 11])
def test_linformer_is_the_package(length: int, share: bool) -> None:
    torch.manual_seed(0)
    theirs = linformer.LinformerSelfAttention(24, seq_len=16, k=5, heads=4, share_kv=share).double()
    theirs.to_out = nn.Identity()
    ours = mechanism("linformer", num_heads=4, head_dim=6, max_length=16, rank=5, share=share, dtype=torch.float64)
    with torch.no_grad():
        ours.key_projection.copy_(theirs.proj_k)
        if not share:
            ours.value_projection.copy_(theirs.proj_v)
    x = normal(1, 2, length, 24)
    q, k = (split_heads(projection(x), 4) for projection in (theirs.to_q, theirs.to_k))
    v = k if share else split_heads(theirs.to_v(x), 4)
    assert relative_error(merge_heads(ours(q, k, v)), theirs(x)) < 1e-12


def test_linformer_needs_its_length() -> None:
    with pytest.raises(ValueError, match="linformer needs max_length"):
        mechanism("linformer", num_heads=2, head_dim=4)
    module = mechanism("linformer", num_heads=HEADS, head_dim=DIM, max_length=20, dtype=torch.float64)
    with pytest.raises(ValueError, match="built for max_length=20; got 37 keys"):
        module(*draw_inputs(0))


@pytest.mark.parametrize("conv", [None, 5])
def test_nystromformer_is_transformers(conv: int | None) -> None:
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=24, num_attention_heads=4, num_landmarks=8, segment_means_seq_len=32, conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = NystromformerSelfAttention(config)
    theirs.conv_kernel_size = conv
    theirs.init_option = "exact"  # each matrix from its own norm, not the batch's largest
    ours = mechanism("nystromformer", num_heads=4, head_dim=6, landmarks=8, conv_kernel=conv)
    if conv:
        ours.conv.load_state_dict(theirs.conv.state_dict())
    x = normal(1, 2, 32, 24).float()
    q, k, v = (split_heads(projection(x), 4) for projection in (theirs.query, theirs.key, theirs.value))
    assert relative_error(merge_heads(ours(q, k, v)), theirs(x)[0]) < 3e-5  # theirs in float32


def test_nystromformer_is_the_package() -> None:
    """One head and one sample: its pseudo-inverse starts from the largest norm of the whole batch. (Masked, the package
    keeps uniform rows for segments without tokens, and so depends on the padding.)"""
    torch.manual_seed(0)
    theirs = nystrom_attention.NystromAttention(
        24, dim_head=6, heads=1, num_landmarks=8, residual=True, residual_conv_kernel=5, eps=0.0
    )
    theirs.to_out = nn.Identity()
    ours = mechanism("nystromformer", num_heads=1, head_dim=6, landmarks=8, conv_kernel=5)
    ours.conv.load_state_dict(theirs.res_conv.state_dict())
    x = normal(2, 1, 32, 24).float()
    q, k, v = (split_heads(t, 1) for t in theirs.to_qkv(x).chunk(3, -1))
    assert relative_error(merge_heads(ours(q, k, v)), theirs(x)) < 3e-5  # theirs in float32


def test_nystromformer_converges_to_softmax() -> None:
    """Smooth inputs, as a language model's are along a text: neighbours resemble each other."""
    length = 128
    walk = [normal(seed, 1, 2, length, 4).cumsum(2) / 12 for seed in (1, 2)]
    q, k, v = *walk, normal(3, 1, 2, length, 4)
    expected = attention("softmax", q, k, v)

    def error(landmarks: int, seed: int) -> float:
        return relative_error(attention("nystromformer", q, k, v, landmarks=landmarks, iterations=40), expected)

    assert slope([4, 8, 16, 32], error, seeds=1) < -0.7
    assert error(64, 0) < 0.02
    # Every token its own landmark: P pinv(P) P = P.
    small = [t[:, :, :24] for t in (q, k, v)]
    out = attention("nystromformer", *small, landmarks=24, iterations=80)
    assert relative_error(out, attention("softmax", *small)) < 1e-6


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    return (-(x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1) / 2).exp()


def test_skyformer_is_its_formula() -> None:
    """All queries and keys as landmarks: the order of the draw does not matter to P."""
    q, k, v = draw_inputs(3)
    x, y = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
    z = torch.cat([x, y], 2)
    middle = gaussian_kernel(z, z) + 0.1 * torch.eye(2 * LENGTH, dtype=torch.float64)
    expected = gaussian_kernel(x, z) @ torch.linalg.solve(middle, gaussian_kernel(z, y) @ v)
    out = attention("skyformer", q, k, v, landmarks=2 * LENGTH, iterations=None)
    assert relative_error(out, expected) < 1e-10
    iterated = attention("skyformer", q, k, v, landmarks=2 * LENGTH, iterations=20)
    assert relative_error(iterated, expected) < 1e-8
    usual = attention("skyformer", q, k, v, landmarks=2 * LENGTH)
    assert relative_error(usual, expected) < 0.05


def test_skyformer_converges_to_the_gaussian_kernel() -> None:
    q, k, v = (normal(seed, 1, 2, 128, 3) for seed in (1, 2, 3))
    expected = gaussian_kernel(q / 3**0.25, k / 3**0.25) @ v

    def error(landmarks: int, seed: int) -> float:
        options = {"landmarks": landmarks, "seed": seed, "gamma": 1e-9, "iterations": None}
        return relative_error(attention("skyformer", q, k, v, **options), expected)

    assert slope([16, 32, 64, 128], error, seeds=4) < -1.0
    assert error(256, 0) < 1e-6


def test_skyformer_draws_by_seed_and_without_replacement() -> None:
    q, k, v = draw_inputs(4)
    outs = [attention("skyformer", q, k, v, landmarks=8, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    everything = attention("skyformer", q, k, v, landmarks=2 * LENGTH, iterations=None)
    more = attention("skyformer", q, k, v, landmarks=500, iterations=None)
    assert relative_error(more, everything) < 1e-9
    with pytest.raises(ValueError, match="landmarks must be an int of at least 2; got 1"):
        attention("skyformer", q, k, v, landmarks=1)
    with pytest.raises(ValueError, match="gamma must be positive"):
        attention("skyformer", q, k, v, gamma=0.0)


def test_the_convolution_is_of_one_sequence_and_odd() -> None:
    with pytest.raises(ValueError, match="conv_kernel must be odd"):
        mechanism("nystromformer", num_heads=HEADS, head_dim=DIM, conv_kernel=4)
    module = mechanism("nystromformer", num_heads=HEADS, head_dim=DIM, conv_kernel=3, dtype=torch.float64)
    with pytest.raises(ValueError, match="convolution needs query and key of one sequence"):
        module(*draw_inputs(5, length=9, key_length=LENGTH))
    assert math.prod(module.conv.weight.shape) == HEADS * 3
