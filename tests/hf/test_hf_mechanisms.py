"""Every attention on q, k, v works in transformers' models under its own name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lln.hf
from helpers.fresh import run_fresh
from helpers.hf_models import build_model, make_batch, make_config, output, record_calls, tokens
from helpers.tensors import relative_error
from lln.hf.masks import lln_mask

PEERS = [name for name in lln.hf.IMPLEMENTATIONS if name not in ("lln", "lln_diag")]
LEARNED = [name for name in PEERS if lln.mechanisms()[name].parameters]
OPTIONS: dict[str, dict[str, Any]] = {
    "elu": {"block_size": 8, "mix": 0.3},
    "performer": {"features": 24, "seed": 3},
    "block_diagonal": {"block_size": 8},
    "nystromformer": {"landmarks": 5},
    "longformer": {"window": 6},
    "bigbird": {"block": 4, "random_blocks": 1},
    "reformer": {"chunk": 8},
    "cosformer": {"max_length": 40},
}
CAUSAL = ["elu", "performer", "cosformer", "block_diagonal", "rfa", "based", "longformer", "transnormer_t1"]


def peer(kind: str, name: str, **options: Any) -> Any:
    return lln.hf.convert(build_model(kind, "sdpa"), name, **(options or OPTIONS.get(name, {})))


def test_all_on_queries_and_keys_are_registered_and_nothing_else() -> None:
    want = {name for name, m in lln.mechanisms().items() if m.kind != "mixer"} - {"softmax"}
    assert set(lln.hf.IMPLEMENTATIONS) == want
    assert not [name for name in want if "flash" in name]
    assert {"elu", "performer", "cosformer", "nystromformer", "reformer", "transnormer_t2"} <= want
    for name in want:
        assert ALL_ATTENTION_FUNCTIONS[name].is_lln
        assert ALL_MASK_ATTENTION_FUNCTIONS[name] is lln_mask


def test_a_name_of_transformers_keeps_its_meaning() -> None:
    code = """
from transformers import AttentionInterface, AttentionMaskInterface
mine = lambda *args, **kwargs: None
AttentionInterface.register("performer", mine)
AttentionMaskInterface.register("relu", mine)
import lln.hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert ALL_ATTENTION_FUNCTIONS["performer"] is mine and "relu" not in ALL_ATTENTION_FUNCTIONS
assert not {"performer", "relu", "sdpa", "eager"} & set(lln.hf.IMPLEMENTATIONS) and "elu" in lln.hf.IMPLEMENTATIONS
try:
    lln.hf.Options(mechanisms={"performer": {}})
except ValueError as problem:
    print(problem)
"""
    assert "got 'performer'" in run_fresh(code)


@pytest.mark.parametrize("name", PEERS)
def test_bert_computes_what_lln_attention_computes(name: str) -> None:
    model, given = peer("bert", name), make_batch("bert")
    with record_calls() as calls:
        ours = output(model, **given)
    assert len(calls) == 2
    for call in calls:
        mask = given["attention_mask"].bool()
        if name in LEARNED:
            want = call.module.lln_peer.attention(call.q, call.k, call.v, key_mask=mask)
        else:
            want = lln.attention(name, call.q, call.k, call.v, key_mask=mask, **OPTIONS.get(name, {}))
        assert relative_error(call.out.transpose(1, 2), want) < 1e-12
    apart = relative_error(ours, output(build_model("bert", "sdpa"), **given))
    assert apart == 0 if name.endswith("convolved_softmax") else apart > 3e-4  # it starts at softmax; Based comes near
    assert relative_error(ours, output(build_model("bert", "lln"), **given)) > 1e-3


@pytest.mark.parametrize("name", PEERS)
def test_padding_and_batch_mates_are_invisible(name: str) -> None:
    model = peer("bert", name)
    for left in (False, True):
        ids, mask, positions = (torch.zeros(2, 23, dtype=torch.long) for _ in range(3))
        whole = [tokens(0, 1, 23), tokens(1, 1, 14)]
        for row, one in enumerate(whole):
            place = slice(23 - one.shape[1], 23) if left else slice(0, one.shape[1])
            ids[row, place], mask[row, place], positions[row, place] = one[0], 1, torch.arange(one.shape[1])
        together = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
        for row, one in enumerate(whole):
            alone = output(model, input_ids=one)
            assert (together[row][mask[row] == 1] - alone[0]).abs().max() < 1e-9


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_causal_models_do_not_look_ahead_and_generate(kind: str, name: str) -> None:
    model = peer(kind, name)
    x = tokens(0)
    changed = x.clone()
    changed[:, 15:] = tokens(9)[:, 15:]
    first, second = (output(model, input_ids=t) for t in (x, changed))
    assert (first - second)[:, :15].abs().max() < 1e-12
    mask = torch.ones_like(x)
    mask[0, :9] = 0
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(x, **how), model.generate(x, use_cache=False, **how))


@pytest.mark.parametrize(("kind", "name", "feature"), [
    ("llama", "nystromformer", "is_causal=True: landmarks are means"),
    ("llama", "skyformer", "is_causal=True"),
    ("gpt2", "reformer", "is_causal=True"),
    ("gpt2", "bigbird", "is_causal=True"),
    ("bart", "block_diagonal", "cross attention, query and key of two sequences: blocks"),
    ("bart", "longformer", "cross attention, query and key of two sequences: a window"),
    ("bart", "cosformer", "cross attention in models"),
])  # fmt: skip
def test_what_a_mechanism_cannot_do_is_refused_in_its_own_sentence(kind: str, name: str, feature: str) -> None:
    model, given = peer(kind, name), make_batch(kind)
    for lengths in (9, 23):  # also where queries and keys happen to be equally many
        if kind == "bart":
            given["decoder_input_ids"] = tokens(1, 3, lengths)
        with pytest.raises(ValueError, match=re.escape(f"{name} does not support {feature}")) as problem:
            model(**given)
        assert "\n" not in str(problem.value)


def test_cosformer_needs_a_length_in_causal_models() -> None:
    model = lln.hf.convert(build_model("llama", "sdpa"), "cosformer")
    with pytest.raises(ValueError, match="unless max_length is given"):
        model(input_ids=tokens(0))


def test_encoder_decoder_with_blocks_in_self_attention_only() -> None:
    model, given = peer("bart", "elu"), make_batch("bart")
    with record_calls() as calls:
        output(model, **given)
    for call in calls:
        cross = call.q.shape[2] != call.k.shape[2]
        causal = bool(call.module.is_causal)
        mask = call.mask.bool() if isinstance(call.mask, torch.Tensor) and call.mask.shape[-1] else None
        options = {} if cross else OPTIONS["elu"]
        want = lln.attention("elu", call.q, call.k, call.v, is_causal=causal, key_mask=mask, **options)
        assert relative_error(call.out.transpose(1, 2), want) < 1e-12
    assert sum(call.q.shape[2] != call.k.shape[2] for call in calls) == 2


@pytest.mark.parametrize("name", ["performer", "elu", "nystromformer"])
def test_saved_and_reloaded_with_options(name: str, tmp_path: Path) -> None:
    model, given = peer("bert", name), make_batch("bert")
    model.save_pretrained(tmp_path)
    held = json.loads((tmp_path / "config.json").read_text())["lln"]
    assert (held["implementation"], held["mechanisms"]) == (name, {name: OPTIONS[name]})
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert again.config._attn_implementation == name
    with record_calls() as calls:
        assert torch.equal(output(again, **given), output(model, **given))
    assert calls
    assert "import lln.hf" in (tmp_path / "README.md").read_text()


def test_options_stay_while_another_attention_runs(tmp_path: Path) -> None:
    model, given = build_model("bert"), make_batch("bert")
    lln.hf.convert(model, mix="ratio", block_size=8)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.lln.mix_logit.fill_(0.7)
    want = output(model, **given)
    lln.hf.convert(model, "performer", features=16)
    performer = output(model, **given)
    model.set_attn_implementation("nystromformer")
    model.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "nystromformer"
    assert torch.equal(output(again, **given), output(model, **given))
    again.set_attn_implementation("performer")
    assert torch.equal(output(again, **given), performer)
    again.set_attn_implementation("lln_diag")
    assert torch.equal(output(again, **given), want)
    plain = tf.AutoModel.from_config(make_config("bert"), attn_implementation="relu", dtype=torch.float64)
    assert plain.config.lln["implementation"] == "relu"


@pytest.mark.parametrize(("arguments", "message"), [
    ({"implementation": "softmax"}, "implementation must be one of lln, lln_diag, block_diagonal"),
    ({"implementation": "tnn"}, "implementation must be one of lln, lln_diag, block_diagonal"),
    ({"implementation": "elu", "features": 3}, "elu has no option 'features'"),
    ({"implementation": "nystromformer", "block_size": 8}, "nystromformer has no option 'block_size'"),
    ({"implementation": "block_diagonal", "mix": 0.3}, "block_diagonal has no option 'mix'"),
    ({"implementation": "nystromformer", "landmarks": 0}, "landmarks must be a positive int"),
    ({"implementation": "linformer", "rank": 0}, "rank must be a positive int"),
    ({"implementation": "linformer", "rows": 3}, "linformer has no option 'rows'"),
    ({"implementation": "elu", "block_size": -1}, "block_size must be a positive int"),
    ({"implementation": "elu", "mix": 0.3}, "mix weighs LLN against the blocks and needs block_size"),
    ({"implementation": "elu", "matching": "paper"}, "matching goes with 'lln' and 'lln_diag'"),
    ({"implementation": "elu", "batches": []}, "batches goes with 'lln' and 'lln_diag'"),
    ({"implementation": "performer", "projection": torch.ones(3, 8)}, "projection of performer must be a plain value"),
    ({"implementation": "lln_diag", "features": 8}, "lln_diag has no option 'features'"),
])  # fmt: skip
def test_wrong_options_are_named_and_leave_the_model_alone(arguments: dict[str, Any], message: str) -> None:
    for start in ("sdpa", "lln", "relu"):
        model, given = build_model("bert", start), make_batch("bert")
        want, held = output(model, **given), getattr(model.config, "lln", None)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            lln.hf.convert(model, **arguments)
        assert getattr(model.config, "lln", None) == held
        assert model.config._attn_implementation == start
        assert torch.equal(output(model, **given), want)


def test_attention_maps_dropout_and_training() -> None:
    model, given = peer("bert", "elu"), make_batch("bert")
    with record_calls() as calls:
        maps = model(**given, output_attentions=True).attentions
    for call, p in zip(calls, maps, strict=True):
        assert relative_error((p @ call.v).transpose(1, 2), call.out) < 1e-12
    model.train()
    first, second = output(model, **given), output(model, **given)
    assert relative_error(first, second) > 1e-3
    first.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    refusing = peer("bert", "transnormer_t1")
    with pytest.raises(ValueError, match="has no attention matrix"):
        refusing(**given, output_attentions=True)


def test_packed_sequences_are_sequences_apart() -> None:
    for kind, name in (("llama", "elu"), ("bert", "nystromformer"), ("llama", "longformer")):
        model = peer(kind, name)
        apart = [tokens(s, 1, n) for s, n in enumerate((7, 1, 11))]
        cu = torch.tensor([0, 7, 8, 19], dtype=torch.int32)
        extra = {"use_cache": False} if kind == "llama" else {}
        packed = output(
            model, input_ids=torch.cat(apart, 1), position_ids=torch.cat([torch.arange(n) for n in (7, 1, 11)])[None],
            cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=11, max_length_k=11, **extra,
        )  # fmt: skip
        want = torch.cat([output(model, input_ids=one, **extra) for one in apart], 1)
        assert (packed - want).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    model, given = peer("bert", "elu"), make_batch("bert")
    want = output(model, **given)
    with torch.no_grad():
        found = output(torch.compile(model, backend="aot_eager", fullgraph=True), **given)
    assert relative_error(found, want) < 1e-12


@pytest.mark.parametrize("name", LEARNED)
def test_what_a_mechanism_learns_is_part_of_the_model(name: str, tmp_path: Path) -> None:
    model, given = peer("bert", name), make_batch("bert")
    plain = build_model("bert", "sdpa")
    own = {n: p for n, p in model.named_parameters() if "lln_peer" in n}
    assert own.keys() == set(dict(model.named_parameters())) - set(dict(plain.named_parameters()))
    output(model, **given)
    model(**given)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own.values())
    with torch.no_grad():
        for p in own.values():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype))
    want = output(model, **given)
    model.save_pretrained(tmp_path)
    loaded, about = type(model).from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert torch.equal(output(loaded.eval(), **given), want)
    other = "hedgehog" if name != "hedgehog" else "elu"
    with pytest.raises(ValueError, match=f"what {name} has learned in .* would be lost"):
        lln.hf.convert(model, other)
    assert torch.equal(output(model, **given), want)
    model.set_attn_implementation("sdpa")
    assert not torch.equal(output(model, **given), want)
    model.set_attn_implementation(name)
    assert torch.equal(output(model, **given), want)


@pytest.mark.parametrize("name", LEARNED)
def test_a_model_without_what_is_learned_gets_its_first_values(name: str, tmp_path: Path) -> None:
    plain = build_model("bert", "sdpa")
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, attn_implementation=name, dtype=torch.float64).eval()
    own = {n: p for n, p in loaded.named_parameters() if "lln_peer" in n}
    torch.manual_seed(0)
    fresh = loaded.encoder.layer[0].attention.self.lln_peer.build()
    for layer in range(2):
        for n, p in fresh.named_parameters():
            found = own[f"encoder.layer.{layer}.attention.self.lln_peer.attention.{n}"]
            assert found.shape == p.shape
            assert float(found.detach().std()) == pytest.approx(float(p.detach().std()), rel=0.3)
    assert output(loaded, **make_batch("bert")).isfinite().all()


def test_a_vision_model_knows_how_many_tokens_linformer_gets() -> None:
    vit = tf.ViTModel(tf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=12, patch_size=4,
        attn_implementation="linformer", lln={"mechanisms": {"linformer": {"rank": 3}}},
    ))  # fmt: skip
    parameters = {n: p for n, p in vit.named_parameters() if "lln_peer" in n}
    assert {tuple(p.shape) for p in parameters.values()} == {(10, 3)}
    assert vit(torch.zeros(1, 3, 12, 12)).last_hidden_state.shape == (1, 10, 16)
