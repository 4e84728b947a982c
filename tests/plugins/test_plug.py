"""LLN attention stands where a module calls torch's attention function: once, with its masks, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.hf_models import sentence
from helpers.tensors import normal, relative_error
from lln.nn.plug import check_plug, make_plug, stand_in

HEADS, DIM = 2, 6


def make(implementation: str = "lln_diag", **options: Any) -> Any:
    return make_plug(nn.Linear(1, 1).double().eval(), implementation, HEADS, DIM, {"block_size": 4, **options})


def tensors(length: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (normal(seed, 3, HEADS, length, DIM) for seed in range(3))
    return query, key, value


def attend(attention: Any, *args: Any, **given: Any) -> Tensor:
    with stand_in(attention, "Host", heads_alike=True):
        return F.scaled_dot_product_attention(*args, **given)


def test_what_is_asked_of_torch_is_done_by_the_module() -> None:
    attention, (q, k, v) = make(), tensors()
    assert torch.equal(attend(attention, q, k, v), attention(q, k, v))
    assert torch.equal(attend(attention, query=q, key=k, value=v, is_causal=False), attention(q, k, v))
    # Outside of it torch's function is torch's.
    softmax = (q @ k.transpose(2, 3) * DIM**-0.5).softmax(-1) @ v
    assert relative_error(F.scaled_dot_product_attention(q, k, v), softmax) < 1e-12


def test_masks_of_each_head_are_padding_and_hidden_keys_are_invisible() -> None:
    attention, (q, k, v) = make(), tensors()
    shown = torch.arange(11) < torch.tensor([[11], [7], [3]])
    wanted = attention(q, k, v, key_mask=shown)
    added = torch.zeros(3, 11, dtype=torch.float64).masked_fill(~shown, -10000.0)
    for mask in (shown[:, None, None], added[:, None, None], added[:, None, None].repeat(1, HEADS, 1, 1)):
        assert torch.equal(attend(attention, q, k, v, attn_mask=mask), wanted)
    other = [torch.where(shown[:, None, :, None], t, 9.0) for t in (k, v)]
    alike = attend(attention, q, *other, attn_mask=shown[:, None, None])
    rows = shown[:, None, :, None]
    assert torch.equal(alike * rows, wanted * rows)


def test_other_masks_are_refused() -> None:
    attention, (q, k, v) = make(), tensors()
    pairs, heads = torch.ones(3, 1, 11, 11).tril().bool(), torch.zeros(3, HEADS, 1, 11, dtype=torch.float64)
    heads[:, 0, :, 5] = -torch.inf
    for mask, message in ((pairs, "attn_mask must be padding"), (heads, "hides other keys from each head")):
        with pytest.raises(ValueError, match=message) as problem:
            attend(attention, q, k, v, attn_mask=mask)
        sentence(problem)


def test_scores_of_another_scale_are_those_of_other_queries() -> None:
    attention, (q, k, v) = make(statistics="fixed", alpha=1.3, beta=0.7), tensors()
    wanted = attention(q * 3.0 * DIM**0.5, k, v)
    assert relative_error(attend(attention, q, k, v, scale=3.0), wanted) < 1e-12
    assert torch.equal(attend(attention, q, k, v, scale=DIM**-0.5), attention(q, k, v))


def test_a_module_that_attends_otherwise_is_refused() -> None:
    attention, (q, k, v) = make(), tensors()
    with (
        pytest.raises(ValueError, match=r"Host must call .* it did so not at all") as problem,
        stand_in(attention, "Host"),
    ):
        (q @ k.transpose(2, 3)).softmax(-1)
    sentence(problem)
    with pytest.raises(ValueError, match="did so 2 times") as problem, stand_in(attention, "Host"):
        F.scaled_dot_product_attention(q, k, F.scaled_dot_product_attention(q, k, v))
    sentence(problem)
    with pytest.raises(ValueError, match="from 11 tokens to 5 others, which is cross attention") as problem:
        attend(attention, q, k[:, :, :5], v[:, :, :5])
    sentence(problem)


def test_dropout_is_that_of_the_call_in_training_alone() -> None:
    attention, (q, k, v) = make(), tensors()
    assert torch.equal(attend(attention, q, k, v, dropout_p=0.5), attention(q, k, v))
    attention.train()
    assert not torch.equal(attend(attention, q, k, v, dropout_p=0.5), attention(q, k, v))


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        ("softmax", {}, "implementation must be 'lln' or 'lln_diag'; got 'softmax'"),
        ("lln", {"block_size": 8}, "block_size goes with implementation='lln_diag'"),
        ("lln_diag", {"tile": 0}, "tile must be a positive int; got 0"),
        ("lln_diag", {"tile": 4, "block_size": 8}, "tile takes the place of block_size"),
        ("lln_diag", {"tile": 4, "mix": "evidence"}, "mix='evidence' goes with blocks of consecutive tokens"),
        ("lln_diag", {"statistic": "fixed"}, "lln_diag has no option 'statistic'; there are alpha, "),
    ],
)
def test_options_that_do_not_go_together_are_named(implementation: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as problem:
        check_plug(implementation, options)
    sentence(problem)


@pytest.mark.long
def test_it_is_one_graph() -> None:
    attention, given = make(), tensors()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(attention, *given), attend(attention, *given)) < 1e-12
