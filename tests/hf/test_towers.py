"""Models of several parts: each part that can attend linearly does, with statistics of its own, and the others go on as
they were, which is said when the model is converted and not when it is called."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import lln.hf
from helpers.hf_models import build_model, expect_guess, record_calls, sentence
from helpers.hf_reference import compute_expected
from helpers.tensors import relative_error
from lln.hf.find import is_causal
from lln.hf.layers import find_running
from lln.instruments import record

SHAPE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    **SHAPE,
    "vocab_size": 61,
    "max_position_embeddings": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {**SHAPE, "image_size": 16, "patch_size": 4}
LLAMA = {"model_type": "llama", **TEXT, "num_key_value_heads": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7,
}  # fmt: skip
IMAGE = 60  # the token that stands for a patch


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 59, (batch, length), generator=torch.Generator().manual_seed(1))


def pair() -> dict[str, Tensor]:
    """Pictures and texts, one of them padded."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": words(), "attention_mask": mask, "pixel_values": draw(2, 3, 16, 16)}


def story(patches: int) -> dict[str, Tensor]:
    """Texts that each begin with a picture."""
    ids = torch.cat([torch.full((2, patches), IMAGE), words(length=5)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": draw(2, 3, 16, 16)}


def with_backbone(config: Any, **more: Any) -> Any:
    backbone = tf.ResNetConfig(**RESNET, out_features=["stage2"])
    plain = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    return config(backbone_config=backbone, **plain, **DETR, **more)


def siglip_tower(**more: Any) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", **VISION, **more}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "clip": (lambda: tf.CLIPModel(tf.CLIPConfig(text_config=TEXT, vision_config=VISION)), pair),
    "owlvit": (
        lambda: tf.OwlViTModel(
            tf.OwlViTConfig(text_config={**TEXT, "max_position_embeddings": 9}, vision_config=VISION)
        ),
        pair,
    ),
    "siglip": (lambda: tf.SiglipModel(tf.SiglipConfig(text_config=TEXT, vision_config=VISION)), pair),
    "llava": (
        lambda: tf.LlavaForConditionalGeneration(
            tf.LlavaConfig(
                text_config=LLAMA, image_token_index=IMAGE, vision_config={"model_type": "clip_vision_model", **VISION}
            )
        ),
        lambda: story(16),
    ),
    "aya": (
        lambda: tf.AyaVisionForConditionalGeneration(
            tf.AyaVisionConfig(
                text_config=LLAMA, image_token_index=IMAGE, vision_config=siglip_tower(), downsample_factor=2
            )
        ),
        lambda: story(4),
    ),
    "paligemma": (
        lambda: tf.PaliGemmaForConditionalGeneration(
            tf.PaliGemmaConfig(
                text_config={"model_type": "gemma", **TEXT, "num_key_value_heads": 1, "head_dim": 8},
                vision_config=siglip_tower(projection_dim=32), image_token_index=IMAGE, projection_dim=32,
                hidden_size=32,
            )
        ),
        lambda: story(16) | {"token_type_ids": torch.zeros(2, 21, dtype=torch.int64)},
    ),
    "gemma3": (
        lambda: tf.Gemma3ForConditionalGeneration(
            tf.Gemma3Config(
                text_config={
                    **TEXT, "num_key_value_heads": 1, "head_dim": 8,
                    "layer_types": ["sliding_attention", "full_attention"],
                },
                vision_config=siglip_tower(), image_token_index=IMAGE, mm_tokens_per_image=4,
            )
        ),
        lambda: story(4) | {"token_type_ids": (story(4)["input_ids"] == IMAGE).long()},
    ),
    "detr": (
        lambda: tf.DetrForObjectDetection(with_backbone(tf.DetrConfig)),
        lambda: {"pixel_values": draw(2, 3, 32, 32), "pixel_mask": torch.ones(2, 32, 32, dtype=torch.int64)},
    ),
    "conditional_detr": (
        lambda: tf.ConditionalDetrModel(with_backbone(tf.ConditionalDetrConfig)),
        lambda: {"pixel_values": draw(2, 3, 32, 32)},
    ),
    "blip2": (
        lambda: tf.Blip2ForConditionalGeneration(
            tf.Blip2Config(
                vision_config=VISION, qformer_config={**TEXT, "encoder_hidden_size": 32}, num_query_tokens=5,
                text_config=LLAMA,
                image_token_index=IMAGE,
            )
        ),
        lambda: story(5),
    ),
    "captions": (
        lambda: tf.VisionEncoderDecoderModel(
            encoder=tf.ViTModel(tf.ViTConfig(**VISION)),
            decoder=tf.GPT2LMHeadModel(
                tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=48, vocab_size=61, add_cross_attention=True)
            ),
        ),
        lambda: {"pixel_values": draw(2, 3, 16, 16), "decoder_input_ids": words()},
    ),
}  # fmt: skip
LAYERS = {
    "clip": 4, "owlvit": 4, "siglip": 4, "llava": 4, "aya": 4, "paligemma": 2, "gemma3": 2, "detr": 3,
    "conditional_detr": 3, "blip2": 7, "captions": 6,
}  # fmt: skip
TEXT_STAYS = ("paligemma", "gemma3")


def make(kind: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    build, given = MODELS[kind]
    model = build().to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 4.0  # so that attention is not flat
            if not parameter.any():
                parameter.normal_()  # so that nothing is hidden behind a zero
    return model, given()


def convert(kind: str, model: Any, name: str = "lln", **options: Any) -> Any:
    with warnings.catch_warnings(), expect_guess():
        if kind in TEXT_STAYS:
            warnings.filterwarnings("ignore", message=".*keeps its softmax attention")
        return lln.hf.convert(model, name, **options)


def run(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out = model(**given)
    found: Tensor = torch.cat([t.flatten() for t in out.to_tuple() if isinstance(t, Tensor) and t.is_floating_point()])
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_each_part_computes_equation_8_with_statistics_of_its_own(kind: str) -> None:
    model, given = make(kind)
    softmax = run(model, given)
    convert(kind, model)
    with record_calls() as calls:
        ours = run(model, given)
    calls = [call for call in calls if call.module.config._attn_implementation == "lln"]
    assert len(calls) == len(find_running(model)) == LAYERS[kind]
    kinds = set()
    for call in calls:
        attention = call.module.lln
        kinds.add((attention.kind, attention.statistics))
        causal = attention.kind == "decoder" and not attention.cross
        want = compute_expected(call, causal, attention.statistics, None)
        assert relative_error(call.out, want) < 1e-12
    expected = {("encoder", "sample"), ("decoder", "fixed")}
    assert kinds == (expected - {("decoder", "fixed")} if kind in ("siglip", *TEXT_STAYS) else expected)
    assert relative_error(ours, softmax) > 1e-6


@pytest.mark.parametrize("kind", MODELS)
def test_measured_options_survive_being_saved(kind: str, tmp_path: Path) -> None:
    model, given = make(kind)
    model.float()
    given = {name: t.float() if t.is_floating_point() else t for name, t in given.items()}
    convert(kind, model, "lln_diag", block_size=4, statistics="running", batches=[given])
    measured = [a for a in find_running(model).values() if (a.running_variance_q != 1).any()]
    assert len(measured) == LAYERS[kind]
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert len(find_running(again)) == LAYERS[kind]
    assert torch.equal(run(again.eval(), given), run(model, given))


def test_the_text_of_clip_is_causal_and_its_image_is_not() -> None:
    model, given = make("clip")
    convert("clip", model)
    other = dict(given, input_ids=given["input_ids"].clone())
    other["input_ids"][:, 5] = 4
    before, after = (model.text_model(**{k: g[k] for k in ("input_ids", "attention_mask")}) for g in (given, other))
    moved = (after.last_hidden_state - before.last_hidden_state).abs().amax((0, 2))
    assert (moved[:5] == 0).all()
    assert (moved[5:6] > 0).all()
    with pytest.raises(ValueError, match="would depend on later ones") as problem:
        lln.hf.convert(model, statistics="sample")
    sentence(problem)
    lln.hf.convert(model, statistics={"encoder": "sample", "decoder": "running"}, batches=[given])
    assert run(model, given).isfinite().all()


@pytest.mark.parametrize("kind", TEXT_STAYS)
def test_a_text_whose_pairs_are_masked_stays_as_it_is(kind: str) -> None:
    model, given = make(kind)
    with pytest.warns(UserWarning, match=r"goes into SiglipVisionModel; Gemma.*keeps its softmax.* one by one\.$"):
        lln.hf.convert(model, "lln")
    assert all("vision_tower" in name for name in find_running(model))
    with record(model) as rec:
        run(model, given)
    assert {row["attention"] for row in rec.rows()} == {"softmax", "lln"}
    fresh, _ = make(kind)
    with pytest.raises(
        ValueError, match=r"in the middle of a causal text.*lln\.hf\.convert\(model\) leaves"
    ) as problem:
        fresh.set_attn_implementation("lln")
    sentence(problem)
    assert torch.equal(run(fresh, given), run(make(kind)[0], given))
    generated = model.generate(**given, max_new_tokens=3, do_sample=False)  # with a cache of keys and values
    assert generated.shape[1] == given["input_ids"].shape[1] + 3


def test_a_pooling_head_keeps_its_attention_which_is_linear() -> None:
    model = tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION)).to(torch.float64).eval()
    lln.hf.convert(model, "lln")
    model.set_attn_implementation("lln_diag")
    out = model(pixel_values=draw(2, 3, 16, 16))
    by_hand = model.head(out.last_hidden_state)
    assert torch.equal(out.pooler_output, by_hand)
    assert isinstance(model.head.attention, torch.nn.MultiheadAttention)


def test_a_model_without_attention_is_told_so_and_one_around_it_is_converted() -> None:
    with pytest.raises(ValueError, match="ResNetModel has no attention; use it as it is") as problem:
        lln.hf.convert(tf.ResNetModel(tf.ResNetConfig(**RESNET)))
    sentence(problem)
    model, given = make("detr")
    with expect_guess():
        model.set_attn_implementation("lln")
    assert len(find_running(model)) == LAYERS["detr"]
    assert run(model, given).isfinite().all()


def test_parts_that_mask_single_pairs_by_themselves_stay() -> None:
    vision = {"model_type": "pixtral", **VISION, "head_dim": 8}
    config = tf.LlavaConfig(
        text_config=LLAMA, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    model = tf.LlavaForConditionalGeneration(config).to(torch.float64).eval()
    with expect_guess(), pytest.warns(UserWarning, match="PixtralVisionModel keeps its softmax attention"):
        lln.hf.convert(model, "lln")
    assert all("language_model" in name for name in find_running(model))
    given = story(16) | {"image_sizes": torch.tensor([[16, 16], [16, 16]])}
    assert run(model, given).isfinite().all()
    with pytest.raises(ValueError, match="by a mask of single pairs") as problem:
        lln.hf.convert(tf.PixtralVisionModel(tf.PixtralVisionConfig(**VISION, head_dim=8)))
    sentence(problem)


@pytest.mark.parametrize("kind", ["clip", "siglip", "captions", "llava"])
def test_models_without_last_hidden_states_are_fine_tuned(kind: str) -> None:
    softmax, given = make(kind)
    model, losses = copy.deepcopy(softmax), []
    convert(kind, model, "lln_diag", block_size=4)
    lln.hf.fine_tune(model, softmax, [given], steps=15, progress=lambda done, loss: losses.append(loss))
    assert 0 < losses[-1] < losses[0]


def test_padding_of_a_text_beside_a_picture_does_not_count_in_fine_tuning() -> None:
    softmax, given = make("clip")
    model = convert("clip", copy.deepcopy(softmax))
    found = []
    for filler in (0, 7):
        ids = given["input_ids"].masked_fill(given["attention_mask"] == 0, filler)
        lln.hf.fine_tune(
            copy.deepcopy(model), softmax, [given | {"input_ids": ids}], steps=1,
            progress=lambda done, loss: found.append(loss),
        )  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_model_that_gives_nothing_to_compare_is_told_so() -> None:
    class Silent(tf.BertModel):
        def forward(self, **given: Any) -> Any:
            return {}

    model = lln.hf.convert(Silent(build_model("bert").config), "lln")
    with pytest.raises(ValueError, match="Silent gives neither hidden states") as problem:
        lln.hf.fine_tune(model, copy.deepcopy(model), [{"input_ids": words()}], steps=1)
    sentence(problem)


def test_a_module_that_does_not_say_so_is_not_causal() -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module, part = Plain(), torch.nn.Sequential(Plain())
    assert not is_causal(module, "0", part)
    setattr(module, "is_causal", True)  # noqa: B010
    assert is_causal(module, "0", part)


def test_a_part_that_adds_a_bias_to_its_scores_stays_as_it_is() -> None:
    text = tf.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=61)
    queries = {**TEXT, "encoder_hidden_size": 32}
    config = tf.Blip2Config(vision_config=VISION, qformer_config=queries, num_query_tokens=5, text_config=text)
    model = tf.Blip2ForConditionalGeneration(config)
    with pytest.warns(UserWarning, match=r"T5.* keeps its softmax attention.*adds a position_bias"):
        lln.hf.convert(model, "lln", statistics="fixed")
    assert {name.split(".")[0] for name in find_running(model)} == {"vision_model", "qformer"}


def test_a_part_that_is_not_there_is_named() -> None:
    model = build_model("bert", "sdpa")
    with pytest.raises(ValueError, match=r"{'text_config': 'lln'}: BertModel has no such part; it has ''") as problem:
        model.set_attn_implementation({"text_config": "lln"})
    sentence(problem)
    assert model.config._attn_implementation == "sdpa"
