"""Longformer, BigBird and Reformer against transformers with the same weights; Transformer-LS and TransNormer against
their formulas, dense in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BigBirdConfig, LongformerConfig, ReformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from helpers.mechanism_cases import HEADS, LENGTH, draw_inputs, merge_heads, split_heads
from helpers.tensors import normal, relative_error
from helpers.untyped import attention, mechanism
from lln.naive import masked_softmax
from lln.peers.bigbird import draw


@pytest.mark.parametrize("by_mask", [False, True])
@torch.no_grad()
def test_longformer_is_transformers(by_mask: bool) -> None:
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=24, num_attention_heads=4, attention_window=[8], attention_probs_dropout_prob=0.0,
        num_hidden_layers=1,
    )  # fmt: skip
    theirs = LongformerSelfAttention(config, 0).double()
    for kind in ("query", "key", "value"):  # one projection for global and local tokens
        getattr(theirs, f"{kind}_global").load_state_dict(getattr(theirs, kind).state_dict())
    x = normal(1, 2, 32, 24)
    valid = torch.ones(2, 32, dtype=torch.bool)
    valid[1, 27:] = False
    chosen = torch.zeros(2, 32, dtype=torch.bool)
    if by_mask:
        chosen[0, [3, 17]] = True
        chosen[1, 9] = True
    else:
        chosen[:, :2] = True
    state = torch.where(chosen, 10000.0, torch.where(valid, 0.0, -10000.0)).double()
    expected = theirs(x, state, is_index_masked=~valid, is_index_global_attn=chosen, is_global_attn=True)[0]
    q, k, v = (split_heads(projection(x), 4) for projection in (theirs.query, theirs.key, theirs.value))
    how = {"global_mask": chosen} if by_mask else {"global_tokens": 2}
    out = merge_heads(attention("longformer", q, k, v, window=4, key_mask=valid, **how))
    assert relative_error(out[valid], expected[valid]) < 1e-6  # theirs takes its softmax in float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 5, 200])
def test_longformer_is_a_masked_softmax(window: int, causal: bool) -> None:
    q, k, v = draw_inputs(2)
    row = torch.arange(LENGTH)
    allowed = ((row[:, None] - row).abs() <= window) | (row < 3) | (row[:, None] < 3)
    if causal:
        allowed = allowed.tril()
    expected = masked_softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, allowed) @ v
    out = attention("longformer", q, k, v, window=window, global_tokens=3, is_causal=causal)
    assert relative_error(out, expected) < 1e-12


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_bigbird_is_transformers(training: bool) -> None:
    """In training with its random blocks; in eval, where it takes block 0 again for each of them."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        hidden_size=24, num_attention_heads=4, block_size=4, num_random_blocks=2, max_position_embeddings=64
    )
    theirs = BigBirdBlockSparseAttention(config, seed=3).double().train(training)
    x, blocks = normal(1, 2, 48, 24), 12
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, 48, dtype=torch.float64), 4)
    blocked, band, from_mask, to_mask = masks
    expected = theirs(x, band, from_mask, to_mask, blocked, blocked)[0]
    np.random.seed(3)
    lengths, counts = theirs._get_rand_attn_plan(48, 4, 2)
    rows = theirs._bigbird_block_rand_mask_with_head(48, 48, 4, 4, 4, lengths, counts)
    plan = torch.zeros(4, blocks, 2, dtype=torch.int64)
    plan[:, 1:-1] = torch.tensor(np.stack(rows))
    q, k, v = (split_heads(projection(x), 4) for projection in (theirs.query, theirs.key, theirs.value))
    assert relative_error(merge_heads(attention("bigbird", q, k, v, block=4, plan=plan)), expected) < 1e-12


@pytest.mark.parametrize("length", [3, 4, 9, LENGTH])
def test_bigbird_is_a_masked_softmax(length: int) -> None:
    q, k, v = draw_inputs(3, length=length)
    blocks = -(-length // 4)
    chosen, none = draw(HEADS, blocks, torch.tensor([blocks - 1]), 2, seed=5)
    allowed = torch.zeros(HEADS, blocks, blocks, dtype=torch.bool)
    for head in range(HEADS):
        for row in range(blocks):
            seen = {0, blocks - 1, row - 1, row, row + 1} | set(
                chosen[0, head, row][~none[0, head, row]].tolist() if 0 < row < blocks - 1 else []
            )
            ends = row in (0, blocks - 1)
            for column in range(blocks):
                allowed[head, row, column] = ends or column in seen
    allowed = allowed.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :length, :length]
    expected = masked_softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, allowed) @ v
    out = attention("bigbird", q, k, v, block=4, random_blocks=2, seed=5)
    assert relative_error(out, expected) < 1e-12


def test_bigbird_draws_distinct_blocks_that_it_does_not_see_anyhow() -> None:
    blocks = 40
    chosen, none = draw(8, blocks, torch.tensor([blocks - 1]), 3, seed=0)
    other, _ = draw(8, blocks, torch.tensor([blocks - 1]), 3, seed=1)
    assert not none[:, :, 1:-1].any()
    assert not torch.equal(chosen, other)
    counts = torch.zeros(blocks)
    for head in range(8):
        for row in range(1, blocks - 1):
            found = chosen[0, head, row].tolist()
            assert len(set(found)) == 3
            assert all(0 < block < blocks - 1 and abs(block - row) > 1 for block in found)
            counts[found] += 1
    # 8 heads, 38 rows, 3 draws out of about 35: each block about 24 times
    assert counts[1:-1].min() > 8
    assert counts[1:-1].max() < 50


@pytest.mark.parametrize("rounds", [1, 3])
@torch.no_grad()
def test_reformer_is_transformers(rounds: int) -> None:
    config = ReformerConfig(
        hidden_size=24, num_attention_heads=4, attention_head_size=6, lsh_attn_chunk_length=4, num_hashes=rounds,
        num_buckets=8, lsh_num_chunks_before=1, lsh_num_chunks_after=0, hash_seed=5, is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0, attn_layers=["lsh"], axial_pos_embds=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LSHSelfAttention(config).double().eval()
    x = normal(1, 2, 32, 24)
    expected = theirs(x).hidden_states
    torch.manual_seed(5)
    rotations = torch.randn(4, 6, rounds, 4, dtype=torch.float64)
    q, v = split_heads(theirs.query_key(x), 4), split_heads(theirs.value(x), 4)
    out = attention("reformer", q, q, v, chunk=4, rounds=rounds, buckets=8, rotations=rotations)
    assert relative_error(merge_heads(out), expected) < 1e-10


def test_reformer_in_one_chunk_is_shared_softmax_without_oneself() -> None:
    q, _, v = draw_inputs(4)
    keys = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    others = ~torch.eye(LENGTH, dtype=torch.bool)
    expected = masked_softmax(q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5, others) @ v
    assert relative_error(attention("reformer", q, q, v, chunk=64), expected) < 1e-12


def test_reformer_finds_its_like() -> None:
    """Tokens in tight clusters, scattered over the sequence: hashing brings them together."""
    length, clusters = 256, 16
    centre = functional.normalize(normal(1, clusters, 8), dim=-1)
    which = torch.randperm(length, generator=torch.Generator().manual_seed(0)) % clusters
    q = 20 * (centre[which] + 0.01 * normal(2, length, 8))[None, None]
    v = functional.one_hot(which, clusters).double()[None, None]
    out = attention("reformer", q, q, v, chunk=32, rounds=4)
    assert (out[0, 0].argmax(-1) == which).double().mean() > 0.95


def test_window_options_are_checked() -> None:
    q, k, v = draw_inputs(5)
    for name, options, message in (
        ("longformer", {"window": 0}, "window must be a positive int"),
        ("longformer", {"global_tokens": -1}, "global_tokens must be an int"),
        ("longformer", {"global_mask": torch.ones(2, 3, dtype=torch.bool)}, "global_mask must have shape"),
        ("bigbird", {"block": 0}, "block must be a positive int"),
        ("bigbird", {"random_blocks": -1}, "random_blocks must be an int"),
        ("bigbird", {"plan": torch.zeros(1, 1, 1)}, "plan must be"),
        ("reformer", {"buckets": 3}, "buckets must be even"),
        ("reformer", {"rotations": torch.zeros(1, 1, 1, 1)}, "rotations must be"),
        ("transnormer_t1", {"part": "both"}, "part must be 'norm' or 'diag'"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(name, q, k, v, **options)


def layer_norm(t: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return split_heads(functional.layer_norm(merge_heads(t), norm.normalized_shape, norm.weight, norm.bias), t.shape[1])


@pytest.mark.parametrize("length", [12, 17])
def test_transformer_ls_is_its_formula(length: int) -> None:
    torch.manual_seed(0)
    module = mechanism("transformer_ls", num_heads=2, head_dim=4, window=4, rank=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal(7, *parameter.shape))
    q, k, v = (normal(seed, 2, 2, length, 4) for seed in (1, 2, 3))
    weight = (k @ module.projection).softmax(-2)  # over positions
    local_k, local_v = layer_norm(k, module.local_norm), layer_norm(v, module.local_norm)
    far_k, far_v = (layer_norm(weight.transpose(-1, -2) @ t, module.global_norm) for t in (local_k, local_v))
    row = torch.arange(length)
    start = row // 4 * 4
    allowed = (row >= start[:, None] - 2) & (row < start[:, None] + 6)
    near = (q @ local_k.transpose(-1, -2) / 2).masked_fill(~allowed, -torch.inf)
    p = torch.cat([near, q @ far_k.transpose(-1, -2) / 2], -1).softmax(-1)
    expected = p @ torch.cat([local_v, far_v], -2)
    assert relative_error(module(q, k, v), expected) < 1e-12
    with pytest.raises(ValueError, match="value dim must be 4; got 3"):
        module(q, k, v[..., :3])


def rms_norm(t: Tensor) -> Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 1e-8).sqrt()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", ["norm", "diag"])
@pytest.mark.parametrize("name", ["transnormer_t1", "transnormer_t2"])
def test_transnormer_is_its_formula(name: str, part: str, causal: bool) -> None:
    q, k, v = draw_inputs(6)
    row = torch.arange(LENGTH)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if part == "diag":
        allowed = row[:, None] // 8 == row // 8
    if causal:
        allowed = allowed.tril()
    first = name == "transnormer_t1"
    if part == "norm":
        fq, fk = (functional.elu(t) + (0 if first else 1) for t in (q, k))
        expected = rms_norm((fq @ fk.transpose(-1, -2) * allowed) @ v)
    else:
        score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        expected = rms_norm((score.relu() * allowed) @ v) if first else masked_softmax(score, allowed) @ v
    out = attention(name, q, k, v, part=part, block=8, is_causal=causal)
    assert relative_error(out, expected) < 1e-11
    if part == "diag":
        mask = torch.tensor([False] * 3 + [True] * LENGTH).expand(2, -1)
        longer = [functional.pad(t, (0, 0, 3, 0), value=2.0) for t in (q, k, v)]
        padded = attention(name, *longer, part=part, block=8, is_causal=causal, key_mask=mask)
        assert relative_error(padded[:, :, 3:], expected) < 1e-11
        with pytest.raises(ValueError, match="part='diag' needs query and key of one sequence"):
            attention(name, q[:, :, :5], k, v, part=part)
