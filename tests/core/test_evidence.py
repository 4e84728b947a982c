"""The evidence read equals its definition for every option, and has the properties that it is built on."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import assert_close, make_inputs, normal, relative_error
from helpers.untyped import lln_attention
from lln import LLNAttention, LLNState, MultiheadAttention
from lln.instruments import entropy, lln_map, record
from lln.naive import naive_evidence

DIRECTIONS: dict[str, Any] = {
    "keys": None,
    "signed": "signed",
    "more": normal(11, 2, 11, 8),
    "fewer": normal(12, 3, 8),
}


def attend(*qkv: Tensor, beta: Any = 1.3, **options: Any) -> Any:
    return lln_attention(*qkv, beta=beta, read="evidence", **options)


def hide(length: int) -> Tensor:
    mask = normal(7, 2, length) > -0.3
    mask[1, : length // 3] = False
    mask[:, -1] = True
    return mask


# Every pair of these options occurs.
OPTIONS = list(itertools.product(DIRECTIONS, (False, True), (None, 4), (False, True), (2, 4)))


@pytest.mark.parametrize(("directions", "is_causal", "block_size", "masked", "heads"), OPTIONS)
def test_outputs_and_gradients_equal_the_definition(
    directions: str, is_causal: bool, block_size: int | None, masked: bool, heads: int
) -> None:
    qkv = make_inputs(2, heads, 2, 19, 8, 5, exact=True)
    options: dict[str, Any] = {"is_causal": is_causal, "block_size": block_size, "directions": DIRECTIONS[directions]}
    if block_size:
        options |= {"mix": (normal(5, heads, 5), normal(6, heads, 5)), "scale": 0.4}
    if masked:
        options["key_mask"] = hide(19)
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    ways: list[tuple[Any, list[Tensor]]] = [(naive_evidence, wanted), (attend, found)]
    for attention, into in ways:
        width = {"more": 11, "fewer": 3}.get(directions, 8)
        leaves = [t.clone().requires_grad_() for t in (*qkv, normal(9, 2, width).exp())]
        given = dict(options)
        if isinstance(given["directions"], Tensor):
            leaves.append(given["directions"].clone().requires_grad_())
            given["directions"] = leaves[-1]
        out = attention(*leaves[:3], beta=leaves[3], **given)
        into += [out.detach(), *torch.autograd.grad((out * normal(8, *out.shape)).sum(), leaves)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) <= 1e-12
    cast = {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()}
    if block_size:
        cast["mix"] = tuple(x.float() for x in options["mix"])
    narrow = attend(*(t.float() for t in qkv), beta=normal(9, 2, width).exp().float(), **cast)
    assert narrow.dtype == torch.float32
    assert relative_error(narrow, wanted[0]) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_alone(is_causal: bool) -> None:
    q, k, v = make_inputs(1, 2, 2, 30, 8)
    offsets = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    beta = normal(3, 3, 2).exp()
    packed = attend(q, k, v, beta=beta, cu_seqlens=offsets, is_causal=is_causal, block_size=4)
    assert_close(packed, naive_evidence(q, k, v, beta, cu_seqlens=offsets, is_causal=is_causal, block_size=4), 1e-12)


def show_rows(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """P: attention is linear in the values."""
    return attend(q, k, torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1), **options)


@pytest.mark.parametrize("directions", [None, "signed"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_sum_to_one_and_nobody_sees_later_keys(directions: Any, is_causal: bool) -> None:
    q, k, _ = make_inputs(2, 2, 2, 150, 8)
    p = show_rows(q, k, directions=directions, is_causal=is_causal)
    assert p.min() >= 0
    assert_close(p.sum(-1), torch.ones(2, 2, 150, dtype=torch.float64), 1e-12)
    if is_causal:
        assert not p.triu(1).any()
        moved = k.clone()
        moved[:, :, 100:] += 1e3  # nor does a later key change an earlier row by a bit
        v = normal(1, 2, 2, 150, 4)
        first, second = (attend(q, one, v, is_causal=True)[:, :, :100] for one in (k, moved))
        assert torch.equal(first, second)


def list_logits(q: Tensor, k: Tensor, beta: Any, scale: float) -> Tensor:
    """[B, H, N, D] from the state, which holds what they are made of."""
    _, state = attend(q, k, k, beta=beta, return_state=True)
    return scale * q @ state.mean_key.transpose(-1, -2) + state.entropy.unsqueeze(-2)


def test_logits_are_lower_bounds_of_softmax_normaliser_and_exact_for_a_query_along_its_channel() -> None:
    q, k, _ = make_inputs(2, 2, 2, 50, 8)
    beta, scale = 1.7, 0.6
    normaliser = (scale * q @ k.transpose(-1, -2)).logsumexp(-1, keepdim=True)
    logits = list_logits(q, k, beta, scale)
    assert (logits <= normaliser + 1e-12).all()
    along = torch.eye(8, dtype=torch.float64).mul(beta / scale).expand(2, 2, 8, 8)  # scale q_i = beta e_i
    exact = (scale * along @ k.transpose(-1, -2)).logsumexp(-1)
    assert_close(list_logits(along, k, beta, scale).diagonal(dim1=-2, dim2=-1), exact, 1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_of_one_key_or_equal_keys_attention_is_exact(is_causal: bool) -> None:
    q, k, v = make_inputs(2, 2, 2, 33, 8)
    equal = k[:, :, :1].expand_as(k)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, equal, v, is_causal=is_causal)
    assert_close(attend(q, equal, v, is_causal=is_causal), wanted, 1e-12)
    one = attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], is_causal=is_causal)
    assert_close(one, v[:, :, :1], 1e-14)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_vector_that_all_keys_share_changes_nothing(is_causal: bool, dtype: torch.dtype) -> None:
    """H derived from L and K would lose 1.6e-3 in float32 with keys around 50. The dtype holds the shifted keys."""
    q, k, v = (t.bfloat16().double() for t in make_inputs(2, 2, 2, 200, 8))
    k = (k * 4).round() / 4  # multiples of 1/4: with 48 added bfloat16 still holds them
    wanted = attend(q, k, v, is_causal=is_causal)
    shifted = attend(q.to(dtype), (k + 48).to(dtype), v.to(dtype), is_causal=is_causal)
    plain = attend(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=is_causal)
    floor = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 3e-3}[dtype]
    assert relative_error(shifted, wanted) <= max(2 * relative_error(plain, wanted), floor)


def test_padding_and_batch_mates_are_invisible() -> None:
    q, k, v = make_inputs(3, 2, 2, 40, 8)
    mask = torch.arange(40) < torch.tensor([[40], [25], [0]])
    noisy = torch.where(mask[:, None, :, None], k, 1e4)
    out = attend(q, noisy, v, key_mask=mask, block_size=8)
    assert_close(out[1:2], attend(q[1:2], noisy[1:2], v[1:2], key_mask=mask[1:2], block_size=8), 1e-14)
    assert_close(attend(q[1:2], noisy[1:2], v[1:2], key_mask=mask[1:2]), attend(q[1:2], k[1:2, :, :25], v[1:2, :, :25]))
    leaves = [t.clone().requires_grad_() for t in (q, noisy, v)]
    dead = attend(*leaves, key_mask=mask)
    assert not dead[2].any()  # a sample without a key gives zeros and zero gradients, never NaN
    for gradient in torch.autograd.grad(dead.sum(), leaves):
        assert gradient.isfinite().all()
        assert not gradient[2].any()


@pytest.mark.parametrize("directions", list(DIRECTIONS))
@pytest.mark.parametrize("block_size", [None, 8])
def test_split_equals_whole(directions: str, block_size: int | None) -> None:
    q, k, v = make_inputs(2, 4, 2, 70, 8)
    options: dict[str, Any] = {"directions": DIRECTIONS[directions], "block_size": block_size, "is_causal": True}
    whole, end = attend(q, k, v, return_state=True, **options)
    outs, state = [], None
    for first, last in itertools.pairwise((0, 1, 2, 37, 70)):  # a token at a time and more
        rows = (t[:, :, first:last] for t in (q, k, v))
        out, state = attend(*rows, state=state, return_state=True, **options)
        outs.append(out)
    assert_close(torch.cat(outs, 2), whole, 1e-12)
    for name in ("log_sum", "mean_value", "mean_key", "entropy"):
        assert_close(getattr(state, name), getattr(end, name), 1e-12)


def test_states_merge_in_any_grouping_and_an_empty_one_changes_nothing() -> None:
    q, k, v = make_inputs(2, 2, 2, 60, 8)
    options: dict[str, Any] = {"return_state": True, "directions": "signed"}
    parts = [attend(q, k[:, :, i : i + 20], v[:, :, i : i + 20], **options)[1] for i in (0, 20, 40)]
    whole = attend(q, k, v, **options)[1]
    nothing = LLNState.empty(2, 2, 8, read="evidence", channels=16, dtype=torch.float64)
    for merged in (
        parts[0].merge(parts[1]).merge(parts[2]),
        parts[2].merge(parts[0].merge(parts[1])),
        nothing.merge(whole),
        whole.merge(nothing),
    ):
        for name in ("log_sum", "mean_value", "mean_key", "entropy"):
            assert_close(getattr(merged, name), getattr(whole, name), 1e-12)
    assert_close(
        attend(q, k[:, :, :0], v[:, :, :0], state=whole, directions="signed"), attend(q, k, v, directions="signed")
    )


@pytest.mark.parametrize("mix", [0.5, "evidence"])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize(("is_causal", "rows"), [(True, 0), (False, 0), (False, 3)])
def test_no_keys_are_no_error_in_the_backward(is_causal: bool, rows: int, directions: str, mix: Any) -> None:
    """As torch's own attention has it: every input has a gradient, of nothing or of zeros."""
    block_size = 4 if is_causal or not rows else None
    if mix == "evidence" and block_size is None:
        return  # goes with blocks
    options: dict[str, Any] = {"directions": DIRECTIONS[directions], "is_causal": is_causal, "block_size": block_size}
    options |= {"mix": mix} if block_size is not None else {}
    qkv = normal(1, 2, 2, rows, 8), normal(2, 2, 2, 0, 8), normal(3, 2, 2, 0, 8)
    leaves = [t.requires_grad_() for t in (*qkv, torch.tensor(1.3, dtype=torch.float64))]
    out = attend(*leaves[:3], beta=leaves[3], **options)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert not gradient.any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_what_lies_in_one_window_has_a_gradient_of_zeros_for_what_reads_the_rest(is_causal: bool) -> None:
    """Or training on several processes would stop at a batch of short texts: a parameter took no part in it."""
    leaves = [t.requires_grad_() for t in (*make_inputs(1, 2, 2, 3, 8, 8, exact=True), normal(4, 2, 8).exp())]
    out = attend(*leaves[:3], beta=leaves[3], is_causal=is_causal, block_size=4, mix="evidence")
    *gradients, of_beta = torch.autograd.grad((out * normal(8, *out.shape)).sum(), leaves)
    assert all(gradient.any() for gradient in gradients)
    assert not of_beta.any()


def test_the_entropy_of_many_tokens_does_not_drift() -> None:
    length = 300_000
    k = normal(0, 1, 1, length, 2).float() + 50
    _, state = attend(k[:, :, :1], k, k, return_state=True)
    b = (1.3 * k.double()).softmax(-2)
    assert relative_error(state.entropy, torch.special.entr(b).sum(-2)) <= 1e-6
    one: Any = LLNState.empty(1, 1, 2, read="evidence")
    for row in k[:, :, :2000].split(1, 2):  # and one at a time
        _, one = attend(row, row, row, state=one, is_causal=True, return_state=True)
    b = (1.3 * k[:, :, :2000].double()).softmax(-2)
    assert relative_error(one.entropy, torch.special.entr(b).sum(-2)) <= 1e-6
    assert relative_error(one.mean_key, b.transpose(-1, -2) @ k[:, :, :2000].double()) <= 1e-6


def test_dropout_keeps_the_mean_and_is_drawn_again_by_its_seed() -> None:
    q, k, v = make_inputs(1, 2, 2, 130, 8)
    for is_causal in (False, True):
        torch.manual_seed(0)
        first = attend(q, k, v, dropout_p=0.3, is_causal=is_causal)
        torch.manual_seed(0)
        assert torch.equal(first, attend(q, k, v, dropout_p=0.3, is_causal=is_causal))
        mean = torch.stack([attend(q, k, v, dropout_p=0.3, is_causal=is_causal) for _ in range(300)]).mean(0)
        assert (mean - attend(q, k, v, is_causal=is_causal)).abs().max() < 0.3
        leaf = v.clone().requires_grad_()
        torch.manual_seed(1)
        out = attend(q, k, leaf, dropout_p=0.3, is_causal=is_causal)
        torch.manual_seed(1)
        assert_close(attend(q, k, v, dropout_p=0.3, is_causal=is_causal), out.detach(), 1e-14)
        (gradient,) = torch.autograd.grad((out * normal(1, *out.shape)).sum(), leaf)
        # Linear in v: what is pulled back by the same mask is the same form in v.
        assert_close((gradient * v).sum(), (out.detach() * normal(1, *out.shape)).sum(), 1e-10)


def test_second_derivatives_are_those_of_the_definition() -> None:
    qkv = make_inputs(1, 1, 1, 7, 3)
    for is_causal in (False, True):
        leaves = [t.clone().requires_grad_() for t in qkv]
        assert torch.autograd.gradgradcheck(lambda *t, c=is_causal: attend(*t, is_causal=c), leaves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 2.0, "beta": 2.0, "read": "evidence"}, "alpha must be left out with read='evidence'"),
        ({"alpha": 2.0, "beta": 2.0, "read": "centre"}, "read must be 'paper' or 'evidence'"),
        ({"beta": 2.0}, "alpha is missing"),
        ({}, r"alpha and beta are missing.*lln\.scaled_dot_product_attention"),
        ({"read": "evidence"}, "beta is missing"),
        ({"alpha": 2.0, "beta": 2.0, "directions": "signed"}, "directions go with read='evidence'"),
        ({"beta": 2.0, "read": "evidence", "directions": "both"}, "directions must be 'signed'"),
        ({"beta": 2.0, "read": "evidence", "directions": torch.ones(3, 4, 8)}, "here with 2 heads of 8"),
        (
            {"beta": 2.0, "read": "evidence", "is_causal": True, "block_size": 4, "backend": "triton"},
            "has kernels with block_size where is_causal is set for mix='evidence' alone",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    q, k, v = make_inputs(1, 2, 2, 10, 8)
    with pytest.raises((ValueError, TypeError), match=message):
        lln_attention(q, k, v, **options)


def test_states_of_different_reads_do_not_mix() -> None:
    q, k, v = make_inputs(1, 2, 2, 10, 8)
    _, ours = attend(q, k, v, return_state=True)
    _, papers = lln_attention(q, k, v, 1.3, 1.3, return_state=True)
    with pytest.raises(ValueError, match="one state is for read='evidence'"):
        ours.merge(papers)
    with pytest.raises(ValueError, match="state was made with read='paper'"):
        attend(q, k, v, state=papers)
    with pytest.raises(ValueError, match="state must be of"):
        attend(q, k, v, state=ours, directions="signed")
    moved = ours.to(torch.bfloat16).clone().detach().index_select(torch.tensor([0, 0]))
    assert (moved.read, moved.mean_key.dtype, moved.entropy.shape) == ("evidence", torch.float32, (2, 2, 8))


@pytest.mark.parametrize("directions", list(DIRECTIONS))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [None, 8])
def test_the_map_is_what_values_are_multiplied_by(directions: str, is_causal: bool, block_size: int | None) -> None:
    q, k, _ = make_inputs(2, 4, 2, 30, 8)
    options: dict[str, Any] = {"directions": DIRECTIONS[directions], "is_causal": is_causal, "block_size": block_size}
    options["key_mask"] = hide(30)
    p = lln_map(q, k, None, 1.3, read="evidence", **options)
    found = p.dense()[p.live[:, None].expand(-1, 4, -1)]
    assert_close(found, show_rows(q, k, **options)[p.live[:, None].expand(-1, 4, -1)], 1e-11)
    assert entropy(p).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"directions": "signed"}, {"directions": 20, "statistics": "fixed"}])
def test_modules_run_the_op_with_their_beta_and_directions(options: dict[str, Any]) -> None:
    q, k, v = make_inputs(2, 4, 2, 30, 8, dtype=torch.float32)
    module = LLNAttention(4, 8, num_key_heads=2, block_size=8, mix="scales", read="evidence", **options)
    assert not [name for name, _ in module.named_parameters() if "alpha" in name]
    alpha, beta = module.coefficients(q, k)
    assert alpha is None
    held: Any = module.channel_directions if "statistics" in options else options.get("directions")
    out = attend(q, k, v, beta=beta, directions=held, block_size=8)
    assert_close(module(q, k, v), out, 1e-6)
    module(q, k, v).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    again = LLNAttention(4, 8, num_key_heads=2, block_size=8, mix="scales", read="evidence", **options)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(q, k, v), module(q, k, v))
    with record(module) as seen:
        module(q, k, v)
    assert seen.table()["entropy"].notna().all()


def test_multihead_attention_has_the_read_and_its_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 32)
    module = MultiheadAttention(32, 4, batch_first=True, read="evidence", directions="signed", block_size=8)
    out, weights = module(x, x, x)
    assert weights is not None
    assert_close(weights.sum(-1), torch.ones(2, 20), 1e-5)
    assert not torch.allclose(out, MultiheadAttention(32, 4, batch_first=True, block_size=8)(x, x, x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.0, "statistics": "fixed"}, "alpha must be left out with read='evidence'"),
        ({"directions": 20}, "learned directions hold beta"),
        ({"directions": 20, "statistics": "fixed", "learnable": "head"}, "learned directions hold beta"),
        ({"directions": 0, "statistics": "fixed"}, "directions must be a positive int"),
        ({"directions": "both"}, "directions must be None or 'signed'"),
        ({"read": "paper", "directions": "signed"}, "directions go with read='evidence'"),
    ],
)
def test_modules_refuse_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLNAttention(2, 8, **({"read": "evidence"} | options))
