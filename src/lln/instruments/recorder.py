"""Instruments on models: what every attention layer does while the model runs, or trains."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lln.instruments.observation import MEASURED, Observation, measure
from lln.instruments.torch_calls import calls_torch_function, watch_torch_function
from lln.instruments.watchers import Look, Remove, replace_forward, watch_linear, watch_lln, watch_multihead
from lln.nn.statistics import is_in_backward
from lln.values import check_count

if TYPE_CHECKING:
    import pandas

WORDS = ("step", "layer", "call", "head", "attention")
NUMBERS = (
    "sigma_q", "sigma_k", "temperature", "entropy", "max_entropy", "spectral_gap", "log_variance", "lognormality",
    "alpha", "beta",
)  # fmt: skip


def record(
    model: nn.Module,
    *,
    every: int = 1,
    samples: int | None = 1,
    keep: bool = False,
    instruments: tuple[str, ...] | list[str] = MEASURED,
) -> Recorder:
    """Measure every attention layer of a model while it runs or trains:

        with lln.instruments.record(model) as rec:
            model(**inputs)
        rec.table()                      # pandas, a row for each step, layer and head; rec.rows() as plain dicts

    The outputs of the model stay the same to the last bit, and nothing is left in the model afterwards. A recomputation
    inside backward (activation checkpointing) is not measured again. It measures lln.LLNAttention (also in
    lln.MultiheadAttention and in models of lln.hf), torch.nn.MultiheadAttention, the attention of models of
    transformers, timm and diffusers, and modules with linear layers named like query, key and value whose softmax
    attention can be verified from outside.

    Args:
        model: the module that is called, without torch.compile. Each call of it is a step, in training or not.
        every: record the first step, and then one step in this many. Default 1.
        samples: the number of samples of each batch that are measured, from the first on (default 1); None: all. The
            results are means over them.
        keep: also keep the observed queries and keys in `rec.observations`. Default False.
        instruments: what to measure, default all: some of sigma_q, sigma_k (standard deviations of the elements of
            queries and keys), temperature, entropy (bits; with max_entropy, that of rows which spread evenly),
            spectral_gap, log_variance (of log P) and lognormality (Kolmogorov-Smirnov distance of log P from a
            Gaussian).

    Returns:
        A Recorder, to be used as a context manager.

    Raises:
        ValueError or TypeError: the message names the argument; on entering, ValueError for a model in which nothing
            can be observed; in a recorded step, ValueError for a layer that attends in a way that the instruments do
            not know.

    Example:
        >>> attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.zeros(1, 8, 16)
        >>> with record(attention, instruments=["entropy"]) as rec:
        ...     _ = attention(x, x, x)
        >>> [(row["head"], round(row["entropy"], 6)) for row in rec.rows()]
        [(0, 3.0), (1, 3.0)]
    """
    return Recorder(model, every, samples, keep, instruments)


class Recorder:
    """The context manager that `record` returns, which holds the measurements. It may be entered again, and then
    continues to count steps.

    Attributes:
        step: the number of the next step; set it to number steps otherwise.
        observations: with keep, a list of (step, call, Observation).

    Example:
        >>> attention, x = nn.MultiheadAttention(16, 2), torch.randn(8, 1, 16)
        >>> rec = record(attention, every=2, keep=True, instruments=[])
        >>> with rec:
        ...     for _ in range(3):
        ...         _ = attention(x, x, x)
        >>> rec.step, [step for step, _, _ in rec.observations]
        (3, [0, 2])
    """

    def __init__(self, model: nn.Module, every: int, samples: int | None, keep: bool, instruments: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
        check_count("every", every)
        if samples is not None:
            check_count("samples", samples)
        unknown = [name for name in instruments if name not in MEASURED]
        if isinstance(instruments, str) or unknown:
            came = instruments if isinstance(instruments, str) else unknown[0]
            raise ValueError(f"instruments must be some of {', '.join(MEASURED)}; got {came!r}.")
        self.model, self.every, self.samples, self.keep = model, every, samples, keep
        self.instruments = tuple(instruments)
        self.step = 0
        self.observations: list[tuple[int, int, Observation]] = []
        self._rows: list[dict[str, Any]] = []
        self._calls: dict[str, int] = {}  # of the layers in this step
        self._looking = False
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Recorder:
        if self._stack is not None:
            raise RuntimeError(
                "record: this recorder is already active; leave its with block first, or make another recorder."
            )
        with contextlib.ExitStack() as stack:
            for remove in self._watch():
                stack.callback(remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *problem: Any) -> None:
        stack, self._stack, self._looking = self._stack, None, False
        if stack is not None:
            stack.close()

    def _watch(self) -> list[Remove]:
        if any(map(is_compiled, self.model.modules())):
            raise ValueError(
                "record: a compiled model cannot be observed; give the model that torch.compile was called on."
            )
        look = Look(self._is_active, self._see, self.samples)
        removes = [*watch_lln(self.model, look), *watch_multihead(self.model, look)]
        skip: set[nn.Module] = {m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)}
        if is_of_transformers(self.model):
            from lln.instruments.transformers_calls import is_watched, watch_transformers

            removes += watch_transformers(self.model, look)
            skip |= set(filter(is_watched, self.model.modules()))
        removes += watch_torch_function(self.model, look)
        skip |= set(filter(calls_torch_function, self.model.modules()))
        removes += watch_linear(self.model, look, skip)
        if not removes:
            raise ValueError(
                f"record: no attention of {type(self.model).__name__} can be observed; known are lln's modules, "
                "torch.nn.MultiheadAttention, models that use transformers' attention interface, attention of timm and "
                "diffusers, and modules with linear layers named like query, key and value and a number of heads."
            )
        if isinstance(self.model, nn.TransformerEncoderLayer):  # see replace_forward
            removes.append(replace_forward(self.model, self._run_between))
        else:  # before and after what is watched, which may be the model itself
            removes.append(self.model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True).remove)
            removes.append(self.model.register_forward_hook(lambda *_: self._end(), always_call=True).remove)
        return removes

    def _run_between(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        try:
            return original(*args, **kwargs)
        finally:
            self._end()

    def _begin(self) -> None:
        if is_in_backward() or torch.compiler.is_compiling():
            return
        self._looking = self.step % self.every == 0
        self._calls.clear()
        self.step += 1

    def _end(self) -> None:
        if not is_in_backward():
            self._looking = False

    def _is_active(self) -> bool:
        return self._looking and not torch.compiler.is_compiling() and not is_in_backward()

    def _see(self, seen: Observation) -> None:
        layer = seen.layer or type(self.model).__name__
        step, call = self.step - 1, self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        if self.keep:
            self.observations.append((step, call, seen))
        if not self.instruments and seen.alpha is None:
            return
        # Means over samples; those without a number (nothing but padding) are left out.
        means = {name: values.nanmean(0).tolist() for name, values in measure(seen, self.instruments).items()}
        found = {name: [None if mean != mean else mean for mean in values] for name, values in means.items()}
        for head in range(seen.query.shape[1]):
            row = {"step": step, "layer": layer, "call": call, "head": head, "attention": seen.attention}
            numbers = {name: found[name][head] if name in found else None for name in NUMBERS}
            self._rows.append(row | numbers)

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each step, layer, call (of a layer that is used several times a step) and head; None: nothing to
        measure. alpha and beta are means over channels where each has its own."""
        return list(self._rows)

    def table(self) -> pandas.DataFrame:
        """The rows as a pandas table; NaN where there is nothing to measure. Needs pandas, the extra `instruments`."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "table() needs pandas; install it with: pip install 'lln-attention[instruments]'. rows() needs nothing."
            ) from None
        table = pandas.DataFrame(self._rows, columns=[*WORDS, *NUMBERS])
        return table.astype(dict.fromkeys(NUMBERS, "float64"))

    def clear(self) -> None:
        """Forget what was recorded, but not the number of the next step."""
        self._rows.clear()
        self.observations.clear()


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module) or module.compile(). Without importing the compiler, which takes seconds."""
    compiler = sys.modules.get("torch._dynamo")
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def is_of_transformers(model: nn.Module) -> bool:
    """Without importing transformers: a model of it has done so."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in model.modules())
