"""mix="evidence" by the kernels: outputs, states and every gradient equal the eager back end's in float64."""

import functools

import pytest
import torch

from helpers.evidence_cases import Case, check
from helpers.tensors import normal, relative_error
from helpers.triton_cases import BACKEND, DEVICE, MARKS
from helpers.untyped import lln_attention

pytestmark = MARKS
MIXED = functools.partial(Case, mix="evidence", dim=8, value_dim=8, heads=1, block_size=8)
MIXES = {
    "plain": MIXED((20,)),
    "odd, signed": MIXED((11, 11), directions="signed", mask="left", group=2, value_dim=5),
    "directions": MIXED((13,), directions=20, mask="holes", beta="[H, D]", scale=0.8),
    "several sets": MIXED((20,), directions=70, block_size=16),
    "overlap": MIXED((11, 11), overlap=True, mask="left", group=2),
    "packed": MIXED((9, 0, 12), packed=True, directions="signed"),
    "dead": MIXED((12, 12), mask="dead sample"),
    "causal": MIXED((11, 11), is_causal=True, mask="left", beta="[H, D]", return_state=True),
    "causal, overlap": MIXED((14,), is_causal=True, overlap=True, directions=20, group=2),
    "causal, packed": MIXED((9, 0, 11), is_causal=True, packed=True, mask="holes"),
    "far": MIXED((12,), shift=50.0, directions="signed"),
    "large": MIXED((12,), beta="[H, D]", size=30.0),
    "bfloat16": MIXED((12, 12), dtype=torch.bfloat16, directions="signed", mask="left"),
    "bfloat16 far": MIXED((12,), dtype=torch.bfloat16, shift=50.0, overlap=True),
    "float16": MIXED((12,), dtype=torch.float16, is_causal=True, overlap=True),
    "nothing": MIXED((0, 0)),
}


@pytest.mark.parametrize("case", MIXES.values(), ids=MIXES)
def test_the_evidence_may_decide_about_the_mix(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mix_by_the_evidence_goes_on_after_a_state(overlap: bool) -> None:
    given, found = [normal(i, 2, 1, 15, 8) for i in range(3)], []
    mask = (torch.arange(15) >= torch.tensor([[0], [6]])).to(DEVICE)
    for backend, place in (("eager", ("cpu", torch.float64)), (BACKEND, (DEVICE, torch.float32))):
        leaves, outs, state = [t.to(*place).requires_grad_() for t in given], [], None
        for part in (slice(0, 5), slice(5, 15)):
            out, state = lln_attention(
                *(t[:, :, part] for t in leaves), beta=1.3, read="evidence", block_size=8, mix="evidence",
                overlap=overlap, is_causal=True, key_mask=mask[:, part].to(place[0]), state=state, return_state=True,
                backend=backend,
            )  # fmt: skip
            outs += [out, state.mean_value, state.mean_key, state.entropy, state.log_sum]
        outs = [t.masked_fill(t == -torch.inf, 0.0) for t in outs]
        weights = [normal(9 + i, *t.shape).to(t) for i, t in enumerate(outs)]
        found.append([t.detach().cpu().double() for t in (*outs, *torch.autograd.grad(outs, leaves, weights))])
    for wanted, ours in zip(*found, strict=True):
        assert relative_error(ours, wanted) <= 2e-5


def test_dropout_keeps_the_mean_and_the_backward_pass_draws_it_again() -> None:
    q, k, v = (normal(i, 1, 1, 12, 8).float().to(DEVICE).requires_grad_() for i in range(3))
    attend = functools.partial(
        lln_attention, beta=1.3, read="evidence", block_size=8, mix="evidence", backend=BACKEND, scale=0.3
    )

    def drop(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return attend(*qkv, dropout_p=0.3)

    several = torch.stack([attend(q, k, v, dropout_p=0.3).detach() for _ in range(12)])
    assert not torch.equal(several[0], several[1])
    assert relative_error(several.mean(0).double(), attend(q, k, v).detach().double()) < 0.4
    g = normal(5, *v.shape).to(v)
    out = drop(q, k, v)
    dq, dv = torch.autograd.grad(out, (q, v), g)
    assert relative_error((out.detach() * g).sum(), (v * dv).sum().detach()) <= 1e-4  # the output is linear in values
    step = 1e-2 * normal(7, *q.shape).to(q)
    ends = [(drop(q + sign * step, k, v) * g).detach().double().sum() for sign in (1.0, -1.0)]
    assert abs(float(ends[0] - ends[1]) / 2 - float((dq * step).sum())) <= 1e-2 * float((dq * step).abs().sum())
