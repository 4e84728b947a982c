"""extend_positions: models take longer inputs than they were made for, and what they knew stays."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import lln.hf
from helpers.hf_models import BERT, TEXT, VISION, VOCABULARY, build_model, make_batch, output, sentence, tokens
from lln.hf.places import Table, continue_sines, find_grids, find_places, is_valid
from lln.lab.inspect.inspection import count_positions

OLD, NEW = 20, 67  # neither a multiple of the other nor of a block
SHORT = {**BERT, "max_position_embeddings": OLD}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, **TEXT, "max_position_embeddings": OLD, "decoder_start_token_id": 1,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": OLD, "vocab_size": VOCABULARY}
ROTARY = {**SHORT, "num_key_value_heads": 2}
LEARNED: dict[str, Any] = {
    "Bert": SHORT, "Roberta": {**SHORT, "pad_token_id": 1}, "XLMRoberta": {**SHORT, "pad_token_id": 1},
    "Camembert": {**SHORT, "pad_token_id": 1}, "Electra": {**SHORT, "embedding_size": 16},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, **TEXT, "max_position_embeddings": OLD},
    "Albert": {**SHORT, "embedding_size": 16}, "MPNet": {**SHORT, "pad_token_id": 1}, "Nystromformer": SHORT,
    "GPT2": GPT, "OPT": {**SHORT, "ffn_dim": 40, "word_embed_proj_dim": 32}, "Bart": SEQ2SEQ,
}  # fmt: skip
SINES: dict[str, Any] = {
    "DistilBert": {**LEARNED["DistilBert"], "sinusoidal_pos_embds": True}, "Marian": SEQ2SEQ, "Pegasus": SEQ2SEQ,
    "M2M100": {**SEQ2SEQ, "pad_token_id": 1}, "GPTJ": {**GPT, "rotary_dim": 4}, "RoFormer": SHORT,
}  # fmt: skip
ROTATED: dict[str, Any] = {
    "Llama": ROTARY, "Mistral": ROTARY, "Qwen2": ROTARY, "EuroBert": ROTARY, "GPTNeoX": SHORT,
    "ModernBert": {**SHORT, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
}  # fmt: skip
PICTURES: dict[str, Any] = {"ViT": VISION, "DeiT": VISION, "Dinov2": VISION, "CLIPVision": VISION}
extend_positions: Any = lln.hf.extend_positions  # without its types: some arguments are wrong on purpose


def make(name: str, shape: dict[str, Any], head: str = "Model", **changes: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(tf, name + head)(getattr(tf, f"{name}Config")(**shape, **changes)).eval()
    fixed = {id(place.module.weight) for place in find_places(model) if follows_sines(place)}
    with torch.no_grad():
        for own in model.parameters():  # as they begin, positions hardly count
            if id(own) not in fixed:
                own += torch.randn_like(own) * 0.1
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and id(module.weight) not in fixed:
                module.weight[module.padding_idx] = 0
    return model


def follows_sines(place: Any) -> bool:
    return isinstance(place, Table) and continue_sines(place.module.weight, len(place.module.weight)) is not None


@torch.no_grad()
def run(model: Any, ids: Tensor) -> Tensor:
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return output(model, input_ids=ids, **extra)


def reload(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def fits(model: Any, length: int) -> bool:
    try:
        run(model, tokens(0, 1, length))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_are_repeated_and_short_inputs_do_not_notice(name: str, tmp_path: Path) -> None:
    model = make(name, LEARNED[name])
    (places, *_) = find_places(model)
    now, short = places.count, tokens(1, 2, OLD - 2)
    before = run(model, short)
    assert fits(model, now)
    assert not fits(model, now + 1)  # else the model needs no more places
    assert lln.hf.extend_positions(model, NEW) is model
    assert torch.equal(run(model, short), before)
    assert {one.count for one in find_places(model)} == {NEW}
    assert fits(model, NEW)
    assert not fits(model, NEW + 1)
    again = reload(model, tmp_path)
    assert torch.equal(run(again, tokens(2, 2, NEW)), run(model, tokens(2, 2, NEW)))


@pytest.mark.parametrize("name", ["Bert", "Roberta", "OPT"])
def test_a_repeated_table_is_its_first_block_again_behind_the_rows_of_no_token(name: str) -> None:
    model = make(name, LEARNED[name])
    (table,) = find_places(model)
    old, first = table.module.weight.detach().clone(), {"Bert": 0, "Roberta": 2, "OPT": 2}[name]
    lln.hf.extend_positions(model, NEW)
    new, block = table.module.weight.detach(), old[first:]
    assert torch.equal(new[: len(old)], old)
    assert torch.equal(new[first:], block.repeat(9, 1)[:NEW])
    assert table.module.num_embeddings == len(new) == first + NEW


def test_roberta_reads_its_positions_where_it_did() -> None:
    """A text that is as long as the old block, once more behind itself: each half has the same embeddings."""
    model = lln.hf.extend_positions(make("Roberta", LEARNED["Roberta"]), 2 * (OLD - 2))
    half = tokens(3, 1, OLD - 2)
    seen = model.embeddings(torch.cat([half, half], 1))
    assert torch.equal(seen[:, : OLD - 2], seen[:, OLD - 2 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_interpolated_rows_lie_between_their_neighbours(dtype: torch.dtype) -> None:
    model = make("Roberta", LEARNED["Roberta"]).to(dtype)
    weight = model.embeddings.position_embeddings.weight
    ramp = torch.linspace(0, 1, OLD - 2)[:, None].expand(-1, 32)
    with torch.no_grad():
        weight[2:] = ramp
        weight[:2] = 7
    lln.hf.extend_positions(model, NEW, method="interpolate")
    new = model.embeddings.position_embeddings.weight
    assert new.dtype == dtype
    assert (new[:2] == 7).all()
    torch.testing.assert_close(new[2:, 5].double(), torch.linspace(0, 1, NEW).double(), atol=8e-3, rtol=0)
    assert fits(model, NEW)


def test_a_model_that_is_long_enough_stays() -> None:
    for name, shape in (("Bert", SHORT), ("Llama", ROTARY)):
        model = make(name, shape)
        before, config = dict(model.named_parameters()), copy.deepcopy(model.config)
        lln.hf.extend_positions(model, OLD)
        assert all(own is before[path] for path, own in model.named_parameters())
        assert model.config.to_dict() == config.to_dict()


def test_what_is_tied_frozen_or_without_memory_stays_so() -> None:
    model = make("Bart", SEQ2SEQ)
    model.decoder.embed_positions.weight = model.encoder.embed_positions.weight
    model.encoder.embed_positions.weight.requires_grad = False
    lln.hf.extend_positions(model, NEW)
    assert model.decoder.embed_positions.weight is model.encoder.embed_positions.weight
    assert not model.encoder.embed_positions.weight.requires_grad
    assert fits(model, NEW)
    for name, shape in (("Bert", SHORT), ("Llama", ROTARY)):
        with torch.device("meta"):
            bare = getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**shape))
        lln.hf.extend_positions(bare, NEW)
        assert {t.device.type for t in (*bare.parameters(), *bare.buffers())} == {"meta"}
        assert bare(input_ids=torch.ones(1, NEW, dtype=torch.int64, device="meta"))[0].shape == (1, NEW, 32)


def test_padding_is_invisible_in_the_new_places() -> None:
    model = lln.hf.extend_positions(build_model("roberta", "lln_diag"), 200)
    ids = tokens(0, 2, 180)
    mask = torch.ones_like(ids)
    mask[1, 150:] = 0
    both = output(model, input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)
    alone = output(model, input_ids=ids[1:, :150])
    torch.testing.assert_close(both[1:, :150], alone)


@pytest.mark.parametrize("name", SINES)
def test_sines_go_on_by_their_formula(name: str, tmp_path: Path) -> None:
    """A short model that was extended is the long one that could have been made."""
    short = make(name, SINES[name])
    tables = {f"{place.path}.weight" for place in find_places(short) if follows_sines(place)}
    assert bool(tables) == (name not in ("M2M100", "GPTJ"))
    before = run(short, tokens(1, 2, OLD - 2))
    lln.hf.extend_positions(short, NEW)
    assert torch.equal(run(short, tokens(1, 2, OLD - 2)), before)
    key = "n_positions" if name == "GPTJ" else "max_position_embeddings"
    long = type(short)(type(short.config)(**{**SINES[name], key: NEW})).eval()
    keep = {path: own for path, own in short.state_dict().items() if path not in tables}
    assert set(long.load_state_dict(keep, strict=False).missing_keys) == tables
    torch.testing.assert_close(run(long, tokens(2, 2, NEW)), run(short, tokens(2, 2, NEW)))
    torch.testing.assert_close(run(reload(short, tmp_path), tokens(2, 2, NEW)), run(short, tokens(2, 2, NEW)))
    with pytest.raises(ValueError, match="method must be left out for the sinusoidal positions") as problem:
        lln.hf.extend_positions(short, 2 * NEW, method="repeat")
    sentence(problem)


def loads_yarn(config: Any) -> bool:
    """5.4 looks for the parameters of one kind of layers among those of all."""
    trial = copy.deepcopy(config)
    trial.rope_parameters["full_attention"] |= {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": OLD
    }  # fmt: skip
    return is_valid(trial)


@pytest.mark.parametrize("method", [None, "linear"])
@pytest.mark.parametrize("name", ROTATED)
def test_rotations_are_scaled_in_the_model_at_hand_and_in_the_loaded_one(
    name: str, method: str | None, tmp_path: Path
) -> None:
    model = make(name, ROTATED[name])
    if name == "ModernBert" and method is None and not loads_yarn(model.config):
        pytest.skip("this transformers cannot load YaRN for some layers alone")
    ids = tokens(1, 2, NEW)
    before = run(model, ids)
    lln.hf.extend_positions(model, NEW, method=method)
    after = run(model, ids)
    assert (after - before).abs().max() > 1e-4
    assert model.config.max_position_embeddings == NEW
    own = model.config.rope_parameters
    own = own.get("full_attention", own)
    assert own["rope_type"] == (method or "yarn")
    assert own["factor"] == NEW / OLD
    assert torch.equal(run(reload(model, tmp_path), ids), after)


def test_linear_scaling_turns_the_last_new_token_as_far_as_the_last_old_one() -> None:
    model = make("Llama", ROTARY)
    x = torch.zeros(1, 1, 8)
    cos, sin = model.rotary_emb(x, torch.tensor([[OLD]]))
    lln.hf.extend_positions(model, 3 * OLD, method="linear")
    torch.testing.assert_close(model.rotary_emb(x, torch.tensor([[3 * OLD]])), (cos, sin))


def test_yarn_leaves_quick_frequencies_and_slows_the_slowest_in_full() -> None:
    model = make("Llama", {**ROTARY, "hidden_size": 256, "max_position_embeddings": 4096})
    before = model.rotary_emb.inv_freq.clone()
    lln.hf.extend_positions(model, 4 * 4096)
    ratio = model.rotary_emb.inv_freq / before
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1], torch.tensor(0.25))
    assert (ratio.diff() <= 0).all()


def test_scaling_twice_is_scaling_once() -> None:
    for method in (None, "linear"):
        once, twice = make("Qwen2", ROTARY), make("Qwen2", ROTARY)
        lln.hf.extend_positions(once, 6 * OLD, method=method)
        lln.hf.extend_positions(lln.hf.extend_positions(twice, 2 * OLD, method=method), 6 * OLD)
        assert once.config.rope_parameters == pytest.approx(twice.config.rope_parameters)
        torch.testing.assert_close(run(once, tokens(1, 1, NEW)), run(twice, tokens(1, 1, NEW)))


def test_windows_with_a_rotation_of_their_own_stay() -> None:
    model = make("ModernBert", ROTATED["ModernBert"])
    before = {name: own.clone() for name, own in model.rotary_emb.named_buffers()}
    lln.hf.extend_positions(model, NEW, method="linear")
    after = dict(model.rotary_emb.named_buffers())
    assert torch.equal(after["sliding_attention_inv_freq"], before["sliding_attention_inv_freq"])
    assert not torch.equal(after["full_attention_inv_freq"], before["full_attention_inv_freq"])


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_generation_goes_on_past_the_old_places(name: str) -> None:
    shape = GPT if name == "GPT2" else ROTARY
    model = make(name, shape, "LMHeadModel" if name == "GPT2" else "ForCausalLM")
    lln.hf.extend_positions(model, NEW)
    lln.hf.convert(model, "lln_diag", statistics="fixed", block_size=8)
    text = model.generate(tokens(0, 2, 9), max_new_tokens=NEW - 9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert text.shape == (2, NEW)
    again = run(model, text[:, :-1]).argmax(-1)[:, 8:]  # in one pass, without a cache
    assert torch.equal(again, text[:, 9:])


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_grow_as_their_model_would_resample_them(name: str, tmp_path: Path) -> None:
    model = make(name, PICTURES[name])
    torch.manual_seed(1)
    small, large = torch.randn(2, 3, 20, 20), torch.randn(2, 3, 36, 36)
    extra = {} if name == "Dinov2" else {"interpolate_pos_encoding": True}
    before = output(model, pixel_values=small)
    lln.hf.extend_positions(model, image_size=20)
    assert torch.equal(output(model, pixel_values=small), before)
    expected = output(model, pixel_values=large, **extra)
    assert lln.hf.extend_positions(model, image_size=36) is model
    torch.testing.assert_close(output(model, pixel_values=large), expected)
    assert model.config.image_size == 36
    again = reload(model, tmp_path)
    torch.testing.assert_close(output(again, pixel_values=large), expected)


def test_patches_of_one_position_have_it_in_every_grid_and_other_tokens_keep_theirs() -> None:
    for name, spare in (("ViT", 1), ("DeiT", 2)):
        model = make(name, VISION).to(torch.bfloat16)
        (grid,) = find_grids(model)
        with torch.no_grad():
            grid.weight[:, spare:] = grid.weight[:, -1:].clone()
        first, other = grid.weight[:, :spare].clone(), grid.weight[:, -1:].clone()
        lln.hf.extend_positions(model, image_size=(40, 24))
        new = model.embeddings.position_embeddings
        assert new.shape == (1, spare + 60, 32)
        assert new.dtype == torch.bfloat16
        assert torch.equal(new[:, :spare], first)
        torch.testing.assert_close(new[:, spare:], other.expand(1, 60, -1))
        assert output(model, pixel_values=torch.randn(1, 3, 40, 24).bfloat16()).shape == (1, spare + 60, 32)
        assert tuple(model.config.image_size) == (40, 24)


def test_text_and_pictures_of_one_model_grow_apart(tmp_path: Path) -> None:
    config = tf.CLIPConfig(text_config={**SHORT, "eos_token_id": 2}, vision_config=VISION, projection_dim=8)
    model = tf.CLIPModel(config).eval()
    lln.hf.extend_positions(lln.hf.extend_positions(model, NEW), image_size=28)
    assert model.config.text_config.max_position_embeddings == NEW
    assert model.config.vision_config.image_size == 28
    batch = {"input_ids": tokens(0, 2, NEW), "pixel_values": torch.randn(2, 3, 28, 28)}
    for one in (model, reload(model, tmp_path)):
        assert one(**batch).logits_per_image.shape == (2, 2)


def test_an_encoder_and_a_decoder_with_configs_of_their_own(tmp_path: Path) -> None:
    parts = tf.BertConfig(**SHORT), tf.BertConfig(**SHORT, is_decoder=True, add_cross_attention=True)
    model = tf.EncoderDecoderModel(tf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).eval()
    lln.hf.extend_positions(model, NEW)
    ids = tokens(0, 2, NEW)
    expected = output(model, input_ids=ids, decoder_input_ids=ids)
    again = reload(model, tmp_path)
    torch.testing.assert_close(output(again, input_ids=ids, decoder_input_ids=ids), expected)


def test_a_converted_model_keeps_its_attention() -> None:
    model = build_model("bert", "sdpa")
    lln.hf.convert(model, "lln", matching="data", batches=[make_batch("bert")])
    lln.hf.extend_positions(model, 200)
    assert model.config._attn_implementation == "lln"
    assert output(model, input_ids=tokens(0, 2, 200)).shape == (2, 200, 32)


def test_a_head_does_not_hide_how_many_places_there_are() -> None:
    for head in ("Model", "ForMaskedLM"):
        model = make("Roberta", LEARNED["Roberta"], head)
        assert count_positions(model) == OLD - 2
        assert count_positions(lln.hf.extend_positions(model, NEW)) == NEW


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("T5", {"d_model": 32, "num_layers": 1}, {"length": NEW}, "T5Model .*relative_attention_bias.* are not bounded"),
    ("Bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}, {"length": NEW}, "ALiBi. of BloomModel are not bounded"),
    ("Bert", SHORT, {"length": OLD - 1}, "length must be at least the 20 tokens that BertModel has places for; got 19"),
    ("Llama", ROTARY, {"length": OLD - 1}, "length must be at least the 20 tokens"),
    ("Bert", SHORT, {"length": 0}, "length must be a positive whole number of tokens; got 0"),
    ("Bert", SHORT, {"length": NEW, "method": "yarn"}, "method must be 'repeat' or 'interpolate' for the learned"),
    ("Llama", ROTARY, {"length": NEW, "method": "repeat"}, "method must be 'yarn' or 'linear' for the rotary"),
    ("Llama", ROTARY, {"length": NEW, "method": "dynamic"}, "method must be one of repeat, interpolate, yarn, linear"),
    ("ViT", VISION, {"length": NEW}, "the places of ViTModel are those of a picture's patches; give image_size"),
    ("Bert", SHORT, {"image_size": 32}, "BertModel has no table of patch positions .*; give length instead"),
    ("ViT", VISION, {"image_size": 30}, "image_size must be a multiple of ViTModel's patch_size"),
    ("ViT", VISION, {"image_size": (16, 24)}, "image_size must be at least the .20, 20. of ViTModel"),
    ("ViT", VISION, {"image_size": (24, 24, 24)}, "image_size must be a positive whole number of pixels or two"),
    ("ViT", VISION, {"image_size": 24, "method": "repeat"}, "method goes with length"),
    ("Dinov2", VISION, {"image_size": (24, 28)}, "image_size must be a square for Dinov2Model"),
    ("Beit", {**VISION, "use_relative_position_bias": True}, {"image_size": 24}, "are bounded by its window"),
    ("ViTMAE", VISION, {"image_size": 24}, "decoder.decoder_pos_embed belongs to the grid"),
    ("Deberta", {**SHORT, "relative_attention": True}, {"length": NEW}, "rel_embeddings.weight is as long as its pos"),
    ("GPTBigCode", GPT, {"length": NEW}, "bias is as long as its positions, and there is no known way"),
    ("Phi3", {**ROTARY, "eos_token_id": 2}, {"length": NEW}, "positions of Phi3Model cannot be made again"),
    ("Falcon", {**SHORT, "alibi": True}, {"length": NEW}, "ALiBi. of FalconModel are not bounded"),
    ("IBert", SHORT, {"length": NEW}, "no positions that could be extended were found in IBertModel"),
]


@pytest.mark.parametrize(("name", "shape", "arguments", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence_and_changes_nothing(
    name: str, shape: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    model = make(name, shape, "ForPreTraining" if name == "ViTMAE" else "Model")
    before, config = dict(model.named_parameters()), copy.deepcopy(model.config)
    with pytest.raises(ValueError, match=words) as problem:
        extend_positions(model, **arguments)
    sentence(problem)
    assert all(own is before[path] for path, own in model.named_parameters())
    assert model.config.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic', which no factor extends; it follows the length"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}, "'yarn', which no factor extends; set"),
    ],
)
def test_scaling_that_no_factor_extends_is_refused(scaling: dict[str, Any], words: str) -> None:
    model = make("Llama", {**ROTARY, "rope_parameters": {"rope_theta": 10000.0, **scaling}})
    with pytest.raises(ValueError, match=words) as problem:
        lln.hf.extend_positions(model, NEW)
    sentence(problem)


def test_one_way_to_scale_does_not_follow_on_another() -> None:
    model = lln.hf.extend_positions(make("Llama", ROTARY), NEW, method="linear")
    with pytest.raises(ValueError, match="scaled by 'linear' already; leave method out") as problem:
        lln.hf.extend_positions(model, 2 * NEW, method="yarn")
    sentence(problem)


def test_attention_with_a_row_for_each_place_is_attached_afterwards() -> None:
    model = make("Bert", SHORT)
    lln.hf.convert(model, "linformer", rank=4)
    with pytest.raises(ValueError, match="extend the positions first") as problem:
        lln.hf.extend_positions(model, NEW)
    sentence(problem)
    model = lln.hf.extend_positions(make("Bert", SHORT), NEW)
    assert fits(lln.hf.convert(model, "linformer", rank=4), NEW)


def test_arguments_that_say_nothing() -> None:
    model = make("Bert", SHORT)
    for arguments in ({}, {"length": NEW, "image_size": 32}):
        with pytest.raises(TypeError, match="give length for a model of text or image_size") as problem:
            extend_positions(model, **arguments)
        sentence(problem)
    with pytest.raises(TypeError, match="model must be a transformers model, or hold one; got Linear"):
        extend_positions(nn.Linear(2, 2), NEW)
