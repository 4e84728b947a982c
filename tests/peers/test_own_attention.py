"""Attention of one's own: a name for it everywhere, and the checks that ours get, which catch what is wrong."""

import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lln
from helpers.mechanism_cases import ON_QKV, OPTIONS


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None,
    dropout_p: float = 0.0, scale: float = 1.0, sharpness: float = 1.0,
) -> Tensor:  # fmt: skip
    """Softmax attention, as a user would write it."""
    scores = sharpness * scale * query @ key.transpose(-1, -2)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None]
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed
    return torch.dropout(weights, dropout_p, dropout_p > 0) @ value


class Learned(nn.Module):
    def __init__(self, num_heads: int, head_dim: int, *, start: float = 1.0) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.full((num_heads, 1, 1), start))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None,
        dropout_p: float = 0.0, scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        given: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "dropout_p": dropout_p, "scale": scale}
        return attend(self.sharpness * query, key, value, **given)


def own(function: Callable[..., Any] = attend, **says: Any) -> str:
    lln.register("own", **says)(function)
    return "own"


def draw(key_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, key_heads, key_heads)]


def test_a_registered_function_is_a_mechanism_like_others() -> None:
    name = own(title="My own")
    q, k, v = draw()
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(lln.attention(name, q, k, v, is_causal=True), exact)
    assert lln.mechanisms()[name].title == "My own"
    assert lln.mechanisms()[name].options == {"sharpness": 1.0}
    torch.testing.assert_close(lln.attention(name, q, k, v, sharpness=0.0), v.mean(2, keepdim=True).expand_as(v))
    module: Any = lln.mechanism(name, num_heads=4, head_dim=8, num_key_heads=2, sharpness=2.0)
    shared = draw(key_heads=2)
    repeated = (t.repeat_interleave(2, 1) for t in shared[1:])
    torch.testing.assert_close(module(*shared), attend(shared[0], *repeated, scale=8**-0.5, sharpness=2.0))
    assert lln.testing.check_mechanism(name) == list(lln.testing.CHECKS)


def test_a_registered_class_is_built_copied_and_pickled() -> None:
    lln.register("learned")(Learned)
    entry = lln.mechanisms()["learned"]
    assert entry.parameters
    assert entry.module_options == {"start": 1.0}
    module: Any = lln.mechanism("learned", num_heads=4, head_dim=8, dtype=torch.float64, start=2.0)
    q, k, v = (t.double() for t in draw())
    wanted = attend(q, k, v, scale=8**-0.5, sharpness=2.0)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(one(q, k, v), wanted)
    assert {name for name, _ in module.named_parameters()} == {"inner.sharpness"}
    with pytest.raises(TypeError, match="no option 'end'"):
        lln.mechanism("learned", num_heads=4, head_dim=8, end=1.0)
    assert "gradients" in lln.testing.check_mechanism("learned")


def test_what_a_function_does_not_take_is_refused() -> None:
    name = own(lambda query, key, value: attend(query, key, value))
    q, k, v = draw()
    with pytest.raises(ValueError, match="own does not support is_causal=True: its function takes no is_causal"):
        lln.attention(name, q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="own does not support key_mask"):
        lln.attention(name, q, k, v, key_mask=torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="own takes no dropout_p"):
        lln.attention(name, q, k, v, dropout_p=0.1)
    assert not {"padding", "nothing", "causal"} & set(lln.testing.check_mechanism(name))


def test_a_kernel_stands_beside_blocks() -> None:
    name = own(kind="kernel")
    q, k, v = draw()
    blocks = lln.attention("block_diagonal", q, k, v, block_size=5)
    out = lln.attention(name, q, k, v, block_size=5, mix=0.25)
    torch.testing.assert_close(out, 0.25 * attend(q, k, v, scale=8**-0.5) + 0.75 * blocks)
    with pytest.raises(ValueError, match="block_size goes with kernel mechanisms"):
        lln.attention(own(), q, k, v, block_size=5)


@pytest.mark.parametrize(
    ("name", "made", "error", "match"),
    [
        ("softmax", attend, ValueError, "name must be one that lln does not use"),
        ("My attention", attend, ValueError, "lower case letters"),
        ("own", 3, TypeError, "must be a function or a class"),
        ("own", dict, TypeError, "must be a function or a class"),
        ("own", lambda query, key: query, TypeError, "must take query, key and value"),
        ("own", lambda query, key, value, more: query, TypeError, "have defaults"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, made: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        lln.register(name)(made)
    assert "own" not in lln.mechanisms()


def test_a_wrong_shape_is_said() -> None:
    with pytest.raises(ValueError, match=r"own must return \[batch, heads, length, value dim\] = \[2, 4, 20, 8\]"):
        lln.attention(own(lambda query, key, value: value[:, :1]), *draw())


def test_a_name_is_given_anew() -> None:
    q, k, v = draw()
    first = lln.attention(own(), q, k, v)
    own(lambda query, key, value: 2 * attend(query, key, value, scale=8**-0.5))
    torch.testing.assert_close(lln.attention("own", q, k, v), 2 * first)


def test_transformers_take_the_name() -> None:
    transformers = pytest.importorskip("transformers")
    import lln.hf

    name = own()
    assert name in lln.hf.IMPLEMENTATIONS
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    batch = {"input_ids": torch.arange(20).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    batch["attention_mask"][0, 7:] = 0
    usual = model(**batch).last_hidden_state
    model.set_attn_implementation(name)
    out = model(**batch).last_hidden_state
    shown = batch["attention_mask"].bool()
    torch.testing.assert_close(out[shown], usual[shown], atol=1e-5, rtol=1e-5)
    lln.hf.convert(model, name, sharpness=0.0)
    assert not torch.allclose(model(**batch).last_hidden_state, out)


@pytest.mark.parametrize("name", ON_QKV)
def test_the_mechanisms_of_the_package_pass(name: str) -> None:
    options: dict[str, Any] = dict(OPTIONS.get(name, {}))
    if name.startswith("lln"):  # whose alpha and beta follow the spread of q and k, without a gradient
        options |= {"alpha": 1.5, "beta": 1.25}
    made = lln.testing.check_mechanism(name, **options)
    refused = set(lln.mechanisms()[name].refuses)
    assert {"shape", "batch", "gradients", "extremes"} <= set(made)
    assert ("causal" in made) == ("causal" not in refused)


def spoil(**changes: Any) -> Callable[..., Tensor]:
    """`attend` with arguments of a call overwritten."""

    def function(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        given: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "scale": scale} | changes
        return attend(query, key, value, **given)

    return function


def mix_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value) + value.mean(0, keepdim=True)


def normalise_nothing(query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-1, -2)
    scores = scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    return scores.softmax(-1) @ value


def square_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value.square())


def round_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exact = value.dtype == torch.float64
    return attend(query, key, value if exact else value.bfloat16().to(value.dtype))


def overflow(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.transpose(-1, -2)).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.1 * grad


@pytest.mark.parametrize(
    ("function", "check", "match"),
    [
        (spoil(is_causal=False), "causal", "later queries and keys change earlier rows"),
        (spoil(key_mask=None), "padding", "padding on the left changes"),
        (spoil(key_mask=None), "nothing", "does not give zeros"),
        (normalise_nothing, "nothing", "does not give zeros"),
        (mix_batch, "batch", "the other sample of a batch"),
        (overflow, "extremes", "not finite in float32"),
        (square_values, "matrix", "not P times value"),
        (lambda query, key, value: attend(query, key, Detached.apply(value)), "gradients", "finite differences"),
        (round_values, "precision", "and off by"),
        (lambda query, key, value: attend(query, key, value + torch.rand(())), "shape", "something else"),
    ],
)
def test_each_check_catches_what_it_is_for(function: Callable[..., Any], check: str, match: str) -> None:
    name = own(function)
    with pytest.raises(AssertionError, match=match):
        lln.testing.check_mechanism(name, only=[check])


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="only must be"):
        lln.testing.check_mechanism("elu", only=["speed"])
    with pytest.raises(ValueError, match="mixes hidden states"):
        lln.testing.check_mechanism("tnn")
    with pytest.raises(ValueError, match="name must be one of"):
        lln.testing.check_mechanism("nothing_like_it")
    assert isinstance(sys.modules["lln.testing"], types.ModuleType)
