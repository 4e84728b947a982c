"""The attentions that `lln bench` sets beside each other, under the names that its options and tables use."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, logsigmoid, scaled_dot_product_attention

from lln.functional import Backend, lln_attention
from lln.nn.attention import LLNAttention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ALPHA = BETA = 2.1354772  # eq. (10) of the paper with its constants, for queries and keys of unit variance
BLOCK_SIZE = 64


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} x {self.length:,} x {self.dim}"


@dataclasses.dataclass(frozen=True)
class Case:
    """What an attention is built for."""

    shape: Shape
    causal: bool
    dtype: torch.dtype
    device: torch.device
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{', causal,' if self.causal else ''} at {self.shape} in {str(self.dtype).removeprefix('torch.')}"


Build = Callable[[Case], Attend]


@dataclasses.dataclass(frozen=True)
class Attention:
    build: Build
    reference: Build | None = None  # the same attention in another way, for the check in float64
    softmax: bool = False  # softmax attention: quadratic in the length, and what speed-ups are counted from
    matrix: bool = False  # keeps the matrix P
    floor: tuple[int, int] | None = None  # N D elements a head that forward, forward + backward must move
    causality: tuple[bool, ...] = (False, True)
    devices: tuple[str, ...] = ("cpu", "cuda")
    peer: str | None = None  # the library that --peers names
    drops: bool = True  # has dropout of P
    heads_first: bool = True  # takes [B, H, N, D], else [B, N, H, D]
    # Entered around the calls, so that no call is charged for it.
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def sdpa(case: Case) -> Attend:
    return functools.partial(scaled_dot_product_attention, is_causal=case.causal, dropout_p=case.dropout)


def eager_softmax(case: Case) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores: Tensor = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if case.causal:
            later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return dropout(scores.softmax(-1), case.dropout) @ v

    return attend


def usual_form(case: Case) -> Attend:
    """LLN as it is usually written: live standard deviations, maxima subtracted, epsilon in the denominator."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        with torch.no_grad():
            sigma_q, sigma_k = q.std(), k.std()
            spread = (((sigma_q * sigma_k) ** 2 + 0.35487) / (2 * 0.14855)).sqrt()  # eq. (10), the paper's constants
        x, y = q * (spread / sigma_q), k * (spread / sigma_k)
        a = (x - x.amax(-1, keepdim=True)).exp()
        b = (y - y.amax((-1, -2), keepdim=True)).exp()
        out = a @ (b.transpose(-1, -2) @ v) / (a @ b.sum(-2).unsqueeze(-1) + 1e-5)
        return out.to(dtype)

    return attend


def eq8(block_size: int | None) -> Build:
    """Eq. (8) written out, for LLN+Diag averaged with softmax attention inside blocks."""

    def build(case: Case) -> Attend:
        place = torch.arange(case.shape.length, device=case.device)
        seen = place <= place[:, None] if case.causal else place >= 0  # [N, N] or [N]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            p = (ALPHA * q).exp() @ (BETA * k).exp().transpose(-1, -2) * seen
            out: Tensor = p @ v / p.sum(-1, keepdim=True)
            if block_size is None:
                return out
            inside = seen & (place // block_size == place[:, None] // block_size)
            return (out + scaled_dot_product_attention(q, k, v, attn_mask=inside)) / 2

        return attend

    return build


def lln_variant(block_size: int | None = None, *, sample: bool = False, backend: Backend = "auto") -> Attention:
    """sample: with the statistics of each sample."""

    def build(case: Case, backend: Backend = backend) -> Attend:
        given: dict[str, Any] = {"block_size": block_size, "backend": backend}
        if sample:
            return LLNAttention(case.shape.heads, case.shape.dim, statistics="sample", dropout=case.dropout, **given)
        given |= {"alpha": ALPHA, "beta": BETA, "is_causal": case.causal, "dropout_p": case.dropout}
        return functools.partial(lln_attention, **given)

    # Forward reads q, k, v and writes out; backward reads q, k, v and grad out and writes three gradients. Blocks need
    # k and v beside the queries once more in each direction, which the cache can give.
    forward, training = 4, 11
    statistics = 2 if sample else 0  # one more look at q and k
    return Attention(
        build,
        reference=functools.partial(build, backend="eager") if sample else eq8(block_size),
        floor=(forward + statistics, training + statistics),
        causality=(False,) if sample else (False, True),
        devices=("cuda",) if backend == "eager" else ("cpu", "cuda"),  # on a CPU "auto" is the eager back end
    )


def evidence_variant(block_size: int | None = None, directions: str | int | None = None) -> Attention:
    """With the evidence read, for weights that were trained with softmax; a number of directions: random ones."""

    def build(case: Case, backend: Backend = "auto") -> Attend:
        given: dict[str, Any] = {"read": "evidence", "beta": BETA, "directions": directions, "block_size": block_size}
        if isinstance(directions, int):
            drawn = torch.randn(directions, case.shape.dim, generator=torch.Generator().manual_seed(0))
            given["directions"] = drawn.mul(case.shape.dim**-0.5).to(case.device)
        given |= {"is_causal": case.causal, "dropout_p": case.dropout, "backend": backend}
        return functools.partial(lln_attention, **given)

    # Elsewhere it runs in plain PyTorch, which takes seconds at the lengths that are measured by default.
    causality = (False,) if block_size is not None or isinstance(directions, int) else (False, True)
    return Attention(build, reference=functools.partial(build, backend="eager"), causality=causality, devices=("cuda",))


def mixed_variant(backend: Backend = "auto") -> Attention:
    """As `lln convert` has it: the evidence decides about the mix; causal with windows that overlap."""

    def build(case: Case, backend: Backend = backend) -> Attend:
        plain: Any = evidence_variant(BLOCK_SIZE, 4 * case.shape.dim).build(dataclasses.replace(case, causal=False))
        return functools.partial(plain, mix="evidence", overlap=case.causal, is_causal=case.causal, backend=backend)

    return Attention(build, reference=functools.partial(build, backend="eager"), devices=("cuda",))


def torch_backend(which: SDPBackend, *devices: str) -> Attention:
    return Attention(sdpa, softmax=True, devices=devices, context=lambda: sdpa_kernel(which))


def fla_linear(case: Case) -> Attend:
    linear = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    return lambda q, k, v: linear(q, k, v, normalize=False)[0]


def fla_gated(case: Case) -> Attend:
    gated = importlib.import_module("fla.ops.gla").chunk_gla
    batch, heads, length, dim = case.shape
    gates = logsigmoid(torch.randn(batch, length, heads, dim, dtype=case.dtype, device=case.device)) / 16
    return lambda q, k, v: gated(q, k, v, gates)[0]


def fla(build: Build) -> Attention:
    return Attention(build, causality=(True,), devices=("cuda",), peer="fla", drops=False, heads_first=False)


ATTENTIONS: dict[str, Attention] = {
    "flash": torch_backend(SDPBackend.FLASH_ATTENTION, "cpu", "cuda"),
    "cudnn": torch_backend(SDPBackend.CUDNN_ATTENTION, "cuda"),
    "efficient": torch_backend(SDPBackend.EFFICIENT_ATTENTION, "cuda"),
    "math": Attention(eager_softmax, softmax=True, matrix=True),
    "usual": Attention(usual_form, causality=(False,), drops=False),
    "LLN": lln_variant(),
    "LLN-sample": lln_variant(sample=True),
    "LLN-eager": lln_variant(backend="eager"),
    "LLN+Diag": lln_variant(BLOCK_SIZE),
    "LLN+Diag-sample": lln_variant(BLOCK_SIZE, sample=True),
    "LLN+Diag-eager": lln_variant(BLOCK_SIZE, backend="eager"),
    "evidence": evidence_variant(),
    "evidence-signed": evidence_variant(directions="signed"),
    "evidence+Diag": evidence_variant(BLOCK_SIZE),
    "evidence-directions": evidence_variant(directions=256),
    "evidence-directions+Diag": evidence_variant(BLOCK_SIZE, directions=256),
    "evidence-mix": mixed_variant(),
    "evidence-mix-eager": mixed_variant("eager"),
    "fla-linear": fla(fla_linear),
    "fla-gla": fla(fla_gated),
}
