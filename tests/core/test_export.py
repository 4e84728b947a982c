"""Those who take the op apart get the same from it: torch.compile with open lengths, torch.export, ONNX, torch.func."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from helpers.tensors import make_inputs, relative_error
from helpers.untyped import lln_attention
from lln import LLNAttention, MultiheadAttention
from lln.kernels import common

LENGTH, OTHERS = 37, (64, 5, 150)
CALLS: dict[str, dict[str, Any]] = {"lln": {}, "lln_diag": {"block_size": 8}}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def make(length: int) -> tuple[torch.Tensor, ...]:
    q, k, v = make_inputs(2, 2, 2, length, 8, dtype=torch.float32)
    return q, k, v, torch.arange(length) < torch.tensor([[length], [length // 2 + 1]])


class Op(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = lln_attention(q, k, v, 1.5, 1.5, key_mask=mask, **self.options)
        return out


class Matched(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if isinstance(self.attention, MultiheadAttention):
            rows = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
            out: torch.Tensor = self.attention(*rows, key_padding_mask=~mask, need_weights=False)[0]
            return out
        out = self.attention(q, k, v, key_mask=mask)
        return out


def export(module: torch.nn.Module, most: int | None = None) -> Any:
    length = torch.export.Dim("length", max=most)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    return torch.export.export(module.eval(), make(LENGTH), dynamic_shapes=shapes)


def check(
    found: Callable[..., Any], module: torch.nn.Module, gradients: bool = True, others: Iterable[int] = OTHERS
) -> None:
    for length in others:
        *rows, mask = make(length)
        rows = [t.requires_grad_(gradients) for t in rows]
        out, wanted = found(*rows, mask), module(*rows, mask)
        assert relative_error(out, wanted) < 1e-5
        if gradients:
            both = (torch.autograd.grad(one.square().sum(), rows) for one in (out, wanted))
            for got, right in zip(*both, strict=True):
                assert relative_error(got, right) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"block_size": 8}, id="both ways", marks=pytest.mark.long),  # that of a module is always run
        pytest.param({"is_causal": True, "block_size": 8}, id="causal", marks=pytest.mark.long),
    ],
)
def test_one_graph_serves_every_length(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    made = []

    def keep(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph

    module = Op(**options)
    check(torch.compile(module, dynamic=True, fullgraph=True, backend=keep), module, gradients=False)
    assert len(made) == 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"matching": "entropy", "block_size": 8}, id="entropy"),
        pytest.param({"matching": "variance"}, id="variance", marks=pytest.mark.long),
        pytest.param({"statistics": "fixed", "learnable": "head", "mix": "ratio", "block_size": 8}, id="learned",
                     marks=pytest.mark.long),
        pytest.param({"read": "evidence", "mix": "evidence", "block_size": 8}, id="evidence", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_one_graph_matches_moments_at_every_length_and_has_gradients(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    made = []

    def keep(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph

    module = Matched(LLNAttention(2, 8, **options))
    check(torch.compile(module, dynamic=True, fullgraph=True, backend=keep), module, others=(37, 64, 5))
    assert len(made) == 1 or options.get("mix") == "evidence"  # which is compiled anew


@pytest.mark.parametrize("name", CALLS)
def test_an_export_serves_every_length_and_has_gradients(name: str) -> None:
    module = Op(**CALLS[name])
    with torch.no_grad():
        program = export(module)
    check(program.module(), module)


@pytest.mark.parametrize(
    "attention",
    [
        LLNAttention(2, 8, block_size=8, matching="entropy", value_convolution=5),
        MultiheadAttention(16, 2, batch_first=True),
    ],
    ids=["LLNAttention", "MultiheadAttention"],
)
def test_modules_are_exported(attention: torch.nn.Module) -> None:
    module = Matched(attention)
    for name, parameter in attention.named_parameters():
        if name == "value_taps":
            torch.nn.init.normal_(parameter)
    check(export(module).module(), module)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_of_one_length_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.jit\.trace would keep .* use torch\.compile or torch\.export"):
        torch.jit.trace(Op(), make(9))


def take_to_onnx(program: Any) -> Callable[..., torch.Tensor]:
    """What ONNX Runtime makes of it."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    session = runtime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        named = {one.name: t.numpy() for one, t in zip(session.get_inputs(), tensors, strict=True)}
        return torch.from_numpy(session.run(None, named)[0])

    return run


@pytest.mark.parametrize("name", CALLS)
def test_onnx_runtime_gives_the_same(name: str) -> None:
    module = Op(**CALLS[name])
    check(take_to_onnx(export(module)), module, gradients=False)


@pytest.mark.parametrize(
    ("name", "most"),
    # 128: that is one chunk, and a graph of half the size; 512: one group of chunks
    [("lln_diag", 128), ("lln_diag", None), ("lln", 512)],
)
@pytest.mark.long
def test_causal_attention_is_exported_for_every_length(name: str, most: int | None) -> None:
    module = Op(is_causal=True, **CALLS[name])
    program, others = export(module, most), [length for length in OTHERS if length <= (most or length)]
    check(program.module(), module, others=others)
    run = take_to_onnx(program)
    check(run, module, gradients=False, others=others)
    *rows, mask = make(min(300, most or 300))
    rows = [400.0 * t for t in rows]  # whose exponentials overflow
    assert relative_error(run(*rows, mask), module(*rows, mask)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"block_size": 8}, {"is_causal": True, "block_size": 8}])
def test_vmap_gives_what_each_sample_gives_alone(options: dict[str, Any]) -> None:
    q, k, v = (t.reshape(3, 2, 2, 20, 4) for t in make_inputs(6, 2, 2, 20, 4))
    mask = torch.rand(3, 2, 20) < 0.7

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = lln_attention(q, k, v, 1.5, 1.5, key_mask=mask, **options)
        return out.square().sum()

    found = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v, mask)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = torch.stack([loss(*rows) for rows in zip(*leaves, mask, strict=True)]).sum()
    for got, wanted in zip(found, torch.autograd.grad(whole, leaves), strict=True):
        torch.testing.assert_close(got, wanted)
    slope = jvp(lambda q: loss(q, k[0], v[0], mask[0]), (q[0],), (q[1],))[1]
    torch.testing.assert_close(slope, (found[0][0] * q[1]).sum())


def test_vmap_goes_through_a_module() -> None:
    attention = LLNAttention(2, 4, block_size=8)
    x = torch.stack([torch.randn(2, 2, 20, 4) for _ in range(3)])
    torch.testing.assert_close(vmap(lambda t: attention(t, t, t))(x), torch.stack([attention(t, t, t) for t in x]))


@pytest.mark.parametrize("length", [1, 20, 128, 300, 1100])  # 1,100: more chunks than are added up together
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_composed_is_the_same_in_float64(length: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(2, 4, 2, length, 4)]
    mask = torch.rand(2, length) < 0.6
    mask[1] = False  # nothing to attend to
    results = []
    for composed in (False, True):
        monkeypatch.setattr(common, "is_watched", lambda composed=composed: composed)
        out, state = lln_attention(*leaves, 40.0, 40.0, key_mask=mask, is_causal=is_causal, return_state=True)
        loss = out.square().sum() + state.mean_value.square().sum()
        results.append([out, state.log_sum, state.mean_value, *torch.autograd.grad(loss, leaves)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
