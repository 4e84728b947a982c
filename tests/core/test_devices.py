"""On every device of this machine the op gives what it gives in float64 on the CPU: outputs, gradients, states."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lln
from helpers.tensors import relative_error
from helpers.untyped import attention, lln_attention, mechanism
from helpers.waiting import forbid_waiting
from lln import LLNAttention
from lln.peers import draws

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CALLS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "blocks": {"block_size": 16, "mix": (0.7, 0.6)},
    "causal blocks": {"block_size": 16, "is_causal": True},
}


def attend_on(device: str, dtype: torch.dtype, packed: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1 if packed else 2, heads, 70, dim) for heads, dim in ((4, 12), (2, 12), (2, 10))]
    q, k, v = (torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes)
    alpha = torch.linspace(1.0, 2.0, 4).to(device, dtype).requires_grad_()
    where = {"cu_seqlens": torch.tensor([0, 23, 23, 70], dtype=torch.int32, device=device)} if packed else {}
    if not packed:
        where["key_mask"] = (torch.arange(70).expand(2, 70) >= torch.tensor([[5], [0]])).to(device)
    out = lln_attention(q, k, v, alpha, 1.3, **options, **where)
    weights = torch.linspace(-1.0, 1.0, out.numel()).view(out.shape).to(device, dtype)
    grads = torch.autograd.grad(out, (q, k, v, alpha), weights)
    results = [out, *grads]
    if options.get("is_causal") or "block_size" not in options:
        _, state = lln_attention(q, k, v, alpha, 1.3, **options, **where, return_state=True)
        results += [state.log_sum.exp(), state.mean_value]  # an empty segment has -inf
        if state.block_size is not None:
            results += [state.block_key, state.block_value, state.count.double()]
    return [t.detach().cpu().double() for t in results]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_device_agrees_with_float64(device: str, packed: bool, name: str) -> None:
    exact = attend_on("cpu", torch.float64, packed, CALLS[name])
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for got, wanted in zip(attend_on(device, dtype, packed, CALLS[name]), exact, strict=True):
            assert relative_error(got, wanted) < tolerance


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's own
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "matching"),
    [
        (torch.int32, "paper"),
        (torch.int64, "entropy"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((torch.int64, "paper"), (torch.int32, "entropy"))),
    ],
)
def test_packed_sequences_compile_to_what_they_are(device: str, dtype: torch.dtype, matching: Any) -> None:
    """With the compiler's own back end on a GPU: what it makes of a search in a part of a tensor it makes there."""
    torch.compiler.reset()
    attention = LLNAttention(2, 8, statistics="sample", matching=matching, convolution=3).to(device)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.3)
    compiled = torch.compile(attention, backend="inductor" if device == "cuda" else "aot_eager_decomp_partition")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 8, generator=generator).to(device) for _ in range(3))
    packed = {"cu_seqlens": torch.tensor([0, 23, 23, 70], dtype=dtype, device=device)}
    with torch.no_grad():  # the graph of gradients would take as long again
        found, wanted = (one(q, k, v, **packed) for one in (compiled, attention))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_is_repeated_by_the_seed_on_every_device(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8, device=device) for _ in range(3))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(lln_attention(q, k, v, 1.5, 1.5, block_size=16, dropout_p=0.4))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def capture(device: str, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call, checked not to wait; on a GPU its replay from a CUDA graph."""
    call()  # curves are brought to the device once
    with forbid_waiting(device):
        call()
    if device != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("matching", ["paper", "variance", "entropy"])
@pytest.mark.parametrize("statistics", ["sample", "batch", "running", "fixed"])
def test_statistics_and_matching_never_wait_for_the_device(device: str, matching: Any, statistics: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, 2, 2)]
    key_mask = torch.arange(40).expand(2, 40) < torch.tensor([[33], [40]])
    modules = [
        LLNAttention(4, 16, num_key_heads=2, matching=matching, statistics=statistics, block_size=8).to(d).eval()
        for d in ("cpu", device)
    ]
    expected = modules[0](*tensors, key_mask=key_mask)
    moved = [t.to(device) for t in tensors]
    hidden = key_mask.to(device)
    out = capture(device, lambda: modules[1](*moved, key_mask=hidden))()
    assert relative_error(out.cpu(), expected) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics_move_on_in_a_captured_training_step(device: str) -> None:
    attention = LLNAttention(2, 16, statistics="running", momentum=0.5).to(device)
    x = torch.ones(1, 2, 40, 16, device=device)

    step = capture(device, lambda: attention(x, x, x))
    for seed in range(12):
        x.copy_(3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        step()
    attention.eval()
    assert attention.running_variance_q.cpu().tolist() == pytest.approx([9.0, 9.0], rel=0.2)


MECHANISMS = [name for name, m in lln.mechanisms().items() if m.kind != "mixer"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_mechanism_waits_for_the_device(name: str, device: str) -> None:
    """Random features, landmarks and rotations lie on the device after the first call, so that a training step can be
    captured."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 64, 16, generator=generator) for _ in range(3)]
    module = mechanism(name, num_heads=2, head_dim=16, max_length=64).eval()
    expected = module(*tensors)
    other = copy.deepcopy(module).to(device)
    moved = [t.to(device).requires_grad_() for t in tensors]

    def step() -> torch.Tensor:
        out: torch.Tensor = other(*moved)
        torch.autograd.grad(out.square().sum(), moved, allow_unused=True)  # Reformer does not read its keys
        return out

    assert relative_error(capture(device, step)().detach().cpu(), expected) < 1e-4


def test_what_is_drawn_for_a_mechanism_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 64, 16)
    for name in ("performer", "rfa", "reformer", "skyformer"):
        first = attention(name, x, x, x)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "Generator", pytest.fail)
            assert torch.equal(attention(name, x, x, x), first)


class Attends(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(self.name, x, x, x)
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["performer", "rfa", "reformer", "skyformer"])
def test_an_export_draws_the_same_and_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn while a model is exported has no values, and must not be kept."""
    monkeypatch.setattr(draws, "KEPT", {})
    x = torch.randn(1, 2, 64, 16)
    exported = [torch.export.export(Attends(name), (x,), strict=strict) for strict in (False, True)]
    out = attention(name, x, x, x)
    assert type(out) is torch.Tensor
    for program in exported:  # other bits: what is traced cannot look at values and take the quick way
        torch.testing.assert_close(program.module()(x), out, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(draws, "KEPT", {})
    assert torch.equal(out, attention(name, x, x, x))
