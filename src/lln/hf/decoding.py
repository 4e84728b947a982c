"""Decoding: one token through an attention module that has an LLNCache, as one kernel that writes over the state.

All that stays the same from token to token (memory, options, refusals) is settled once a state, in a `Stepper`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.hf.attach import ModelAttention
from lln.hf.cache import StateLayer
from lln.hf.find import is_same_scale
from lln.kernels.common import constant, raw_stream
from lln.kernels.triton.plan import use_device
from lln.kernels.triton.support import has_kernels
from lln.matching.moments import score_factor

MOST_TAPES = 16  # of one state: by the layouts in which tokens come


def find_stepper(attention: ModelAttention, layer: StateLayer, query: Tensor, scaling: float | None) -> Stepper | None:
    """None where a step is more than the kernel does, or the kernels do not run."""
    held = None if torch.compiler.is_compiling() else layer.stepper
    if held is not None and held.state is layer.state and held.settings is attention.settings:
        return held if held.scaling == scaling else None
    if torch.compiler.is_compiling() and layer.ticket is None:
        return None
    held = Stepper.make(attention, layer, query, scaling)
    if not torch.compiler.is_compiling():
        layer.stepper = held
    return held


class Stepper:
    """Steps of one module after one state."""

    def __reduce__(self) -> Any:
        """A copy of a cache has other memory, and makes its own."""
        return type(None), ()

    @classmethod
    def make(cls, attention: ModelAttention, layer: StateLayer, query: Tensor, scaling: float | None) -> Stepper | None:
        state, scale = layer.state, attention.scale
        usual = query.shape[-1] ** -0.5 if scale is None else scale
        if state is None or attention.cross or attention.statistics not in ("running", "fixed"):
            return None
        if attention.statistics == "running" and attention.matching != "paper":
            return None
        if scaling is not None and not is_same_scale(scaling, usual):
            return None
        if attention.backend == "eager" or not (query.is_cuda or attention.backend == "triton"):
            return None
        if state.mean_value.dtype != torch.float32 or state.mean_value.device != query.device or not has_kernels(query):
            return None
        from lln.kernels.triton import step  # on demand: `import lln.hf` does without triton

        if not step.can_step(query, state.mean_value, state.block_size):
            return None
        return cls(attention, layer, query, usual, scaling)

    def __init__(
        self, attention: ModelAttention, layer: StateLayer, query: Tensor, scale: float, scaling: float | None
    ) -> None:
        from lln.kernels.triton import step

        assert layer.state is not None
        self.scaling, self.scale = scaling, float(scale)
        if not torch.compiler.is_compiling():
            self.settings = attention.settings
            layer.state = layer.state._map(Tensor.contiguous)
            if layer.ticket is None or len(layer.ticket) != len(layer.state.log_sum):
                layer.ticket = layer.state.log_sum.new_zeros(len(layer.state.log_sum), dtype=torch.int32)
        self.state = state = layer.state
        assert layer.ticket is not None
        self.ticket = layer.ticket
        self.length = layer.length if isinstance(layer.length, Tensor) else None
        self.held: Any = (
            state.log_sum, state.mean_value, state.count, state.block_key, state.block_value, state.block_mask
        )  # fmt: skip
        self.kind, self.factor = step.GIVEN, 1.0
        numbers: tuple[Tensor, ...] = ()
        if attention.statistics == "running":
            self.kind, self.factor = step.VARIANCE, score_factor(attention.scale, attention.head_dim)
        elif attention.numbers:
            device = query.device
            numbers = tuple(constant(attention.numbers[n], torch.float32, device) for n in ("alpha", "beta"))
        elif attention.learns:
            self.kind = step.LOGARITHM
        self.numbers = numbers
        self.weights: tuple[Tensor | None, Tensor | None] = None, None
        if attention.block_size is not None:
            mix = float(attention.mix)
            self.weights = constant(mix, torch.float32, query.device), constant(1.0 - mix, torch.float32, query.device)
        self.tapes: dict[Any, Any] = {}
        if not torch.compiler.is_compiling():
            self.between = [0 if t is None else t.data_ptr() for t in self.weights]
            self.after = [0 if t is None else t.data_ptr() for t in (*self.held, self.ticket, self.length)]

    def take(self, attention: ModelAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """out [B, H, 1, E]; the state has one more token."""
        alpha, beta = self.numbers or attention.sources
        if alpha.ndim == 2:  # what is learned
            alpha, beta = alpha.unsqueeze(0), beta.unsqueeze(0)
        if not torch.compiler.is_compiling():
            rows = query, key, value, alpha, beta
            kinds: list[Any] = [raw_stream(query.device) if query.is_cuda else 0, mask is None]
            for t in rows:
                kinds += (t.shape, t.stride(), t.dtype, t.data_ptr() & 15)
            found = self.tapes.get(where := tuple(kinds))
            if found is not None:
                bases = [t.data_ptr() for t in rows]
                bases += self.between
                bases.append(0 if mask is None else mask.data_ptr())
                with use_device(query.device):
                    played: Tensor = found.play(bases + self.after)[0]
                return played
        from lln.kernels.triton import step, tape

        given = step.Step(query, key, value, alpha, beta, *self.weights, mask, *self.held)
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.lln.step_in_place(
                *given, self.ticket, self.length, self.scale, self.kind, self.factor
            )
            return made
        out = step.take_step_in_place(given, self.ticket, self.length, self.scale, self.kind, self.factor)
        recorded = tape.TAPES.get(step.make_in_place_key(given, self.length, self.scale, self.kind, self.factor))
        if recorded is not None and len(self.tapes) < MOST_TAPES:
            self.tapes[where] = recorded
        return out
