"""Tiles of image models are softmax attention among neighbouring patches and the tokens that are no patches, mixed with
LLN attention, in the tokens' own order."""

import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import lln.hf
from helpers.hf_models import BERT, VISION, build_model, output, record_calls, sentence, tokens
from helpers.tensors import relative_error
from lln.checks import Inputs, check_inputs
from lln.hf.attach import ModelAttention
from lln.hf.interface import collect_nothing
from lln.instruments import entropy, lln_map, record, spectral_gap
from lln.naive import naive_lln
from lln.nn.tiles import MOST_GRIDS, Patches, cut_tiles, find_tiles, keep_tiles, tiled_attention

WIDE = torch.float64
CPU = torch.device("cpu")
ALPHA, BETA = 1.3, 0.8
Cut = tuple[list[int], list[int]]  # how many rows, and how many columns, the tiles have one after another
# (grid, other tokens, tile, how it is to be cut)
GRIDS: list[tuple[tuple[int, int], int, int, Cut]] = [
    ((5, 7), 1, 3, ([3, 2], [3, 2, 2])),
    ((14, 14), 2, 8, ([7, 7], [7, 7])),
    ((3, 3), 5, 8, ([3], [3])),
    ((4, 6), 0, 2, ([2, 2], [2, 2, 2])),
    ((1, 9), 1, 4, ([1], [3, 3, 3])),
    ((5, 5), 0, 1, ([1] * 5, [1] * 5)),
]


def may_see(cut: Cut, prefix: int) -> Tensor:
    """[N, N]: patch by patch, whether the two are in the same tile or one of them is no patch."""
    rows, columns = ([i for i, size in enumerate(sizes) for _ in range(size)] for sizes in cut)
    places: list[Any] = [None] * prefix + [(row, column) for row in rows for column in columns]
    return torch.tensor([[a is None or b is None or a == b for b in places] for a in places])


def reference(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, alpha: Any = ALPHA, beta: Any = BETA, scale: float | None = None
) -> Tensor:
    """Half LLN attention by its equation, half softmax over the pairs that `seen` [N, N] or [B, 1, N, N] allows."""
    key_mask = seen.any(-2).expand(len(q), 1, -1)[:, 0]
    linear = naive_lln(q, k, v, alpha, beta, key_mask=key_mask)
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q.double() @ k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return 0.5 * linear + 0.5 * p @ v


def make_tensors(length: int, heads: int = 4, key_heads: int = 2, dim: int = 6, dtype: torch.dtype = WIDE) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, dim), (key_heads, dim), (key_heads, dim - 1)
    made = (torch.randn(2, h, length, d, generator=generator, dtype=WIDE).mul(1.5).to(dtype) for h, d in shapes)
    return [t.requires_grad_() for t in made]


def attend(qkv: Sequence[Tensor], grid: tuple[int, int], prefix: int, tile: int, mask: Tensor | None = None) -> Tensor:
    query, key, value = qkv
    inputs: Inputs = check_inputs(query, key, value, key_mask=mask, cu_seqlens=None)
    tiles = find_tiles(grid, prefix, tile, CPU)
    return tiled_attention(inputs, ALPHA, BETA, tiles, block_size=tile**2, mix=0.5, scale=None)


@pytest.mark.parametrize(("grid", "prefix", "tile", "cut"), GRIDS)
def test_tiles_are_softmax_in_both_directions(grid: tuple[int, int], prefix: int, tile: int, cut: Cut) -> None:
    q, k, v = make_tensors(prefix + grid[0] * grid[1])
    found, wanted = attend([q, k, v], grid, prefix, tile), reference(q, k, v, may_see(cut, prefix))
    assert relative_error(found, wanted) < 1e-12
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=WIDE).view_as(wanted)
    pairs = (torch.autograd.grad(one, (q, k, v), weight) for one in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        assert relative_error(mine, theirs) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    (grid, prefix, tile, cut) = GRIDS[0]
    q, k, v = (t.detach() for t in make_tensors(36, key_heads=4, dtype=dtype))
    wanted = reference(q, k, v, may_see(cut, prefix))
    softmax = torch.nn.functional.scaled_dot_product_attention
    plain = softmax(q, k, v, may_see(cut, prefix)), softmax(q.double(), k.double(), v.double(), may_see(cut, prefix))
    found = attend([q, k, v], grid, prefix, tile)
    assert found.dtype == dtype
    assert relative_error(found, wanted) < 2 * relative_error(*plain)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_every_patch_is_in_one_rectangle(prefix: int) -> None:
    for height, width, tile in itertools.product((1, 2, 5, 14, 37), (1, 3, 16, 33), (1, 2, 7, 8, 40)):
        tiles = cut_tiles(height, width, prefix, tile, CPU)
        assert tiles.owner[:prefix].tolist() == [-1] * prefix
        owner = tiles.owner[prefix:].view(height, width)
        sides = []
        for number in range(len(tiles.tokens)):
            rows, columns = (owner == number).nonzero(as_tuple=True)
            high, wide = (int(t.max() - t.min()) + 1 for t in (rows, columns))
            assert len(rows) == high * wide
            sides.append((high, wide))
        for lengths, side in zip(zip(*sides, strict=True), (height, width), strict=True):
            assert max(lengths) <= tile
            assert max(lengths) - min(lengths) <= 1
            assert max(lengths) == math.ceil(side / math.ceil(side / tile))
        assert len(tiles.tokens) == math.ceil(height / tile) * math.ceil(width / tile)
        # Where a patch went is where it is found, and a slot says whether it holds one.
        flat = tiles.tokens.flatten()[tiles.slots]
        assert flat.tolist() == list(range(prefix, prefix + height * width))
        filled = tiles.tokens.numel() if tiles.filled is None else int(tiles.filled.sum())
        assert filled == height * width


def test_an_image_turned_over_gives_its_rows_turned_over() -> None:
    height, width, prefix = 5, 7, 2
    q, k, v = make_tensors(prefix + height * width)
    at = torch.arange(prefix, prefix + height * width).view(height, width).T.flatten()
    order = torch.cat([torch.arange(prefix), at])
    turned = attend([t[:, :, order] for t in (q, k, v)], (width, height), prefix, 3)
    assert relative_error(turned, attend([q, k, v], (height, width), prefix, 3)[:, :, order]) < 1e-12


def test_hidden_patches_are_invisible() -> None:
    grid, prefix, tile, cut = GRIDS[0]
    q, k, v = make_tensors(36)
    mask = torch.ones(2, 36, dtype=torch.bool)
    mask[0, 3:20:2] = False
    mask[1] = False
    mask[1, 1:4] = True  # a part of the first tile, and not the class token: rows elsewhere have no neighbour
    found = attend([q, k, v], grid, prefix, tile, mask)
    seen = may_see(cut, prefix) & mask[:, None, None]
    assert bool((~seen.any(-1)).any())
    assert relative_error(found, reference(q, k, v, seen)) < 1e-12
    other = [torch.where(mask[:, None, :, None], t, 7.0) for t in (k, v)]
    assert torch.equal(attend([q, *other], grid, prefix, tile, mask), found)


def test_the_class_token_sees_all_and_is_seen() -> None:
    grid, prefix, tile, _ = GRIDS[0]
    q, k, _ = (t.detach() for t in make_tensors(36))
    inputs = check_inputs(q, k, torch.eye(36, dtype=WIDE).expand(2, 2, -1, -1), key_mask=None, cu_seqlens=None)
    tiles = find_tiles(grid, prefix, tile, CPU)
    p = tiled_attention(inputs, ALPHA, BETA, tiles, block_size=9, mix=0.0, scale=None)
    assert bool((p[:, :, 0] > 0).all())
    assert bool((p[:, :, :, 0] > 0).all())
    assert bool((p == 0).any())
    assert torch.allclose(p.sum(-1), torch.ones((), dtype=WIDE))


def test_few_grids_are_kept() -> None:
    for width in range(1, MOST_GRIDS + 10):
        find_tiles((1, width), 0, 2, CPU)
    assert keep_tiles.cache_info().currsize <= MOST_GRIDS
    assert find_tiles((1, 9), 0, 4, CPU) is find_tiles((1, 9), 0, 4, CPU)
    with torch.inference_mode():
        kept = find_tiles((3, 9), 0, 4, CPU)
    assert not kept.slots.is_inference()


KINDS = {
    "vit": (tf.ViTConfig, 1),
    "deit": (tf.DeiTConfig, 2),
    "dinov2": (tf.Dinov2Config, 1),
    "registers": (tf.Dinov2WithRegistersConfig, 5),
    "ijepa": (tf.IJepaConfig, 0),
    "clip": (tf.CLIPVisionConfig, 1),
    "dinov3": (tf.DINOv3ViTConfig, 4),
}
FILLED = ([3, 2], [3, 2])  # 5 x 5 patches, tile=3


def build(kind: str, implementation: str | None = "lln_diag", **options: Any) -> Any:
    """A model of 5 x 5 patches in float64."""
    torch.manual_seed(0)
    more = {"num_register_tokens": 3} if kind == "dinov3" else {}
    maker: Any = KINDS[kind][0]
    model = tf.AutoModel.from_config(maker(**VISION, **more), dtype=WIDE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_proj", "k_proj")):
                parameter *= 8
            elif "token" in name or "class_embedding" in name:
                parameter.normal_()
    return model if implementation is None else lln.hf.convert(model, implementation, **options)


def picture(height: int = 20, width: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def check_calls(model: Any, cut: Cut, prefix: int, **given: Any) -> None:
    """Every layer gives the reference, and output_attentions what multiplies the values, in their order."""
    with record_calls() as calls:
        model(**given, output_attentions=True)
    assert len(calls) == VISION["num_hidden_layers"]
    for call in calls:
        alpha, beta = call.module.lln.coefficients(call.q, call.k)
        wanted = reference(call.q, call.k, call.v, may_see(cut, prefix), alpha, beta, call.module.lln.scale)
        assert relative_error(call.out.transpose(1, 2), wanted) < 1e-12
        assert relative_error(call.weights @ call.v, wanted) < 1e-12
        units = torch.eye(call.k.shape[2], dtype=WIDE).expand(*call.k.shape[:2], -1, -1)
        p = reference(call.q, call.k, units, may_see(cut, prefix), alpha, beta, call.module.lln.scale)
        assert relative_error(call.weights, p) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_models_attend_in_tiles(kind: str, tmp_path: Path) -> None:
    prefix = KINDS[kind][1]
    model = build(kind, tile=3)
    check_calls(model, FILLED, prefix, pixel_values=picture())
    out = output(model, pixel_values=picture())
    rows = output(build(kind, block_size=9), pixel_values=picture())
    assert relative_error(out, rows) > 1e-3
    model.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path, dtype=WIDE).eval()
    assert again.config.lln["tile"] == 3
    assert torch.equal(output(again, pixel_values=picture()), out)


def test_images_of_any_shape_are_cut_as_they_are() -> None:
    model = build("registers", tile=3)
    check_calls(model, ([3, 2], [3, 2, 2]), 5, pixel_values=picture(20, 28))
    check_calls(model, ([3, 2, 2], [3, 2]), 5, pixel_values=picture(28, 20))  # as many patches, of another shape
    check_calls(model, ([2], [3, 3, 3]), 5, pixel_values=picture(8, 36))  # so many that a square would be 18
    check_calls(build("vit", tile=8), ([5], [7]), 1, pixel_values=picture(20, 28), interpolate_pos_encoding=True)


def test_all_of_an_image_in_one_tile_is_half_softmax() -> None:
    model = build("deit", tile=5, mix=0.0)
    softmax = build("deit", None)
    assert relative_error(output(model, pixel_values=picture()), output(softmax, pixel_values=picture())) < 1e-10


def test_statistics_count_patches_once() -> None:
    models = build("vit", tile=4), build("vit", block_size=16)  # tiles of 3 x 3, 3 x 2 and 2 x 2 in slots of 9
    with record_calls() as calls:
        for model in models:
            model(pixel_values=picture())
    (first, *_), (second, *_) = calls[:2], calls[2:]
    assert torch.equal(first.q, second.q)
    found = (call.module.lln.coefficients(call.q, call.k) for call in (first, second))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{"mix": "ratio"}, {"mix": "scales", "learnable": "channel"}, {"convolution": 3}])
def test_what_is_learned_gets_gradients(options: Any) -> None:
    model = build("registers", tile=3, **options)
    output(model, pixel_values=picture()).square().sum().backward()
    learned = {name: p for name, p in model.named_parameters() if ".lln." in name}
    assert learned
    assert all(p.grad is not None and bool(p.grad.any()) for p in learned.values())


def test_checkpointed_crops_of_several_shapes_give_the_same_gradients() -> None:
    def gradients(checkpointing: bool) -> list[Tensor]:
        model = build("registers", tile=3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outs = [output(model, pixel_values=picture(*size)) for size in ((20, 28), (12, 12))]
        sum(out.square().sum() for out in outs).backward()  # type: ignore[union-attr]
        return [p.grad for p in model.parameters() if p.grad is not None]

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_instruments_see_tiles() -> None:
    model = build("registers", tile=3)
    with record(model, samples=None) as rec, record_calls() as calls:
        model(pixel_values=picture(), output_attentions=True)
    rows = rec.rows()
    seen = {(row["layer"], row["head"]): row for row in rows}
    for layer, call in zip(sorted({row["layer"] for row in rows}), calls, strict=True):
        p = call.weights
        bits = -(p * p.log2()).sum(-1).mean((0, 2))
        gaps = 1 - torch.linalg.eigvals(p).abs().sort(-1).values[..., -2].mean(0)
        for head in range(4):
            assert seen[layer, head]["entropy"] == pytest.approx(bits[head].item(), rel=1e-9)
            assert seen[layer, head]["spectral_gap"] == pytest.approx(gaps[head].item(), abs=1e-5)


def test_a_map_of_tiles_multiplies_values_as_attention_does() -> None:
    grid, prefix, tile, _ = GRIDS[0]
    q, k, v = (t.detach() for t in make_tensors(36, key_heads=4))
    owner = find_tiles(grid, prefix, tile, CPU).owner
    p = lln_map(q, k, ALPHA, BETA, block_size=tile**2, tiles=owner)
    dense, (group,) = p.dense(), list(p.groups())
    assert relative_error(dense @ v, attend([q, k, v], grid, prefix, tile)) < 1e-12
    flat = dense.flatten(0, 1)
    assert relative_error(group.multiply(v.flatten(0, 1)), flat @ v.flatten(0, 1)) < 1e-12
    assert relative_error(group.multiply_transposed(v.flatten(0, 1)), flat.transpose(1, 2) @ v.flatten(0, 1)) < 1e-12
    assert relative_error(group.diagonal(), flat.diagonal(dim1=1, dim2=2)) < 1e-12
    assert relative_error(entropy(p), -(dense * dense.log2()).sum(-1).mean(-1)) < 1e-12
    largest = torch.linalg.eigvals(dense).abs().sort(-1).values
    assert torch.allclose(spectral_gap(p), 1 - largest[..., -2], atol=1e-6)
    wrongs: tuple[dict[str, Any], ...] = (
        {"tiles": owner[1:]},
        {"tiles": owner.float()},
        {"tiles": owner, "is_causal": True},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="tiles") as problem:
            lln_map(q, k, ALPHA, BETA, **{"block_size": 9, **wrong})
        sentence(problem)


def test_conversion_and_distillation_learn_with_tiles() -> None:
    batches = [{"pixel_values": picture(20, 28, seed)} for seed in range(3)]
    model = build("dinov2", tile=3, matching="data", batches=batches, learnable="channel", mix="ratio")
    losses: list[float] = []
    lln.hf.distill(model, batches, steps=15, progress=lambda done, loss: losses.append(loss))
    assert losses[-1] < 0.9 * losses[0]
    running = build("dinov2", tile=3, statistics="running", batches=batches)
    check_calls(running, FILLED, 1, pixel_values=picture())


def test_a_copy_has_patches_of_its_own_and_pickles() -> None:
    model = build("registers", tile=3)
    out = output(model, pixel_values=picture())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(again, pixel_values=picture()), out)
        output(again, pixel_values=picture(12, 16))
        assert 12 in find_held(again).grids
        assert 12 not in find_held(model).grids


def find_held(model: Any) -> Patches:
    """The one that all layers share."""
    first, *more = [module.patches for module in model.modules() if isinstance(module, ModelAttention)]
    assert isinstance(first, Patches)
    assert all(other is first for other in more)
    return first


def test_compiled_models_have_tiles_of_the_image_that_came() -> None:
    model = build("vit", None)
    del model.layers[1:]  # one shows it, and is traced in half the time
    lln.hf.convert(model, "lln_diag", tile=3)
    with collect_nothing(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for shape in ((20, 28), (28, 20)):  # as many patches in either
            given = {"pixel_values": picture(*shape), "interpolate_pos_encoding": True}
            assert relative_error(output(compiled, **given), output(model, **given)) < 1e-12


def test_blocks_and_tiles_take_each_others_place() -> None:
    model = build("vit", tile=3)
    tiled = output(model, pixel_values=picture())
    lln.hf.convert(model, matching="variance")
    assert model.config.lln["tile"] == 3
    lln.hf.convert(model, matching="paper", block_size=9)
    assert model.config.lln["tile"] is None
    plain = build("vit", block_size=9)
    assert torch.equal(output(model, pixel_values=picture()), output(plain, pixel_values=picture()))
    model.set_attn_implementation("lln")
    model.set_attn_implementation("lln_diag")
    lln.hf.convert(model, tile=3)
    assert torch.equal(output(model, pixel_values=picture()), tiled)
    convolution = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    assert len(convolution._forward_hooks) == 1


def test_what_has_no_tiles_is_refused_and_left_as_it_was() -> None:
    sizes = {**VISION, "decoder_num_hidden_layers": 1, "decoder_hidden_size": 32, "decoder_num_attention_heads": 4}
    models: list[tuple[Any, dict[str, Any], str]] = [
        (build_model("bert", "sdpa"), {"tile": 3}, "does not cut an image into patches"),
        (build_model("llama", "sdpa"), {"tile": 3}, "does not attend within one image"),
        (tf.ViTMAEModel(tf.ViTMAEConfig(**sizes)), {"tile": 3}, "drops patches at random"),
        (tf.YolosModel(tf.YolosConfig(**{**VISION, "image_size": [20, 20]})), {"tile": 3}, "detection_tokens"),
        (build("vit", None), {"tile": 0}, "lln: tile must be a positive int; got 0"),
        (build("vit", None), {"tile": 3, "overlap": True}, "two ways to lay out blocks"),
        (build("vit", None), {"tile": 3, "block_size": 9}, "takes the place of block_size"),
        (build("vit", None), {"implementation": "lln", "tile": 3}, "goes with implementation='lln_diag'"),
        (build("vit", None), {"implementation": "elu", "tile": 3}, "goes with 'lln' and 'lln_diag'"),
    ]
    for model, options, message in models:
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=message) as problem:
            lln.hf.convert(model, **options)
        sentence(problem)
        assert model.config._attn_implementation == before
        assert getattr(model.config, "lln", None) is None
    text = tf.BertModel(tf.BertConfig(**BERT, lln={"implementation": "lln_diag", "tile": 3}))
    with pytest.raises(ValueError, match="does not cut an image into patches"):
        text(input_ids=tokens(0))


def test_calls_that_are_no_image_are_refused() -> None:
    model = build("vit", tile=3)
    attention = next(m for m in model.modules() if isinstance(m, ModelAttention))
    q, k, v = (t.detach() for t in make_tensors(26, key_heads=4, dim=8))
    v = k
    with pytest.raises(ValueError, match=r"26 tokens of ViTModel are not 1 special .* \(none so far\)") as found:
        attention(q, k, v)
    sentence(found)
    model(pixel_values=picture())
    assert attention(q, k, v).shape == q.shape
    assert attention.settings is None  # a GPU that played an earlier call's kernels again would leave the tiles out
    with pytest.raises(ValueError, match=r"25 tokens of ViTModel are not 1 special tokens and .* \(5 x 5\)"):
        attention(*(t[:, :, 1:] for t in (q, k, v)))
    offsets = torch.tensor([0, 20, 26], dtype=torch.int32)
    one = [t[:1] for t in (q, k, v)]
    fixed = build("vit", tile=3, statistics="fixed")
    fixed(pixel_values=picture())
    other = next(m for m in fixed.modules() if isinstance(m, ModelAttention))
    calls: tuple[dict[str, Any], ...] = ({"is_causal": True}, {"cu_seqlens": offsets}, {"return_state": True})
    for given in calls:
        with pytest.raises(ValueError, match="tile: an image is seen as a whole") as problem:
            other(*one, **given)
        sentence(problem)
    text = build_model("bert", "lln_diag")
    assert output(text, input_ids=tokens(0)).shape[1] == 23
