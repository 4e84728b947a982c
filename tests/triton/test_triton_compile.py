"""backend="triton" under torch.compile and torch.export: one graph for all lengths, dropout, states, rules of ops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.tensors import normal, relative_error
from helpers.triton_cases import DEVICE, GPU, MARKS, MODES, attend, extras, gradients, only_triton, tensors
from lln import LLNState
from lln.kernels.call import FIELDS, TENSORS, Call
from lln.kernels.triton import op

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch.compile's own

modes = pytest.mark.parametrize("mode", MODES)

COMPILED: dict[str, dict[str, Any]] = MODES | {"packed": {"block_size": 16}, "padded": {"block_size": 16}}
ENGINES = ["aot_eager", *(["inductor"] if GPU else [])]


@only_triton
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "mode", [pytest.param(one, marks=pytest.mark.long if one in ("causal", "blocks") else ()) for one in COMPILED]
)
def test_one_compiled_graph_serves_every_length(mode: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "FREE", 0)  # the last lengths keep their state in any case
    torch.compiler.reset()
    counter = CompileCounterWithBackend(engine)

    def call(*given: Any) -> Tensor:
        q, k, v, alpha, options = given
        return attend(2 * q, k, v, alpha, 1.4, **COMPILED[mode], **options) + 1

    compiled: Any = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    alpha = torch.tensor([1.2, 1.5], device=DEVICE, requires_grad=True)
    for length in (40, 50, *((70, 1000, 3001) if GPU else (300,))):
        leaves = [*tensors(length), alpha]
        first = counter.frame_count  # compiling the first one may take more than one attempt
        out, expected = compiled(*leaves, extras(mode, length)), call(*leaves, extras(mode, length))
        assert torch.equal(out, expected) or relative_error(out, expected) <= 1e-6
        for got, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
            assert relative_error(got, wanted) <= 1e-6
        assert counter.frame_count == first or length == 40


@only_triton
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_dropout_draws_anew_and_follows_the_seed(engine: str) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend(engine)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, 1.2, 1.4, block_size=16, dropout_p=0.3)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 50):
        leaves, outs, first = tensors(length), [], counter.frame_count
        for seed in (1, None, 1):
            if seed is not None:
                torch.manual_seed(seed)
            outs.append(compiled(*leaves))
        assert torch.equal(outs[0], outs[2])
        assert not torch.equal(outs[0], outs[1])
        for out in outs:  # backward drops what forward dropped: linear in the values
            dv = gradients(out, leaves)[2]
            total = (out.double() * normal(30, *out.shape).to(DEVICE)).sum().item()
            assert (dv.double() * leaves[2].double()).sum().item() == pytest.approx(total, rel=1e-5, abs=1e-4)
        assert counter.frame_count == first or length == 40


@only_triton
@pytest.mark.parametrize("block_size", [None, 16])
def test_a_compiled_step_takes_and_gives_a_state(block_size: int | None) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"is_causal": True, "block_size": block_size, "return_state": True}

    def step(q: Tensor, k: Tensor, v: Tensor, state: LLNState) -> tuple[Tensor, LLNState]:
        return attend(q, k, v, 1.2, 1.4, state=state, **options)

    compiled: Any = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    leaves = [x.detach() for x in tensors(24)]
    whole = attend(*leaves, 1.2, 1.4, **options)[0]
    state = attend(*(x[:, :, :20] for x in leaves), 1.2, 1.4, **options)[1]
    for t in range(20, 24):
        first = counter.frame_count
        out, state = compiled(*(x[:, :, t : t + 1] for x in leaves), state)
        assert relative_error(out, whole[:, :, t : t + 1]) <= 1e-5
        assert counter.frame_count == first or t == 20


@only_triton
@pytest.mark.parametrize("free", [0, op.FREE])
def test_the_registered_op_keeps_the_rules_of_custom_ops(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "FREE", free)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()

    def factor(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).add(1.0).to(DEVICE).requires_grad_()

    none: dict[str, Any] = dict.fromkeys(FIELDS[:TENSORS])
    for is_causal in (False, True):
        rows = {"query": draw(1, 2, 20, 16), "key": draw(1, 1, 20, 16), "value": draw(1, 1, 20, 16)}
        settings: dict[str, Any] = {"is_causal": is_causal, "scale": 0.25, "dropout_p": 0.0}
        plain = {"alpha": factor(1, 2, 1), "beta": factor(1, 1, 16), "block_size": None}
        mixed = {"alpha": factor(1, 1, 1), "beta": factor(1, 1, 1), "block_size": 8}
        mixed |= {"lln_weight": factor(1, 2, 1), "block_weight": factor(1, 1, 1)}
        for factors in (plain, mixed):
            call = Call(**(none | rows | settings | factors))
            torch.library.opcheck(torch.ops.lln.attend.default, call.arguments())


@only_triton
def test_an_output_that_nobody_used_has_a_gradient_of_its_own_shape() -> None:
    """Kernels read it by its strides: one that is narrower would be read beyond its end, where zeros may lie, too."""
    shapes: list[list[int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.lln.attend_backward.default:
                shapes.append(list(args[0].shape))
            return func(*args, **(kwargs or {}))

    none: dict[str, Any] = dict.fromkeys(FIELDS[:TENSORS])
    rows = {
        name: torch.randn(1, 2, 20, width, device=DEVICE).requires_grad_()
        for name, width in (("query", 16), ("key", 16), ("value", 24))
    }
    factors = {name: torch.ones(1, 1, 1, device=DEVICE) for name in ("alpha", "beta")}
    call = Call(**(none | rows | factors), is_causal=False, scale=0.25, dropout_p=0.0, block_size=None)
    _, log_sum, _ = torch.ops.lln.attend(*call.arguments())
    with Watch():
        torch.autograd.grad(log_sum.sum(), rows["key"])
    assert shapes == [[1, 2, 20, 24]]


@only_triton
@modes
def test_models_are_exported_for_every_length(mode: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = torch.nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.inputs(x).chunk(3, -1))
            return attend(q, k, v, 1.2, 1.4, **MODES[mode])

    model = Model().to(DEVICE).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(2, 40, 32, device=DEVICE),), dynamic_shapes={"x": {1: length}})
    for n in (50, 300):
        x = normal(n, 2, n, 32).to(DEVICE, torch.float32)
        assert relative_error(exported.module()(x), model(x)) <= 1e-6
