"""timm's vision transformers with LLN attention: their own layers and weights, and eq. (8) in the place of softmax."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.layers import Attention
from torch import Tensor, nn

import lln.timm
from helpers.command import assert_sentence, run_command
from helpers.hf_models import sentence
from helpers.picture_files import make_pictures
from helpers.tensors import normal, relative_error
from lln.instruments import record
from lln.lab.inspect.inspection import inspect_batches
from lln.naive import naive_lln, naive_lln_diag
from lln.nn.plug import BLOCK_SIZE

SHAPE: dict[str, Any] = {
    "img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3,
}  # fmt: skip
WIDE = torch.float64


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**SHAPE | changes).to(WIDE).eval()
    with torch.no_grad():  # at its start attention is so flat that softmax and LLN look alike
        for name, parameter in model.named_parameters():
            if "qkv.weight" in name:
                parameter *= 20
    return model


def pictures(*size: int) -> Tensor:
    return normal(1, 2, 3, *(size or (32, 32)))


def project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of timm's own layer, by its weights."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return layer.q_norm(q), layer.k_norm(k), v


def find_coefficients(q: Tensor, k: Tensor) -> tuple[Any, Any]:
    return lln.match_moments(q.flatten(2).std(-1), k.flatten(2).std(-1), q.shape[-1])


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "norm_layer": nn.LayerNorm}, {"attn_head_dim": 10}])
@pytest.mark.parametrize("implementation", ["lln", "lln_diag"])
def test_a_layer_is_timms_with_eq_8_in_it(implementation: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = lln.timm.make_layer(implementation)(24, num_heads=3, qkv_bias=True, **options).to(WIDE).eval()
    theirs = Attention(24, num_heads=3, qkv_bias=True, **options).to(WIDE)
    assert isinstance(layer, Attention)
    assert {n: p.shape for n, p in layer.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    layer.load_state_dict(theirs.state_dict())
    x = normal(0, 2, 70, 24)
    q, k, v = project(theirs, x)
    reference = naive_lln if implementation == "lln" else naive_lln_diag
    blocks = () if implementation == "lln" else (BLOCK_SIZE,)
    attended = reference(q, k, v, *find_coefficients(q, k), *blocks)
    assert relative_error(layer(x), theirs.proj(attended.transpose(1, 2).flatten(2))) < 1e-12


def test_weights_load_exactly_into_a_model_with_our_layer() -> None:
    base = build()
    model = timm.models.VisionTransformer(attn_layer=lln.timm.make_layer("lln_diag", block_size=9), **SHAPE)
    model.to(WIDE).eval().load_state_dict(base.state_dict())
    wanted = lln.timm.convert(copy.deepcopy(base), "lln_diag", block_size=9)
    assert torch.equal(model(pictures()), wanted(pictures()))
    assert not torch.equal(model(pictures()), base(pictures()))
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=lln.timm.make_layer("lln"), img_size=48, depth=1)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 1000)


@pytest.mark.parametrize(
    "changes",
    [{}, {"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}, {"no_embed_class": True, "reg_tokens": 2}],
)
def test_tiles_are_neighbours_and_other_tokens_see_all(changes: dict[str, Any]) -> None:
    """The softmax part alone, against softmax over the pairs that a tile allows."""
    base = build(dynamic_img_size=True, **changes)
    model = lln.timm.convert(copy.deepcopy(base), "lln_diag", tile=3, mix=0.0)
    prefix = base.num_prefix_tokens
    for height, width in ((8, 8), (5, 7)):
        rows, columns = (torch.arange(n) * -(-n // 3) // n for n in (height, width))
        tile = torch.cat([torch.full((prefix,), -1), (rows[:, None] * 10 + columns).flatten()])
        seen = (tile[:, None] == tile) | (tile[:, None] < 0) | (tile < 0)
        x, layer = base.patch_embed(pictures(4 * height, 4 * width)), model.blocks[0].attn
        x = base._pos_embed(x)
        q, k, v = project(layer, x)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        model.patch_embed(pictures(4 * height, 4 * width))
        found = layer(x)
        assert relative_error(found, layer.proj(wanted.transpose(1, 2).flatten(2))) < 1e-12


def test_calls_that_are_no_image_are_refused() -> None:
    model = lln.timm.convert(build(), tile=3)
    with pytest.raises(
        ValueError, match=r"65 tokens of VisionTransformer are not 1 special tokens and .* \(none so far\)"
    ) as problem:
        model.blocks[0].attn(normal(0, 1, 65, 32))
    sentence(problem)
    assert model(pictures()).shape == (2, 3)
    dropping = lln.timm.convert(build(patch_drop_rate=0.5), tile=3).train()
    with pytest.raises(ValueError, match="33 tokens of VisionTransformer are not 1 special tokens and") as problem:
        dropping(pictures())
    sentence(problem)


def test_masks_are_padding_or_refused() -> None:
    layer, x = build().blocks[0].attn, normal(0, 2, 20, 32)
    lln.timm.convert(layer_model := nn.Sequential(layer), "lln_diag", block_size=6)
    layer = layer_model[0]
    shown = torch.arange(20) < torch.tensor([[20], [13]])
    found = layer(x, attn_mask=shown[:, None, None])
    assert relative_error(found[1:, :13], layer(x[1:, :13])) < 1e-12
    with pytest.raises(ValueError, match="attn_mask must be padding") as problem:
        layer(x, attn_mask=torch.ones(20, 20, dtype=torch.bool).tril())
    sentence(problem)
    with pytest.raises(ValueError, match="statistics='sample'") as problem:
        layer(x, is_causal=True)
    fixed = lln.timm.convert(nn.Sequential(build().blocks[0].attn), "lln_diag", block_size=6, statistics="fixed")[0]
    assert relative_error(fixed(x, is_causal=True)[:, :9], fixed(x[:, :9], is_causal=True)) < 1e-12


@pytest.mark.parametrize(
    ("name", "options"),
    [("eva02_tiny_patch14_224", {"img_size": 56}), ("vit_small_patch16_dinov3", {"img_size": 64}),
     ("vit_base_patch16_siglip_224", {"img_size": 64}), ("deit_tiny_distilled_patch16_224", {"img_size": 64})],
)  # fmt: skip
def test_other_models_of_these_layers_are_converted(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, embed_dim=192, num_heads=3, **options).eval()
    x = torch.randn(1, 3, options["img_size"], options["img_size"])
    before = model(x)
    lln.timm.convert(model, "lln_diag", tile=2)
    assert [m.lln.tile for m in model.modules() if isinstance(m, lln.timm.Linearised)] == [2]
    with record(model, instruments=["entropy"]) as rec:
        after = model(x)
    assert {row["attention"] for row in rec.rows() if row["layer"] == "blocks.0.attn"} == {"lln_diag"}
    assert not torch.equal(before, after)


def test_models_of_other_attention_are_refused_and_left() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for name, message in (
        ("swin_tiny_patch4_window7_224", "WindowAttention .* is none of"),
        ("resnet18", "nothing can be converted"),
    ):
        model = timm.create_model(name, **({"img_size": 32, "window_size": 2} if "swin" in name else {})).eval()
        before = model(x)
        with pytest.raises(ValueError, match=message) as problem:
            lln.timm.convert(model)
        sentence(problem)
        assert torch.equal(model(x), before)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Sequential(Attention(32)), {"tile": 2}, "has no patch_embed.proj that cuts an image"),
        (build(), {"statistics": "running", "alpha": 1.0, "beta": 1.0}, "go with statistics='fixed'"),
        (build(), {"implementation": "softmax"}, "implementation must be"),
    ]
    for model, options, message in wrong:
        with pytest.raises(ValueError, match=message) as problem:
            lln.timm.convert(model, **options)
        sentence(problem)
        assert not any(isinstance(m, lln.timm.Linearised) for m in model.modules())
    with pytest.raises(ValueError, match="build the model first, and then call") as problem:
        lln.timm.make_layer(tile=3)
    sentence(problem)
    with pytest.raises(TypeError, match="model must be a timm model"):
        lln.timm.convert("vit")


def test_what_was_learned_is_not_lost() -> None:
    model = lln.timm.convert(build(), "lln_diag", mix="scales")
    assert "blocks.0.attn.lln.lln_scale" in model.state_dict()
    with pytest.raises(ValueError, match=r"learned in blocks\.0\.attn would be lost") as problem:
        lln.timm.convert(model, "lln")
    sentence(problem)
    model = lln.timm.convert(lln.timm.convert(build(), "lln_diag", block_size=5), "lln")
    assert relative_error(model(pictures()), lln.timm.convert(build(), "lln")(pictures())) == 0


def test_copies_and_pickles_are_the_same_model() -> None:
    model = lln.timm.convert(build(dynamic_img_size=True), "lln_diag", tile=3)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    for made in copies:
        for size in ((32, 32), (20, 28)):
            assert torch.equal(made(pictures(*size)), model(pictures(*size)))
        assert (
            made.blocks[0].attn.lln.patches is made.blocks[1].attn.lln.patches is not model.blocks[0].attn.lln.patches
        )


@pytest.mark.long
def test_gradients_reach_the_projections_and_it_is_one_graph() -> None:
    model = lln.timm.convert(build(), "lln_diag", tile=3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for one in (model, compiled):
        model.zero_grad()
        one(pictures()).square().sum().backward()
        found.append(torch.cat([block.attn.qkv.weight.grad.flatten() for block in model.blocks]))
    assert relative_error(found[1], found[0]) < 1e-10
    assert float(found[0].abs().min()) > 0


@pytest.mark.parametrize("converted", [False, True])
def test_record_sees_the_attention(converted: bool) -> None:
    model, x = build(), pictures()
    if converted:
        lln.timm.convert(model, "lln_diag", tile=3)
    before = model(x)
    with record(model, keep=True, samples=None) as rec:
        assert torch.equal(model(x), before)
    assert [(row["layer"], row["head"]) for row in rec.rows()] == [
        (f"blocks.{i}.attn", h) for i in (0, 1) for h in range(4)
    ]
    _, _, seen = rec.observations[0]
    layer = model.blocks[0].attn
    q, _, v = project(layer, model.blocks[0].norm1(model._pos_embed(model.patch_embed(x))))
    assert torch.equal(seen.query, q)
    p = seen.map().dense()
    assert relative_error(layer.proj((p @ v).transpose(1, 2).flatten(2)), layer(model.blocks[0].norm1(
        model._pos_embed(model.patch_embed(x))))) < 1e-12  # fmt: skip


def test_inspect_compares_lln_with_the_softmax_attention_of_a_model() -> None:
    found = inspect_batches(build(), [{"x": pictures()}])
    assert [row["label"] for row in found["layers"]] == ["0", "1"]
    for row in found["rows"]:
        assert row["attention"] == "softmax"
        assert abs(row["lln"]["data"]["entropy_difference"]) < 0.1
        assert row["lln"]["paper"]["alpha"] > 0


def test_the_command_inspects_a_saved_model_on_pictures(tmp_path: Path) -> None:
    shape = {**SHAPE, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **shape).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
    timm.models.save_for_hf(model, str(tmp_path / "vit"), model_args=shape)
    files = make_pictures(tmp_path / "pictures", 3)
    answer = run_command(
        "inspect", tmp_path / "vit", "--images", tmp_path / "pictures", "--batch-size", 2, "--json",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["texts"], found["tokens"]) == ([file.name for file in files], [65] * 3)
    half, how = (0.5, 0.5, 0.5), {"interpolation": "bicubic", "crop_pct": 0.9, "is_training": False}
    prepare = timm.data.create_transform((3, 32, 32), mean=half, std=half, **how)
    x = torch.stack([prepare(Image.open(file)) for file in files])
    for row, wanted in zip(found["rows"], inspect_batches(model, [{"x": x}])["rows"], strict=True):
        assert row["entropy"] == pytest.approx(wanted["entropy"], abs=1e-5)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "3 pictures of 195 tokens together" in page
    answer = run_command("inspect", tmp_path / "vit", "--text", "a cat", "--out", tmp_path / "out")
    assert_sentence(answer.stderr, "is a model of timm, which sees pictures; name a folder", command="lln inspect")
