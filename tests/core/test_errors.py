"""Every wrong argument is refused in a sentence that names it, what came, and what is allowed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lln
from helpers.untyped import lln_attention
from lln import LLNState

B, HQ, HK, N, D, E = 2, 4, 2, 6, 8, 5


def tensors(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "query": torch.randn(B, HQ, N, D),
        "key": torch.randn(B, HK, N, D),
        "value": torch.randn(B, HK, N, E),
        "alpha": 2.0,
        "beta": 2.0,
    }
    return given | changed


def pack(**changed: Any) -> dict[str, Any]:
    given = {name: t[:1] for name, t in tensors().items() if isinstance(t, Tensor)}
    return tensors(**given, cu_seqlens=torch.tensor([0, 2, N], dtype=torch.int32)) | changed


def make_state(**changed: Any) -> LLNState:
    _, state = lln_attention(**tensors(is_causal=True, **changed), return_state=True)
    return state


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    # the three tensors
    "not a tensor": (TypeError, tensors(query=[1.0]), r"query must be a tensor; got \[1.0\] \(list\)"),
    "three dimensions": (ValueError, tensors(key=torch.randn(B, N, D)), r"key must have 4 dim.*\[2, 6, 8\]"),
    "integers": (TypeError, tensors(query=torch.ones(B, HQ, N, D, dtype=torch.int64)), "query must be float32.*int64"),
    "two dtypes": (TypeError, tensors(value=torch.randn(B, HK, N, E).double()), "one dtype.*value is torch.float64"),
    "two devices": (ValueError, tensors(key=torch.empty(B, HK, N, D, device="meta")), "one device.*key: meta"),
    "sparse": (TypeError, tensors(query=torch.randn(B, HQ, N, D).to_sparse()), "query must be a dense tensor"),
    "key and value lengths": (ValueError, tensors(value=torch.randn(B, HK, 5, E)), "key and value must agree"),
    "dims": (ValueError, tensors(query=torch.randn(B, HQ, N, 7)), "query and key must agree in batch and dim"),
    "batches": (ValueError, tensors(query=torch.randn(3, HQ, N, D)), "query and key must agree in batch and dim"),
    "empty dim": (ValueError, tensors(value=torch.randn(B, HK, N, 0)), "heads and dim must be at least 1"),
    "head groups": (ValueError, tensors(query=torch.randn(B, 3, N, D)), "multiple of the number of key heads.*3.*2"),
    # alpha and beta
    "negative alpha": (ValueError, tensors(alpha=-1.0), "alpha must be positive; got -1.0"),
    "zero beta": (ValueError, tensors(beta=0), "beta must be positive; got 0"),
    "infinite alpha": (ValueError, tensors(alpha=math.inf), "alpha must be finite; got inf"),
    "NaN beta": (ValueError, tensors(beta=math.nan), "beta must be finite; got nan"),
    "text alpha": (TypeError, tensors(alpha="2"), r"alpha must be a number or a tensor; got '2' \(str\)"),
    "bool beta": (TypeError, tensors(beta=True), "beta must be a number or a tensor; got True"),
    "alpha of key heads": (ValueError, tensors(alpha=torch.ones(HK)), r"alpha must be .*2, 4, 8; got \[2\]"),
    "beta of query heads": (ValueError, tensors(beta=torch.ones(HQ)), r"beta must be .*2, 2, 8; got \[4\]"),
    "four-dimensional alpha": (ValueError, tensors(alpha=torch.ones(B, HQ, N, D)), r"alpha must be .*\[2, 4, 6, 8\]"),
    "two readings": (ValueError, tensors(alpha=torch.ones(2, 1)), r"alpha must be .*2, 4, 8; got \[2, 1\]"),
    "huge alpha": (ValueError, tensors(alpha=1e39), "alpha must lie between .* and .* for torch.float32; got 1e[+]39"),
    "vanishing beta": (ValueError, tensors(beta=1e-320), "beta must lie between"),
    "integer alpha": (TypeError, tensors(alpha=torch.ones(HQ, dtype=torch.int64)), "alpha must be a floating-point"),
    "alpha elsewhere": (ValueError, tensors(alpha=torch.ones(HQ, device="meta")), "alpha must be on the device"),
    # blocks and mix
    "block_size 0": (ValueError, tensors(block_size=0), r"block_size must be a positive int.*got 0 \(int\)"),
    "fractional block_size": (ValueError, tensors(block_size=8.0), "block_size must be a positive int.*got 8.0"),
    "blocks across": (
        ValueError,
        tensors(block_size=4, query=torch.randn(B, HQ, 3, D)),
        "block_size must be None in cross attention",
    ),
    "mix without blocks": (ValueError, tensors(mix=0.3), "mix.*needs block_size; got 0.3"),
    "tensor mix without blocks": (ValueError, tensors(mix=torch.tensor(0.5)), "mix.*needs block_size"),
    "mix above 1": (ValueError, tensors(block_size=4, mix=1.5), r"mix must lie between 0 and 1; got 1.5.*\(r, p\)"),
    "three mixes": (ValueError, tensors(block_size=4, mix=(1, 1, 1)), "mix must be a number.*got 3 values"),
    "NaN in a pair": (ValueError, tensors(block_size=4, mix=(1.0, math.nan)), "mix must be finite; got nan"),
    "mix shape": (ValueError, tensors(block_size=4, mix=torch.ones(3)), r"mix must be a number or .*got \[3\]"),
    # flags and numbers
    "causal lengths": (
        ValueError,
        tensors(is_causal=True, query=torch.randn(B, HQ, 3, D)),
        "is_causal needs query and key of one sequence; got lengths 3 and 6",
    ),
    "is_causal as a mask": (TypeError, tensors(is_causal=torch.ones(N, N)), "is_causal must be True or False"),
    "return_state as a number": (TypeError, tensors(return_state=1), "return_state must be True or False; got 1"),
    "dropout above 1": (ValueError, tensors(dropout_p=1.5), "dropout_p must lie between 0 and 1; got 1.5"),
    "dropout None": (TypeError, tensors(dropout_p=None), "dropout_p must be a number; got None"),
    "NaN scale": (ValueError, tensors(block_size=4, scale=math.nan), "scale must be finite"),
    "unknown back end": (
        ValueError,
        tensors(backend="cuda"),
        "backend must be 'auto', 'eager' or 'triton'; got 'cuda'",
    ),
    "Triton, wide heads": (
        ValueError,
        tensors(query=torch.randn(B, HQ, N, 300), key=torch.randn(B, HK, N, 300), backend="triton"),
        "backend='triton' cannot run this call: .*; use 'auto' or 'eager'",
    ),
    # key_mask
    "mask list": (TypeError, tensors(key_mask=[True] * N), "key_mask must be a bool tensor"),
    "pairwise mask": (
        ValueError,
        tensors(key_mask=torch.ones(N, N).bool()),
        r"key_mask must have shape \[batch, key length\] = \[2, 6\]; got \[6, 6\].*no query-key pairs",
    ),
    "float mask": (TypeError, tensors(key_mask=torch.ones(B, N)), r"key_mask must be bool.*Use key_mask.bool\(\)"),
    "mask elsewhere": (
        ValueError,
        tensors(key_mask=torch.ones(B, N, dtype=torch.bool, device="meta")),
        "key_mask must be on the device",
    ),
    # packing
    "packed batch": (ValueError, tensors(cu_seqlens=torch.tensor([0, N])), "cu_seqlens.*batch 1; got batch 2"),
    "offset list": (TypeError, pack(cu_seqlens=[0, 2, N]), r"cu_seqlens must be an int32 tensor.*\[0, 2, 6\]"),
    "float offsets": (ValueError, pack(cu_seqlens=torch.tensor([0.0, 6.0])), "cu_seqlens must be an int32 tensor"),
    "one offset": (ValueError, pack(cu_seqlens=torch.tensor([0])), r"cu_seqlens.*at least \[2\]"),
    "offsets too short": (ValueError, pack(cu_seqlens=torch.tensor([0, 5])), r"rise from 0 .* 6; got \[0, 5\]"),
    "falling offsets": (ValueError, pack(cu_seqlens=torch.tensor([0, 4, 2, 6])), r"rise from 0 .*\[0, 4, 2, 6\]"),
    "offsets elsewhere": (
        ValueError,
        pack(cu_seqlens=torch.tensor([0, 6], device="meta")),
        "cu_seqlens must be on the device",
    ),
    "unequal pair": (
        ValueError,
        pack(cu_seqlens=(torch.tensor([0, 6]), torch.tensor([0, 3, 6]))),
        "same number of sequences; got 1 and 2",
    ),
    "packed cross without a pair": (
        ValueError,
        pack(query=torch.randn(1, HQ, 3, D), cu_seqlens=torch.tensor([0, 3])),
        "different lengths, 3 and 6; cross attention takes a pair",
    ),
    "packed causal pair": (
        ValueError,
        pack(is_causal=True, cu_seqlens=(torch.tensor([0, 6]), torch.tensor([0, 6]))),
        "is_causal needs query and key of one sequence; got a pair of cu_seqlens",
    ),
    # states
    "state tuple": (TypeError, tensors(state=(1, 2)), "state must be an lln.LLNState"),
    "state shape": (
        ValueError,
        tensors(state=LLNState.empty(B, HQ, D, E)),
        r"state must be of .* = \[2, 2, 8, 5\]; got \[2, 4, 8, 5\]",
    ),
    "state dtype": (
        ValueError,
        tensors(state=LLNState.empty(B, HK, D, E).to(torch.float64)),
        r"use state.to\(torch.fl",
    ),
    "state elsewhere": (ValueError, tensors(state=LLNState.empty(B, HK, D, E, device="meta")), "state is on meta"),
    "state of another beta": (ValueError, tensors(state=make_state(beta=1.0)), "state was made with another beta"),
    "bidirectional block state": (
        ValueError,
        tensors(block_size=4, return_state=True),
        "block_size with state or return_state is causal only.*set is_causal=True or block_size=None",
    ),
    "state without its blocks": (
        ValueError,
        tensors(block_size=4, is_causal=True, state=make_state()),
        r"state was made with block_size=None, this call has block_size=4",
    ),
    "state with blocks": (
        ValueError,
        tensors(is_causal=True, state=make_state(block_size=4)),
        r"state was made with block_size=4, this call has block_size=None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named_in_the_error(name: str) -> None:
    error, arguments, message = REFUSED[name]
    with pytest.raises(error, match=message) as caught:
        lln_attention(**arguments)
    assert "\n" not in str(caught.value)


def test_a_nested_tensor_is_sent_to_cu_seqlens() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"query must be a dense tensor; got a nested tensor.*cu_seqlens"):
        lln_attention(**tensors(query=nested))


def test_the_right_arguments_are_accepted() -> None:
    assert lln_attention(**tensors()).shape == (B, HQ, N, E)
    assert lln_attention(**pack()).shape == (1, HQ, N, E)


def test_a_two_dimensional_alpha_that_can_be_read_two_ways_is_refused_and_the_remedy_works() -> None:
    q, k, v = (torch.randn(3, 3, 5, 3) for _ in range(3))
    alpha = torch.rand(3, 3) + 0.5
    with pytest.raises(ValueError, match=r"alpha of shape \[3, 3\] may be .*say which with \[batch, heads, 1\]"):
        lln_attention(q, k, v, alpha, 2.0)
    by_sample = lln_attention(q, k, v, alpha[:, :, None], 2.0)
    by_channel = lln_attention(q, k, v, alpha[None], 2.0)
    assert not torch.allclose(by_sample, by_channel)


def test_states_that_cannot_be_one_do_not_merge() -> None:
    plain = make_state()
    with pytest.raises(ValueError, match=r"LLNState.merge: the states were made with different beta"):
        plain.merge(make_state(beta=1.0))
    with pytest.raises(ValueError, match=r"LLNState.merge: states with an open block \(block_size\) do not merge"):
        make_state(block_size=4).merge(make_state(block_size=4))
    with pytest.raises(ValueError, match=r"LLNState.merge: .* the same \[batch, heads, dim, value dim\]"):
        plain.merge(LLNState.empty(B, HK, D, 7))
    with pytest.raises(ValueError, match=r"LLNState.merge: the states differ in dtype"):
        plain.merge(LLNState.empty(B, HK, D, E, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"LLNState.merge: other must be an LLNState; got Tensor"):
        plain.merge(plain.log_sum)  # type: ignore[arg-type]


def test_a_state_of_mismatched_parts_is_refused() -> None:
    log_sum, mean = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"log_sum must be .batch, heads, dim. and mean_value"):
        LLNState(log_sum[0], mean)
    with pytest.raises(ValueError, match="count, block_key, block_value and block_mask go together"):
        LLNState(log_sum, mean, count=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("name", ["op", "module", "multihead", "lln", "lln_diag"])
def test_tensors_are_checked_once_whichever_way_they_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    usual = lln.checks.check_tensors

    def check_and_note(query: Tensor, key: Tensor, value: Tensor) -> None:
        seen.append(query)
        usual(query, key, value)

    monkeypatch.setattr(lln.checks, "check_tensors", check_and_note)
    q = torch.randn(B, HQ, N, D)
    if name == "op":
        lln.lln_attention(q, q, q, 2.0, 2.0)
    elif name == "module":
        lln.LLNAttention(HQ, D)(q, q, q)
    elif name == "multihead":
        x = torch.randn(B, N, HQ * D)
        lln.MultiheadAttention(HQ * D, HQ, batch_first=True)(x, x, x, need_weights=True)
    else:
        lln.attention(name, q, q, q)
    assert len(seen) == 1
