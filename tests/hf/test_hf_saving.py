"""What a model runs and what it has learned or measured is there again after it was saved, in a process that knows
nothing of the first."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.fresh import run_fresh
from helpers.hf_models import (
    ALL,
    CAUSAL,
    IMAGES,
    build_model,
    expect_guess,
    make_batch,
    make_config,
    output,
    record_calls,
)
from helpers.tensors import relative_error
from lln.hf.hooks import upload

HEADS = {
    "bert": "BertForSequenceClassification",
    "vit": "ViTForImageClassification",
    "bart": "BartForConditionalGeneration",
}
ROUND = """
import pathlib, sys, warnings
warnings.simplefilter("error")
import torch, transformers, lln.hf
source, target = map(pathlib.Path, sys.argv[1:])
for folder in source.iterdir():
    kind, given = torch.load(folder / "inputs.pt")
    model = getattr(transformers, kind).from_pretrained(folder)
    model.save_pretrained(target / folder.name)
    torch.save((kind, given), target / folder.name / "inputs.pt")
    with torch.no_grad():
        torch.save(model(**given)[0], target / folder.name / "output.pt")
"""
CASES: dict[str, dict[str, Any]] = {
    "bert": {"statistics": "running", "mix": "ratio"},
    "llama": {"statistics": "running", "mix": "scales"},
    "bart": {"statistics": {"encoder": "sample", "decoder": "running"}, "mix": "ratio"},
    "albert": {"learnable": "channel"},
    "gpt2": {"alpha": 1.5, "beta": torch.tensor([1.0, 1.5, 2.0, 2.5])},
    "vit": {"matching": "entropy", "statistics": "running"},
}


def make_trained(kind: str, **options: Any) -> Any:
    """A model whose statistics and mix have moved away from where they begin."""
    model = build_model(kind)
    lln.hf.convert(model, "lln_diag", block_size=8, **options)
    model.train()
    for step in range(3):
        output(model, **make_batch(kind, step))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lln." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model.eval()


def test_two_rounds_through_fresh_processes_are_bit_equal(tmp_path: Path) -> None:
    wanted = {}
    for kind, options in CASES.items():
        model, given = make_trained(kind, **options), make_batch(kind, 7)
        with torch.no_grad():
            wanted[kind] = output(model, **given)
            forgetful = output(copy.deepcopy(model).apply(reset), **given)
        assert relative_error(wanted[kind], forgetful) > 1e-6  # there is something to lose
        model.save_pretrained(tmp_path / "a" / kind)
        torch.save((type(model).__name__, given), tmp_path / "a" / kind / "inputs.pt")
    for source, target in ("ab", "bc"):
        places = [str(tmp_path / name) for name in (source, target)]
        run_fresh(ROUND, *places)
        for kind, want in wanted.items():
            assert torch.equal(torch.load(tmp_path / target / kind / "output.pt"), want)
            first, last = (json.loads((tmp_path / d / kind / "config.json").read_text())["lln"] for d in ("a", target))
            assert first == last


def reset(module: Any) -> None:
    kind: Any = lln.LLNAttention  # inside a model it can do more
    if isinstance(module, kind):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor._is_hf_initialized = False
        module.initialise()


@pytest.mark.parametrize("kind", ALL)
def test_a_plain_reload_runs_the_same_attention(kind: str, tmp_path: Path) -> None:
    model, given = build_model(kind, "lln"), make_batch(kind)
    model.save_pretrained(tmp_path)
    with expect_guess():
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with record_calls() as calls:
        assert torch.equal(output(again.to(torch.float64), **given), output(model, **given))
    assert calls
    assert again.config._attn_implementation == "lln"


# In a process of its own: what each way to load a folder without lln.hf gives, one line each.
ALONE = """
import sys, torch, transformers as tf
folder, concrete, trust = sys.argv[1], sys.argv[2], {"trust_remote_code": True} if sys.argv[3:] else {}
given, want = torch.load(folder + "/inputs.pt")
ways = {
    concrete: lambda: getattr(tf, concrete).from_pretrained(folder),
    "auto": lambda: tf.AutoModel.from_pretrained(folder, **trust),
    "config": lambda: tf.AutoModel.from_config(tf.AutoConfig.from_pretrained(folder), **trust),
    "pipeline": lambda: tf.pipeline("feature-extraction", folder, tokenizer=None, **trust).model,
}
if trust:
    del ways[concrete]  # has no such argument
assert "lln" not in sys.modules
for name, load in ways.items():
    try:
        model = load().eval()
    except ValueError as problem:
        told = "needs `import lln.hf` before the model is loaded" in str(problem)
        print(name, "refused" if told else "failed")
    else:
        same = model.config._attn_implementation == "lln_diag" and torch.equal(model(**given)[0], want)
        fresh = name == "config" and model.config._attn_implementation == "lln_diag"
        print(name, "runs" if same or fresh else "differs")
"""


def load_alone(folder: Path, *arguments: str) -> set[str]:
    return set(run_fresh(ALONE, str(folder), *arguments).splitlines())


@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_without_lln_hf_no_class_runs_softmax_in_the_place_of_what_was_saved(kind: str, tmp_path: Path) -> None:
    model, given = make_trained(kind, statistics=CASES["bart"]["statistics"], mix="ratio"), make_batch(kind)
    model.save_pretrained(tmp_path)
    torch.save((given, output(model, **given)), tmp_path / "inputs.pt")
    concrete = type(model).__name__
    assert load_alone(tmp_path, concrete) == {f"{way} refused" for way in (concrete, "auto", "config", "pipeline")}
    assert load_alone(tmp_path, concrete, "trust") == {f"{way} runs" for way in ("auto", "config", "pipeline")}


def test_a_part_that_can_be_loaded_alone_is_refused_alone(tmp_path: Path) -> None:
    parts = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**parts, "image_size": 8, "patch_size": 4}
    model = tf.CLIPModel(tf.CLIPConfig(text_config={**parts, "vocab_size": 9}, vision_config=vision))
    lln.hf.convert(model.vision_model, "lln")
    model.save_pretrained(tmp_path)
    code = """
import sys, transformers as tf
for kind in sys.argv[2:]:
    try:
        print(kind, getattr(tf, kind).from_pretrained(sys.argv[1]).config._attn_implementation)
    except ValueError as problem:
        print(kind, "lln, which needs `import lln.hf`" in str(problem))
"""
    kinds = ["CLIPModel", "CLIPVisionModel", "CLIPTextModel"]
    assert run_fresh(code, str(tmp_path), *kinds).splitlines() == [
        "CLIPModel True",
        "CLIPVisionModel True",
        "CLIPTextModel sdpa",
    ]
    again = tf.CLIPModel.from_pretrained(tmp_path)
    ran = [part.config._attn_implementation for part in (again, again.vision_model, again.text_model)]
    assert ran == ["sdpa", "lln", "sdpa"]


def test_a_model_that_runs_softmax_again_is_saved_as_any_other(tmp_path: Path) -> None:
    build_model("bert").save_pretrained(tmp_path / "ours")
    model = tf.AutoModel.from_pretrained(tmp_path / "ours")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "softmax")
    ours, softmax = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "softmax"))
    assert {"attn_implementation", "auto_map"} <= set(ours)
    assert not {"attn_implementation", "auto_map"} & set(softmax)
    assert not (tmp_path / "softmax" / "modeling_lln.py").exists()


def test_a_config_that_was_read_before_the_import_serves_after_it(tmp_path: Path) -> None:
    build_model("bert").save_pretrained(tmp_path)
    code = f"""
import transformers
config = transformers.AutoConfig.from_pretrained({str(tmp_path)!r})
import lln.hf
model = transformers.AutoModel.from_pretrained({str(tmp_path)!r}, config=config)
print(model.config._attn_implementation)
model.set_attn_implementation("sdpa")
model.save_pretrained({str(tmp_path / "softmax")!r})
"""
    assert run_fresh(code).split() == ["lln_diag"]
    assert "auto_map" not in json.loads((tmp_path / "softmax" / "config.json").read_text())


def test_with_lln_hf_a_config_says_nothing_that_transformers_would_refuse(tmp_path: Path) -> None:
    build_model("bert").save_pretrained(tmp_path)
    held = tf.AutoConfig.from_pretrained(tmp_path)
    assert held._attn_implementation is None
    assert not hasattr(held, "auto_map")
    with pytest.warns(UserWarning, match="config.lln names 'lln_diag', but attn_implementation='eager' was asked for"):
        tf.AutoModel.from_pretrained(tmp_path, output_attentions=True)  # for which transformers itself asks for eager


def test_code_that_a_model_brings_stays_its_own(tmp_path: Path) -> None:
    model = build_model("bert")
    model.config.auto_map = {"AutoModel": "mine.Mine"}
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"] == {"AutoModel": "mine.Mine"}
    assert saved["attn_implementation"].startswith("lln_diag, which needs")


def test_the_card_says_what_is_needed(tmp_path: Path) -> None:
    build_model("bert").save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert all(said in card for said in ("import lln.hf", "lln-attention[hf]", "trust_remote_code=True"))


def test_a_card_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    model = build_model("bert")
    for _ in range(2):
        model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("# Mine\n")
    assert card.count("import lln.hf") == 1
    build_model("bert", "sdpa").save_pretrained(tmp_path / "softmax")
    assert not (tmp_path / "softmax" / "README.md").exists()


@pytest.mark.parametrize("kind", ["bert", "vit", "bart"])
def test_a_head_on_a_converted_body_finds_its_values(kind: str, tmp_path: Path) -> None:
    body = make_trained(kind, statistics="running", mix="ratio")
    body.save_pretrained(tmp_path)
    with_head = getattr(tf, HEADS[kind]).from_pretrained(tmp_path)
    mine, theirs = dict(body.named_buffers()), dict(with_head.base_model.named_buffers())
    assert any("running_variance_q" in name for name in mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with_head.save_pretrained(tmp_path / "head")
    back = type(body).from_pretrained(tmp_path / "head").to(torch.float64)
    assert torch.equal(output(back, **make_batch(kind)), output(body, **make_batch(kind)))


@pytest.mark.parametrize("mix", ["ratio", "scales"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_a_softmax_checkpoint_does_not_bring_is_initialised(
    mix: str, dtype: torch.dtype, tmp_path: Path, poisoned_memory: None
) -> None:
    build_model("bert", "sdpa").save_pretrained(tmp_path)
    wanted = tf.AutoConfig.from_pretrained(tmp_path)
    wanted.lln = {"implementation": "lln_diag", "statistics": "running", "mix": mix, "block_size": 8}
    model = tf.AutoModel.from_pretrained(tmp_path, config=wanted, dtype=dtype)
    layer = model.encoder.layer[1].attention.self.lln
    assert (layer.running_variance_q == 1).all()
    assert layer.running_variance_k.dtype == torch.float32
    assert layer.running_count == 0
    assert (layer.pending == 0).all()
    weights = layer.mix_weights()
    assert all((w == 0.5).all() for w in (weights if mix == "scales" else [weights]))
    assert output(model, **make_batch("bert")).isfinite().all()


def test_measured_values_survive_loading_in_half_precision(tmp_path: Path) -> None:
    model = make_trained("llama", matching="data", batches=[make_batch("llama")])
    model.save_pretrained(tmp_path)
    half = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mine, theirs = (m.model.layers[0].self_attn.lln for m in (model, half))
    assert theirs.fixed_alpha.dtype == torch.float64
    assert torch.equal(mine.fixed_alpha, theirs.fixed_alpha)
    assert half.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_options_go_through_a_config_and_back() -> None:
    wanted = make_config("bert")
    wanted.lln = {"implementation": "lln_diag", "matching": "entropy", "block_size": 16, "mix": 0.25}
    again = type(wanted).from_dict(wanted.to_dict())
    assert again.lln == wanted.lln
    model = tf.AutoModel.from_config(again)
    layer = model.encoder.layer[0].attention.self.lln
    assert (layer.matching, layer.block_size, layer.mix, layer.statistics) == ("entropy", 16, 0.25, "sample")
    assert model.config._attn_implementation == "lln_diag"
    assert lln.hf.Options(**model.config.lln) == lln.hf.Options(**wanted.lln)


def test_an_implementation_that_is_asked_for_wins_over_the_saved_one(tmp_path: Path) -> None:
    model, given = build_model("bert", "lln"), make_batch("bert")
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="config.lln names 'lln'") as seen:
        softmax = tf.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert len(seen) == 1
    with record_calls() as calls:
        output(softmax, **given)
    assert not calls
    softmax.save_pretrained(tmp_path / "again")
    assert tf.AutoModel.from_pretrained(tmp_path / "again").config._attn_implementation == "sdpa"
    diag = tf.AutoModel.from_pretrained(tmp_path, attn_implementation="lln_diag")
    assert diag.encoder.layer[0].attention.self.lln.block_size == 64


def test_a_name_that_is_refused_is_not_said_to_run(tmp_path: Path) -> None:
    model = lln.hf.convert(build_model("bert", "sdpa"), "lln_diag", block_size=8, mix="ratio")
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(ValueError, match="lln adds: 'lln', 'lln_diag'"):
            tf.AutoModel.from_pretrained(tmp_path, attn_implementation="lln-diag")
        with pytest.raises(ValueError, match=r"the learned mix='ratio' .* would be lost"):
            tf.AutoModel.from_pretrained(tmp_path, attn_implementation="paged|lln")


def test_values_stay_while_softmax_runs(tmp_path: Path) -> None:
    model, given = make_trained("bert", statistics="running", mix="ratio"), make_batch("bert")
    want = output(model, **given)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    again.set_attn_implementation("lln_diag")
    assert torch.equal(output(again, **given), want)


def test_models_made_before_the_import_switch_unless_something_was_lost(tmp_path: Path) -> None:
    make_trained("bert", statistics="running").save_pretrained(tmp_path)
    code = f"""
import torch, transformers
model = transformers.AutoModel.from_pretrained({str(tmp_path)!r}, attn_implementation="sdpa")
plain = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
x = torch.arange(20)[None]
before = plain.eval()(x)[0]
import lln.hf
plain.set_attn_implementation("lln_diag")
assert (plain(x)[0] - before).abs().max() > 1e-6
assert plain.config.lln["implementation"] == "lln_diag"
try:
    model.set_attn_implementation("lln_diag")
except ValueError as problem:
    assert model.config._attn_implementation == "sdpa"
    print(problem)
"""
    assert "loaded before `import lln.hf`" in run_fresh(code)


def test_resized_embeddings_and_sharded_files(tmp_path: Path) -> None:
    model, given = build_model("bert"), make_batch("bert")
    model.resize_token_embeddings(80)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert again.config.vocab_size == 80
    assert torch.equal(output(again, **given), output(model, **given))
    assert relative_error(output(again, **given), output(build_model("bert", "sdpa"), **given)) > 1e-3


def test_a_state_dict_is_enough(tmp_path: Path) -> None:
    kinds = [kind for kind in ALL if kind not in (*IMAGES, *CAUSAL)]
    for kind in kinds:
        model = build_model(kind)
        lln.hf.convert(model, statistics="running")
        other = build_model(kind)
        lln.hf.convert(other, statistics="running")
        model.train()
        output(model, **make_batch(kind))
        other.load_state_dict(model.state_dict())
        assert torch.equal(output(other, **make_batch(kind)), output(model.eval(), **make_batch(kind)))


def test_a_model_built_around_a_converted_one_keeps_its_values() -> None:
    body, given = make_trained("bert", statistics="running", mix="ratio"), make_batch("bert")
    want, values = output(body, **given), {name: t.clone() for name, t in body.state_dict().items() if ".lln." in name}
    decoder = tf.BertLMHeadModel(make_config("bert", is_decoder=True, add_cross_attention=True)).to(torch.float64)

    class Around(tf.BertPreTrainedModel):
        def __init__(self) -> None:
            super().__init__(body.config)
            self.body = body
            self.post_init()

    for build_around in (lambda: tf.EncoderDecoderModel(encoder=body, decoder=decoder), Around, body.init_weights):
        build_around()
        found = body.state_dict()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert torch.equal(output(body.eval(), **given), want)


def test_the_card_on_the_hub_says_what_is_needed(tmp_path: Path) -> None:
    assert tf.PreTrainedModel._upload_modified_files.is_lln_hook
    card = tmp_path / "README.md"
    card.write_text("# Made by transformers, over ours\n")
    sent = []
    upload(
        lambda model, folder, *more: sent.append((card.read_text(), *more)), build_model("bert"), tmp_path, "me/mine"
    )
    ((text, *more),) = sent
    assert text.startswith("# Made by transformers")
    assert text.count("import lln.hf") == 1
    assert more == ["me/mine"]


def test_a_config_that_is_not_what_runs_is_not_saved(tmp_path: Path) -> None:
    model, given = build_model("bert"), make_batch("bert")
    model.config.lln["block_size"] = 2
    with pytest.raises(ValueError, match=r"config\.lln was changed by hand.*lln\.hf\.convert"):
        model.save_pretrained(tmp_path)
    model.set_attn_implementation("lln_diag")
    model.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again, **given), output(model, **given))
    assert again.encoder.layer[0].attention.self.lln.block_size == 2
