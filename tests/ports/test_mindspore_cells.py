"""The cells of lln.mindspore in the places that MindSpore's own have, with PyTorch's numbers. `make test-mindspore`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lln
from helpers.ports import make_case
from helpers.untyped import match_moments as match_torch_moments

ms: Any = pytest.importorskip("mindspore")
port: Any = pytest.importorskip("lln.mindspore")

MODES = {"pynative": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE}
in_both_modes = pytest.mark.parametrize("mode", MODES)
OPTIONS: list[dict[str, Any]] = [
    {"matching": "entropy", "block_size": 8, "mix": 0.3},
    {"matching": "variance"},
    {"statistics": "fixed", "alpha": 1.3, "beta": 1.7, "block_size": 8},
]


def give_weights(ours: Any, theirs: Any) -> None:
    """Under the same names and in the same shapes."""
    weights = {name: ms.Parameter(ms.Tensor(p.detach().numpy())) for name, p in theirs.named_parameters()}
    missing, unknown = ms.load_param_into_net(ours, weights, strict_load=True)
    assert not missing
    assert not unknown


def furthest(found: Any, expected: Any) -> float:
    return float(abs(found.asnumpy() - expected.detach().numpy()).max())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@in_both_modes
def test_multi_head_attention_is_pytorchs_and_so_are_its_gradients(mode: str, options: dict[str, Any]) -> None:
    ms.set_context(mode=MODES[mode])
    torch.manual_seed(0)
    theirs = lln.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64, **options)
    ours = port.MultiheadAttention(16, 2, batch_first=True, dtype=ms.float64, **options)
    give_weights(ours, theirs)
    x, padding = torch.randn(2, 20, 16, dtype=torch.float64), torch.zeros(2, 20, dtype=torch.bool)
    padding[0, :7] = True
    weights = torch.randn(2, 20, 16).double()
    given, hidden, factors = (ms.Tensor(t.numpy()) for t in (x, padding, weights))
    expected, shares = theirs(x, x, x, padding)
    out, found = ours(given, given, given, hidden)
    assert furthest(out, expected) < 1e-12
    assert furthest(found, shares) < 1e-12

    def weigh(t: Any) -> Any:
        return (ours(t, t, t, hidden, need_weights=False)[0] * factors).sum()

    gradients = ms.grad(weigh, 0, ours.trainable_params())(given)
    leaf = x.clone().requires_grad_()
    names = [p.name for p in ours.trainable_params()]
    named = dict(theirs.named_parameters())
    out = (theirs(leaf, leaf, leaf, padding, need_weights=False)[0] * weights).sum()
    wanted = torch.autograd.grad(out, [leaf, *(named[name] for name in names)])
    for one, other in zip((gradients[0], *gradients[1]), wanted, strict=True):
        assert furthest(one, other) < 1e-11 * abs(other).max()


@in_both_modes
def test_an_encoder_layer_takes_it_for_its_own(mode: str) -> None:
    ms.set_context(mode=MODES[mode])
    layer = ms.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).set_train(False)
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ours = port.MultiheadAttention(16, 2, batch_first=True, matching="variance")
    theirs.self_attn = lln.MultiheadAttention(16, 2, batch_first=True, matching="variance")
    give_weights(ours, theirs.self_attn)
    layer.self_attn = ours
    for name in ("1", "2"):
        dense, norm = getattr(theirs, f"linear{name}"), getattr(theirs, f"norm{name}")
        getattr(layer, f"dense{name}").weight.set_data(ms.Tensor(dense.weight.detach().numpy()))
        getattr(layer, f"dense{name}").bias.set_data(ms.Tensor(dense.bias.detach().numpy()))
        assert norm.weight.shape == getattr(layer, f"norm{name}").gamma.shape
    x, padding = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([[20], [13]])
    expected = theirs(x, src_key_padding_mask=padding)
    for mask in (padding.numpy(), np.where(padding.numpy(), -np.inf, 0).astype("float32")):
        found = layer(ms.Tensor(x.numpy()), src_key_padding_mask=ms.Tensor(mask))
        assert furthest(found[0], expected[0]) < 1e-5
        assert furthest(found[1, :13], expected[1, :13]) < 1e-5


@in_both_modes
def test_cross_attention_has_keys_of_another_width_and_padding_of_its_own(mode: str) -> None:
    ms.set_context(mode=MODES[mode])
    theirs = lln.MultiheadAttention(16, 2, kdim=12, vdim=10)
    ours = port.MultiheadAttention(16, 2, kdim=12, vdim=10, is_cross=True)
    give_weights(ours, theirs)
    given = torch.randn(9, 2, 16), torch.randn(9, 2, 12), torch.randn(9, 2, 10)
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    expected, _ = theirs(*given, padding, need_weights=False)
    (found,) = ours(*(ms.Tensor(t.numpy()) for t in given), ms.Tensor(padding.numpy()), need_weights=False)
    assert furthest(found, expected) < 1e-5


@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
@in_both_modes
def test_matching_finds_what_pytorch_finds(mode: str, matching: str) -> None:
    ms.set_context(mode=MODES[mode])
    numbers = port.match_moments(0.7, 1.4, 40, matching, 0.2, length=300)
    assert numbers == pytest.approx(match_torch_moments(0.7, 1.4, 40, matching, 0.2, length=300), rel=1e-14)
    sigmas = [torch.tensor([[0.2, 1.0], [3.0, 0.6]], dtype=torch.float64) * i for i in (1, 2)]
    found = port.match_moments(*(ms.Tensor(s.numpy()) for s in sigmas), 40, matching)
    for ours, theirs in zip(found, match_torch_moments(*sigmas, 40, matching), strict=True):
        assert furthest(ours, theirs) < 1e-12


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "dropout is supported only in PyTorch"),
    ({"add_zero_attn": True}, "add_zero_attn is supported only in PyTorch"),
    ({"is_causal": True}, "statistics='sample' looks at all tokens"),
    ({"alpha": 1.0}, "alpha and beta go with statistics='fixed'"),
    ({"matching": "median"}, "matching must be 'paper', 'variance' or 'entropy'"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=str)
def test_what_is_wrong_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        port.MultiheadAttention(16, 2, **options)


@in_both_modes
def test_calls_that_cannot_be_are_named(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MindSpore writes down a graph that it could not compile
    ms.set_context(mode=MODES[mode])
    attention = port.MultiheadAttention(16, 2)
    x = ms.Tensor(np.zeros((3, 1, 16), "float32"))
    with pytest.raises(ValueError, match=r"attn_mask: linear attention forms no pairs"):
        attention(x, x, x, attn_mask=ms.Tensor(np.zeros((3, 3), bool)))
    q, k, v, _ = (ms.Tensor(t) for t in make_case(8))
    cell = port.LLNAttention(8, statistics="fixed", is_causal=True)
    with pytest.raises(ValueError, match=r"is_causal needs query and key of equal length"):
        cell(q, k[:, :, :5], v[:, :, :5])
