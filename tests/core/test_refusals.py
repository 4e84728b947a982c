"""What is refused where it can be seen, in one sentence of moderate length; and updates from several threads, all of
which count."""

import copy
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lln
from helpers.untyped import lln_attention
from lln import LLNState
from lln import instruments as tools

untyped: Any = lln  # wrong arguments on purpose

Q, K, V = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
LONG = list(range(10_000))
WRONG = {"negative": -1.0, "zero": 0.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("shape", [(), (2,), (1, 2, 8)])
def test_tensors_of_coefficients_that_are_wrong_in_one_place_are_refused(
    name: str, wrong: float, shape: tuple[int, ...]
) -> None:
    values = torch.full(shape, 2.0)
    values.view(-1)[-1] = wrong
    said = f"^{name} must be positive and finite in every place; got {wrong} in a float32 tensor of shape"
    for tensor in (values, values.to(torch.bfloat16), values.double().requires_grad_()):
        with pytest.raises(ValueError, match=said.replace("float32", r"\w+")):
            lln_attention(Q, K, V, **{"alpha": 2.0, "beta": 2.0} | {name: tensor})
    with pytest.raises(ValueError, match=said):
        untyped.LLNAttention(2, 8, statistics="fixed", **{name: values})
    with pytest.raises(ValueError, match=said):
        untyped.MultiheadAttention(16, 2, statistics="fixed", **{name: values})


def test_tensors_that_cannot_be_looked_at_are_not() -> None:
    good, bad = torch.full((2,), 2.0), torch.full((2,), -1.0)
    lln_attention(Q, K, V, good, good[:, None].expand(2, 8))
    lln_attention(Q, K, V, torch.full((0, 2), 1.0)[:0].sum() + 1.0, 2.0)
    mapped = torch.func.vmap(lambda a: lln_attention(Q, K, V, a, 2.0))(torch.stack([good, good]))
    torch.testing.assert_close(mapped[0], lln_attention(Q, K, V, good, 2.0))
    with torch.device("meta"):
        shapes = [torch.empty(1, 2, 10, 8) for _ in range(3)]
        assert lln_attention(*shapes, torch.empty(2), 2.0).shape == (1, 2, 10, 8)
    gradient = torch.func.grad(lambda a: lln_attention(Q, K, V, a, 2.0).sum())(good)
    assert gradient.shape == (2,)
    module = untyped.LLNAttention(2, 8, statistics="fixed", learnable="head")
    with torch.no_grad():
        module.log_alpha.fill_(math.nan)  # what training did is told by its loss
    assert bool(module(Q, K, V).isnan().any())
    assert bad.lt(0).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": -1}, "batch must be an int of at least 0; got -1"),
        ({"batch": 1.5}, "batch must be an int"),
        ({"heads": 0}, "heads must be a positive int; got 0"),
        ({"head_dim": 0}, "head_dim must be a positive int"),
        ({"head_dim": "8"}, "head_dim must be a positive int; got '8'"),
        ({"value_dim": 0}, "value_dim must be a positive int"),
        ({"value_dim": -1}, "value_dim must be a positive int"),
        ({"block_size": 0}, "block_size must be a positive int"),
        ({"block_size": -1}, "block_size must be a positive int"),
        ({"block_size": True}, "block_size must be a positive int"),
        ({"read": "evidence", "channels": 0}, "channels must be a positive int"),
        ({"read": "best"}, "read must be 'paper' or 'evidence'"),
        ({"overlap": 1}, "overlap must be True or False"),
        ({"dtype": torch.int64}, r"dtype must be torch.float32, .*; got torch.int64"),
        ({"dtype": "float32"}, "dtype must be torch.float32"),
        ({"device": "nowhere"}, "device 'nowhere' is none"),
    ],
)
def test_an_empty_state_checks_what_it_is_told(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^LLNState.empty: {said}") as caught:
        untyped.LLNState.empty(**{"batch": 1, "heads": 2, "head_dim": 8} | given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [2, -1, 100])
def test_a_sequence_that_is_not_there_cannot_be_chosen(index: int) -> None:
    with pytest.raises(ValueError, match=f"index must lie between 0 and 1, for a state of 2 sequences; got {index}"):
        LLNState.empty(2, 2, 8).index_select(torch.tensor([0, index, 1]))


@pytest.mark.parametrize("index", [0, [0, 1], torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([True]), None])
def test_an_index_is_a_vector_of_whole_numbers(index: Any) -> None:
    with pytest.raises(TypeError, match=r"^LLNState.index_select: index must be an int64 tensor, \[n\]; got "):
        untyped.LLNState.empty(2, 2, 8).index_select(index)
    assert LLNState.empty(2, 2, 8).index_select(torch.zeros(0, dtype=torch.int64)).log_sum.shape == (0, 2, 8)


@pytest.mark.parametrize("tool", ["entropy", "variance", "log_moments", "lognormal_fit", "spectral_gap",
                                  "principal_std"])  # fmt: skip
@pytest.mark.parametrize("given", [torch.eye(4), None, 3, np.eye(4)], ids=["tensor", "None", "int", "array"])
def test_an_instrument_says_what_it_takes(tool: str, given: Any) -> None:
    with pytest.raises(TypeError, match=r"^p must be an AttentionMap: .* of a matrix as dense_map\(p\) does; got "):
        getattr(tools, tool)(given)


def attend(**options: Any) -> Callable[[], Any]:
    return lambda: lln_attention(**{"query": Q, "key": K, "value": V, "alpha": 2.0, "beta": 2.0} | options)


@pytest.mark.parametrize(
    "call",
    [
        attend(query=np.zeros((100, 100, 100))), attend(alpha=LONG), attend(beta=np.ones(5000)),
        attend(cu_seqlens=torch.arange(5000)), attend(cu_seqlens=LONG), attend(key_mask=LONG),
        attend(block_size=2, mix=LONG), attend(block_size=LONG), attend(is_causal=np.zeros(5000)),
        attend(backend=np.zeros(5000)), attend(dropout_p=np.zeros(5000)), attend(read=np.zeros(5000)),
        attend(block_size=2, mix="m" * 5000), attend(state=LONG),
        lambda: untyped.LLNAttention(LONG, 8), lambda: untyped.LLNAttention(2, 8, matching=LONG),
        lambda: untyped.LLNAttention(2, 8, mix=np.zeros(5000), block_size=4),
        lambda: untyped.LLNAttention(2, 8, convolution=LONG),
        lambda: untyped.LLNAttention(2, 8, backend=torch.zeros(5000)),
        lambda: untyped.LLNState.empty(LONG, 2, 8), lambda: untyped.LLNState.empty(2, 2, 8).index_select(LONG),
    ],
)  # fmt: skip
def test_no_error_prints_a_whole_array(call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def take_steps(layer: lln.LLNAttention, inputs: list[Tensor]) -> None:
    for x in inputs:
        layer(x, x, x, is_causal=True)


def test_steps_of_several_threads_all_count() -> None:
    """However they interleave: a barrier holds every thread between the look at its inputs and their keeping."""
    inputs = torch.randn(4, 6, 1, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    layer = untyped.LLNAttention(2, 8, statistics="running")
    meet, sum_moments = threading.Barrier(4), layer.sum_moments

    def meet_first(*given: Any) -> Tensor:
        found = sum_moments(*given)
        meet.wait(timeout=60)
        return found

    layer.__dict__["sum_moments"] = meet_first
    threads = [threading.Thread(target=take_steps, args=(layer, list(part))) for part in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layer.eval()
    assert layer.running_count == 24
    del layer.__dict__["sum_moments"]
    assert all(t.isfinite().all() for t in (layer.running_variance_q, layer.running_variance_k))


def test_one_thread_keeps_the_averages_it_always_had() -> None:
    inputs = list(torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(2)))
    layer = untyped.LLNAttention(2, 8, statistics="running", momentum=0.25)
    take_steps(layer, inputs)
    layer.eval()
    wanted = None
    for x in inputs:
        variance = x.double()[0].flatten(1).var(1)
        wanted = variance if wanted is None else wanted.lerp(variance, 0.25)
    assert layer.running_count == 3
    torch.testing.assert_close(layer.running_variance_q.double(), wanted, rtol=1e-5, atol=1e-6)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        take_steps(twin.train(), inputs[:1])
        assert twin.eval().running_count == 4


def test_running_statistics_refuse_to_be_lost() -> None:
    layer = untyped.LLNAttention(2, 8, statistics="running")
    replica = nn.Module._replicate_for_data_parallel(layer)
    with pytest.raises(RuntimeError, match=r"does not work in torch.nn.DataParallel, "):
        replica(Q, Q, Q, is_causal=True)
    replica.training = False
    replica(Q, Q, Q, is_causal=True)


@pytest.mark.parametrize("kind", ["number", "tensor", "mixed"])
def test_one_beta_is_the_same_to_a_millionth_and_no_further(kind: str) -> None:
    """A beta that was saved as text, or cast, is the same one; another is not, however near."""

    def state(beta: float) -> LLNState:
        given = torch.full((1, 2, 1), beta, dtype=torch.float64) if kind != "number" else beta
        return lln_attention(Q.double(), K.double(), V.double(), 2.0, given, return_state=True)[1]

    first = (
        state(1.5)
        if kind != "mixed"
        else lln_attention(Q.double(), K.double(), V.double(), 2.0, 1.5, return_state=True)[1]
    )
    first.merge(state(1.5 * (1 + 2e-7)))
    for apart in (1.5e-6, -1.5e-6, 1e-4):
        with pytest.raises(ValueError, match="were made with different beta"):
            first.merge(state(1.5 * (1 + apart)))
