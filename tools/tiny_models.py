"""Tiny models of transformers' architectures with random weights, made from the configs' defaults by the names that
sizes have there, and inputs for them. For `test_models.py`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS, KEY_HEADS, DIM, WIDTH, INNER, LAYERS, WORDS = 4, 2, 16, 64, 48, 2, 128
BATCH, LENGTH, HIDDEN, SHORT, IMAGE, MOST = 2, 24, 7, 9, 64, 40_000_000
# Sizes by their names in configs, the first that matches. A number that is smaller already stays.
SIZES = [(re.compile(pattern), size) for pattern, size in (
    (r"^mamba_(d_head|head_dim)$", 2 * WIDTH // HEADS),
    (r"(^|_)(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$", KEY_HEADS),
    (r"(^|_)(attention_heads|num_heads|n_heads?|nhead|heads|num_attention_heads)$", HEADS),
    (r"linear_num_(key|value)_heads$", KEY_HEADS),
    (r"(kv_lora|q_lora|lora)_rank$", DIM),
    (r"(head_dim|d_kv|dim_head|kv_channels|attention_head_size|query_pre_attn_scalar)$", DIM),
    (r"(^|_)(num_hidden_layers|hidden_layers|num_layers|n_layers?|layers|depth|num_blocks|max_window_layers)$", LAYERS),
    (r"(^|_)(first_k_dense_replace|num_nextn_predict_layers|topk_group|n_group|num_kv_shared_layers)$", 1),
    (r"(^|_)(n_routed_experts|num_experts|num_local_experts|moe_num_experts)$", 4),
    (r"(^|_)(num_experts_per_tok|moe_topk|moe_k|num_experts_per_token)$", 2),
    (r"(^|_)(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|hidden_dim_ff|dim_feedforward|ffn_hidden_size)$", INNER),
    (r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|emb_dim|width|d_embed|embedding_size|projection_dim)$",
     WIDTH),
    (r"_(hidden_size|d_model|embed_dim|hidden_dim|embedding_size|projection_dim|output_dim|projection_size)$", WIDTH),
    (r"^(output_dim|proj_dim|projection_size|out_dim|cross_attention_hidden_size|lstm_hidden)$", WIDTH),
    (r"(^|_)vocab_size(_per_layer_input)?$", WORDS),
    (r"(^|_)(max_position_embeddings|n_positions|max_sequence_length|max_source_positions|max_target_positions)$", 256),
    (r"(^|_)(image_size|input_size|pretrain_image_size)$", IMAGE),
    (r"^(num_queries|resampler_n_latents|num_latents)$", 10),
)]  # fmt: skip
KEYS = r"(num_key_value_heads|num_kv_heads)$"
OF_HEADS = r"(heads?|head_dim|d_kv|dim_head|kv_channels|head_size|scalar|rank)$"
FEW = r"(layers?|depth|vocab_size)$"
# Which sizes are made small, from all to as few as it takes: some configs are only right as a whole.
ATTEMPTS = ("all", "no heads", "some")
Inputs = dict[str, Any]


SOUND_MASKS = ("input_features_mask", "feature_attention_mask")
EMBEDDED = ("hidden_states", "inputs_embeds", "input_embeds")


class CannotShrink(Exception):
    """No tiny model of an architecture could be made and run."""


@dataclasses.dataclass
class Tiny:
    """A model that runs with softmax attention, as what makes it again, and inputs for it."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    inputs: Inputs

    def build(self, implementation: str) -> PreTrainedModel:
        torch.manual_seed(0)
        config = copy.deepcopy(self.config)
        with wide_default():
            model = self.kind._from_config(config, attn_implementation=implementation, dtype=torch.float64)
        return model.double().eval()

    def run(self, model: PreTrainedModel) -> Any:
        torch.manual_seed(1)
        given = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in self.inputs.items()}
        with torch.no_grad(), wide_default():
            return model(**given)


@contextlib.contextmanager
def wide_default() -> Iterator[None]:
    """Tensors that a model makes for itself are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def list_architectures() -> list[str]:
    return sorted(CONFIG_MAPPING.keys())


def find_class(name: str) -> type[PreTrainedModel]:
    """The plainest model class of a config: what AutoModel makes, else with a head, else any that takes the config."""
    tables = [n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")]
    import transformers

    for table in sorted(tables, key=lambda n: (n != "MODEL_MAPPING_NAMES", "CAUSAL" not in n, "MULTIMODAL" not in n)):
        found = getattr(modeling_auto, table).get(name)
        for one in [found] if isinstance(found, str) else found or ():
            with contextlib.suppress(AttributeError):
                return getattr(transformers, one)  # type: ignore[no-any-return]
    wanted = CONFIG_MAPPING[name]
    place = importlib.import_module(wanted.__module__.replace(".configuration_", ".modeling_"))
    kinds = [k for k in vars(place).values() if isinstance(k, type) and issubclass(k, PreTrainedModel)]
    kinds = [k for k in kinds if getattr(k, "config_class", None) is wanted and k.__module__ == place.__name__]
    kinds = [k for k in kinds if not k.__name__.endswith("PreTrainedModel")]
    if not kinds:
        raise CannotShrink("no model class of its own takes this config")
    return kinds[0]


def shrink(config: PreTrainedConfig, attempt: str) -> None:
    """In place, and what is inside it likewise."""
    for held in vars(config).copy().values():
        if isinstance(held, PreTrainedConfig):
            shrink(held, attempt)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if getattr(config, "vocab_size", 0) is None:
        put(config, "vocab_size", WORDS)
    order = list(dict.fromkeys(kinds)) if isinstance(kinds, (list, tuple)) else []
    layers, before = max(LAYERS, len(order)), set()
    if isinstance(kinds, (list, tuple)):
        before.add(len(kinds))
    for name, value in vars(config).copy().items():
        if type(value) is not int or name.endswith("_token_id"):
            continue
        size = next((size for pattern, size in SIZES if pattern.search(name)), None)
        if re.search(KEYS, name) and hasattr(config, "qk_rope_head_dim"):  # latent attention: a key for each query head
            size = HEADS if size is not None else None
        if attempt == "no heads" and re.search(OF_HEADS, name):
            size = None
        if attempt == "some" and not re.search(FEW, name):
            size = None
        if size == LAYERS and hasattr(config, "depths"):  # layers of stages, which must stay as many as their widths
            size = None
        if size == LAYERS and re.search(r"layers?$|depth$|blocks$", name):
            before |= {value}
            size = layers
        if size is not None and value > size:
            put(config, name, size)
    for name, value in vars(config).copy().items():
        if not isinstance(value, (list, tuple)) or not value:
            continue
        if name in ("layer_types", "layers_block_type", "_layer_types") and order:
            put(config, name, [*order, *[order[-1]] * (layers - len(order))])
        elif name == "mrope_section" or (isinstance(value[0], int) and "section" in name):
            put(config, name, share(list(value), DIM // 2))
        elif len(value) in before and len(value) > layers:
            put(config, name, type(value)(value[:layers]))
        elif isinstance(value[0], int) and "index" in name:  # of layers
            put(config, name, type(value)(sorted({min(int(i), layers - 1) for i in value})))
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, dict) and "rope_type" in ropes and "mrope_section" in config.ignore_keys_at_rope_validation:
        ropes["mrope_section"] = share(list(ropes.get("mrope_section", (16, 24, 24))), DIM // 2)
    put(config, "_experts_implementation_internal", "eager")  # others know no float64
    words = getattr(config, "vocab_size", None)
    for name, value in vars(config).copy().items():
        if type(value) is int and name.endswith(("_token_id", "_token_index")) and type(words) is int:
            put(config, name, value if 0 <= value < words else min(words - 1, 1 + len(name) % 4))
    if getattr(config, "initializer_range", None):
        put(config, "initializer_range", 0.2)  # at the usual start attention is so flat that all kinds look alike


def put(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # some are properties, and some have rules of their own
        setattr(config, name, value)


def share(parts: list[int], total: int) -> list[int]:
    """[16, 24, 24] for 8 -> [2, 3, 3]"""
    small = [max(1, part * total // sum(parts)) for part in parts]
    small[-1] += total - sum(small)
    return small


def find_number(config: Any, names: tuple[str, ...], usual: int) -> int:
    """The first of these in a config or one inside it."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            value = value[0]
        if type(value) is int:
            return value
    inner = [c for c in vars(config).values() if isinstance(c, PreTrainedConfig)]
    return next((n for c in inner if (n := find_number(c, names, -1)) >= 0), usual)


def make_inputs(model: PreTrainedModel) -> Iterator[Inputs]:
    """Ways to call a model, the fullest first."""
    config, random = model.config, torch.Generator().manual_seed(3)
    takes = dict(inspect.signature(model.forward).parameters)
    words = find_number(config, ("vocab_size",), WORDS)
    width = find_number(config, ("hidden_size", "d_model", "embed_dim"), WIDTH)
    side, channels = find_number(config, ("image_size",), IMAGE), find_number(config, ("num_channels",), 3)
    mels = find_number(config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim"), 80)

    def words_of(length: int) -> torch.Tensor:
        return torch.randint(5, max(6, min(words, 90)), (BATCH, length), generator=random)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, *shape, generator=random, dtype=torch.float64)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH - HIDDEN :] = 0
    text: Inputs = {"input_ids": words_of(LENGTH)}
    more: Inputs = {"attention_mask": mask}
    if "bbox" in takes:
        more["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    if "decoder_input_ids" in takes and (config.is_encoder_decoder or "input_ids" not in takes):
        text["decoder_input_ids"] = words_of(SHORT)
    patch = find_number(config, ("patch_size",), 14)
    pictures = [{"pixel_values": normal(channels, side, side)}]
    frames = find_number(config, ("num_frames",), 4)
    pictures += [
        {"pixel_values": normal(frames, channels, side, side)},
        {"pixel_values": normal(1, channels, 224, 224)},
    ]
    grid = {"grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    times = find_number(config, ("temporal_patch_size",), 2)
    cut = torch.randn(32, channels * times * patch**2, generator=random, dtype=torch.float64)
    sounds: list[Inputs] = [{"input_features": normal(mels, 2 * find_number(config, ("max_source_positions",), 32))}]
    sounds += [{"input_features": normal(mels, 64)}, {"input_features": normal(64, mels)}]
    sounds += [{"input_features": normal(mels, 3000)}, {"input_features": normal(1, 1024, 128)}]
    waves: list[Inputs] = [{"input_values": normal(4000)}, {"input_values": normal(1024, 128)}]
    waves += [{"input_values": normal(1, 4000)}, {"input_values": words_of(LENGTH)}]
    hidden: list[Inputs] = [
        {"hidden_states": cut, **grid} if "grid_thw" in takes else {"hidden_states": normal(LENGTH, width)},
        {"inputs_embeds": normal(LENGTH, width)}, {"query_embeds": normal(LENGTH, width)},
        {"input_embeds": normal(LENGTH, width)},
    ]  # fmt: skip
    starts: list[list[Inputs]] = []
    if "input_ids" in takes:
        both = [{**text, **picture} for picture in pictures] if "pixel_values" in takes else []
        starts.append([*both, text])
    starts += [ways for name, ways in (("pixel_values", pictures), ("pixel_values_videos", [
        {"pixel_values_videos": p["pixel_values"]} for p in pictures[1:]
    ]), ("input_features", sounds), ("input_values", waves)) if name in takes]  # fmt: skip
    starts += [[way] for way in hidden if next(iter(way)) in takes]
    for ways in starts:
        for way in ways:
            extra = {name: value for name, value in more.items() if name in takes}
            decoder = {"decoder_input_ids": words_of(SHORT)} if "decoder_input_ids" in takes else {}
            if "encoder_hidden_states" in takes and not decoder:
                across = find_number(config, ("encoder_hidden_size",), width)
                decoder = {"encoder_hidden_states": normal(SHORT, across)}
            quiet = {"use_cache": False} if "use_cache" in takes else {}
            known = {name: value for name, value in way.items() if name in takes}
            if "input_features" in known:
                length = known["input_features"].shape[-1]
                extra = {n: torch.ones(BATCH, length, dtype=torch.long) for n in SOUND_MASKS if n in takes}
            masked = (
                ("input_features" in known and bool(extra)) or "input_ids" in known or next(iter(known)) in EMBEDDED
            )
            for added in ([extra] if masked else []) + [{}]:
                yield {**known, **added, **quiet}
                if decoder and not set(decoder) <= set(known):
                    yield {**known, **added, **decoder, **quiet}


def make_tiny(name: str) -> Tiny:
    """A tiny model of the architecture, run once with softmax attention. CannotShrink says why there is none."""
    kind, said = find_class(name), []
    for attempt in ATTEMPTS:
        try:
            config = CONFIG_MAPPING[name]()
            shrink(config, attempt)
            tiny = Tiny(kind, config, {})
            if attempt != "all":
                check_size(tiny)
            model = tiny.build("eager")
        except CannotShrink as problem:
            said.append(str(problem))
            continue
        except Exception as problem:
            said.append(f"not built: {first_line(problem)}")
            continue
        for inputs in make_inputs(model):
            tiny.inputs = inputs
            try:
                tiny.run(model)
            except Exception as problem:
                said.append(f"not run on {', '.join(inputs)}: {first_line(problem)}")
                continue
            return tiny
    raise CannotShrink(said[0] if said else "its inputs are not known")


def check_size(tiny: Tiny) -> None:
    """CannotShrink where what is left is too large. Without memory for its weights."""
    with torch.device("meta"):
        model = tiny.kind._from_config(copy.deepcopy(tiny.config))
    if (count := sum(p.numel() for p in model.parameters())) > MOST:
        raise CannotShrink(f"{count / 1e6:,.0f} million parameters are left of it")


def first_line(problem: BaseException) -> str:
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:160] if text else ''}"
