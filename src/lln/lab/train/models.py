"""The models of the recipes: transformers' own, with the attention that a config names."""

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import BertConfig, PreTrainedModel, masking_utils
from transformers.modeling_outputs import SequenceClassifierOutput

import lln.hf  # registers the attentions
from lln.files import Unreadable, read_json
from lln.hf.options import OF_BLOCKS
from lln.lab.core.errors import first_line
from lln.lab.train.config import (
    BY_WIDTH,
    INITIALISED,
    LEARNED,
    NONE,
    OF_ARCHITECTURE,
    OF_TORCH,
    Attention,
    Config,
)
from lln.lab.train.mixers import check_mixer, describe_mixer, is_mixer, load_weights, put_mixers
from lln.values import check_choice, check_positive

SOFTMAX = "sdpa"
# What softmax is called with the one option of it that is asked for.
CONVOLVED = {"value_convolution": "value_convolved_softmax", "convolution": "convolved_softmax"}
SLOWEST = 10_000.0  # the longest wave of sinusoidal positions, over 2 pi


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a model needs to know of its data."""

    vocabulary: int = 0
    labels: int = 0
    channels: int = 0
    padding: int = 0  # token id
    pair: bool = False  # two sequences an example


class SequenceClassifier(PreTrainedModel):
    """An encoder, the mean of its tokens, and two layers on it (Long Range Arena); of a pair, both means, their product
    and their difference."""

    config_class = BertConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = transformers.BertModel(config, add_pooling_layer=False)
        width, inner = config.hidden_size * (4 if config.pair else 1), config.intermediate_size
        self.head = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, config.num_labels))
        self.post_init()

    def mean(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        states: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, N, C]
        if mask is None:
            return states.mean(1)
        weights = mask.to(states.dtype).unsqueeze(-1)
        return (states * weights).sum(1) / weights.sum(1).clamp_min(1.0)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pair_ids: Tensor | None = None,
        pair_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        found = self.mean(input_ids, attention_mask)
        if pair_ids is not None:
            other = self.mean(pair_ids, pair_mask)
            found = torch.cat([found, other, found * other, found - other], -1)
        logits = self.head(found)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read_start(start: str) -> Any:
    """The config of a saved model."""
    try:
        found = read_json(Path(start) / "config.json", dict)
    except Unreadable as error:
        raise ValueError(f"model.start: {error}") from None
    if found is None:
        raise ValueError(f"model.start: {start} holds no saved model (no config.json).")
    return found


def fit_start(settings: Any, config: Config) -> None:
    """A model of another shape would begin anew in part, and say nothing of it. One that goes on with shorter sequences
    keeps the positions that it has learned."""
    start, before = config.model.start, read_start(config.model.start)
    for name in SHAPE:
        if name in before and before[name] != getattr(settings, name):
            raise ValueError(
                f"model.start: {start} has a {name} of {before[name]}; got settings (model, data.options) "
                f"with {getattr(settings, name)}."
            )
    own = getattr(settings, "mixer", None)
    if own != (there := before.get("mixer")):
        raise ValueError(
            f"model.start: {start} is a model with {there or 'attention'}; got settings (attention) with "
            f"{own or 'attention'}."
        )
    known = before.get("max_position_embeddings")
    if known is not None and config.model.positions == LEARNED:
        if settings.max_position_embeddings > known:
            most = config.data.length - (settings.max_position_embeddings - known)
            raise ValueError(f"data.length: {start} knows {most} positions; got {config.data.length}.")
        settings.max_position_embeddings = known


def fix_positions(embedding: nn.Embedding, settings: Any, kind: str) -> None:
    """Positions that are not learned: of tens of thousands each would be seen too rarely. Sines and cosines have the
    spread that learned ones begin with."""
    places, width = embedding.weight.shape
    table = torch.zeros(places, width)
    if kind != NONE:
        rates = SLOWEST ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)  # [width / 2]
        angles = torch.arange(places, dtype=torch.float64)[:, None] * rates
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
        table = (waves * settings.initializer_range * 2**0.5).float()
    embedding.weight.requires_grad_(False).copy_(table)


def begin_as_torch(model: nn.Module) -> None:
    """Linear layers and convolutions drawn anew, as torch draws those that it makes: uniformly, with a standard
    deviation of 1 / sqrt(3 inputs). What another layer shares (a head its embeddings) stays."""
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and id(module.weight) not in shared:
            module.reset_parameters()


def build(config: Config, sizes: Sizes) -> Any:
    """A new model, or the one in the folder `model.start` with a new head."""
    settings, kind = describe_model(config, sizes)
    name, learned = config.attention.name, config.model.positions == LEARNED
    mixed = is_mixer(name)
    settings.lln, given = (None, {}) if mixed else read_options(config.attention)
    if mixed:
        settings.mixer, name = describe_mixer(config), SOFTMAX
    elif name == "softmax":
        name = SOFTMAX if settings.lln is None else settings.lln["implementation"]
    if config.model.start:
        fit_start(settings, config)
    goes_on = config.model.start != "" and not config.model.untrained
    if goes_on and not mixed:
        anew = {"ignore_mismatched_sizes": not learned}  # a table of fixed positions is made anew, for any length
        try:
            model = kind.from_pretrained(config.model.start, config=settings, attn_implementation=name, **anew)
        except (OSError, RuntimeError, SafetensorError) as error:  # damaged weights, or those of something else
            raise unloadable(config.model.start, error) from error
    else:
        settings._attn_implementation = name
        model = kind(settings)
        if config.model.initialisation == OF_TORCH:
            begin_as_torch(model)
    if mixed:
        put_mixers(model, config)
        try:
            if goes_on:
                load_weights(model, config.model.start)
        except (OSError, SafetensorError) as error:
            raise unloadable(config.model.start, error) from error
    if not learned:
        fix_positions(model.base_model.embeddings.position_embeddings, settings, config.model.positions)
    if given:
        lln.hf.convert(model, name, alpha=given["alpha"], beta=given["beta"])
    if config.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def unloadable(start: str, error: Exception) -> ValueError:
    return ValueError(f"model.start: {start} cannot be loaded: {first_line(error)}.")


def read_options(attention: Attention) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """(config.lln of the model, {alpha, beta} where the options give them as numbers: Fig. 10). beta is alpha unless it
    is given."""
    name, options = attention.name, copy.deepcopy(attention.options)
    if name == "softmax":
        if not options:
            return None, {}
        name = CONVOLVED[next(iter(options))]
    if name not in ("lln", "lln_diag"):
        return {"implementation": name, "mechanisms": {name: options}}, {}
    given = {}
    if "alpha" in options:
        alpha = options.pop("alpha")
        given = {"alpha": alpha, "beta": options.pop("beta", alpha)}
        options |= {"statistics": "fixed", "coefficients": "head"}
    return {"implementation": name, **options}, given


def check_attention(config: Config) -> None:
    """ValueError or TypeError, in one sentence, for what no model of a recipe could run."""
    name = config.attention.name
    if is_mixer(name):
        check_mixer(config)
        return
    check_choice("attention.name", name, "softmax", *lln.hf.IMPLEMENTATIONS)
    if name == "softmax" and (len(given := config.attention.options) > 1 or not set(given) <= set(CONVOLVED)):
        raise ValueError(
            "attention.options: softmax takes only value_convolution, or the deprecated convolution; got "
            f"{', '.join(sorted(given))}."
        )
    if name == "lln" and (foreign := [option for option in OF_BLOCKS if option in config.attention.options]):
        raise ValueError(f"attention.options: {foreign[0]} goes with lln_diag; got it with lln.")
    held, given = read_options(config.attention)
    for option, number in given.items():
        check_positive(f"attention.options.{option}", number)
    if held is not None:
        if unknown := sorted(set(held) - {field.name for field in dataclasses.fields(lln.hf.Options)}):
            raise ValueError(f"attention.options: {name} has no option {unknown[0]!r}.")
        try:
            lln.hf.Options(**held)
        except (ValueError, TypeError) as error:
            raise ValueError(f"attention.options: {error}") from None


def describe_model(config: Config, sizes: Sizes) -> tuple[Any, Any]:
    """(transformers' config, the class of the model)"""
    m, length = config.model, config.data.length
    options: dict[str, Any] = {
        "hidden_size": m.width,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "intermediate_size": m.inner,
        "hidden_dropout_prob": m.dropout,
        "attention_probs_dropout_prob": m.attention_dropout,
    }
    rule = m.initialisation or INITIALISED.get(config.task, OF_ARCHITECTURE)
    if m.initial or rule == BY_WIDTH:
        # BERT's own 0.02 is for 768 channels: with 64, attention begins so flat that Pathfinder is never learned.
        options["initializer_range"] = m.initial or m.width**-0.5
    if config.task in ("glue", "image", "lra"):
        options["num_labels"] = sizes.labels
    if config.task == "image":
        options |= {"image_size": length, "patch_size": m.patch, "num_channels": sizes.channels}
        return transformers.ViTConfig(**options), transformers.ViTForImageClassification
    options |= {"vocab_size": sizes.vocabulary, "pad_token_id": sizes.padding, "type_vocab_size": 1}
    if config.task == "lra":
        return BertConfig(**options, max_position_embeddings=length, pair=sizes.pair), SequenceClassifier
    options["max_position_embeddings"] = length + sizes.padding + 1  # RoBERTa's positions begin after the padding id
    family = "RobertaPreLayerNorm" if m.pre_norm else "Roberta"
    head = "SequenceClassification" if config.task == "glue" else "MaskedLM"
    return getattr(transformers, f"{family}Config")(**options), getattr(transformers, f"{family}For{head}")


HERE = threading.local()  # a ContextVar would say the same, but torch.compile cannot read one
LOCK = threading.Lock()
REPLACED: list[Any] = []  # transformers' own is_tracing, once for each `skip_masks` that is open in any thread


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@functools.cache  # the same function every time, or torch.compile would compile anew
def make_is_tracing(usual: Any) -> Any:
    def is_tracing(tensor: Any = None) -> bool:
        """No in threads that skip masks; others find what they would have."""
        return not getattr(HERE, "unmasked", False) and usual(tensor)

    return is_tracing


@contextlib.contextmanager
def skip_masks() -> Iterator[None]:
    """For batches without a mask. Where a graph is captured or traced, transformers as late as 5.17 makes one even
    then, which hides nothing and keeps torch from its fast attention."""
    with LOCK:
        REPLACED.append(REPLACED[0] if REPLACED else masking_utils.is_tracing)
        masking_utils.is_tracing = make_is_tracing(REPLACED[0])
    before, HERE.unmasked = getattr(HERE, "unmasked", False), True
    try:
        yield
    finally:
        HERE.unmasked = before
        with LOCK:
            usual = REPLACED.pop()
            if not REPLACED:
                masking_utils.is_tracing = usual
