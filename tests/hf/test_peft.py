"""Adapters of peft around a converted model: what its attention has learned is trained, saved and loaded with them."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import lln.hf
from helpers.hf_models import IMAGES, build_model, build_writer, make_batch, output, sentence
from helpers.tensors import relative_error

LEARNED: dict[str, Any] = {"learnable": "channel", "mix": "scales", "block_size": 4}
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"], "vit": ["q_proj", "v_proj"], "bart": ["q_proj"]}


def make_base(kind: str = "bert", **changes: Any) -> Any:
    build = build_model if kind in ("bert", *IMAGES) else build_writer
    return lln.hf.convert(build(kind, "sdpa"), "lln_diag", **LEARNED | changes)


def wrap(model: Any, kind: str = "bert", name: str = "default") -> Any:
    adapter = peft.LoraConfig(target_modules=TARGETS[kind], modules_to_save=["lln"])
    return peft.get_peft_model(model, adapter, adapter_name=name)


def train(model: Any, **given: Tensor) -> None:
    """A step that moves all that is trained."""
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.backward(output(model, **given).square().mean())
    assert all(p.grad is not None for p in weights)
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    model.zero_grad()
    model.eval()


@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_learned_is_saved_with_the_adapter_and_comes_back(kind: str, tmp_path: Path) -> None:
    base, given = make_base(kind), make_batch(kind)
    before = output(base, **given)
    model = wrap(copy.deepcopy(base), kind)
    assert torch.equal(output(model, **given), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"lln_scale", "block_scale", "log_alpha", "log_beta"} <= {name.rpartition(".")[2] for name in trained}
    train(model, **given)
    want = output(model, **given)
    assert relative_error(want, before) > 1e-3
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_base(kind), tmp_path).eval()
    assert torch.equal(output(again, **given), want)
    with again.disable_adapter():
        assert torch.equal(output(again, **given), before)
    merged = again.merge_and_unload()
    assert relative_error(output(merged, **given), want) < 1e-12
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(merged).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert torch.equal(output(loaded.eval(), **given), output(merged, **given))


def test_each_adapter_has_attention_of_its_own() -> None:
    model, given = wrap(make_base(), name="one"), make_batch("bert")
    model.add_adapter("other", peft.LoraConfig(target_modules=TARGETS["bert"], modules_to_save=["lln"]))
    found = {}
    for name in ("one", "other"):
        model.set_adapter(name)
        train(model, **given)
        found[name] = output(model, **given)
        assert not any(p.requires_grad for n, p in model.named_parameters() if ".lln." in n and f".{name}." not in n)
    train(model, **given)
    assert not torch.equal(output(model, **given), found["other"])
    model.set_adapter("one")
    assert torch.equal(output(model, **given), found["one"])


def test_a_writer_with_an_adapter_keeps_a_state() -> None:
    model = wrap(make_base("llama", statistics="fixed"), "llama")
    train(model, **make_batch("llama"))
    ids = make_batch("llama")["input_ids"][:1]
    with_state, without = (model.generate(input_ids=ids, max_new_tokens=6, use_cache=use) for use in (True, False))
    assert torch.equal(with_state, without)


def test_measured_statistics_are_saved_with_the_adapter(tmp_path: Path) -> None:
    given = make_batch("bert")
    model = wrap(make_base(learnable=None, statistics="running", batches=[given]))
    model.train()
    for seed in range(3):
        output(model, **make_batch("bert", seed))
    model.eval()
    want = output(model, **given)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_base(learnable=None, statistics="running"), tmp_path).eval()
    assert torch.equal(output(again, **given), want)


def test_tiles_follow_the_image_through_an_adapter() -> None:
    base = lln.hf.convert(build_model("vit", "sdpa"), "lln_diag", tile=2, learnable="head")
    given = make_batch("vit")
    want = output(base, **given)
    fresh = lln.hf.convert(build_model("vit", "sdpa"), "lln_diag", tile=2, learnable="head")  # has seen no image yet
    assert torch.equal(output(wrap(fresh, "vit"), **given), want)


def test_a_model_in_an_adapter_can_be_converted_fitted_and_distilled() -> None:
    given = make_batch("bert")
    plain = peft.get_peft_model(build_model("bert", "sdpa"), peft.LoraConfig(target_modules=TARGETS["bert"]))
    softmax, teacher = output(plain, **given), copy.deepcopy(plain)
    assert lln.hf.convert(plain, "lln", statistics="sample") is plain
    assert relative_error(output(plain, **given), softmax) > 1e-3
    with pytest.warns(UserWarning, match="are no part of its adapter"):
        lln.hf.convert(plain, "lln_diag", block_size=4, mix="ratio", learnable="head")
    losses: list[float] = []
    lln.hf.fit(plain, [given])
    lln.hf.distill(plain, [given], steps=4, progress=lambda done, loss: losses.append(loss))
    lln.hf.fine_tune(plain, teacher, [given], steps=2)
    assert losses[-1] < losses[0]


def test_other_options_would_lose_what_the_adapter_learned() -> None:
    model = wrap(make_base())
    want = output(model, **make_batch("bert"))
    with pytest.raises(ValueError, match=r"peft keeps what .* has learned .* merge_and_unload") as problem:
        lln.hf.convert(model, block_size=8)
    sentence(problem)
    assert torch.equal(output(model, **make_batch("bert")), want)
    assert lln.hf.convert(model) is model  # the same options change nothing
    assert torch.equal(output(model, **make_batch("bert")), want)


def test_an_adapter_with_values_is_not_put_on_softmax_without_a_word(tmp_path: Path) -> None:
    wrap(make_base()).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has no place for it; first lln\.hf\.convert the model"):
        peft.PeftModel.from_pretrained(build_model("bert", "sdpa"), tmp_path)
