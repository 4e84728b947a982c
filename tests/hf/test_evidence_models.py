"""Models with the evidence read: what is fitted and distilled comes nearer to softmax, generates and is saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lln.hf
from helpers.hf_models import VOCABULARY, build_writer, make_batch, output, sentence, tokens
from helpers.tensors import relative_error
from lln.lab.convert.layer_report import compare_layers

EVIDENCE: dict[str, Any] = {"read": "evidence", "directions": 32, "mix": "scales", "feature_map": "linear"}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
KINDS = ("bert", "llama", "bart")
BLOCK = 4
# LLN alone, and LLN+Diag by how its two parts are laid out and mixed
WAYS: dict[str, dict[str, Any]] = {
    "lln": {"implementation": "lln", "mix": None},
    "scales": {"implementation": "lln_diag", "block_size": BLOCK},
    "evidence": {"implementation": "lln_diag", "block_size": BLOCK, "mix": "evidence"},
    "overlap": {"implementation": "lln_diag", "block_size": BLOCK, "mix": "evidence", "overlap": True},
}


def softmax(kind: str) -> Any:
    return build_writer(kind, "sdpa")


def batches(kind: str, count: int = 3) -> list[dict[str, Any]]:
    """With padding: at the end, and where a decoder generates, at the beginning."""
    found = [make_batch(kind, seed) for seed in range(count)]
    if kind == "llama":
        found[-1] = {name: t.flip(1) for name, t in found[-1].items()}
    return found


def make_converted(kind: str, way: str = "scales") -> Any:
    """Not fitted yet: directions as they begin."""
    return lln.hf.convert(softmax(kind), **(EVIDENCE | WAYS[way]))


def make_learned(kind: str, way: str = "scales") -> Any:
    """Fitted, and with a feature map that is no identity."""
    model = lln.hf.fit(make_converted(kind, way), batches(kind))
    return lln.hf.distill(model, batches(kind), steps=3).eval()


def errors(model: Any, given: list[dict[str, Any]]) -> list[float]:
    return [row["lln"]["error"] for row in compare_layers(model, given)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_and_then_distillation_come_nearer_to_softmax_and_change_nothing_else(kind: str, way: str) -> None:
    model, given = make_converted(kind, way), batches(kind)
    before, found = {name: t.clone() for name, t in model.state_dict().items()}, [errors(model, given)]
    seen: list[tuple[int, int]] = []
    lln.hf.fit(model, given, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]  # once for the directions, once for the rest
    found.append(errors(model, given))
    lln.hf.distill(model, given, steps=20, rate=0.01)
    found.append(errors(model, given))
    for first, fitted, distilled in zip(*found, strict=True):
        assert distilled < fitted < first
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".lln." not in name), name


def test_a_fit_knows_what_is_padding() -> None:
    """What stands in padding, and that it is there, changes nothing that is found."""
    padded, other, short = make_converted("bert"), make_converted("bert"), make_converted("bert")
    x, mask = tokens(1), torch.ones(3, 23, dtype=torch.long)
    mask[:, 15:] = 0
    lln.hf.fit(padded, [{"input_ids": x, "attention_mask": mask}])
    lln.hf.fit(other, [{"input_ids": x.masked_fill(mask == 0, VOCABULARY - 1), "attention_mask": mask}])
    lln.hf.fit(short, [{"input_ids": x[:, :15]}])
    for name, tensor in padded.state_dict().items():
        for model in (other, short):
            assert relative_error(model.state_dict()[name].double(), tensor.double()) < 1e-9, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart"])
def test_generation_from_a_state_equals_full_recomputation(kind: str, way: str) -> None:
    model = make_learned(kind, way)
    x = tokens(5)
    mask = torch.ones_like(x)
    mask[0, :9] = mask[2, :3] = 0
    x = x.masked_fill(mask == 0, 0)
    how = {"max_new_tokens": 9, "attention_mask": mask, **GREEDY}
    want = model.generate(x, use_cache=False, **how)
    found = model.generate(x, return_dict_in_generate=True, **how)
    assert torch.equal(found.sequences, want)
    cache = found.past_key_values
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if kind == "bart" else (cache,)
    assert all(isinstance(part, lln.hf.LLNCache) for part in parts)
    assert torch.equal(model.generate(x, num_beams=3, **how), model.generate(x, num_beams=3, use_cache=False, **how))
    still = model.generate(x, cache_implementation="static", disable_compile=True, **how)
    assert torch.equal(still, want)
    if kind != "bart":  # whose rows have no padding when they are alone, but an encoder of another length
        alone = model.generate(x[:1, 9:], max_new_tokens=9, **GREEDY)
        assert torch.equal(alone[0, -9:], want[0, -9:])


@pytest.mark.parametrize("way", ["scales", "overlap"])
def test_logits_of_rotary_keys_do_not_depend_on_where_a_sequence_is_cut(way: str) -> None:
    model, x = make_learned("llama", way), tokens(5, 2)
    want = output(model, input_ids=x, use_cache=False)
    for cuts in ((1, 23), (4, 9, 23), (3, 4, 5, 23)):
        cache, found, start = lln.hf.LLNCache(), [], 0
        for end in cuts:
            found.append(output(model, input_ids=x[:, start:end], past_key_values=cache))
            start = end
        assert relative_error(torch.cat(found, 1), want) < 1e-11
    assert cache.nbytes == measure_after(model, 40)


def measure_after(model: Any, length: int) -> int:
    cache = lln.hf.LLNCache()
    output(model, input_ids=tokens(6, 2, length), past_key_values=cache)
    return cache.nbytes


@pytest.mark.parametrize(
    ("kind", "way"), [("bert", "scales"), ("bert", "evidence"), ("llama", "overlap"), ("bart", "lln")]
)
def test_a_fitted_model_comes_back_as_it_was_saved(kind: str, way: str, tmp_path: Path) -> None:
    model, given = make_learned(kind, way), make_batch(kind, 7)
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again.config.lln == model.config.lln
    assert torch.equal(output(again, **given), output(model, **given))
    before = output(make_converted(kind, way), **given)
    assert relative_error(before, output(model, **given)) > 1e-3  # there is something to lose


def test_the_seed_of_a_fit_is_all_that_it_depends_on() -> None:
    found: list[dict[str, Tensor]] = []
    for seed in (0, 0, 1):
        model = lln.hf.fit(make_converted("bert"), batches("bert"), seed=seed)
        found.append({name: t for name, t in model.state_dict().items() if "channel_directions" in name})
    first, again, other = found
    assert first
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor)
        assert not torch.equal(other[name], tensor)


@pytest.mark.parametrize("mix", ["ratio", "scales"])
def test_a_fit_of_the_papers_read_comes_nearer_too(mix: str) -> None:
    given = batches("llama")
    model = lln.hf.convert(softmax("llama"), "lln_diag", block_size=BLOCK, matching="data", mix=mix, batches=given)
    before = errors(model, given)
    lln.hf.fit(model, given)
    assert all(after < was for after, was in zip(errors(model, given), before, strict=True))


def test_what_cannot_be_fitted_is_refused_in_one_sentence() -> None:
    given, model = batches("bert"), make_converted("bert")
    few = [{"input_ids": tokens(0, 1, 9)}]
    moved = lln.hf.distill(copy.deepcopy(model), given, steps=2)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (softmax("bert"), given, ValueError, "the model runs 'sdpa'; first lln.hf.convert"),
        (model, iter(given), TypeError, "batches must be a list"),
        (model, [], ValueError, "batches must hold at least one batch"),
        (lln.hf.convert(softmax("bert"), "lln"), given, ValueError, "has no values that fit could find"),
        (model, few, ValueError, "saw 9 queries for each key head, which is too few to find 32 directions"),
        (moved, given, ValueError, "fit before lln.hf.distill"),
    ]
    for asked, inputs, kind, message in cases:
        before = {name: t.clone() for name, t in asked.state_dict().items()}
        with pytest.raises(kind) as problem:
            lln.hf.fit(asked, inputs)
        assert message in sentence(problem)
        assert all(torch.equal(t, before[name]) for name, t in asked.state_dict().items())
