"""`lln compare`: what it measures, and its cells. A cell that cannot be filled says why, in a word or two."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lln
from lln.instruments import dense_map, entropy, spectral_gap
from lln.lab.bench.attentions import Attend
from lln.lab.bench.calls import Inputs, describe_plan, is_out_of_memory, make_works
from lln.lab.core.errors import WrongOption
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.seeds import normal
from lln.lab.core.timing import peak_memory, time_calls
from lln.peers import attention_matrix, mechanisms
from lln.rules import suggest

Rows = list[dict[str, Any]]
Store = Callable[[dict[str, Any]], None]
CPU = torch.device("cpu")
DEFAULT = ("softmax", "lln", "lln_diag", "elu", "performer", "cosformer", "nystromformer", "linformer")
MATRIX_LENGTH = 512  # longest sequence whose P is formed
SLOWEST_MS = 20_000.0  # of one call; longer lengths of that mechanism are left out


@dataclasses.dataclass(frozen=True)
class ComparisonPlan:
    names: tuple[str, ...] = DEFAULT
    lengths: tuple[int, ...] = (512, 2048)
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0)
    batch: int = 1
    heads: int = 4
    dim: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in mechanisms()]
        if unknown:
            raise WrongOption(
                "--attentions",
                f"there is no mechanism {unknown[0]!r}; there are: {', '.join(mechanisms())}."
                f"{suggest(unknown[0], mechanisms())} Attention of your own goes with --plugin file.py:function.",
            )
        if not self.names or not self.lengths:
            raise WrongOption("--attentions", "at least one mechanism and one length are needed.")

    @property
    def matrix_length(self) -> int:
        return min(max(self.lengths), MATRIX_LENGTH)

    def steps(self) -> int:
        return len(self.names) * (len(self.lengths) + len(self.temperatures))

    def draw_inputs(self, length: int, sigma: float = 1.0) -> Inputs:
        """q and k of this spread, v and a gradient, [batch, heads, length, dim]: the same for every mechanism."""
        shape = self.batch * self.heads * length, self.dim
        q, k, v, g = (
            normal((self.seed, self.dim, length, 0, side), *shape, device=CPU)
            .view(self.batch, self.heads, length, self.dim)
            .mul(scale)
            .to(self.device, self.dtype)
            for side, scale in enumerate((sigma, sigma, 1.0, 1.0))
        )
        return q, k, v, g


def find_sigma(temperature: float) -> float:
    """sigma_q = sigma_k of Gaussian queries and keys at this temperature, eq. (5): tau = 1 / (sigma_q sigma_k)."""
    return 1.0 / math.sqrt(temperature)


def measure(plan: ComparisonPlan, *, store: Store = ignore, progress: Progress = ignore) -> dict[str, Any]:
    """The result, ready for JSON; `store` gets it after each mechanism."""
    result: dict[str, Any] = {
        "what": "time and peak extra memory of attention, its entropy and spectral gap, and its overlap with softmax",
        "settings": describe_plan(plan) | {"matrix_length": plan.matrix_length},
        "provenance": provenance(plan.seed, plan.device),
        "finished": False,
        "costs": [],
        "concentration": [],
    }
    for name in plan.names:
        result["costs"] += measure_costs(plan, name, progress)
        result["concentration"] += measure_concentrations(plan, name, progress)
        store(result)
    result["uniform"] = [measure_uniform(plan, temperature) for temperature in plan.temperatures]
    result["finished"] = True
    store(result)
    return result


def build(plan: ComparisonPlan, name: str, length: int) -> Attend:
    """The mechanism as a function of q, k, v; a module where it learns something. A mixer replaces the projections too:
    its hidden states are q with the heads side by side."""
    entry = mechanisms()[name]
    if entry.function is not None:
        return lambda q, k, v: lln.attention(name, q, k, v, is_causal=plan.causal)
    torch.manual_seed(plan.seed)
    module = lln.mechanism(
        name, num_heads=plan.heads, head_dim=plan.dim, max_length=length, device=plan.device, dtype=plan.dtype
    )
    if entry.kind != "mixer":
        return functools.partial(module, is_causal=plan.causal)

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden: Tensor = module(q.transpose(1, 2).flatten(2), is_causal=plan.causal)
        out: Tensor = hidden.unflatten(2, (plan.heads, plan.dim)).transpose(1, 2)
        return out

    return mix


def measure_costs(plan: ComparisonPlan, name: str, progress: Progress) -> Rows:
    """A row for each length. What cannot be measured has a note; longer than what took too long is not tried."""
    rows: Rows = []
    last = 0.0
    for length in sorted(plan.lengths):
        progress(f"{name}: {length}")
        row: dict[str, Any] = {"mechanism": name, "length": length, "forward_ms": None, "training_ms": None,
                               "training_bytes": None, "note": None}  # fmt: skip
        rows.append(row)
        if last > SLOWEST_MS:
            row["note"] = "too slow"
            continue
        try:
            row |= measure_cost(plan, name, length)
            last = row["training_ms"]["median"]
        except ValueError as error:
            row |= {"note": "unsupported", "reason": str(error)}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            row["note"] = "out of memory"
            last = float("inf")
    return rows


def measure_cost(plan: ComparisonPlan, name: str, length: int) -> dict[str, Any]:
    q, k, v, g = plan.draw_inputs(length)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g
    works = make_works(build(plan, name, length), inputs)
    times = time_calls(works, repeats=plan.repeats, device=plan.device)
    found = {f"{part}_ms": dataclasses.asdict(timing) for part, timing in times.items()}
    return found | {"training_bytes": peak_memory(works["training"], plan.device)}


def measure_concentrations(plan: ComparisonPlan, name: str, progress: Progress) -> Rows:
    """At each temperature, on Gaussian queries and keys."""
    rows: Rows = []
    for temperature in plan.temperatures:
        progress(f"{name}: temperature {temperature:g}")
        q, k, v, _ = plan.draw_inputs(plan.matrix_length, find_sigma(temperature))
        rows.append(
            {"mechanism": name, "temperature": temperature, **measure_concentration(name, q, k, v, plan.causal)}
        )
    return rows


def measure_concentration(
    name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None
) -> dict[str, Any]:
    """Entropy and gap of P where there is one, how much of it lies where softmax's does, and the distance of the output
    from softmax's over the norm of softmax's; in float64."""
    found: dict[str, Any] = {"entropy": None, "gap": None, "overlap": None, "error": None, "note": None}
    entry = mechanisms()[name]
    if entry.function is None:
        return found | {"note": "learned"}  # before training it says nothing about the mechanism
    q, k, v = q.double(), k.double(), v.double()
    try:
        out = lln.attention(name, q, k, v, is_causal=is_causal, scale=scale)
    except ValueError as error:
        return found | {"note": "unsupported", "reason": str(error)}
    exact = lln.attention("softmax", q, k, v, is_causal=is_causal, scale=scale)
    found["error"] = float((out - exact).norm() / exact.norm())
    if not entry.matrix:
        return found | {"note": "no matrix"}
    matrix, usual = (attention_matrix(one, q, k, is_causal=is_causal, scale=scale) for one in (name, "softmax"))
    try:
        p = dense_map(matrix)
    except ValueError:
        return found | {"note": "not stochastic"}  # negative entries, or rows that do not sum to 1: no entropy
    numbers = {"entropy": entropy(p).mean(), "gap": spectral_gap(p).mean(), "overlap": find_overlap(matrix, usual)}
    return found | {key: float(value) for key, value in numbers.items()}


def find_overlap(p: Tensor, q: Tensor) -> Tensor:
    """The share of their weight that two attention matrices put on the same tokens, mean over rows: 1 where they are
    equal, 0 where no row has a token in common.

    >>> find_overlap(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor(0.2500)
    """
    return torch.minimum(p, q).sum(-1).mean()


def measure_uniform(plan: ComparisonPlan, temperature: float) -> dict[str, float]:
    """How much attention that looks at all tokens alike overlaps with softmax's: what any mechanism has to beat."""
    q, k, _, _ = (t.double() for t in plan.draw_inputs(plan.matrix_length, find_sigma(temperature)))
    even, usual = (attention_matrix("softmax", t, k, is_causal=plan.causal) for t in (0 * q, q))
    return {"temperature": temperature, "overlap": float(find_overlap(even, usual))}


def measure_on_model(
    plan: ComparisonPlan, model: Any, tokenizer: Any, progress: Progress = ignore, texts: Sequence[str] | None = None
) -> Rows:
    """The same on the queries and keys of a pretrained model's layers, a text at a time; values are Gaussian. Layers
    that attend to another sequence or with a bias of single pairs are left out."""
    from lln.lab.inspect.inspection import TEXTS, encode, run

    rows: Rows = []
    for number, batch in enumerate(encode(model, tokenizer, list(texts or TEXTS), plan.matrix_length, 1)):
        seen = [one for _, one in run(model, batch) if not one.cross and one.bias is None]
        for name in plan.names:
            progress(f"{name}: text {number + 1}")
            for one in seen:
                generator = torch.Generator().manual_seed(plan.seed)
                shape = (*one.key.shape[:3], one.query.shape[3])
                v = torch.randn(shape, dtype=torch.float64, generator=generator).to(one.key.device)
                place = {"mechanism": name, "text": number, "layer": one.layer}
                rows.append(place | measure_concentration(name, one.query, one.key, v, one.is_causal, one.scale))
    return rows
