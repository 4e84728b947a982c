"""transformers' Trainer on a run's folder: what it measures goes to metrics.jsonl, what it saves is sealed, and a run
that was stopped goes on as if it had not been."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from lln.hf.distillation import NotFinite
from lln.lab.data.examples import IGNORE
from lln.lab.train.config import Config
from lln.lab.train.guesses import Guesses
from lln.lab.train.run_folder import Run, seal

# Gains, shares and offsets of LLN attention; its maps and convolutions decay as other weights do, to the identity.
UNDECAYED = ("log_alpha", "log_beta", "mix_logit", "lln_scale", "block_scale", "key_offset")


class RunTrainer(Trainer):
    """The Trainer of a run."""

    guesses: Guesses | None = None  # of masked language models

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The models' own losses are means and take no count of tokens, whatever their signature says: without this they
        # are not divided by the number of passes an update, and are multiplied by that of processes.
        self.model_accepts_loss_kwargs = False
        self.bad: Tensor | None = None  # whether a loss was not finite; looked at when something is logged

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices: not biases, nor gains of norms. transformers goes by names, and would take all of a pre-norm
        RoBERTa, which is called roberta_prelayernorm, for a norm."""
        found = ((name, weight.ndim, name.split(".")[-1]) for name, weight in model.named_parameters())
        return [name for name, ndim, last in found if ndim > 1 and last not in UNDECAYED]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each process has a file in it
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / "training_args.bin").unlink()  # a pickle, and config.json says more
            seal(folder)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            kwargs["num_items_in_batch"] = None  # see mean_over_tokens
        if self.guesses is not None and (model.training or self.guesses.evaluated):
            with self.guesses.only(inputs["labels"]) as labels:
                return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None and "loss" in logs:  # Figs. 8b and 10b: it changes from step to step
            logs["loss_scale"] = float(scaler.get_scale())
        super().log(logs, *args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        # save_pretrained gives some weights (ViT's) older names, and the Trainer does not translate them back: a run
        # that goes on would begin with new weights.
        self.model.save_pretrained = functools.partial(self.model.save_pretrained, save_original_format=False)
        try:
            super()._save(*args, **kwargs)
        finally:
            del self.model.save_pretrained

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = set(self.model._tied_weights_keys or {})
        if strange := sorted({*load_result.missing_keys, *load_result.unexpected_keys} - tied):
            raise ValueError(f"The checkpoint is not one of this model: {strange[0]} is in one of the two only.")
        self.model.tie_weights()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        bad = ~loss.isfinite()
        self.bad = bad if self.bad is None else self.bad | bad
        look = loss.device.type == "cpu" or (self.state.global_step + 1) % self.args.logging_steps == 0
        if look and bool(self.bad):  # on a GPU this waits for it
            raise NotFinite(first_not_finite(self.model, self._prepare_inputs(inputs), self.state.global_step + 1))
        return loss


def first_not_finite(model: nn.Module, inputs: dict[str, Any], step: int) -> str:
    """Which part of the model is the first to give something that is not finite."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"The loss is not finite at step {step}: the weights {name} are not."
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            for t in tensors:
                if isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()) and not found:
                    found.append(name)

        return hook

    hooks = [m.register_forward_hook(look(name)) for name, m in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    where = f"{found[0]} is the first part of the model whose output is not" if found else "yet the model's outputs are"
    return f"The loss is not finite at step {step}: {where}. A lower optimisation.rate or optimisation.clip=1 may help."


class Metrics(TrainerCallback):
    """What the Trainer logs, into the run's metrics.jsonl."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        left_out = ("epoch", "total_flos", "step")  # and times, which say something about this process alone
        kept = {
            k: v for k, v in (logs or {}).items() if k not in left_out and not k.endswith(("_per_second", "_runtime"))
        }
        if state.is_world_process_zero and kept and "train_loss" not in kept:  # the last is of this process's life only
            self.run.log({"step": state.global_step, **kept})


def arguments(config: Config, folder: Path, *, device: str, processes: int, report_to: list[str]) -> TrainingArguments:
    o = config.optimisation
    micro, rest = divmod(o.batch, o.accumulation * processes)
    if rest or micro == 0:
        raise ValueError(
            f"optimisation.batch must be a multiple of accumulation times processes; got {o.batch} for "
            f"{o.accumulation} x {processes}."
        )
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=o.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=o.accumulation,
        learning_rate=o.rate,
        warmup_steps=o.warmup,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(o.schedule, o.schedule),
        optim="adamw_torch_fused",
        weight_decay=o.decay,
        adam_beta1=o.betas[0],
        adam_beta2=o.betas[1],
        adam_epsilon=o.epsilon,
        max_grad_norm=o.clip,
        seed=config.seed,
        data_seed=config.seed,
        bf16=config.precision == "bfloat16",
        fp16=config.precision == "float16",
        torch_compile=config.compile and not config.graph,  # a graph compiles the layers itself
        use_cpu=device == "cpu",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.evaluate_every,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=2,
        report_to=report_to or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
    )


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, N], zero where nothing is to be guessed"""
    flat = logits.float().flatten(0, 1)  # [B N, vocabulary]
    return nn.functional.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)


def mean_over_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross entropy of the guessed tokens. In training the mean over those of the whole batch: parts of it, on other
    processes or in other passes, need not hold equally many. In evaluation the mean over sequences of their means,
    which does not depend on how they are put into batches."""
    if num_items_in_batch is not None:
        return token_losses(outputs["logits"], labels).sum() / num_items_in_batch
    return sequence_losses(outputs["logits"], labels).mean()


def sequence_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[B]"""
    return token_losses(logits, labels).sum(1) / (labels != IGNORE).sum(1).clamp_min(1)


# The loss of an evaluation is computed from what each example gave: the Trainer's own is a mean over batches, and the
# last of several processes' batches is filled up with examples that were counted already.


def mean_loss(prediction: Any) -> dict[str, float]:
    """Of predictions that are `sequence_losses`."""
    return {"loss": float(prediction.predictions.astype("float64").mean())}


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = torch.from_numpy(prediction.label_ids)
    loss = nn.functional.cross_entropy(torch.from_numpy(logits).double(), labels)
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean()), "loss": float(loss)}


def parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())
