"""The whole training step as one CUDA graph: batch, forward, backward, clipping, AdamW.

A small model leaves a GPU waiting for Python, so here Python launches one thing a step. The stored examples lie on the
device, and the order and the masks are those of `Stream` and `Examples`, bit for bit; what is logged, saved, recorded
and evaluated is as always. Without a GPU the same loop runs step by step.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lln.hf.interface import collect_nothing
from lln.lab.core.errors import first_line
from lln.lab.data.examples import Stream
from lln.lab.train.config import Config, need
from lln.lab.train.loop import Loop
from lln.lab.train.models import skip_masks
from lln.lab.train.objective import Batch

FIRST = 3  # steps of a process that are launched one by one: libraries and the optimiser set themselves up in them
AHEAD = 256  # steps whose examples are named to the device at once


class Feed:
    """Batches of a stream, made on the device: `batch()` is tensors in, tensors out, and goes on by one each time."""

    def __init__(self, stream: Stream, size: int, device: torch.device) -> None:
        self.stream, self.size, self.device = stream, size, device
        self.stored = {name: t.to(device) for name, t in stream.examples.read(slice(None)).items()}
        self.places = torch.zeros(AHEAD, 2, size, dtype=torch.int64, device=device)  # of each step: indices, epochs
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.next: int | None = None  # step that the cursor stands at

    def seek(self, step: int) -> None:
        """Make ready for the batch of this step."""
        at = step % AHEAD
        if at == 0 or self.next != step:
            end = min((step - at + AHEAD) * self.size, len(self.stream))
            positions = np.arange((step - at) * self.size, end)
            pair = np.stack(self.stream.find_places(positions))  # [2, steps * size]
            steps = torch.from_numpy(pair.reshape(2, -1, self.size)).transpose(0, 1)
            self.places[: len(steps)].copy_(steps)
            self.cursor.fill_(at)
        self.next = step + 1

    def batch(self) -> dict[str, Tensor]:
        index, epoch = self.places.index_select(0, self.cursor)[0].unbind(0)
        self.cursor += 1
        rows = {name: stored.index_select(0, index) for name, stored in self.stored.items()}
        return self.stream.examples.finish(rows, index, epoch)


@functools.cache
def find_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all runs of a process: a library keeps workspaces for every stream that it has seen."""
    return torch.cuda.Stream(device)


class GraphLoop(Loop):
    """The loop of a run with `graph`, on one device."""

    graph: torch.cuda.CUDAGraph | None = None

    def open_batches(self) -> None:
        self.feed, self.first = Feed(self.stream, self.micro, self.device), self.step

    def train(self) -> None:
        if self.config.compile:
            torch.compiler.reset()  # of another run in this process nothing fits
        if self.device.type != "cuda":
            super().train()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
        # A graph is captured on a stream of its own, and what autograd keeps of earlier steps must be of that one too.
        side = find_stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().train()
        torch.cuda.current_stream().wait_stream(side)

    def take_step(self) -> None:
        self.feed.seek(self.step)
        watched = self.recording.is_due(self.step)  # a recorder sees nothing of a graph
        if watched or self.step < self.first + FIRST or self.device.type != "cuda":
            self.recording.open(self.step)
            with compile_layers(self.model, self.config.compile and not watched):
                self.learn([self.feed.batch()])
        else:
            self.graph = self.graph or self.capture()
            self.graph.replay()
        if (self.step + 1) % self.config.log_every == 0 and bool(self.bad):
            self.feed.next = None
            self.feed.seek(self.step)
            self.refuse_loss(self.feed.batch())

    def check_loss(self, batch: Batch) -> None:
        """After the step, which cannot be left in the middle."""

    def run_model(self, **inputs: Tensor) -> Any:
        with skip_masks() if "attention_mask" not in inputs else contextlib.nullcontext():
            return super().run_model(**inputs)

    def capture(self) -> torch.cuda.CUDAGraph:
        """The step, recorded and not yet run."""
        graph = torch.cuda.CUDAGraph()
        self.mark_capturable(self.optimizer.param_groups, True)
        try:
            with (
                compile_layers(self.model, self.config.compile),
                torch.cuda.graph(graph, stream=torch.cuda.current_stream()),
            ):
                self.learn([self.feed.batch()])
        except RuntimeError as error:
            reason = first_line(error)
            raise ValueError(
                f"graph: this step cannot be captured in a CUDA graph ({reason}); use graph=no."
            ) from error
        finally:
            self.mark_capturable(self.optimizer.param_groups, False)
        return graph

    def mark_capturable(self, groups: list[dict[str, Any]], on: bool) -> None:
        """Fused AdamW can be captured as it is, and asks for the mark; where it is set and a step is not captured,
        torch warns."""
        for group in groups:
            group["capturable"] = on

    def load_moments(self, state: dict[str, Any]) -> None:
        self.mark_capturable(state["param_groups"], False)  # earlier versions left it
        super().load_moments(state)


@contextlib.contextmanager
def compile_layers(model: nn.Module, on: bool) -> Iterator[None]:
    """With `on`, the layers as torch.compile makes them, each by itself: they are alike, so one is compiled. Only for
    the steps that a graph holds: a recorder sees nothing of compiled layers, and evaluations have other shapes."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    for layer in layers:
        layer.compile()
    try:
        with warnings.catch_warnings(), collect_nothing(model) if on else contextlib.nullcontext():
            # torch.compile looks at gradients of what passes between layers, and torch warns of that.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def check_graph(config: Config, processes: int) -> None:
    """ValueError, in one sentence, for what a graph cannot hold."""
    host_seeds = config.model.attention_dropout > 0 and config.attention.name not in ("softmax", "lln", "lln_diag")
    half = config.precision == "float16"
    need(
        (processes == 1, "graph needs one process only: gradients of several are exchanged outside of the graph."),
        (config.optimisation.accumulation == 1, "graph needs optimisation.accumulation=1: one graph is one pass."),
        (not half, "graph needs no float16: its loss scale is decided on the host; use bfloat16."),
        (not config.checkpointing, "graph needs checkpointing=no: it saves and restores random numbers on the host."),
        (
            not host_seeds,
            "graph needs model.attention_dropout=0 with this attention: its dropout takes a seed from the host.",
        ),
    )
