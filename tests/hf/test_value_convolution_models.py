"""Models of transformers with a convolution of the values: saved and loaded, generated with in constant memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import lln.hf
from helpers.hf_models import build_model, build_writer, expect_guess, make_batch, output, record_calls, tokens
from helpers.tensors import relative_error
from lln.lab.paper.jobs import configure
from lln.lab.train.models import check_attention
from lln.lab.train.run import train
from lln.naive import naive_value_convolution
from lln.nn.value_convolution import convolve_patches

WIDE = torch.float64
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def shake(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("value_taps"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def list_taps(model: Any) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("value_taps")]


def make_writer(kind: str = "llama", **options: Any) -> Any:
    made = lln.hf.convert(
        build_writer(kind), "lln_diag", statistics="fixed", block_size=4, value_convolution=5, **options
    )
    return shake(made)


def pad_left(lengths: list[int]) -> tuple[Tensor, Tensor]:
    x = tokens(5, len(lengths), max(lengths))
    mask = torch.arange(x.shape[1]) >= x.shape[1] - torch.tensor(lengths)[:, None]
    return x.masked_fill(~mask, 0), mask.long()


@pytest.mark.parametrize("kind", ["bert", "llama", "bart"])
def test_models_keep_it_through_saving(kind: str, tmp_path: Path) -> None:
    model, given = build_model(kind), make_batch(kind, 0)
    before = output(model, **given)
    with expect_guess():
        lln.hf.convert(model, value_convolution=5)
    assert torch.equal(output(model, **given), before)
    assert model.config.lln["value_convolution"] == 5
    assert len(list_taps(model)) == (4 if kind == "bart" else 2)  # cross attention has none
    after = output(shake(model), **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    with expect_guess():
        again = type(model).from_pretrained(tmp_path, dtype=WIDE)
    assert again.config.lln_values
    assert torch.equal(output(again.eval(), **given), after)
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("lln_diag")
    assert torch.equal(output(model, **given), after)
    with pytest.raises(ValueError, match=r"value_convolution=3: what .* has learned with a width of 5 would be lost"):
        lln.hf.convert(model, value_convolution=3)
    assert torch.equal(output(model, **given), after)


def test_a_softmax_checkpoint_begins_with_zeros(tmp_path: Path) -> None:
    build_model("bert", "sdpa").save_pretrained(tmp_path)
    held = tf.AutoConfig.from_pretrained(tmp_path)
    held.lln = {"implementation": "lln", "value_convolution": 3}
    taps = list_taps(tf.AutoModel.from_pretrained(tmp_path, config=held))
    assert len(taps) == 2
    assert not any(bool(one.any()) for one in taps)


def test_every_layer_gives_the_formula_and_p_without_it() -> None:
    model = shake(lln.hf.convert(build_model("bert"), "lln_diag", block_size=4, value_convolution=3))
    given = make_batch("bert")
    with record_calls() as calls:
        model(**given, output_attentions=True)
    mask = given["attention_mask"].bool()
    for call in calls:
        near = naive_value_convolution(call.v, call.module.lln.value_taps.detach(), key_mask=mask)
        want = call.weights @ call.v + near
        assert relative_error(call.out.transpose(1, 2), want) < 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart"])
def test_every_way_to_decode_equals_full_recomputation(kind: str) -> None:
    with expect_guess():
        model = make_writer(kind)
    x, mask = pad_left([3, 14, 9])
    how = {"max_new_tokens": 7, "attention_mask": mask, **GREEDY}
    want = model.generate(x, use_cache=False, **how)
    plain = model.generate(x, return_dict_in_generate=True, **how)
    assert torch.equal(plain.sequences, want)
    own = plain.past_key_values.self_attention_cache if kind == "bart" else plain.past_key_values
    assert isinstance(own, lln.hf.LLNCache)
    assert own.layers[0].state.last_value.shape[2] == 4
    for more in ({"num_beams": 3}, {"cache_implementation": "dynamic"}):
        beams = {k: v for k, v in more.items() if k == "num_beams"}
        assert torch.equal(model.generate(x, **how | more), model.generate(x, use_cache=False, **how | beams))
    if kind == "llama":
        assert torch.equal(model.generate(x, prefill_chunk_size=3, **how), want)
        for row, n in enumerate([3, 14, 9]):
            alone = model.generate(x[row : row + 1, -n:], max_new_tokens=7, **GREEDY)
            assert torch.equal(want[row, -7:], alone[0, -7:])


def test_a_static_cache_stays_where_it_is_and_a_crop_goes_back() -> None:
    model, x = make_writer(), tokens(0, 2, 17)
    want, cache = output(model, input_ids=x, use_cache=False), lln.hf.LLNCache(static=True)
    places = set()
    for _ in range(2):
        with torch.no_grad():
            parts = [output(model, input_ids=x[:, a:b], past_key_values=cache) for a, b in ((0, 9), (9, 10), (10, 17))]
        assert relative_error(torch.cat(parts, 1), want) < 1e-12
        places.add(cache.layers[0].state.last_value.data_ptr())
        cache.reset()
    assert len(places) == 1
    cache = lln.hf.LLNCache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(x[:, :9], past_key_values=cache)
        cache.crop(0)
        model(x[:, 9:14], past_key_values=cache)
        cache.crop(-3)
        rest = output(model, input_ids=x[:, 11:], past_key_values=cache)
    assert relative_error(rest, want[:, 11:]) < 1e-12


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compiled_decoding_with_a_static_cache() -> None:
    model = shake(lln.hf.convert(
        build_writer("llama", num_hidden_layers=1), "lln_diag", statistics="fixed", block_size=4, value_convolution=5
    ))  # fmt: skip
    x, mask = pad_left([14, 23])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling = tf.CompileConfig(backend="aot_eager", fullgraph=True, mode=None, dynamic=False)
    compiling._compile_all_devices = True
    how = {"max_new_tokens": 9, "attention_mask": mask, **GREEDY}
    static = {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(model.generate(x, **static, **how), model.generate(x, use_cache=False, **how))
    assert not torch._dynamo.utils.counters["graph_break"]


def test_packed_sequences_stay_apart() -> None:
    model, x = make_writer(), tokens(0, 1, 15)
    places = torch.cat([torch.arange(9), torch.arange(6)])[None]
    packed = output(model, input_ids=x, position_ids=places, use_cache=False)
    for part in (slice(0, 9), slice(9, 15)):
        assert relative_error(packed[:, part], output(model, input_ids=x[:, part], use_cache=False)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("bert", "block_diagonal", {"block_size": 4}),
        ("bert", "value_convolved_softmax", {}),
        ("llama", "value_convolved_softmax", {}),
        ("bert", "elu", {}),
    ],
)
def test_other_mechanisms_run_with_it_and_keep_it(kind: str, name: str, options: Any, tmp_path: Path) -> None:
    model, given = build_model(kind, "sdpa"), make_batch(kind)
    lln.hf.convert(model, name, value_convolution=3, **options)
    before = output(model, **given)
    if "softmax" in name:
        assert relative_error(before, output(build_model(kind, "sdpa"), **given)) < 1e-12
    after = output(shake(model), **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=WIDE).eval()
    assert again.config.lln["mechanisms"] == {name: {"value_convolution": 3, **options}}
    assert torch.equal(output(again, **given), after)
    if kind == "llama":  # token by token, with keys and values kept
        x = tokens(0, 2, 6)
        how = {"max_new_tokens": 5, **GREEDY}
        assert torch.equal(again.generate(x, **how), again.generate(x, use_cache=False, **how))


@pytest.mark.parametrize("name", ["lln", "lln_diag", "value_convolved_softmax"])
def test_images_have_rows_and_columns(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tile": 3} if name == "lln_diag" else {}
    model = lln.hf.convert(build_model("vit", "sdpa"), name, value_convolution="3x3", **options)
    given = make_batch("vit")
    before, after = output(model, **given), output(shake(model), **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=WIDE).eval()
    with record_calls() as calls:
        found = again(**given, output_attentions=True) if name != "value_convolved_softmax" else again(**given)
    assert torch.equal(found[0], after)
    if name != "value_convolved_softmax":
        for call in calls:
            near = convolve_patches(call.v, call.module.lln.value_taps.detach(), (5, 5), 1)
            assert relative_error(call.out.transpose(1, 2), call.weights @ call.v + near) < 1e-12
    with pytest.raises(ValueError, match="value_convolution: the model does not cut an image into patches"):
        lln.hf.convert(build_model("bert"), name, value_convolution="3x3")


def test_wrong_options_are_refused() -> None:
    options: Any
    for options in ({"value_convolution": 4}, {"mechanisms": {"elu": {"value_convolution": 4}}}):
        with pytest.raises(ValueError, match="value_convolution must be an odd int of 3 or more"):
            lln.hf.Options(**options)
    for attention in (
        "softmax:value_convolution=5",
        "softmax",
        "block_diagonal:value_convolution=5",
        "lln:convolution=3",
    ):
        check_attention(configure("mlm", "tiny", attention, 0, {}))
    both = configure("mlm", "tiny", "softmax:value_convolution=5:convolution=5", 0, {})
    with pytest.raises(ValueError, match="softmax takes only value_convolution, or the deprecated convolution"):
        check_attention(both)


def test_a_fit_asks_the_rest_for_what_the_neighbours_do_not_give() -> None:
    """With taps that give all of softmax's output but half, the best mix is that of the half."""
    batch = {"input_ids": tokens(0, 3, 16)}
    found = []
    for width in (None, 3):
        model = lln.hf.convert(build_model("bert", "sdpa"), "lln_diag", block_size=16, mix="scales")
        if width is not None:
            lln.hf.convert(model, value_convolution=width)
            for module in model.modules():
                if isinstance(module, lln.LLNAttention):
                    with torch.no_grad():  # each token's own value, which blocks of all tokens can take back
                        module.value_taps[..., 1] = 0.5
        lln.hf.fit(model, [batch])
        first = next(m for m in model.modules() if isinstance(m, lln.LLNAttention))
        found.append((first.lln_scale.detach().clone(), first.block_scale.detach().clone()))
    # One block is softmax itself: without taps it is taken whole; what the taps have added moves it.
    assert relative_error(found[0][1], torch.ones_like(found[0][1])) < 1e-2
    assert relative_error(found[1][1], found[0][1]) > 1e-3


@pytest.mark.parametrize("attention", ["lln:value_convolution=3x3", "softmax:value_convolution=3x3"])
def test_an_image_recipe_learns_rows_and_columns(attention: str, tmp_path: Path, cache: Path) -> None:
    small = {"optimisation.steps": "3", "optimisation.batch": "4", "optimisation.warmup": "1", "log_every": "1",
             "save_every": "3", "evaluate_every": "3", "record_every": "0", "data.train": "12", "data.evaluation": "8",
             "model.layers": "2"}  # fmt: skip
    train(configure("image", "tiny", attention, 0, small), tmp_path / "run", cache_dir=cache)
    model = tf.AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "model")
    taps, last = list_taps(model)
    assert not bool(last.any())  # patches of the last layer, where the class token alone is read
    assert taps.shape == (2, 32, 3, 3)
    assert float(taps.detach().abs().max()) > 1e-5
