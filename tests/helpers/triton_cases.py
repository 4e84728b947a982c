"""The cases of the Triton back end's tests, their answer in float64, and the comparison of the two.

The answer is that of the eager back end in float64, which its own tests hold to the dense equation (8). Without a GPU
the kernels run in Triton's interpreter, slowly: few heads and short sequences there, longer ones where a GPU is.
"""

import dataclasses
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from helpers.call_options import draw_coefficient, draw_mix, draw_state, make_offsets, mask_keys
from helpers.tensors import State, normal, relative_error
from helpers.untyped import lln_attention
from lln import LLNState

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Another name tries the tests themselves on a back end that is known to be right.
BACKEND: Any = os.environ.get("LLN_TEST_BACKEND", "triton")
only_triton = pytest.mark.skipif(BACKEND != "triton", reason="a promise of the Triton back end alone")
# For every test. The interpreter runs on NumPy, which warns of infinities and NaN in lanes that a mask leaves out.
MARKS = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

MODES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "blocks": {"block_size": 48},
    "causal blocks": {"is_causal": True, "block_size": 48},
}
STATE = ("log_sum", "mean_value", "block_key", "block_value")
ZERO = 0.03  # a gradient this small beside the largest one is zero in theory, or may as well be
MOST = 0.1  # error that is never allowed, however plain PyTorch rounds: more is another function
Tensors = dict[str, Tensor]


def quicken_interpreter() -> None:
    """Triton's interpreter replaces the functions of triton.language at every launch, which it needs, and again at
    every call of a function inside a kernel, which costs a third of the time of these tests."""
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *args, **options)

    def patch_once(function: Any) -> Any:
        modules = frozenset(id(x) for x in function.__globals__.values() if isinstance(x, types.ModuleType))
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once


if not GPU and BACKEND == "triton":
    quicken_interpreter()


def attend(*args: Any, **options: Any) -> Any:
    return lln_attention(*args, **options, backend=BACKEND)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call in words. `lengths` are those of the sequences: a batch of equal ones, or packed end to end."""

    lengths: tuple[int, ...] = (70, 70)
    key_lengths: tuple[int, ...] | None = None  # cross attention
    packed: bool = False
    key_heads: int = 2
    group: int = 1
    dim: int = 16
    value_dim: int | None = None
    is_causal: bool = False
    block_size: int | None = None
    scale: float | None = None
    mask: str = "none"
    alpha: str = "number"
    beta: str = "number"
    mix: str = "number"
    state: bool = False
    return_state: bool = False
    dtype: torch.dtype = torch.float32
    size: float = 1.0  # of the exponents

    def __str__(self) -> str:
        changed = (
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.default != getattr(self, f.name)
        )
        return " ".join(f"{name}={x}" for name, x in changed).replace(", ", ",")


def name_mix(mix: Any) -> dict[str, Any]:
    return dict(zip(("mix r", "mix p"), mix, strict=True)) if isinstance(mix, tuple) else {"mix": mix}


def name_state(state: State, dtype: torch.dtype) -> dict[str, Tensor]:
    """As the kernels keep it: rows that are hidden are zero."""
    fields = {name: x for name, x in state._asdict().items() if x is not None}
    fields["mean_value"] = fields["mean_value"].float()
    for name in fields.keys() & {"block_key", "block_value"}:
        fields[name] = (fields[name] * fields["block_mask"][:, None, :, None]).to(dtype)
    return {f"state {name}": x for name, x in fields.items()}


def build_arguments(case: Case) -> dict[str, Any]:
    """Everything that goes into the call, by name; what has two parts (mix, state) under two words."""
    batch, heads = len(case.lengths), case.key_heads * case.group
    key_lengths = case.key_lengths or case.lengths
    dim, dv = case.dim, case.value_dim or case.dim
    rows, nq, nk = (1, sum(case.lengths), sum(key_lengths)) if case.packed else (batch, case.lengths[0], key_lengths[0])
    given: dict[str, Any] = {
        "query": (case.size * normal(0, rows, heads, nq, dim)).to(case.dtype),
        "key": (case.size * normal(1, rows, case.key_heads, nk, dim)).to(case.dtype),
        "value": normal(2, rows, case.key_heads, nk, dv).to(case.dtype),
        "alpha": draw_coefficient(case.alpha, 3, batch, heads, dim, torch.float32),
        "beta": draw_coefficient(case.beta, 4, batch, case.key_heads, dim, torch.float32),
        "is_causal": case.is_causal,
        "block_size": case.block_size,
        "scale": case.scale,
    }
    if case.mask != "none":
        given["key_mask"] = mask_keys(case.mask, key_lengths).reshape(rows, nk)
    if case.packed:
        offsets = make_offsets(case.lengths), make_offsets(key_lengths)
        given["cu_seqlens"] = offsets[0] if case.key_lengths is None else offsets
    if case.block_size is not None:
        given |= name_mix(draw_mix(case.mix, batch, heads, dv, torch.float32))
    if case.state:
        given |= name_state(draw_state(batch, case.key_heads, dim, dv, case.block_size), case.dtype)
    return given


def assemble(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the op out of what `build` gave."""
    arguments = {name: x for name, x in given.items() if " " not in name}
    if "mix r" in given:
        arguments["mix"] = given["mix r"], given["mix p"]
    state = {name.removeprefix("state "): x for name, x in given.items() if name.startswith("state ")}
    return arguments | ({"state": LLNState(**state)} if state else {})


def evaluate(
    case: Case,
    backend: str = BACKEND,
    wide: bool = False,
    layout: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given,
    upstream: Callable[[Tensor], Tensor] = lambda g: g,
    of: tuple[str, ...] = ("out", *STATE),
) -> Tensors:
    """Output, returned state, and as "d name" the gradients of a random sum of those named in `of`; `wide`: the
    same numbers in float64 on the CPU. `layout` and `upstream` lay the arguments and the gradient out in memory."""

    def place(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(place(y) for y in x)
        if not isinstance(x, Tensor):
            return x
        return x.to("cpu" if wide else DEVICE, torch.float64 if wide and x.is_floating_point() else x.dtype)

    given = {name: place(x) for name, x in build_arguments(case).items()}
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    result = lln_attention(**assemble(layout(given)), return_state=case.return_state, backend=backend)
    out, state = result if case.return_state else (result, None)
    found = {"out": out} | {n: x for n in STATE if (x := getattr(state, n, None)) is not None}
    if not wide:
        assert out.dtype == case.dtype
        assert state is None or (state.log_sum.dtype, state.mean_value.dtype) == (torch.float64, torch.float32)
    weights = []
    summed = [(n, x) for n, x in found.items() if n in of and x.requires_grad]
    for seed, (name, x) in enumerate(summed):
        g = normal(30 + seed, *x.shape).to(torch.float32 if name in STATE[:2] else case.dtype).to(x)
        weights.append(upstream(g.masked_fill(x == -torch.inf, 0)))
    grads = torch.autograd.grad([x for _, x in summed], list(leaves.values()), weights, allow_unused=True)
    found |= {
        f"d {n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {n: x.detach().cpu().double() for n, x in found.items()}


def errors(actual: Tensors, expected: Tensors, terms: dict[str, float] | None = None) -> dict[str, float]:
    """Relative errors. A gradient may be zero in theory and rounding in practice: it is compared with all others.
    terms: of gradients that are sums over tokens, the norm of what is added up. Its rounding stays when it cancels."""
    assert actual.keys() == expected.keys()
    floor = find_floor(expected)
    found = {}
    for name, x in expected.items():
        empty = x == -torch.inf  # the log_sum of no keys
        assert torch.equal(actual[name] == -torch.inf, empty), name
        finite, wanted = (t.masked_fill(empty, 0) for t in (actual[name], x))
        least = max(floor, (terms or {}).get(name, 0.0)) if name.startswith("d ") else 0.0
        found[name] = relative_error(finite, wanted, least)
    return found


def find_floor(expected: Tensors) -> float:
    return ZERO * max((x.norm().item() for n, x in expected.items() if n.startswith("d ")), default=0.0)


def find_terms(case: Case, expected: Tensors) -> dict[str, float]:
    """As d alpha is the sum of q dq / alpha over tokens, and d mix that of the output times its gradient."""
    given = build_arguments(case)
    products = {
        f"d {name}": given[of].double() * expected[f"d {of}"] for name, of in (("alpha", "query"), ("beta", "key"))
    }
    return {name: x.norm().item() for name, x in products.items()} | {
        name: expected["out"].norm().item() for name in expected if name.startswith("d mix")
    }


def find_tolerance(name: str, dtype: torch.dtype, eager: float, least: float) -> float:
    """Twice the eager back end's error. What is float32 beside narrow inputs (states, gradients of alpha and beta) is
    made of products of narrow numbers, and as good as these."""
    narrow = name in ("out", "d query", "d key", "d value")
    return max(2 * eager, least if dtype == torch.float32 or narrow else 1e-2)


def check(case: Case, tolerance: float = 2e-5, *, as_plain: bool = False, **how: Any) -> None:
    """Float32 is right to `tolerance`; a narrower type to twice what the eager back end makes of it, which computes in
    float32. as_plain: or to twice what plain PyTorch makes of it, in any type (`evaluate_plainly`), where sums that
    cancel are judged by their terms, and what is zero in theory by what rounding does to the largest gradient."""
    expected = evaluate(case, "eager", wide=True, **how)
    terms = find_terms(case, expected) if as_plain else None
    found = errors(evaluate(case, **how), expected, terms)
    limits = dict.fromkeys(found, tolerance)
    if case.dtype != torch.float32:
        eager = errors(evaluate(case, "eager", **how), expected, terms)
        limits = {n: find_tolerance(n, case.dtype, e, tolerance) for n, e in eager.items()}
    if as_plain and any(e > limits[n] for n, e in found.items()):
        for result in evaluate_plainly(case, **how):
            plain = errors(result, expected, terms)
            limits = {n: max(limits[n], min(2 * e, MOST)) for n, e in plain.items()}
        limits |= {n: max(limits[n], 2 * tolerance) for n in terms or ()}
        rounding = torch.finfo(case.dtype).eps / 4 / ZERO
        limits |= {
            n: max(limits[n], rounding)
            for n, x in expected.items()
            if n.startswith("d ") and x.norm().item() < find_floor(expected)
        }
    over = {n: (e, limits[n]) for n, e in found.items() if not e <= limits[n]}
    assert not over, over


PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")}


class RoundProducts(TorchDispatchMode):
    """Matrix products have factors and results of a type, and sum more precisely: what tensor cores do, and
    torch.autocast. noise: each number is first moved at random by as much as half of what rounding may do to it, so
    that a sum whose errors happen to cancel is no standard."""

    def __init__(self, dtype: torch.dtype, noise: torch.Generator | None = None) -> None:
        super().__init__()
        self.dtype, self.noise = dtype, noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        return tree_map(self.round, func(*tree_map(self.round, args), **(kwargs or {})))

    def round(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self.noise is not None:
            moved = torch.rand(x.shape, generator=self.noise, dtype=x.dtype) - 0.5
            x = x * (1 + moved * torch.finfo(self.dtype).eps / 2)
        return x.to(self.dtype).to(x.dtype)


def evaluate_plainly(case: Case, **how: Any) -> Iterator[Tensors]:
    """What plain PyTorch makes of it, several times where rounding decides: float32 as it is, and a narrower type with
    products of that type."""
    if case.dtype == torch.float32:
        yield evaluate(case, "eager", **how)
        return
    for noise in (None, *(torch.Generator().manual_seed(seed) for seed in range(4))):
        with RoundProducts(case.dtype, noise):
            yield evaluate(case, "eager", wide=True, **how)


def passes(
    tensors: list[Tensor], *coefficients: Any, wide: bool = False, g: Tensor | None = None, **options: Any
) -> Tensors:
    """out, dq, dk and dv of given q, k, v; `g` is the gradient of out."""
    place = {"device": "cpu", "dtype": torch.float64} if wide else {"device": DEVICE}
    leaves = [x.detach().to(**place).requires_grad_() for x in tensors]
    out = lln_attention(*leaves, *coefficients, **options, backend="eager" if wide else BACKEND)
    g = normal(30, *out.shape) if g is None else g
    found = out, *torch.autograd.grad(out, leaves, g.to(out))
    return dict(zip(("out", "d query", "d key", "d value"), (x.detach().cpu().double() for x in found), strict=True))


def tensors(length: int = 70, dim: int = 16, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(batch, heads, length, dim) for heads in (2, 1, 1)]
    return [normal(s, *shape).to(DEVICE, dtype).requires_grad_() for s, shape in enumerate(shapes)]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, normal(30, *out.shape).to(out))


def extras(mode: str, length: int) -> dict[str, Any]:
    """The tensors among the options, which change from call to call."""
    if mode == "packed":
        return {"cu_seqlens": make_offsets((length // 3, 0, length - length // 3), DEVICE)}
    return {"key_mask": torch.arange(length, device=DEVICE)[None] >= length // 4} if mode == "padded" else {}
