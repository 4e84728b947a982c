"""The training loop: batches in a seeded order, autocast, DistributedDataParallel, AdamW, and a run's folder, in which
what is measured goes to metrics.jsonl and what is saved is sealed. A run that was stopped goes on as if it had not
been, to the last bit.

`Loop` runs the passes one by one. `graph.GraphLoop` launches a step as one CUDA graph, `shard.ShardedLoop` spreads the
weights over the processes; each changes the few methods that differ.
"""

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import safe_globals

from lln.files import explain_writing
from lln.hf.distillation import NotFinite
from lln.lab.data.examples import Stream
from lln.lab.train.config import Config, Optimisation
from lln.lab.train.objective import Batch
from lln.lab.train.recording import Recording, average_layers, make_whole
from lln.lab.train.run_folder import CHECKPOINT, Run, read_step, seal
from lln.lab.train.tasks import TaskData

# Gains, shares and offsets of LLN attention; its maps and convolutions decay as other weights do, to the identity.
UNDECAYED = ("log_alpha", "log_beta", "mix_logit", "lln_scale", "block_scale", "key_offset")
WEIGHTS, MOMENTS, SCALE = "model.safetensors", "optimizer.pt", "scaler.pt"  # files of a checkpoint
KEPT = 2  # checkpoints
COMPILER = "inductor"  # backend of torch.compile

Report = Callable[[dict[str, float], int], None]  # values, step
Progress = Callable[[int, dict[str, float]], None]  # step, the last values


class Loop:
    """A run, from the step it stands at to its last. Of several processes the first one writes."""

    def __init__(
        self, config: Config, data: TaskData, model: PreTrainedModel, device: torch.device, run: Run,
        reports: list[Report], progress: Progress,
    ) -> None:  # fmt: skip
        self.config, self.data, self.model, self.device = config, data, model, device
        self.run, self.reports, self.progress = run, reports, progress
        self.processes, self.rank = count_processes()
        self.writes = self.rank == 0
        o = config.optimisation
        self.readers, self.reader = self.count_readers()
        self.micro = o.batch // (o.accumulation * self.readers)
        self.stream = Stream(data.train, seed=config.seed, length=o.steps * o.batch)
        self.objective = data.make_objective(model)
        # All that hold a part of a gradient have to measure.
        self.recording = Recording(model, config.record_every if self.writes or config.fsdp else 0)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.loss = torch.zeros((), device=device)  # summed since something was logged
        self.norm = torch.zeros((), device=device)  # of the gradient, before clipping
        self.bad = torch.zeros((), dtype=torch.bool, device=device)  # whether a loss was not finite
        self.step, self.pace, self.last = 0, Pace(), dict[str, float]()

    # From the first step to the last

    def prepare(self, checkpoint: Path | None) -> None:
        """Stand at the step of a checkpoint, or at the first."""
        if checkpoint is not None:
            self.step = read_step(checkpoint)
            found = self.model.load_state_dict(load_file(checkpoint / WEIGHTS), strict=False)
            tied = set(self.model.all_tied_weights_keys)
            if strange := sorted({*found.missing_keys, *found.unexpected_keys} - tied):
                raise ValueError(f"The checkpoint is not one of this model: {strange[0]} is in one of the two only.")
            self.model.tie_weights()
        self.parallel = self.wrap()
        compiled = self.config.compile and not (self.config.graph or self.config.fsdp)  # a graph compiles layers itself
        self.forward = torch.compile(self.parallel, backend=COMPILER) if compiled else self.parallel
        self.optimizer = make_optimizer(self.model, self.config.optimisation)
        if checkpoint is not None:
            self.load_moments(torch.load(checkpoint / MOMENTS, map_location="cpu", weights_only=True))
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(torch.load(checkpoint / SCALE, weights_only=True))
        self.open_batches()
        if checkpoint is not None:  # last: a DataLoader draws a number when it is opened
            load_random(checkpoint / self.name_random_file(), self.device)

    def train(self) -> None:
        while self.step < self.config.optimisation.steps:
            self.set_rate(find_rate(self.config.optimisation, self.step))
            self.take_step()
            self.step += 1
            self.finish_step()

    def take_step(self) -> None:
        self.recording.open(self.step)
        self.learn([self.move(next(self.batches)) for _ in range(self.config.optimisation.accumulation)])

    def learn(self, batches: list[Batch]) -> None:
        """One update of the weights, from one or more passes."""
        self.model.train()  # an evaluation may lie before
        divisor = self.share_count(self.objective.divide_by(batches))
        for number, batch in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else self.keep_gradients():
                loss = self.objective.compute_loss(self.run_model, batch) / divisor
                self.scaler.scale(loss).backward()
            self.recording.close()
            self.loss += loss.detach()
            self.bad |= ~loss.detach().isfinite()
            self.check_loss(batch)
        self.scaler.unscale_(self.optimizer)
        limit = self.config.optimisation.clip or math.inf
        self.norm.copy_(make_whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        if self.recording.is_due(self.step):
            self.recording.read_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.zero_grad()

    def finish_step(self) -> None:
        """What is due after a step."""
        config = self.config
        self.progress(self.step, self.last)
        recorded = self.recording.take()
        if recorded is not None and self.writes:
            self.run.log({"step": self.step, **recorded, "loss_scale": self.read_loss_scale()})
            self.log(average_layers(recorded["heads"]))
        if self.step % config.log_every == 0:
            self.log_loss()
        if self.step % config.evaluate_every == 0:
            self.evaluate("eval")
        if self.step % config.save_every == 0 or self.step == config.optimisation.steps:
            self.save()

    # Parts of a step

    def count_readers(self) -> tuple[int, int]:
        """(how many parts a batch is read in, which of them by this process)"""
        return self.processes, self.rank

    def open_batches(self) -> None:
        # Processes take turns, so that a global batch is the one that a single process sees.
        first = self.step * self.config.optimisation.batch + self.reader * self.micro
        starts = range(first, len(self.stream), self.readers * self.micro)
        self.batches = self.load(self.stream, (range(at, at + self.micro) for at in starts))

    def load(self, examples: Any, places: Any) -> Iterator[Batch]:
        """Batches of the examples at these places, in pinned memory where they go to a GPU."""
        pin = self.device.type == "cuda"
        return iter(DataLoader(examples, batch_sampler=places, collate_fn=dict, pin_memory=pin))

    def move(self, batch: Batch) -> Batch:
        return {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}

    def autocast(self) -> torch.autocast:
        narrow = torch.float16 if self.config.precision == "float16" else torch.bfloat16
        return torch.autocast(self.device.type, narrow, enabled=self.config.precision != "float32")

    def run_model(self, **inputs: Tensor) -> Any:
        with self.autocast():
            return (self.forward if self.model.training else self.model)(**inputs)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if self.config.graph and self.device.type == "cuda":
                group["lr"].fill_(rate)  # where the graph reads it
            else:
                group["lr"] = rate

    def check_loss(self, batch: Batch) -> None:
        """On a GPU this waits for it, so only when something is logged."""
        look = self.device.type == "cpu" or (self.step + 1) % self.config.log_every == 0
        if look and bool(self.bad):
            self.refuse_loss(batch)

    def refuse_loss(self, batch: Batch) -> NoReturn:
        with self.autocast():
            raise NotFinite(find_not_finite(self.model, batch, self.step + 1))

    # Several processes

    def wrap(self) -> Any:
        """The model, or what stands around it."""
        if self.processes == 1:
            return self.model
        return DistributedDataParallel(self.model, [self.device] if self.device.type == "cuda" else None)

    def keep_gradients(self) -> contextlib.AbstractContextManager[None]:
        """For passes that others of the same update follow: gradients are exchanged after the last."""
        model = self.parallel
        return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()

    def share_count(self, count: Tensor | int) -> Tensor | int:
        """What all processes count together, over their number: gradients are means over processes. Never 0: where no
        token of any is masked, as few short texts may have none, the sum that it divides is 0 already."""
        if not isinstance(count, Tensor):
            return count
        if self.processes == 1:
            return count.clamp_min(1)
        distributed.all_reduce(count)
        return count.clamp_min(1) / self.processes

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes."""
        if self.processes == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.processes)]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Those of examples, of all processes that read others."""
        return self.gather(rows)

    # What is measured

    def measure(self, batch: Batch) -> Tensor:
        return self.objective.measure(self.run_model, batch)

    def log(self, values: dict[str, float]) -> None:
        self.last |= values
        if self.writes:
            self.run.log({"step": self.step, **values})
        for report in self.reports:
            report(values, self.step)

    def log_loss(self) -> None:
        loss = self.gather(self.loss[None]).mean().item() / self.config.log_every
        rate = find_rate(self.config.optimisation, self.step - 1)
        scale = self.read_loss_scale()
        self.pace.look(self.step)
        self.log(
            {"loss": loss, "grad_norm": self.norm.item(), "learning_rate": rate}
            | ({} if scale is None else {"loss_scale": scale})  # Figs. 8b and 10b: it changes from step to step
        )
        self.loss.zero_()

    def read_loss_scale(self) -> float | None:
        """Of float16 training: how much the loss is multiplied so that gradients do not vanish."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def evaluate(self, prefix: str) -> dict[str, float]:
        self.model.eval()
        found: dict[str, float] = {}
        for name, examples in self.data.evaluations.items():
            head = f"{prefix}_{name}" if len(self.data.evaluations) > 1 else prefix
            scores = {f"{head}_{key}": value for key, value in self.score(examples).items()}
            self.log(scores)
            found |= scores
        self.pace.pause()
        return found

    @torch.no_grad()
    def score(self, examples: Any) -> dict[str, float]:
        """Each example counts once: where there are several processes the last batches begin again with the first
        examples, which are cut off."""
        turn = self.readers * self.micro
        places = math.ceil(len(examples) / turn) * turn if self.readers > 1 else len(examples)
        order = np.resize(np.arange(len(examples)), places)
        starts = range(self.reader * self.micro, places, turn)
        found, labels = [], []
        for batch in map(self.move, self.load(examples, [order[at : at + self.micro].tolist() for at in starts])):
            found.append(self.gather_rows(self.measure(batch)))
            labels.append(self.gather_rows(batch["labels"]))
        rows, wanted = (torch.cat(parts)[: len(examples)].cpu().numpy() for parts in (found, labels))
        return self.objective.score(rows, wanted)

    # Checkpoints

    def save(self) -> None:
        with explain_writing(self.run.path):
            self.save_here(self.run.path / f"{CHECKPOINT}{self.step}")

    def save_here(self, folder: Path) -> None:
        weights, moments = self.gather_weights(), self.gather_moments()  # all processes have to ask
        folder.mkdir(exist_ok=True)
        if self.writes:
            # Not under the older names that save_pretrained gives some weights (ViT's), which nobody translates back.
            self.model.save_pretrained(folder, state_dict=weights, save_original_format=False)
            torch.save(moments, folder / MOMENTS)
            if self.scaler.is_enabled():
                torch.save(self.scaler.state_dict(), folder / SCALE)
        states = {"cpu": torch.get_rng_state()}  # of torch's generators; nothing else draws while a model trains
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        torch.save(states, folder / self.name_random_file())
        if self.processes > 1:
            distributed.barrier()  # each process has a file in it
        if self.writes:
            seal(folder)
            for old in self.run.list_checkpoints()[:-KEPT]:  # by step: a clock may have been set back
                shutil.rmtree(old)
        self.pace.pause()

    def name_random_file(self) -> str:
        return "rng_state.pth" if self.processes == 1 else f"rng_state_{self.rank}.pth"

    def gather_weights(self) -> dict[str, Any] | None:
        """Whole tensors to save; None: as the model holds them."""
        return None

    def gather_moments(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_moments(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Pace:
    """Seconds a step, between one look at the loss and the next, which waits for a GPU: what lies between two such
    looks with no evaluation and no checkpoint is steps alone. The first stretch warms up and does not count."""

    def __init__(self) -> None:
        self.paces: list[float] = []
        self.last: tuple[int, float] | None = None

    def look(self, step: int) -> None:
        now = time.perf_counter()
        if self.last is not None and step > self.last[0]:
            self.paces.append((now - self.last[1]) / (step - self.last[0]))
        self.last = step, now

    def pause(self) -> None:
        """Something else than steps is being done."""
        self.last = None

    def median(self) -> float | None:
        kept = self.paces[1:]
        return statistics.median(kept) if kept else None


def count_processes() -> tuple[int, int]:
    """(how many processes torchrun has started, which of them this one is)"""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def find_rate(o: Optimisation, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    if step < o.warmup:
        return o.rate * (step / o.warmup)
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    left = {"constant": 1.0, "linear": (o.steps - step) / max(1, o.steps - o.warmup)}
    return o.rate * left.get(o.schedule, 0.5 * (1.0 + math.cos(math.pi * done)))


def find_decaying(model: nn.Module) -> list[str]:
    """Names of weights that decay: matrices, not biases, nor gains of norms."""
    found = ((name, weight.ndim, name.split(".")[-1]) for name, weight in model.named_parameters())
    return [name for name, ndim, last in found if ndim > 1 and last not in UNDECAYED]


def make_optimizer(model: nn.Module, o: Optimisation) -> torch.optim.AdamW:
    decaying, learned = find_decaying(model), [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in learned if name in decaying], "weight_decay": o.decay},
        {"params": [p for name, p in learned if name not in decaying], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.rate, betas=o.betas, eps=o.epsilon, fused=True)


def load_random(file: Path, device: torch.device) -> None:
    """Where it was saved by another number of processes there is none for this one, and numbers are drawn anew."""
    if not file.exists():
        return
    with safe_globals():  # earlier versions saved numpy's state, too
        held = torch.load(file, map_location="cpu", weights_only=True)
    torch.set_rng_state(held["cpu"])
    if device.type == "cuda" and "cuda" in held:
        state = held["cuda"]  # earlier versions saved those of all devices where there were several processes
        torch.cuda.set_rng_state(state[device.index or 0] if isinstance(state, list) else state, device)


def find_not_finite(model: nn.Module, batch: Batch, step: int) -> str:
    """Which part of the model is the first to give something that is not finite."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"The loss is not finite at step {step}: the weights {name} are not."
    names, found = {module: name for name, module in model.named_modules() if name}, list[str]()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(t, Tensor)]
        if not all(bool(t.isfinite().all()) for t in tensors):
            found.append(names[module])

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(look))
        model(**batch)
    where = f"{found[0]} is the first part of the model whose output is not" if found else "yet the model's outputs are"
    return f"The loss is not finite at step {step}: {where}. A lower optimisation.rate or optimisation.clip=1 may help."
