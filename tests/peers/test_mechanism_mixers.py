"""FLASH and TNN, the token mixers, against their formulas, dense in float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.mechanism_cases import MIXERS
from helpers.tensors import normal, relative_error
from helpers.untyped import attention, mechanism

OPTIONS: dict[str, dict[str, Any]] = {
    "flash": {"chunk": 5, "key_dim": 6},
    "tnn": {"expansion": 2, "rpe_dim": 5, "decay": 0.9},
}


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    module = mechanism(name, num_heads=2, head_dim=4, **OPTIONS[name], **options)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4, 13, 20])
def test_flash_is_its_formula(length: int, causal: bool) -> None:
    module, x = make("flash"), normal(1, 2, length, 8)
    u, v = functional.silu(module.to_uv(x)).chunk(2, -1)
    z = functional.silu(module.to_z(x))
    q, k, far_q, far_k = (z * module.scale[i] + module.shift[i] for i in range(4))
    row = torch.arange(length)
    same = row[:, None] // 5 == row // 5
    distance = (row[:, None] - row).clamp(-4, 4)
    near = functional.relu(q @ k.transpose(-1, -2) / 5 + module.bias[distance + 4]).square() * same
    far = far_q @ far_k.transpose(-1, -2)
    if causal:
        near, far = near.tril(), far / 5 * (row // 5 < row[:, None] // 5)
    else:
        far = far / length
    expected = module.to_out(u * ((near + far) @ v))
    assert relative_error(module(x, is_causal=causal), expected) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_tnn_is_its_toeplitz_matrix(causal: bool) -> None:
    module, length = make("tnn"), 13
    x = normal(2, 2, length, 8)
    u, v = functional.silu(module.to_uv(x)).chunk(2, -1)

    def rms_norm(t: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-8).sqrt()

    matrix = torch.zeros(length, length, v.shape[-1], dtype=torch.float64)
    for i in range(length):
        for j in range(i + 1 if causal else length):
            t = module.position(torch.tensor([[float(i - j)]], dtype=torch.float64))
            for layer in module.layers:
                t = layer(functional.relu(rms_norm(t)))
            matrix[i, j] = t[0] * 0.9 ** abs(i - j)
    expected = module.to_out(u * torch.einsum("ijc,bjc->bic", matrix, v))
    assert relative_error(module(x, is_causal=causal), expected) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MIXERS)
def test_padding_is_invisible(name: str, side: str, causal: bool) -> None:
    module, x = make(name), normal(3, 2, 13, 8)
    pad, rows = ((3, 0), slice(3, None)) if side == "left" else ((0, 3), slice(13))
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[:, rows] = True
    longer = functional.pad(x, (0, 0, *pad), value=2.0)
    out = module(longer, key_mask=mask, is_causal=causal)[:, rows]
    assert relative_error(out, module(x, is_causal=causal)) < 1e-12


@pytest.mark.parametrize("name", MIXERS)
def test_the_future_and_batch_mates_are_invisible(name: str) -> None:
    module, x = make(name), normal(4, 2, 13, 8)
    out = module(x, is_causal=True)
    changed = x.clone()
    changed[:, 8:] *= -5
    # The FFT adds up all positions, so the future is visible in its rounding.
    torch.testing.assert_close(module(changed, is_causal=True)[:, :8], out[:, :8], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(module(x)[:1], module(x[:1]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_packed_is_one_by_one(name: str, causal: bool) -> None:
    module, x = make(name), normal(5, 1, 17, 8)
    offsets = torch.tensor([0, 6, 6, 16, 17], dtype=torch.int32)
    parts = [module(x[:, a:b], is_causal=causal) for a, b in ((0, 6), (6, 16), (16, 17))]
    out = module(x, is_causal=causal, cu_seqlens=offsets)
    assert relative_error(out, torch.cat(parts, 1)) < 1e-12


@pytest.mark.parametrize("name", MIXERS)
def test_a_sample_without_tokens_is_zero_and_gradients_are_right(name: str) -> None:
    module, x = make(name), normal(6, 2, 7, 8).requires_grad_()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0] = False
    for causal in (False, True):
        out = module(x, key_mask=mask, is_causal=causal)
        (g,) = torch.autograd.grad(out.square().sum(), x)
        assert (out[0] == 0).all()
        assert (g[0] == 0).all()
        assert torch.autograd.gradcheck(lambda t, c=causal: module(t, is_causal=c), x, atol=1e-6, fast_mode=True)
    module(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_modules_copy_pickle_drop_and_run_narrow(name: str) -> None:
    module, x = make(name).eval(), normal(7, 2, 13, 8)
    out = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), out)
    dropping = make(name, dropout=0.5)
    torch.manual_seed(1)
    first = dropping(x)
    torch.manual_seed(1)
    assert torch.equal(dropping(x), first)
    assert not torch.allclose(first, out)
    assert torch.equal(dropping.eval()(x), out)
    narrow = copy.deepcopy(module).bfloat16()(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow, out) < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(copy.deepcopy(module).float()(x.float()), out) < 0.05


@pytest.mark.parametrize("name", MIXERS)
def test_wrong_input_is_named(name: str) -> None:
    module = make(name)
    with pytest.raises(TypeError, match=r"takes one tensor, hidden \[batch, length, 8\]; got 3: give it what would be"):
        module(*[normal(8, 2, 13, 8)] * 3)
    with pytest.raises(ValueError, match=r"hidden must be \[batch, length, 8\]"):
        module(normal(8, 2, 13, 7))
    with pytest.raises(TypeError, match="key_mask must be bool"):
        module(normal(8, 2, 13, 8), key_mask=torch.ones(2, 13))
    with pytest.raises(ValueError, match=f"{name} learns the whole unit, so it is a module"):
        attention(name, *[normal(8, 1, 1, 3, 4)] * 3)
    with pytest.raises(TypeError, match=f"{name} has no option 'block_size'"):
        mechanism(name, num_heads=2, head_dim=4, block_size=8)
    with pytest.raises(ValueError, match="dropout must lie"):
        mechanism(name, num_heads=2, head_dim=4, dropout=2.0)
