"""The whole training step as one CUDA graph: batch, forward, backward, clipping, AdamW.

A small model leaves a GPU waiting for Python, so here Python launches one thing a step. The stored examples lie on the
device, and the order and the masks are those of `Stream` and `Examples`, bit for bit; what is logged, saved, recorded
and evaluated goes through the Trainer as always. Without a GPU the same loop runs step by step.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lln.hf.distillation import NotFinite
from lln.hf.interface import nothing_collected
from lln.lab.core.errors import first_line
from lln.lab.data.examples import IGNORE, Stream
from lln.lab.train.config import Config
from lln.lab.train.loop import RunTrainer, first_not_finite
from lln.lab.train.models import unmasked

FIRST = 3  # steps of a process that are launched one by one: libraries and the optimiser set themselves up in them
AHEAD = 256  # steps whose examples are named to the device at once


class Feed:
    """Batches of a stream, made on the device: `batch()` is tensors in, tensors out, and goes on by one each time."""

    def __init__(self, stream: Stream, size: int, device: torch.device) -> None:
        self.stream, self.size, self.device = stream, size, device
        self.stored = {name: t.to(device) for name, t in stream.examples.raw(slice(None)).items()}
        self.places = torch.zeros(AHEAD, 2, size, dtype=torch.int64, device=device)  # of each step: indices, epochs
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.next: int | None = None  # step that the cursor stands at

    def seek(self, step: int) -> None:
        """Make ready for the batch of this step."""
        at = step % AHEAD
        if at == 0 or self.next != step:
            end = min((step - at + AHEAD) * self.size, len(self.stream))
            positions = np.arange((step - at) * self.size, end)
            pair = np.stack(self.stream.places(positions))  # [2, steps * size]
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
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all runs of a process: a library keeps workspaces for every stream that it has seen."""
    return torch.cuda.Stream(device)


class GraphTrainer(RunTrainer):
    """The Trainer of a run with `graph`, on one device."""

    record_every = 0
    compiles = False  # the layers, within the graph
    control: Any

    def _run_epoch(self, model: nn.Module, **about: Any) -> None:
        """All steps: a stream is one epoch to the Trainer."""
        self.feed = Feed(self.train_dataset, self.args.per_device_train_batch_size, self.args.device)
        self.norm = torch.zeros((), device=self.args.device)
        self.not_finite = torch.zeros((), dtype=torch.bool, device=self.args.device)
        self.accelerator.gradient_state._set_sync_gradients(True)
        if about["resume_from_checkpoint"] is not None:
            self._load_rng_state(about["resume_from_checkpoint"])
        if self.compiles:
            torch.compiler.reset()  # of another run in this process nothing fits
        if self.args.device.type != "cuda":
            self.run_steps(model, about["start_time"])
            return
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=self.args.device)
        # A graph is captured on a stream of its own, and what autograd keeps of earlier steps must be of that one too.
        side = stream_of(self.args.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run_steps(model, about["start_time"])
        torch.cuda.current_stream().wait_stream(side)

    def run_steps(self, model: nn.Module, start_time: float) -> None:
        graph: torch.cuda.CUDAGraph | None = None
        first = self.state.global_step
        while self.state.global_step < self.state.max_steps:
            step = self.state.global_step
            self.feed.seek(step)
            watched = self.record_every and step % self.record_every == 0  # a recorder sees nothing of a graph
            if watched or step < first + FIRST or self.args.device.type != "cuda":
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                with fused(model, self.compiles and not watched):
                    self.step(model, watched=True)
            else:
                graph = graph or self.captured(model)
                graph.replay()
            rate = self._get_learning_rate() if (step + 1) % self.args.logging_steps == 0 else None
            self.lr_scheduler.step()
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / self.state.max_steps
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            if self.control.should_log and bool(self.not_finite):
                self.feed.next = None
                self.feed.seek(step)
                raise NotFinite(first_not_finite(self.model, self.feed.batch(), step + 1))
            self._maybe_log_save_evaluate(
                self._tr_loss, self.norm, model, None, 0.0, None, start_time, learning_rate=rate
            )

    def step(self, model: nn.Module, watched: bool = False) -> None:
        """watched: callbacks may look at the gradients."""
        model.train()  # an evaluation may lie before
        inputs = self.feed.batch()
        count = (inputs["labels"] != IGNORE).sum() if self.compute_loss_func is not None else None
        with unmasked() if "attention_mask" not in inputs else contextlib.nullcontext():
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        self.accelerator.backward(loss)
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")
        self.norm.copy_(nn.utils.clip_grad_norm_(model.parameters(), limit))
        if watched:
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        model.zero_grad()
        self._tr_loss += loss.detach()
        self.not_finite |= ~loss.detach().isfinite()

    def captured(self, model: nn.Module) -> torch.cuda.CUDAGraph:
        """The step, recorded and not yet run."""
        graph = torch.cuda.CUDAGraph()
        # Fused AdamW can be captured as it is; torch warns where the mark is set and a step is not captured.
        groups = self.optimizer.param_groups
        for group in groups:
            group["capturable"] = True
        try:
            with fused(model, self.compiles), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self.step(model)
        except RuntimeError as error:
            reason = first_line(error)
            raise ValueError(
                f"graph: this step cannot be captured in a CUDA graph ({reason}); use graph=no."
            ) from error
        return graph

    def _get_learning_rate(self) -> float:
        """As computed, whatever the dtype of the optimiser's own copy."""
        schedule = self.lr_scheduler
        return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](schedule.last_epoch))


@contextlib.contextmanager
def fused(model: nn.Module, on: bool) -> Iterator[None]:
    """With `on`, the layers as torch.compile makes them, each by itself: they are alike, so one is compiled. Only for
    the steps that a graph holds: a recorder sees nothing of compiled layers, and evaluations have other shapes."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    for layer in layers:
        layer.compile()
    try:
        with warnings.catch_warnings(), nothing_collected(model) if on else contextlib.nullcontext():
            # torch.compile looks at gradients of what passes between layers, and torch warns of that.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def check_graph(config: Config, processes: int) -> None:
    """ValueError, in one sentence, for what a graph cannot hold."""
    for wrong, what in (
        (processes > 1, "one process only: gradients of several are exchanged outside of the graph"),
        (config.optimisation.accumulation > 1, "optimisation.accumulation=1: one graph is one pass"),
        (config.precision == "float16", "no float16: its loss scale is decided on the host; use bfloat16"),
        (config.checkpointing, "checkpointing=no: it saves and restores random numbers on the host"),
        (
            config.model.attention_dropout > 0 and config.attention.name not in ("softmax", "lln", "lln_diag"),
            "model.attention_dropout=0 with this attention: its dropout takes a seed from the host",
        ),
    ):
        if wrong:
            raise ValueError(f"graph needs {what}.")
