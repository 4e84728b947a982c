"""Mechanisms that take the place of the whole attention block (FLASH, TNN) in the recipes' models of text: encoders of
transformers whose layers have `attention.self`, which makes q, k and v, and `attention.output.dense` after it. Norm,
dropout and residual stay the model's."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

import lln
from lln.lab.train.config import Config, need

WEIGHTS = "model.safetensors"


def is_mixer(name: str) -> bool:
    entry = lln.mechanisms().get(name)
    return entry is not None and entry.kind == "mixer"


class MixerBlock(nn.Module):
    """What an encoder layer calls in the place of its attention."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
        """attention_mask [B, 1, N, N] bool as torch's attention takes it: all of its rows show the same keys."""
        shown = None if attention_mask is None else attention_mask[:, 0, 0]  # [B, N]
        return self.mixer(hidden, key_mask=shown), None


def describe_mixer(config: Config) -> dict[str, Any]:
    """As a model's config says it."""
    return {"name": config.attention.name, **config.attention.options}


def check_mixer(config: Config) -> None:
    """ValueError or TypeError, in one sentence, for what no model could be made of."""
    name = config.attention.name
    need((
        config.task != "image",
        f"attention.name: {name} mixes hidden states in the place of the whole attention block, which goes with models "
        f"of text; got it with {config.task}.",
    ))  # fmt: skip
    try:
        make_mixer(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"attention.options: {error}") from None


def make_mixer(config: Config) -> nn.Module:
    m = config.model
    return lln.mechanism(
        config.attention.name, num_heads=m.heads, head_dim=m.width // m.heads, max_length=config.data.length or None,
        dropout=m.attention_dropout, **config.attention.options,
    )  # fmt: skip


def put_mixers(model: Any, config: Config) -> None:
    """In the place of every layer's attention, and of the projection after it: mixers have their own. They draw their
    first weights as they do anywhere."""
    for layer in model.base_model.encoder.layer:
        layer.attention.self = MixerBlock(make_mixer(config))
        layer.attention.output.dense = nn.Identity()


def load_weights(model: Any, start: str) -> None:
    """Those of the model in a folder, whatever its head: transformers would make the model without mixers. Positions
    that are fixed are made anew."""
    held, own = load_file(Path(start) / WEIGHTS), model.state_dict()
    fits = {name: t for name, t in held.items() if name in own and own[name].shape == t.shape}
    inside = [
        n for n in model.load_state_dict(fits, strict=False).missing_keys if n.startswith(model.base_model_prefix)
    ]
    lost = [name for name in inside if not name.endswith("position_embeddings.weight")]
    need((not lost, f"model.start: {start} holds a model of another kind; it has no {', '.join(lost[:1])}."))
