"""Long inputs are worked through in spans of rows: how they are cut is invisible, in outputs and in every gradient."""

import pytest
import torch

from helpers.untyped import lln_attention


def results(options: dict) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 300, 6), (2, 2, 300, 6), (2, 2, 300, 5)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    alpha, beta, mix = (torch.rand(2, h, n, generator=generator, dtype=torch.float64).add(0.5).requires_grad_()
                        for h, n in ((4, 6), (2, 6), (4, 5)))  # fmt: skip
    key_mask = torch.rand(2, 300, generator=generator) > 0.3
    leaves = [q, k, v, alpha, beta] + ([mix] if "block_size" in options else [])
    if "block_size" in options:
        options = options | {"mix": (mix, 1.0)}
    out = lln_attention(q, k, v, alpha, beta, key_mask=key_mask, **options)
    return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator, dtype=out.dtype))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [None, 7])
def test_the_size_of_a_span_is_invisible(
    is_causal: bool, block_size: int | None, request: pytest.FixtureRequest
) -> None:
    options = {"is_causal": is_causal} | ({} if block_size is None else {"block_size": block_size})
    whole = results(options)
    request.getfixturevalue("short_chunks")
    for got, wanted in zip(results(options), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("short_chunks")
def test_every_span_has_its_own_dropout() -> None:
    ones = torch.ones(1, 1, 64, 4, dtype=torch.float64)
    q, k, v = (ones.repeat(1, 1, 2, 1) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"block_size": 64, "mix": 0.0}):
        torch.manual_seed(0)
        out = lln_attention(q, k, v, 1.0, 1.0, dropout_p=0.5, **options)
        assert not torch.equal(out[:, :, :64], out[:, :, 64:])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"block_size": 20}])
@pytest.mark.usefixtures("short_chunks")
def test_dropout_in_spans_has_the_gradient_of_its_output(options: dict) -> None:
    q, k, v = (torch.randn(1, 1, 70, 3, dtype=torch.float64).requires_grad_() for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return lln_attention(q, k, v, 1.2, 0.9, dropout_p=0.3, **options)

    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


def test_no_two_parts_of_a_call_share_their_dropout() -> None:
    def drop_pairs(block_size: int, length: int) -> torch.Tensor:
        ones, eye = torch.ones(1, 1, length, 1), torch.eye(length)[None, None]
        return lln_attention(ones, ones, eye, 1.0, 1.0, block_size=block_size, mix=(0.0, 1.0), dropout_p=0.5)[0, 0] > 0

    torch.manual_seed(0)
    p = drop_pairs(8, 12)  # one whole block and a short one
    assert not torch.equal(p[:8, :8].flatten()[:16], p[8:, 8:].flatten())
    q = torch.ones(1, 1, 40, 30)
    out = lln_attention(q, q, q, 1.0, 1.0, dropout_p=0.5, cu_seqlens=torch.tensor([0, 20, 40]))
    assert not torch.equal(out[:, :, :20], out[:, :, 20:])
