"""diffusers' models with LLN attention: every processor goes on to do its own work, around eq. (8) in the place of
softmax; cross attention stays."""

import copy
import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor, nn

import lln.diffusers
from helpers.command import assert_sentence, run_command
from helpers.hf_models import sentence
from helpers.picture_files import make_pictures
from helpers.tensors import normal, relative_error
from lln.instruments import record
from lln.lab.inspect.inspection import inspect_batches
from lln.lab.inspect.subject import catch_calls
from lln.naive import naive_lln, naive_lln_diag

BLOCK = 5
SMALL: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
IMAGE = {"sample_size": 8, "norm_num_groups": 1}
STEPS = torch.tensor([3, 40])
Case = tuple[Any, dict[str, Any]]


def make_dit() -> Case:
    model = diffusers.DiTTransformer2DModel(**SMALL, **IMAGE)
    return model, {"hidden_states": normal(0, 2, 4, 8, 8), "timestep": STEPS, "class_labels": torch.tensor([1, 2])}


def make_unet() -> Case:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=2, norm_num_groups=4,
    )  # fmt: skip
    return model, {"sample": normal(0, 2, 4, 16, 16), "timestep": STEPS, "encoder_hidden_states": normal(1, 2, 7, 12)}


def make_sd3() -> Case:
    model = diffusers.SD3Transformer2DModel(
        **SMALL, sample_size=16, patch_size=2, joint_attention_dim=12, caption_projection_dim=16, out_channels=4,
        pooled_projection_dim=10, pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": normal(0, 2, 4, 16, 16), "encoder_hidden_states": normal(1, 2, 5, 12),
        "pooled_projections": normal(2, 2, 10), "timestep": STEPS,
    }  # fmt: skip


def make_flux() -> Case:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    places = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], 1).double()
    return model, {
        "hidden_states": normal(0, 2, 16, 4), "encoder_hidden_states": normal(1, 2, 5, 12), "timestep": STEPS / 100,
        "pooled_projections": normal(2, 2, 10), "img_ids": places, "txt_ids": torch.zeros(5, 3).double(),
    }  # fmt: skip


def make_pixart() -> Case:
    model = diffusers.PixArtTransformer2DModel(
        **SMALL, **IMAGE, cross_attention_dim=16, caption_channels=12, use_additional_conditions=False
    )
    return model, {
        "hidden_states": normal(0, 2, 4, 8, 8), "encoder_hidden_states": normal(1, 2, 6, 12), "timestep": STEPS,
        "encoder_attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


MODELS: dict[str, Callable[[], Case]] = {
    "dit": make_dit, "unet": make_unet, "sd3": make_sd3, "flux": make_flux, "pixart": make_pixart,
}  # fmt: skip


def build(name: str) -> Case:
    torch.manual_seed(0)
    model, given = MODELS[name]()
    with torch.no_grad():  # at its start attention is so flat that softmax and LLN look alike
        for path, parameter in model.named_parameters():
            if "to_q.weight" in path or "to_k.weight" in path:
                parameter *= 8
    return model.double().eval(), given


def run(case: Case) -> Tensor:
    out: Tensor = case[0](**case[1]).sample
    return out


def record_calls(case: Case) -> Iterator[tuple[Any, Tensor, Tensor, Tensor, Any, Tensor]]:
    """(module, query, key, value, key_mask, output) of each call of an LLNAttention."""
    calls: list[Any] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        calls.append((module, *args, kwargs["key_mask"], output))

    handles = [
        m.register_forward_hook(hook, with_kwargs=True) for m in case[0].modules() if isinstance(m, lln.LLNAttention)
    ]
    run(case)
    for handle in handles:
        handle.remove()
    yield from calls


@pytest.mark.parametrize("implementation", ["lln", "lln_diag"])
@pytest.mark.parametrize("name", MODELS)
def test_models_attend_by_eq_8(name: str, implementation: str) -> None:
    case = build(name)
    before = run(case)
    options = {"block_size": BLOCK} if implementation == "lln_diag" else {}
    assert lln.diffusers.convert(case[0], implementation, **options) is case[0]
    count = 0
    for module, q, k, v, key_mask, out in record_calls(case):
        assert key_mask is None
        alpha, beta = lln.match_moments(q.flatten(2).std(-1), k.flatten(2).std(-1), q.shape[-1])
        wanted = naive_lln_diag(q, k, v, alpha, beta, BLOCK) if options else naive_lln(q, k, v, alpha, beta)
        assert relative_error(out, wanted) < 1e-12
        count += 1
        assert module.num_heads == 2
    assert count == {"dit": 2, "unet": 4, "sd3": 3, "flux": 2, "pixart": 2}[name]
    assert relative_error(run(case), before) > 1e-4


def test_everything_but_the_attention_is_the_models_own() -> None:
    """With softmax attention of all keys in the one block, a converted model is the one it was."""
    for name in MODELS:
        case = build(name)
        before = run(case)
        lln.diffusers.convert(case[0], "lln_diag", block_size=1000, mix=0.0)
        assert relative_error(run(case), before) < 1e-12


def test_cross_attention_stays_and_processors_can_be_told_apart() -> None:
    model, _ = build("unet")
    mine = {name: module.processor for name, module in lln.diffusers.find_attention(model)}
    theirs = set(mine.values())
    lln.diffusers.convert(model)
    for name, module in lln.diffusers.find_attention(model):
        if name.endswith("attn2"):
            assert module.processor is mine[name]
            assert not hasattr(module, "lln")
        else:
            assert isinstance(module.processor, lln.diffusers.Processor)
            assert module.processor.inner in theirs
            found, wanted = (inspect.signature(p.__call__) for p in (module.processor, mine[name]))
            assert found == wanted
    assert repr(lln.diffusers.make_processor(JointAttnProcessor2_0())) == "Processor(JointAttnProcessor2_0)"


def test_text_that_is_hidden_is_not_seen_in_joint_attention() -> None:
    layer = Attention(16, heads=2, dim_head=8, processor=AttnProcessor()).double().eval()
    lln.diffusers.convert(nn.ModuleDict({"attn1": layer}), block_size=BLOCK)
    assert isinstance(layer.processor.inner, AttnProcessor2_0)
    x = normal(0, 2, 12, 16)
    shown = torch.arange(12) < torch.tensor([[12], [8]])
    added = torch.zeros(2, 12).double().masked_fill(~shown, -10000.0)
    out = layer(x, attention_mask=added[:, None])
    assert relative_error(out[1:, :8], layer(x[1:, :8])) < 1e-12
    with pytest.raises(ValueError, match="attn_mask must be padding") as problem:
        layer(x, attention_mask=torch.zeros(2, 12, 12).double())
    sentence(problem)
    with pytest.raises(ValueError, match="as float may hold 0 and -inf") as problem:
        layer(x, attention_mask=added[:, None] / 100000)
    sentence(problem)


def test_what_cannot_be_is_refused_and_left_as_it_was() -> None:
    both = Attention(16, heads=2, dim_head=8, added_kv_proj_dim=12).double()
    scaled = Attention(16, heads=2, dim_head=8, scale_qk=False)
    across = Attention(16, heads=2, dim_head=8, cross_attention_dim=12)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (nn.ModuleDict({"attn": both}), {}, "from queries of the image alone"),
        (nn.ModuleDict({"attn": scaled}), {}, "does not divide its scores by the root of the head size"),
        (nn.ModuleDict({"attn": across}), {}, "no self attention or joint attention"),
        (nn.Linear(2, 2), {}, "Linear has no self attention or joint attention"),
        (build("dit")[0], {"tile": 4}, "tile is not supported in models of diffusers"),
        (build("dit")[0], {"implementation": "lln", "mix": 0.2}, "mix goes with implementation='lln_diag'"),
        (build("dit")[0], {"matching": "data"}, "matching must be"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message) as problem:
            lln.diffusers.convert(model, **options)
        sentence(problem)
        assert not any(isinstance(module, lln.LLNAttention) for module in model.modules())
    with pytest.raises(TypeError, match=r"such as pipe\.transformer or pipe\.unet of a pipeline; got str"):
        lln.diffusers.convert("pipe")


def test_what_was_learned_is_saved_with_the_model_and_not_lost() -> None:
    model, _ = build("dit")
    lln.diffusers.convert(model, "lln_diag", learnable="head", mix="ratio")
    held = [name for name in model.state_dict() if ".lln." in name]
    assert held[:2] == ["transformer_blocks.0.attn1.lln.log_alpha", "transformer_blocks.0.attn1.lln.log_beta"]
    with pytest.raises(ValueError, match=r"what LLN attention has learned in .* would be lost") as problem:
        lln.diffusers.convert(model, "lln")
    sentence(problem)
    model, given = build("dit")
    lln.diffusers.convert(lln.diffusers.convert(model, "lln_diag"), "lln")
    other = build("dit")
    lln.diffusers.convert(other[0], "lln")
    assert torch.equal(run((model, given)), run(other))


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_copies_and_pickles_are_the_same_model(name: str) -> None:
    model, given = build(name)
    lln.diffusers.convert(model, block_size=BLOCK)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run((made, given)), run((model, given)))


def test_record_sees_self_attention_and_cross_attention() -> None:
    case = build("unet")
    before = run(case)
    with record(case[0], instruments=["entropy"]) as rec:
        assert torch.equal(run(case), before)
    assert {row["attention"] for row in rec.rows()} == {"softmax"}
    layers = [row["layer"] for row in rec.rows()]
    lln.diffusers.convert(case[0], "lln_diag", block_size=BLOCK)
    with record(case[0], instruments=["entropy"]) as rec:
        run(case)
    assert sorted(row["layer"] for row in rec.rows()) == sorted(layers)
    for row in rec.rows():
        assert row["attention"] == ("lln_diag" if row["layer"].endswith("attn1") else "softmax")


def test_inspect_compares_lln_with_the_softmax_attention_of_a_model() -> None:
    model, given = build("sd3")
    found = inspect_batches(model, [given])
    assert len(found["layers"]) == 3
    for row in found["rows"]:
        assert abs(row["lln"]["data"]["entropy_difference"]) < 0.1


def make_classes() -> Any:
    """A pipeline that makes pictures of classes."""
    shape = {**SMALL, **IMAGE, "out_channels": 8}
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, latent_channels=4)
    return diffusers.DiTPipeline(diffusers.DiTTransformer2DModel(**shape), vae, diffusers.DDIMScheduler())


def make_prompted() -> Any:
    """A pipeline that makes pictures of texts, each of which is one of a few letters to it."""
    ends = ["<|startoftext|>", "<|endoftext|>"]
    letters = [letter + end for letter in "abcdefgh" for end in ("", "</w>")]
    words = {"vocab_size": 18, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "hidden_size": 12}
    config = transformers.CLIPTextConfig(
        **words, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    )
    unet, _ = make_unet()
    return diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, latent_channels=4),
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(
            vocab={word: at for at, word in enumerate([*ends, *letters])}, merges=[], model_max_length=8
        ),
        unet=unet, scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def make_unconditional() -> Any:
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, attention_head_dim=8, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())


@pytest.mark.parametrize(
    ("make", "arguments", "shown", "tokens", "layers"),
    [
        (make_classes, [], ["class 0", "class 1", "class 2", "class 3"], [16] * 4 * 2 * 3, 2),  # 2: with and without it
        (make_prompted, ["--text", "a b", "--text", "c"], ["a b", "c"], [64] * 2 * 2 * 3, 8),
        (make_unconditional, ["--batch-size", "2"], ["sample 0", "sample 1", "sample 2", "sample 3"], [16] * 4 * 3, 4),
    ],
)
def test_the_command_inspects_what_a_pipeline_does(
    make: Callable[[], Any], arguments: list[str], shown: list[str], tokens: list[int], layers: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "pipeline")
    answer = run_command(
        "inspect", tmp_path / "pipeline", *arguments, "--json", "--out", tmp_path / "out"
    )  # fmt: skip
    assert (answer.exit_code, answer.stderr.strip()) == (0, "")
    found = json.loads(answer.stdout)
    assert (found["texts"], found["tokens"], len(found["layers"])) == (shown, tokens, layers)
    for row in found["rows"]:
        assert 0 < row["entropy"] <= row["max_entropy"] + 1e-9
    assert f"{len(shown)} " in (tmp_path / "out" / "index.html").read_text()


def test_what_a_pipeline_cannot_be_asked_for_is_one_sentence(tmp_path: Path) -> None:
    make_classes().save_pretrained(tmp_path / "pipeline")
    make_pictures(tmp_path / "pictures", 1)
    for place, arguments, words in (
        ("pipeline/transformer", [], "is one part of a diffusers pipeline (DiTTransformer2DModel)"),
        ("pipeline", ["--text", "a cat"], "(DiTPipeline) takes no prompt; leave it out"),
        ("pipeline", ["--images", tmp_path / "pictures"], "makes pictures and takes none"),
    ):
        answer = run_command("inspect", tmp_path / place, *arguments, "--out", tmp_path / "out")
        assert_sentence(answer.stderr, words, command="lln inspect")


def test_a_pipeline_gives_its_model_what_it_gives_without_us(tmp_path: Path) -> None:
    """What is seen is what the model is called with in a generation of the same seed."""
    pipe = make_prompted()
    pipe.set_progress_bar_config(disable=True)
    seen: list[Any] = []
    calls = catch_calls(pipe.unet, lambda: seen.append(pipe("a", num_inference_steps=2, output_type="latent",
        generator=torch.Generator().manual_seed(0)).images))  # fmt: skip
    again = pipe("a", num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0)).images
    assert len(calls) == 2
    assert torch.equal(seen[0], again)
    assert {"sample", "timestep", "encoder_hidden_states"} <= set(calls[0])
    assert not pipe.unet._forward_pre_hooks


@pytest.mark.long
@pytest.mark.parametrize("name", ["dit", "sd3"])
def test_it_is_one_graph(name: str) -> None:
    model, given = build(name)
    lln.diffusers.convert(model, block_size=BLOCK)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(run((compiled, given)), run((model, given))) < 1e-10
