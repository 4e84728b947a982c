"""What LLN attention learns from the softmax attention of the same model, and what stays as it was."""

import copy
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import CAUSAL, build_model, make_batch, output, sentence, tokens
from helpers.tensors import relative_error
from lln.hf.distillation import NotFinite, choose, distillation, fine_tuning
from lln.hf.find import attention_modules
from lln.hf.watch import WATCHERS
from lln.instruments.observation import measure
from lln.lab.convert.layer_report import compare_layers, hidden_error, last_hidden

KINDS = ("bert", "llama", "bart")
ALL_OF_IT: dict[str, Any] = {"learnable": "channel", "mix": "scales", "feature_map": "linear"}
BLOCK = 8


def batches(kind: str, count: int = 3) -> list[dict[str, Any]]:
    return [make_batch(kind, seed) for seed in range(count)]


def convert_matched(kind: str, implementation: str = "lln_diag", **learned: Any) -> Any:
    model = build_model(kind, "sdpa")
    blocks: dict[str, Any] = {"block_size": BLOCK} if implementation == "lln_diag" else {}
    return lln.hf.convert(model, implementation, matching="data", batches=batches(kind), **blocks, **learned)


def collect_losses(model: Any, given: list[dict[str, Any]], **options: Any) -> list[float]:
    losses: list[float] = []
    lln.hf.distill(model, given, progress=lambda done, loss: losses.append(loss), **options)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_step_it_is_the_matched_model(kind: str) -> None:
    plain, learnable = convert_matched(kind), convert_matched(kind, **ALL_OF_IT)
    given = make_batch(kind, 7)
    # log and exp of alpha, and 0.5 a + 0.5 b in place of a number, round.
    assert relative_error(output(learnable, **given), output(plain, **given)) < 1e-12
    mapped, unmapped = (convert_matched(kind, **{**ALL_OF_IT, "feature_map": name}) for name in ("linear", None))
    assert torch.equal(output(mapped, **given), output(unmapped, **given))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_falls_and_nothing_else_changes(kind: str) -> None:
    model, given = convert_matched(kind, **ALL_OF_IT), batches(kind)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rows = compare_layers(model, given)
    losses = collect_losses(model, given, steps=25)
    assert losses[-1] < 0.9 * losses[0]
    found = compare_layers(model, given)
    for row, was in zip(found, rows, strict=True):
        assert row["lln"]["error"] < was["lln"]["error"]
        assert row["softmax"] == was["softmax"]
    with mock.patch("lln.lab.convert.layer_report.measure", wraps=measure) as seen:
        assert compare_layers(model, given, rows) == found
    assert "softmax" not in {call.args[0].attention for call in seen.call_args_list}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".lln." not in name), name
    assert model.config._attn_implementation == "lln_diag"
    assert not WATCHERS
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("learned", "names"),
    [
        ({"learnable": "head"}, {"log_alpha", "log_beta"}),
        ({"mix": "ratio"}, {"mix_logit"}),
        ({"feature_map": "linear"}, {"map_q", "map_k", "key_offset"}),
        (ALL_OF_IT, {"log_alpha", "log_beta", "lln_scale", "block_scale", "map_q", "map_k", "key_offset"}),
    ],
)
def test_what_is_asked_for_is_what_learns(learned: dict[str, Any], names: set[str]) -> None:
    model = convert_matched("bert", **learned)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    collect_losses(model, batches("bert"), steps=2)
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {f"{module}.lln.{name}" for module, _ in attention_modules(model) for name in names}


def test_layers_learn_independently_of_each_other() -> None:
    """The inputs of a layer are those of the softmax model, whatever the layers below it have learned."""
    model = convert_matched("bert", **ALL_OF_IT)
    other = copy.deepcopy(model)
    first, second = (name for name, _ in attention_modules(model))
    with torch.no_grad():
        other.get_submodule(first).lln.map_q.add_(0.5)
    for one in (model, other):
        collect_losses(one, batches("bert"), steps=3)
    names = [name for name in model.state_dict() if name.startswith(f"{second}.lln")]
    assert names
    assert all(torch.equal(model.state_dict()[name], other.state_dict()[name]) for name in names)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_loss_is_the_relative_error_of_what_softmax_gives(kind: str) -> None:
    """Once more from what reaches the model's own output projection."""
    model, given = build_model(kind, "sdpa", num_hidden_layers=1), make_batch(kind)
    lln.hf.convert(model, "lln_diag", matching="data", batches=[given], block_size=BLOCK, **ALL_OF_IT)
    ((name, module),) = attention_modules(model)
    (row,) = compare_layers(model, [given])
    (loss,) = collect_losses(copy.deepcopy(model), [given], steps=1)
    seen: list[torch.Tensor] = []
    last = module.o_proj if kind == "llama" else model.encoder.layer[0].attention.output.dense
    last.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    for implementation in ("sdpa", "lln_diag"):
        model.set_attn_implementation(implementation)
        output(model, **given)
    rows = given["attention_mask"].bool()
    teacher, student = (t[rows].unflatten(-1, (4, 8)) for t in seen)  # [tokens, heads, dim]
    error = student - teacher
    want = (error.square().sum((0, 2)) / teacher.square().sum((0, 2))).mean()
    assert abs(loss / float(want) - 1) < 1e-9
    assert row["layer"] == name
    assert abs(row["lln"]["error"] / float(error.norm() / teacher.norm()) - 1) < 1e-9


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_padding_does_not_change_what_is_learned(kind: str) -> None:
    short = tokens(1, 2, 15)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[:, 15:] = 0
    padded = {"input_ids": torch.cat([short, tokens(2, 2, 8)], 1), "attention_mask": mask}
    models = []
    for given in ({"input_ids": short, "attention_mask": torch.ones_like(short)}, padded):
        model = build_model(kind, "sdpa")
        lln.hf.convert(model, "lln_diag", matching="data", batches=[given], block_size=4, **ALL_OF_IT)
        collect_losses(model, [given], steps=5)
        models.append((model, compare_layers(model, [given])))
    (one, rows), (other, more) = models
    for name, t in one.state_dict().items():
        assert relative_error(other.state_dict()[name], t, 1e-3) < 1e-8, name
    for a, b in zip(rows, more, strict=True):
        for what in ("entropy", "spectral_gap", "error", "mix"):
            assert abs(a["lln"][what] - b["lln"][what]) < 1e-6


def test_the_same_seed_gives_the_same_bits_and_another_one_another_order() -> None:
    found = []
    for seed in (0, 0, 1):
        model = convert_matched("bert", **ALL_OF_IT)
        collect_losses(model, batches("bert"), steps=4, seed=seed)
        found.append({name: t for name, t in model.state_dict().items() if ".lln." in name})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert any(not torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_every_batch_comes_once_before_any_comes_again() -> None:
    assert (
        {choose(range(7), step, 3) for step in range(7)}
        == set(range(7))
        == {choose(range(7), 7 + s, 3) for s in range(7)}
    )
    assert [choose(range(7), s, 3) for s in range(7)] != [choose(range(7), 7 + s, 3) for s in range(7)]


def test_a_learner_goes_on_from_its_state_to_the_last_bit() -> None:
    given = batches("llama")
    whole, halves = convert_matched("llama", **ALL_OF_IT), convert_matched("llama", **ALL_OF_IT)
    collect_losses(whole, given, steps=6)

    class Stop(Exception):
        pass

    kept: dict[str, torch.Tensor] = {}
    learner = distillation(halves, 6)

    def stop(done: int, loss: float) -> None:
        if done == 3:
            kept.update({name: t.clone() for name, t in learner.state().items()})
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        lln.hf.distill(halves, given, learner=learner, progress=stop)
    assert halves.config._attn_implementation == "lln_diag"
    again = distillation(halves, 6)
    again.load(kept, 3)
    lln.hf.distill(halves, given, learner=again)
    for name, t in whole.state_dict().items():
        assert torch.equal(halves.state_dict()[name], t), name


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_fine_tuning_brings_the_last_hidden_states_nearer(kind: str) -> None:
    teacher, given = build_model(kind, "sdpa"), batches(kind)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "value" in name or "v_proj" in name:
                parameter *= 30.0  # so that attention says something
    model = copy.deepcopy(teacher)
    lln.hf.convert(model, "lln_diag", matching="data", batches=given, block_size=BLOCK, **ALL_OF_IT)
    original = {name: t.clone() for name, t in teacher.state_dict().items()}
    wanted = last_hidden(teacher, given)
    before = hidden_error(last_hidden(model, given), wanted)
    losses: list[float] = []
    lln.hf.fine_tune(model, teacher, given, steps=30, rate=1e-3, progress=lambda done, loss: losses.append(loss))
    after = hidden_error(last_hidden(model, given), wanted)
    assert after < 0.8 * before
    assert abs(losses[0] ** 0.5 / before - 1) < 0.5  # the same number on one batch
    assert all(torch.equal(t, original[name]) for name, t in teacher.state_dict().items())
    assert fine_tuning(model, 3).parameters.keys() == dict(model.base_model.named_parameters()).keys()


def test_fine_tuning_on_logits_brings_the_next_token_nearer() -> None:
    """The loss is the Kullback-Leibler divergence of a token, padding left out, and everything learns, the head too."""
    teacher, given = build_model("llama", "sdpa"), batches("llama", 2)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            parameter *= 30.0 if "v_proj" in name else 5.0 if "lm_head" in name else 1.0  # so that tokens differ
    model = copy.deepcopy(teacher)
    lln.hf.convert(model, "lln_diag", matching="data", batches=given, block_size=BLOCK, **ALL_OF_IT)

    def diverge(batch: dict[str, Any]) -> float:
        with torch.no_grad():
            both = [one(**batch).logits[batch["attention_mask"].bool()].softmax(-1) for one in (teacher, model)]
        wanted, found = both
        return float((wanted * (wanted / found).log()).sum(-1).mean())

    before = {name: t.clone() for name, t in model.named_parameters()}
    original = {name: t.clone() for name, t in teacher.state_dict().items()}
    first, losses = [diverge(batch) for batch in given], list[float]()
    lln.hf.fine_tune(
        model, teacher, given, on="logits", steps=30, rate=1e-3, progress=lambda done, loss: losses.append(loss)
    )
    assert min(abs(losses[0] / one - 1) for one in first) < 1e-9
    assert sum(map(diverge, given)) < 0.5 * sum(first)
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(t, original[name]) for name, t in teacher.state_dict().items())


def test_what_has_no_logits_is_not_fine_tuned_on_them() -> None:
    teacher, model = build_model("bert", "sdpa"), convert_matched("bert", **ALL_OF_IT)
    with pytest.raises(ValueError, match=r"on='logits' needs .*, and BertModel does not; leave it out") as problem:
        lln.hf.fine_tune(model, teacher, batches("bert"), on="logits", steps=1)
    sentence(problem)
    with pytest.raises(ValueError, match=r"on must be 'hidden' or 'logits'; got 'loss'"):
        lln.hf.fine_tune(model, teacher, batches("bert"), on="loss", steps=1)


def test_learned_values_survive_saving_and_generation_goes_on_in_constant_memory(tmp_path: Path) -> None:
    for kind, maker in (("bert", tf.AutoModel), ("llama", tf.AutoModelForCausalLM)):
        model = convert_matched(kind, **ALL_OF_IT)
        collect_losses(model, batches(kind), steps=3)
        model.save_pretrained(tmp_path / kind)
        again = maker.from_pretrained(tmp_path / kind)
        assert torch.equal(output(again, **make_batch(kind, 5)), output(model, **make_batch(kind, 5)))
        if kind in CAUSAL:
            prompt = tokens(3, 2, 11)
            whole = model.generate(prompt, max_new_tokens=12, use_cache=False, eos_token_id=None, do_sample=False)
            cached = again.generate(prompt, max_new_tokens=12, eos_token_id=None, do_sample=False)
            assert torch.equal(cached, whole)


def test_a_checkpoint_with_a_learned_mix_is_not_loaded_without_it(tmp_path: Path) -> None:
    convert_matched("bert", mix="ratio").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the learned mix='ratio' .* would be lost") as problem:
        tf.AutoModel.from_pretrained(tmp_path, attn_implementation="lln")
    sentence(problem)
    model = tf.AutoModel.from_pretrained(tmp_path)
    lln.hf.convert(model, "lln", mix=0.5)
    model.save_pretrained(tmp_path / "without")
    assert tf.AutoModel.from_pretrained(tmp_path / "without").config._attn_implementation == "lln"


def test_what_was_found_is_where_learning_begins() -> None:
    """alpha and beta that were found or given become parameters with the same values."""
    model = convert_matched("llama")
    layer = model.model.layers[0].self_attn
    found = layer.lln.fixed_alpha[0].clone(), layer.lln.fixed_beta[0].clone()
    lln.hf.convert(model, learnable="channel")
    for learned, value, heads in zip((layer.lln.log_alpha, layer.lln.log_beta), found, (4, 2), strict=True):
        assert learned.shape == (heads, 8)
        assert relative_error(learned.exp(), value.expand(heads, 8)) < 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "batches must hold at least one batch"),
        (iter([{}]), "batches must be a list"),
        ([torch.ones(2)], "batches must be dicts"),
    ],
)
def test_wrong_batches_are_named(given: Any, message: str) -> None:
    model = convert_matched("bert", **ALL_OF_IT)
    with pytest.raises((ValueError, TypeError), match=message) as problem:
        lln.hf.distill(model, given)
    sentence(problem)


def test_what_cannot_be_distilled_is_named() -> None:
    given = batches("llama")
    with pytest.raises(ValueError, match="the model's attention has nothing to learn"):
        lln.hf.distill(convert_matched("llama"), given)
    with pytest.raises(ValueError, match=re.escape("first lln.hf.convert(model, 'lln_diag')")):
        lln.hf.distill(build_model("llama", "sdpa"), given)
    with pytest.raises(ValueError, match="steps must be a positive int; got 0"):
        lln.hf.distill(convert_matched("llama", **ALL_OF_IT), given, steps=0)
    packed = {"input_ids": tokens(0, 1), "position_ids": torch.cat([torch.arange(15), torch.arange(8)])[None]}
    with pytest.raises(ValueError, match="hides other keys from each query"):
        lln.hf.distill(convert_matched("llama", **ALL_OF_IT), [packed | {"use_cache": False}])
    model = convert_matched("llama", **ALL_OF_IT)
    with pytest.raises(ValueError, match="teacher must be another model"):
        lln.hf.fine_tune(model, model, given)
    with torch.no_grad():
        model.model.layers[0].self_attn.lln.key_offset.fill_(torch.nan)
    with pytest.raises(NotFinite, match="The loss is nan at step 1"):
        lln.hf.distill(model, given)
