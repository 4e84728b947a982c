"""Teach LLN attention what softmax attention gives, layer by layer, and then the model as a whole.

`distill`: the model runs with softmax attention, and in each layer LLN attention is asked for the same output on the
same queries, keys and values. The inputs of a layer are always those of the softmax model, so that layers learn
independently of each other, all in the same pass, and nothing but LLN's own parameters changes: alpha and beta, the
mix, the feature map. The loss of a layer is the squared error of a head's output over its squared size, a mean over
heads: a head whose values are small is worth as much as any other, and the number reads the same in every layer.

`fine_tune`: what is left adds up over the layers. All weights of the body are then trained so that the last hidden
states are those of the softmax model: relative squared error over all tokens. Hidden states and not logits, because
every head stands on them, and they are there where a model has no head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.hf.attach import ModelAttention
from lln.hf.find import Model, find_model
from lln.hf.layers import check_runs, find_running
from lln.hf.options import IMPLEMENTATIONS
from lln.hf.watch import SoftmaxCall, check_batches, check_pattern, find_rows, move_batch, show_softmax, switch_to_eval
from lln.values import check_count, derive_seed

Batch = Mapping[str, Any]
Progress = Callable[[int, float], None]  # steps done, loss
RATE = 0.03
FINE_RATE, FINE_LLN_RATE = 1e-4, 1e-3
LAST = "last_hidden_state"
WARMUP = 10  # steps over which the rate rises; then it falls in a straight line to 0


class NotFinite(ArithmeticError):
    """A loss is NaN or infinite."""


class Learner:
    """Adam on named parameters, each with a rate of its own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Mapping[str, float], steps: int) -> None:
        self.parameters, self.steps, self.done = dict(parameters), check_count("steps", steps), 0
        # One group a rate: on a GPU a step of Adam takes as many launches as there are groups.
        alike: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            alike.setdefault(rates[name], []).append(parameter)
        self.rates = list(alike)
        groups = [{"params": members, "lr": rate} for rate, members in alike.items()]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
        self.adam.zero_grad()

    def step(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NotFinite(f"The loss is {loss} at step {self.done + 1}; a lower rate may help.")
        factor = min(1.0, (self.done + 1) / WARMUP) * (1.0 - self.done / self.steps)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        self.adam.step()
        self.adam.zero_grad()
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        """The parameters and what Adam knows about them, by names."""
        found = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            found |= {f"{name}/{moment}": value for moment, value in self.adam.state[parameter].items()}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Go on from a state after so many steps."""
        for key, value in state.items():
            name, _, moment = key.partition("/")
            parameter = self.parameters[name]
            if moment:
                held = value.clone() if moment == "step" else value.to(parameter, copy=True)
                self.adam.state[parameter][moment] = held
            else:
                parameter.copy_(value)
        self.done = done

    def learn(self, batches: Sequence[Batch], seed: int, teach: Callable[[Batch], float], progress: Progress) -> None:
        """Take the steps that are left. teach: leaves the gradients of a batch, and returns its loss."""
        check_batches(batches)
        while self.done < self.steps:
            loss = teach(choose(batches, self.done, seed))
            self.step(loss)
            progress(self.done, loss)


def choose(batches: Sequence[Any], step: int, seed: int) -> Any:
    """The batch of a step: all of them once, in an order of its own, before any comes again."""
    epoch, at = divmod(step, len(batches))
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return batches[int(torch.randperm(len(batches), generator=generator)[at])]


def relative_error(student: Tensor, teacher: Tensor, rows: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """Squared error over the squared size of what is wanted, both summed over `dims`; a mean over the rest. Rows that
    are padding, False in `rows` [B, N], do not count. Both [B, N, ...]."""
    error, size = (student - teacher).square(), teacher.square()
    if rows is not None:
        shape = [*rows.shape, *[1] * (teacher.ndim - 2)]
        error, size = (torch.where(rows.view(shape), t, 0.0) for t in (error, size))
    return (error.sum(dims) / size.sum(dims).clamp_min(torch.finfo(size.dtype).tiny)).mean()


def distillation(model: PreTrainedModel, steps: int, rate: float = RATE) -> Learner:
    """The learner of `distill`, before its first step."""
    mine = {id(p) for attention in find_running(model).values() for p in attention.parameters()}
    held = {name: p for name, p in model.named_parameters() if id(p) in mine}
    if not held:
        raise ValueError(
            "distill: the model's attention has nothing to learn; first call lln.hf.convert(model, ..., "
            "read='evidence', directions=..., mix='scales'), or learnable='channel', which makes alpha and beta "
            "parameters, or feature_map='linear'."
        )
    return Learner(held, dict.fromkeys(held, rate), steps)


def distill(
    model: Model,
    batches: Sequence[Batch],
    *,
    steps: int = 300,
    rate: float = RATE,
    seed: int = 0,
    learner: Learner | None = None,
    progress: Progress = lambda done, loss: None,
) -> Model:
    """Train the learnable values of a converted model's attention, so that each layer gives the outputs of its softmax
    attention on the same inputs.

    Args:
        model: a model that runs "lln" or "lln_diag" with learnable alpha and beta, learned directions of the evidence
            read, a learned mix or a feature map; or another mechanism that learns something ("hedgehog").
        batches: inputs of the model, each a dict of arguments; padding does not count. Use sequences as long as those
            that the model is meant for, because the share of keys outside a block depends on the length.
        steps: the number of training steps, each with one batch. Default 300.
        rate: the highest learning rate of Adam. Default 0.03.
        seed: seed of the order of the batches.
        learner: the learner of `distillation(model, steps)`, to continue after the steps that it has done.
        progress: a function that is called after every step with the number of steps done and the loss, a mean over
            layers.

    Returns:
        The model. Only the parameters in its attention's `.lln` have changed.

    Raises:
        ValueError or TypeError: the message names the argument.
        NotFinite: the loss is NaN or infinite.

    Example:
        >>> import torch, transformers, lln.hf
        >>> _ = torch.manual_seed(0)
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.BertModel(transformers.BertConfig(**shape, initializer_range=1.0))
        >>> batches = [{"input_ids": torch.randint(9, (2, 12))} for _ in range(3)]
        >>> model = lln.hf.convert(model, "lln", matching="data", batches=batches, learnable="channel")
        >>> losses = []
        >>> _ = lln.hf.distill(model, batches, steps=12, progress=lambda done, loss: losses.append(loss))
        >>> losses[-1] < losses[0]
        True
    """
    body = find_model(model)
    check_runs("distill", body, IMPLEMENTATIONS)
    running = find_running(body)
    learner = distillation(body, steps, rate) if learner is None else learner
    losses: list[Tensor] = []

    def look(call: SoftmaxCall) -> None:
        """Ask the LLN attention of a module for what softmax gave, and leave its gradients."""
        check_pattern(call)
        with torch.enable_grad():
            attention = running[call.layer]
            more = {} if isinstance(attention, ModelAttention) else {"cu_seqlens": None, "dropout": 0.0}
            out = attention(call.query, call.key, call.value, **call.where, **more)
            loss = relative_error(out.transpose(1, 2), call.out, call.where["query_mask"], (0, 1, 3))
            loss.backward()
        losses.append(loss.detach())

    with show_softmax(body, look) as run:

        def teach(batch: Batch) -> float:
            losses.clear()
            run(batch)
            return sum(loss.item() for loss in losses) / len(losses)  # a device is waited for once a step

        learner.learn(batches, seed, teach, progress)
    return model


def fine_tuning(model: PreTrainedModel, steps: int, rate: float = FINE_RATE) -> Learner:
    """The learner of `fine_tune`, before its first step."""
    held = {name: p for name, p in model.base_model.named_parameters() if p.requires_grad and p.is_floating_point()}
    factor = rate / FINE_RATE
    rates = {name: factor * (FINE_LLN_RATE if ".lln." in name else FINE_RATE) for name in held}
    return Learner(held, rates, steps)


def find_hidden(output: Any, model: str) -> dict[str, Tensor]:
    """What a model is to keep of its output, by names: its last hidden states; those of each part where it has several
    (CLIP); what it gives otherwise, as logits, where it says nothing of hidden states. model: its class."""
    named = list(output.items()) if isinstance(output, Mapping) else []
    own = {name: one for name, one in named if name == LAST}
    inner = {f"{name}.{LAST}": one[LAST] for name, one in named if isinstance(one, Mapping) and LAST in one}
    given = {name: one for name, one in named if isinstance(one, Tensor) and one.is_floating_point() and one.ndim > 1}
    if not (found := own or inner or given):
        raise ValueError(
            f"model: {model} gives neither hidden states nor anything else that could be compared; give "
            "lln.hf.fine_tune the part of it that does."
        )
    return found


def choose_rows(rows: Tensor | None, name: str, hidden: Tensor) -> Tensor | None:
    """The rows of text that are no padding, where these are hidden states of text."""
    text = not any(word in name for word in ("vision", "image", "audio"))
    return rows if text and rows is not None and rows.shape == hidden.shape[:2] else None


def fine_tune(
    model: Model,
    teacher: nn.Module,
    batches: Sequence[Batch],
    *,
    steps: int = 100,
    rate: float = FINE_RATE,
    seed: int = 0,
    learner: Learner | None = None,
    progress: Progress = lambda done, loss: None,
) -> Model:
    """Train all weights of a converted model, so that its last hidden states become those of its softmax teacher.

    A model with several parts (CLIP) learns the hidden states of each part. A model that gives no hidden states learns
    its logits, or its other outputs.

    Args:
        model: the converted model, trained in place and without dropout, whatever mode it is in.
        teacher: the softmax model that it was made from, which must be another object.
        batches, steps, seed, progress: as in `distill`; the default of steps is 100.
        learner: the learner of `fine_tuning(model, steps)`, to continue after the steps that it has done.
        rate: the highest learning rate of Adam for the weights, default 0.0001; LLN's own parameters learn at ten times
            this rate.

    Returns:
        The model.

    Raises:
        ValueError, TypeError or NotFinite, as `distill`.

    Example:
        >>> import copy, torch, transformers, lln.hf
        >>> _ = torch.manual_seed(0)
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> softmax = transformers.BertModel(transformers.BertConfig(**shape, initializer_range=1.0))
        >>> model = lln.hf.convert(copy.deepcopy(softmax), "lln")
        >>> losses, batches = [], [{"input_ids": torch.randint(9, (2, 12))}]
        >>> _ = lln.hf.fine_tune(model, softmax, batches, steps=12, progress=lambda done, loss: losses.append(loss))
        >>> losses[-1] < losses[0]
        True
    """
    if model is teacher or any(a is b for a, b in zip(model.parameters(), teacher.parameters(), strict=False)):
        raise ValueError("teacher must be another model than the one that learns, with weights of its own.")
    student, master = find_model(model), find_model(teacher)
    learner = fine_tuning(student, steps, rate) if learner is None else learner

    def teach(batch: Batch) -> float:
        batch = move_batch(batch, student)
        with torch.no_grad():
            wanted = find_hidden(master.base_model(**batch), type(master).__name__)
        found = find_hidden(student.base_model(**batch), type(student).__name__)
        rows = find_rows(student, batch)
        errors = [
            relative_error(found[name], one, choose_rows(rows, name, one), tuple(range(one.ndim)))
            for name, one in wanted.items()
        ]
        loss = torch.stack(errors).mean()
        loss.backward()
        return loss.item()

    with switch_to_eval(student), switch_to_eval(master):
        learner.learn(batches, seed, teach, progress)
    return model
