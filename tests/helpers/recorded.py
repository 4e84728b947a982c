"""What the instruments see of a module that attends with more than its queries and keys."""

import math

import torch
from torch import Tensor

from helpers.tensors import relative_error
from lln import LLNAttention
from lln.instruments import entropy, record
from lln.nn.weights import dense_weights


def measure_bits(p: Tensor) -> Tensor:
    """The entropy of each row."""
    return torch.special.entr(p).sum(-1) / math.log(2)


def assert_instruments_see_p(
    module: LLNAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(P, the output). Recording changes no bit of the output, the entropy recorded is that of P at valid tokens, and
    what LLN is compared with is softmax attention of the plain queries and keys."""
    p, out = dense_weights(module, q, k, key_mask=key_mask), module(q, k, v, key_mask=key_mask)
    with record(module, samples=None) as rec:
        assert torch.equal(module(q, k, v, key_mask=key_mask), out)
    valid = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    bits = measure_bits(p).masked_fill(~valid[:, None], 0.0).sum(-1) / valid.sum(-1)[:, None]
    found = torch.tensor([row["entropy"] for row in rec.rows()], dtype=p.dtype)
    assert relative_error(found, bits.mean(0)) < 1e-9
    with record(module, samples=1, keep=True, instruments=()) as rec:
        module(q, k, v)
    ((_, _, seen),) = rec.observations
    group = q.shape[1] // k.shape[1]
    plain = torch.softmax(q[:1] @ k[:1].repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5, -1)
    assert relative_error(entropy(seen.softmax_map()), measure_bits(plain).mean(-1)) < 1e-9
    return p, out
