"""lln.MultiheadAttention is torch's in every argument, parameter and shape, and LLN attention in what it computes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.tensors import assert_norm_close, normal, relative_error
from helpers.untyped import lln_attention
from lln.nn.multihead import MultiheadAttention

B, L, S, E, H = 3, 7, 10, 12, 4
D = E // H
EXACT = 1e-12
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)  # True = ignore, as in torch
LEARNABLE: dict[str, Any] = {"learnable": "channel", "block_size": 3, "mix": "ratio"}
PADDING = torch.arange(L) >= torch.tensor([[7], [4], [5]])  # [B, L]


def module(*arguments: Any, **options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"batch_first": True, "dtype": torch.float64, **options}
    made = MultiheadAttention(E, H, *arguments, **settings)
    for name, parameter in made.named_parameters():
        if "bias" in name:  # torch starts biases at 0, where a forgotten one would not show
            nn.init.normal_(parameter)
    return made


def make_fixed(**options: Any) -> MultiheadAttention:
    return module(statistics="fixed", alpha=1.5, beta=1.25, **options)


def make_additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def project(mha: MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    weights = [mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight]
    if mha.in_proj_weight is not None:
        weights = list(mha.in_proj_weight.split(E))
    triples = zip(inputs, weights, mha.in_proj_bias.split(E), strict=True)
    return [(x @ w.T + b).unflatten(-1, (H, D)).transpose(1, 2) for x, w, b in triples]


def join_heads(mha: MultiheadAttention, out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2) @ mha.out_proj.weight.T + mha.out_proj.bias


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 5, "vdim": 9}, {"kdim": 5, "add_bias_kv": True}, {"add_zero_attn": True}]
)
def test_weights_load_both_ways(options: dict[str, Any]) -> None:
    ours, theirs = module(**options), nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    assert isinstance(ours, nn.MultiheadAttention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for made in (ours, theirs):
        torch.manual_seed(1)
        made._reset_parameters()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("options", [LEARNABLE | {"statistics": "fixed"}, {"statistics": "running"}])
def test_what_only_lln_has_is_kept_apart(options: dict[str, Any]) -> None:
    more = set(module(**options).state_dict()) - set(nn.MultiheadAttention(E, H).state_dict())
    assert more
    assert all(name.startswith("attention.") for name in more)


@pytest.mark.parametrize("block_size", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_lln_attention_between_projections(block_size: int | None, masked: bool, is_causal: bool) -> None:
    blocks = {} if block_size is None else {"block_size": block_size, "mix": 0.3}
    x, mha = normal(1, B, L, E), make_fixed(**blocks)
    q, k, v = project(mha, x, x, x)
    key_mask = ~PADDING if masked else None
    expected = lln_attention(q, k, v, 1.5, 1.25, is_causal=is_causal, key_mask=key_mask, **blocks)
    padding = PADDING if masked else None
    out, weights = mha(x, x, x, padding, is_causal=is_causal, average_attn_weights=False)
    assert_norm_close(out, join_heads(mha, expected))
    assert_norm_close(weights @ v, expected)  # the weights are the P that made the output
    rows = weights.sum(-1)[~PADDING[:, None].expand(-1, H, -1)]  # a block of padding alone has nothing to give
    assert_norm_close(rows, torch.ones_like(rows))
    assert not masked or not weights[PADDING[:, None, None].expand(-1, H, L, -1)].any()
    assert not is_causal or not weights.triu(1).any()
    assert_norm_close(mha(x, x, x, padding, is_causal=is_causal)[1], weights.mean(1))
    assert mha(x, x, x, padding, is_causal=is_causal, need_weights=False)[1] is None


@pytest.mark.parametrize("statistics", ["sample", "batch", "running", "fixed"])
def test_weights_follow_the_coefficients_of_their_own_step(statistics: str) -> None:
    mha = module(statistics=statistics)
    for step in range(3):  # running statistics move from step to step
        x = (1 + step) * normal(step, B, L, E)
        out, weights = mha(x, x, x, PADDING, average_attn_weights=False)
        assert_norm_close(out, join_heads(mha, weights @ project(mha, x, x, x)[2]))


def test_keys_and_values_of_other_sizes_and_long_keys_of_few_queries() -> None:
    mha = make_fixed(kdim=5, vdim=9)
    query, key, value = normal(1, B, 1, E), normal(2, B, 150, 5), normal(3, B, 150, 9)
    q, k, v = project(mha, query, key, value)
    out, weights = mha(query, key, value, average_attn_weights=False)
    assert_norm_close(weights @ v, lln_attention(q, k, v, 1.5, 1.25))
    assert_norm_close(out, join_heads(mha, weights @ v))


@pytest.mark.parametrize("average", [True, False])
def test_layouts_agree(average: bool) -> None:
    query, key, value = normal(1, B, L, E), normal(2, B, S, E), normal(3, B, S, E)
    padding = torch.arange(S) >= torch.tensor([[10], [4], [6]])
    options: dict[str, Any] = {"average_attn_weights": average}
    first, last = module(), module(batch_first=False)
    out, weights = first(query, key, value, padding, **options)
    expected = nn.MultiheadAttention(E, H, batch_first=True).double()(query, key, value, padding, **options)
    assert [out.shape, weights.shape] == [t.shape for t in expected]
    turned = last(*(t.transpose(0, 1) for t in (query, key, value)), padding, **options)
    assert_norm_close(turned[0].transpose(0, 1), out)
    assert_norm_close(turned[1], weights)
    for b in range(B):
        single = last(query[b], key[b], value[b], padding[b], **options)
        assert_norm_close(single[0], out[b])
        assert_norm_close(single[1], weights[b])


@pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_padding_is_invisible(options: dict[str, Any]) -> None:
    mha, x, other = module(**options), normal(1, B, L, E), normal(2, B, L, E)
    other[~PADDING] = x[~PADDING]
    out, weights = mha(x, x, x, PADDING)
    for inputs, mask in ((other, PADDING), (x, make_additive(PADDING)), (x, make_additive(PADDING).float())):
        again, _ = mha(inputs, inputs, inputs, mask)
        assert_norm_close(again[~PADDING], out[~PADDING])
    for b, n in enumerate((~PADDING).sum(1).tolist()):
        alone, p = mha(x[b, :n], x[b, :n], x[b, :n])
        assert_norm_close(alone, out[b, :n])
        kept = torch.cat([weights[b, :n, :n], weights[b, :n, L:]], -1)
        assert_norm_close(kept, p)


def test_a_sample_of_padding_alone_is_finite() -> None:
    mha, x, padding = module(), normal(1, B, L, E), PADDING.clone()
    padding[1] = True
    out, weights = mha(x, x, x, padding)
    assert torch.equal(out[1], mha.out_proj.bias.expand(L, E))
    assert not weights[1].any()
    assert out.isfinite().all()


def test_appended_keys_are_keys() -> None:
    mha, x = make_fixed(add_bias_kv=True, add_zero_attn=True), normal(1, B, L, E)
    q, k, v = project(mha, x, x, x)
    k, v = (
        torch.cat([t, bias.view(1, H, 1, D).expand(B, -1, -1, -1), torch.zeros(B, H, 1, D)], 2)
        for t, bias in ((k, mha.bias_k), (v, mha.bias_v))
        if bias is not None
    )
    key_mask = torch.cat([~PADDING, torch.ones(B, 2, dtype=torch.bool)], 1)
    expected = lln_attention(q, k, v, 1.5, 1.25, key_mask=key_mask)
    out, weights = mha(x, x, x, PADDING, average_attn_weights=False)
    assert_norm_close(weights @ v, expected)
    assert_norm_close(out, join_heads(mha, expected))


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float", "square_subsequent", "3-D", "with padding"])
def test_a_causal_mask_is_found(kind: str, hint: bool) -> None:
    mha, x = make_fixed(), normal(1, B, L, E)
    everything = (CAUSAL | PADDING[:, None]).repeat_interleave(H, 0)
    mask = {
        "bool": CAUSAL,
        "float": make_additive(CAUSAL),
        "square_subsequent": nn.Transformer.generate_square_subsequent_mask(L),
        "3-D": CAUSAL.expand(B * H, L, L),
        "with padding": make_additive(everything),
    }[kind]
    expected = mha(x, x, x, PADDING if kind == "with padding" else None, is_causal=True)
    for got, wanted in zip(mha(x, x, x, attn_mask=mask, is_causal=hint), expected, strict=True):
        assert_norm_close(got, wanted)


def test_a_mask_that_hides_the_same_keys_from_all_is_padding() -> None:
    mha, x = module(), normal(1, B, L, E)
    expected, _ = mha(x, x, x, PADDING)
    each = PADDING[:, None].expand(B, L, L).repeat_interleave(H, 0)
    for mask in (each, make_additive(each)):
        assert_norm_close(mha(x, x, x, attn_mask=mask)[0], expected)
    assert_norm_close(
        mha(x, x, x, PADDING, attn_mask=PADDING[2].expand(L, L))[0], mha(x, x, x, PADDING | PADDING[2])[0]
    )
    assert_norm_close(mha(x, x, x, attn_mask=torch.zeros(L, L))[0], mha(x, x, x)[0])


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = module(**options)
    return layer


def warn_of_nested(made: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        return nn.TransformerEncoder(made, 2, enable_nested_tensor=True)


def replace_attention(made: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    softmax = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(softmax, 2, enable_nested_tensor=True)
    for layer in encoder.layers:
        layer.load_state_dict(made.state_dict())
        layer.self_attn = copy.deepcopy(made.self_attn)
    return encoder


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(
    "build", [lambda layer: layer, warn_of_nested, replace_attention], ids=["layer", "encoder", "replaced"]
)
def test_encoders_run_it_in_eval_as_in_training(build: Any, padding: Tensor | None) -> None:
    layer, x = encoder_layer(), normal(1, B, L, E)
    model = build(layer).requires_grad_(False)
    visible = ~PADDING if padding is not None else torch.ones(B, L, dtype=torch.bool)
    expected = model.train()(x, src_key_padding_mask=padding)[visible]
    assert_norm_close(model.eval()(x, src_key_padding_mask=padding)[visible], expected)
    with torch.no_grad():
        assert_norm_close(model.eval()(x, src_key_padding_mask=padding)[visible], expected)
    softmax = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    softmax.load_state_dict(layer.self_attn.state_dict())
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.self_attn = softmax
    assert relative_error(model(x, src_key_padding_mask=padding)[visible], expected) > 1e-3


@pytest.mark.parametrize("statistics", ["fixed", "running"])
def test_a_decoder_does_not_see_the_future(statistics: str) -> None:
    layer = nn.TransformerDecoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = module(statistics=statistics)
    layer.multihead_attn = module(statistics=statistics, decoder=True)
    x, memory = normal(1, B, L, E), normal(2, B, S, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    layer.train()(x, memory, mask, tgt_is_causal=True)  # running statistics see some data
    out = nn.TransformerDecoder(layer, 2).eval()(x, memory, mask)
    changed = torch.cat([x[:, :4], normal(3, B, L - 4, E)], 1)
    again = nn.TransformerDecoder(layer, 2).eval()(changed, memory, mask)
    assert_norm_close(again[:, :4], out[:, :4])
    assert relative_error(again[:, 4:], out[:, 4:]) > 1e-2


@pytest.mark.parametrize("part", [0, 1])  # the output, the weights
@pytest.mark.parametrize("options", [{}, {"kdim": E, "vdim": 9, "add_bias_kv": True}, LEARNABLE])
def test_gradients_are_right_and_reach_all_parameters(options: dict[str, Any], part: int) -> None:
    mha = make_fixed(**options)
    query, key, value = normal(1, 2, 4, E), normal(2, 2, 4, E), normal(3, 2, 4, mha.vdim)
    names, parameters = zip(*mha.named_parameters(), strict=True)

    def call(*given: Tensor) -> Tensor:
        named = dict(zip(names, given, strict=True))
        result: Tensor = torch.func.functional_call(mha, named, (query, key, value))[part]
        return result

    assert torch.autograd.gradcheck(call, parameters)
    out = call(*parameters)
    grads = torch.autograd.grad(out, parameters, normal(4, *out.shape), materialize_grads=True)
    touched = {name for name, grad in zip(names, grads, strict=True) if grad.any()}
    apart = {"v_proj_weight", "bias_v", "out_proj.weight", "out_proj.bias"} if part else set()
    assert touched == set(names) - apart


def test_dropout_acts_in_training_only_and_not_on_the_weights() -> None:
    mha, x = module(0.5), normal(1, B, L, E)
    kept = module()
    (dropped, weights), (out, expected) = mha(x, x, x), kept(x, x, x)
    assert relative_error(dropped, out) > 1e-2
    assert_norm_close(weights, expected)
    assert_norm_close(mha.eval()(x, x, x)[0], out)
    mha.train().dropout = 0.0
    assert_norm_close(mha(x, x, x)[0], out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_dtypes_come_out_as_they_went_in(dtype: torch.dtype, autocast: bool) -> None:
    x, exact = normal(1, B, L, E), module()
    mha = copy.deepcopy(exact).to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        narrow = x.to(mha.out_proj.weight.dtype)
        out, weights = mha(narrow, narrow, narrow, make_additive(PADDING))
    assert out.dtype == weights.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    for got, wanted in zip((out, weights), exact(x, x, x, PADDING), strict=True):
        assert_norm_close(got.double(), wanted, tolerance)


X, KEYS = normal(1, B, L, E), normal(2, B, S, E)
ACROSS = {"key": KEYS, "value": KEYS}
ANY = normal(3, L, L) > 0
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (TypeError, r"query must be a dense tensor; got \[\]", {"query": []}),
    "features": (ValueError, r"key must have 12 features.*\[3, 7, 11\]", {"key": X[..., 1:]}),
    "dimensions": (ValueError, r"value must have 3 dimensions.*\[7, 12\]", {"value": X[0]}),
    "lengths": (ValueError, r"key and value must agree.*\[3, 10, 12\].*\[3, 7, 12\]", {"key": KEYS}),
    "batches": (ValueError, "query and key must agree in batch, dimension 0", {"query": X[:2]}),
    "mask shape": (ValueError, r"key_padding_mask must have shape \[3, 7\].*\[7, 3\]", {"key_padding_mask": PADDING.T}),
    "mask dtype": (TypeError, "key_padding_mask must be .*bool.*int64", {"key_padding_mask": PADDING.long()}),
    "key bias": (ValueError, "key_padding_mask as float may hold 0 and -inf", {"key_padding_mask": -1.0 * PADDING}),
    "pairs": (ValueError, "attn_mask must be causal.*never forms query-key pairs", {"attn_mask": ANY}),
    "pair bias": (ValueError, "attn_mask as float .*no query-key scores", {"attn_mask": normal(1, L, L)}),
    "heads": (ValueError, "every query and head", {"attn_mask": PADDING.repeat(H, 1)[:, None].expand(-1, L, -1)}),
    "a wrong hint": (ValueError, "attn_mask must be causal", {"attn_mask": ANY, "is_causal": True}),
    "a false hint": (ValueError, "attn_mask must be causal", {"attn_mask": ~CAUSAL & CAUSAL, "is_causal": True}),
    "attn_mask shape": (ValueError, r"attn_mask must have shape \[7, 7\] or \[12, 7, 7\]", {"attn_mask": CAUSAL[1:]}),
    "causal across": (ValueError, "is_causal .* equal length; got 7 and 10", ACROSS | {"is_causal": True}),
    "causal mask across": (
        ValueError,
        "attn_mask must be causal with query and key of equal length",
        ACROSS | {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1)},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_linear_attention_cannot_do_is_refused(name: str) -> None:
    error, message, changed = REFUSED[name]
    with pytest.raises(error, match=message) as raised:
        make_fixed()(**({"query": X, "key": X, "value": X} | changed))
    assert "\n" not in str(raised.value)


def test_refusals_of_modules() -> None:
    with pytest.raises(ValueError, match=r"embed_dim must be a positive multiple .*embed_dim=12 and num_heads=5"):
        MultiheadAttention(E, 5)
    for name in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"{name} appends a key .*block_size=None"):
            module(block_size=3, **{name: True})
        with pytest.raises(ValueError, match="is_causal: keys that add_bias_kv"):
            make_fixed(**{name: True})(X, X, X, is_causal=True)
    with pytest.raises(ValueError, match="need_weights: every value channel has its own P"):
        module(block_size=3, mix="scales")(X, X, X)
    with pytest.raises(ValueError, match="sample"):
        module()(X, X, X, attn_mask=CAUSAL)


def test_weights_too_large_to_keep_are_refused_before_they_are_made() -> None:
    mha, x = make_fixed(dtype=torch.float32), torch.zeros(1, 1, E).expand(1, 2**13 + 1, E)
    with pytest.raises(ValueError, match=r"need_weights.*268,.*pass need_weights=False"):
        mha(x, x, x)
    assert mha(x, x, x, need_weights=False)[0].shape == x.shape
