"""One face for the back ends, in NumPy arrays, so that the same test functions run over PyTorch, JAX and MindSpore."""

import functools
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.untyped import lln_attention, naive_evidence, naive_lln, naive_lln_diag

ALPHA, BETA = 1.3, 1.7
# Kinds of attention: the options of each.
CASES: dict[str, dict[str, Any]] = {
    "lln": {},
    "causal": {"is_causal": True},
    "diag": {"block_size": 8, "mix": 0.3},
    "causal diag": {"is_causal": True, "block_size": 8, "mix": 0.3},
    "evidence": {"read": "evidence", "directions": "signed"},
    "causal evidence": {"is_causal": True, "read": "evidence"},
}


def make_case(length: int = 70, dtype: str = "float64", seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """(q [2, 4, N, 8], k [2, 2, N, 8], v [2, 2, N, 6], mask [2, N]): grouped heads, several chunks, left padding."""
    random = np.random.default_rng(seed)
    shapes = (2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6)
    q, k, v = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    mask = random.random((2, length)) > 0.3
    mask[0, :5], mask[1] = False, True
    return q, k, v, mask


def attend_naively(q: Any, k: Any, v: Any, mask: Any, case: str) -> Any:
    """The float64 reference."""
    options = dict(CASES[case])
    given = [torch.tensor(t) for t in (q, k, v)]
    options["key_mask"] = torch.tensor(mask)
    if options.pop("read", None):
        return naive_evidence(*given, BETA, **options).numpy()
    if size := options.pop("block_size", None):
        return naive_lln_diag(*given, ALPHA, BETA, size, **options).numpy()
    return naive_lln(*given, ALPHA, BETA, **options).numpy()


class OnTorch:
    cases = tuple(CASES)

    def attend(self, q: Any, k: Any, v: Any, mask: Any, case: str, state: Any = None, keep: bool = False) -> Any:
        """The output; with keep also the state, which the next call takes."""
        given = [torch.tensor(t) for t in (q, k, v)]
        found = self.call(given, torch.tensor(mask), CASES[case], state=state, return_state=keep)
        return (found[0].numpy(), found[1]) if keep else found.numpy()

    def call(self, given: list[Any], mask: Any, options: dict[str, Any], **more: Any) -> Any:
        alpha = None if "read" in options else ALPHA
        return lln_attention(*given, alpha, BETA, key_mask=mask, backend="eager", **options, **more)

    def merge(self, first: Any, second: Any) -> Any:
        return first.merge(second)

    def differentiate(self, q: Any, k: Any, v: Any, mask: Any, weights: Any, case: str) -> list[Any]:
        """The gradients of sum(out * weights)."""
        given = [torch.tensor(t, requires_grad=True) for t in (q, k, v)]
        out = self.call(given, torch.tensor(mask), CASES[case])
        return [g.numpy() for g in torch.autograd.grad((out * torch.tensor(weights)).sum(), given)]


@functools.cache
def compile_jax(case: str, shapes: Any, dtype: str, kind: str) -> Any:
    """lln.jax.lln_attention for arrays of these shapes, compiled in a hurry. kind: "plain", "state" or "grad"."""
    import jax
    import jax.numpy as jnp

    from lln.jax import LLNState, lln_attention

    options = CASES[case]

    def attend(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        alpha = None if "read" in options else ALPHA
        return lln_attention(q, k, v, alpha, BETA, key_mask=mask, **options, **more)

    def go_on(q: Any, k: Any, v: Any, mask: Any, state: Any) -> Any:
        return attend(q, k, v, mask, state=state, return_state=True)

    def weigh(q: Any, k: Any, v: Any, mask: Any, weights: Any) -> Any:
        return (attend(q, k, v, mask) * weights).sum()

    given: list[Any] = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:3]]
    given.append(jax.ShapeDtypeStruct(shapes[3], "bool"))
    chosen: Any = attend
    if kind == "state":
        chosen = go_on
        sizes = {"block_size": options.get("block_size"), "read": options.get("read", "paper"), "dtype": dtype}
        sizes["channels"] = 16 if options.get("directions") == "signed" else None
        given.append(LLNState.empty(2, 2, 8, 6, **sizes))
    elif kind == "grad":
        chosen = jax.grad(weigh, (0, 1, 2))
        given.append(jnp.zeros((*shapes[0][:3], shapes[2][3]), dtype))
    # Chunks of 16 rows, so that small inputs cross several; and less to compile.
    with mock.patch("lln.jax.scanning.CHUNK", 64 if kind == "plain" else 16):
        return jax.jit(chosen).lower(*given).compile(), given[-1]


class OnJax:
    cases = tuple(CASES)

    def attend(self, q: Any, k: Any, v: Any, mask: Any, case: str, state: Any = None, keep: bool = False) -> Any:
        import jax

        with jax.enable_x64(True):
            shapes = tuple(t.shape for t in (q, k, v, mask))
            if not keep and state is None:
                return np.asarray(compile_jax(case, shapes, str(q.dtype), "plain")[0](q, k, v, mask))
            run, empty = compile_jax(case, shapes, str(q.dtype), "state")
            out, after = run(q, k, v, mask, empty if state is None else state)
            return (np.asarray(out), after) if keep else np.asarray(out)

    def merge(self, first: Any, second: Any) -> Any:
        import jax

        with jax.enable_x64(True):
            return first.merge(second)

    def differentiate(self, q: Any, k: Any, v: Any, mask: Any, weights: Any, case: str) -> list[Any]:
        import jax

        with jax.enable_x64(True):
            shapes = tuple(t.shape for t in (q, k, v, mask))
            run, _ = compile_jax(case, shapes, str(q.dtype), "grad")
            return [np.asarray(g) for g in run(q, k, v, mask, weights)]


class OnMindSpore:
    cases = tuple(case for case, options in CASES.items() if "read" not in options)

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def load(self) -> Any:
        import mindspore as ms

        ms.set_context(mode=ms.GRAPH_MODE if self.mode == "graph" else ms.PYNATIVE_MODE)
        return ms

    @functools.cache  # noqa: B019, one instance a mode
    def make(self, case: str, dtype: Any, keep: bool) -> Any:
        """A cell, which is what a graph is made of, and which keeps its graphs."""
        ms = self.load()
        from lln.mindspore import lln_attention

        # In a graph MindSpore keeps Python's numbers in float32.
        given = dict(CASES[case])
        alpha, beta, mix = (ms.Tensor(np.asarray([x], dtype)) for x in (ALPHA, BETA, given.pop("mix", 0.5)))

        class Attend(ms.nn.Cell):  # type: ignore[name-defined]
            def construct(self, q: Any, k: Any, v: Any, mask: Any, state: Any = None) -> Any:
                return lln_attention(
                    q, k, v, alpha, beta, key_mask=mask, mix=mix, state=state, return_state=keep, **given
                )

        return Attend()

    def attend(self, q: Any, k: Any, v: Any, mask: Any, case: str, state: Any = None, keep: bool = False) -> Any:
        ms = self.load()
        given = [ms.Tensor(t) for t in (q, k, v, mask)]
        cell = self.make(case, q.dtype, keep)
        found = cell(*given) if state is None else cell(*given, state)
        return (found[0].asnumpy(), found[1]) if keep else found.asnumpy()

    def merge(self, first: Any, second: Any) -> Any:
        from lln.mindspore.sums import merge

        return merge(*first, *second)

    def differentiate(self, q: Any, k: Any, v: Any, mask: Any, weights: Any, case: str) -> list[Any]:
        ms = self.load()
        cell, given, weights = self.make(case, q.dtype, False), ms.Tensor(mask), ms.Tensor(weights)

        def weigh(q: Any, k: Any, v: Any) -> Any:
            return (cell(q, k, v, given) * weights).sum()

        return [g.asnumpy() for g in ms.grad(weigh, (0, 1, 2))(*(ms.Tensor(t) for t in (q, k, v)))]
