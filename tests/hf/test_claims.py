"""What LLN attention has measured or learned never vanishes without a word: config.lln says that it is there, and
whoever finds it gone says so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import build_model, make_batch, make_config, output, sentence

MISSING = r"config\.lln says that .* keeps values among its weights, and they are missing"
# What a process that never imports lln.hf does with folders, and one that imports it too late.
WITHOUT = """
import sys, transformers as tf
for kind in sys.argv[2:]:
    model = getattr(tf, kind).from_pretrained(sys.argv[1] + kind, attn_implementation="sdpa")
    model.save_pretrained(sys.argv[1] + kind + "-again")
assert "lln" not in sys.modules
"""
TOO_LATE = """
import sys, warnings, transformers as tf
source, target, plain, same = sys.argv[1:]
model, other = (tf.BertModel.from_pretrained(one, attn_implementation="sdpa") for one in (source, plain))
import lln.hf
for change in (lambda: lln.hf.convert(model, block_size=16), lambda: model.set_attn_implementation("lln_diag")):
    try:
        change()
    except ValueError as problem:
        print(problem)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    model.save_pretrained(target)
    other.save_pretrained(same)
print(*(one.message for one in said))
"""
LEARNED: dict[str, dict[str, Any]] = {
    "running": {"statistics": "running"},
    "learnable": {"learnable": "head"},
    "mix": {"mix": "ratio"},
    "directions": {"read": "evidence", "directions": 12},
    "convolution": {"convolution": 3},
    "coefficients": {"alpha": 1.5, "beta": 1.25},
    "linformer": {"implementation": "linformer", "rank": 4},
}


def run(code: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return done.stdout


def drop_values(source: Path, target: Path) -> None:
    """What `WITHOUT` does to a folder, without a process for each: see the test of that name."""
    model = tf.BertModel(make_config("bert"))
    model.save_pretrained(target)
    mine, held = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    said = {name: held[name] for name in ("lln", "lln_values") if name in held}
    (target / "config.json").write_text(json.dumps(mine | said))


def test_a_process_without_lln_hf_leaves_the_claim_and_not_the_values(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {"BertModel": {"mix": "ratio"}, "BertForMaskedLM": {"learnable": "head"}}
    for kind, options in kinds.items():
        model = getattr(tf, kind)(make_config("bert"))
        lln.hf.convert(model, "lln_diag", **options).save_pretrained(tmp_path / kind)
    run(WITHOUT, f"{tmp_path}/", *kinds)
    for kind in kinds:
        for again in (tf.BertModel, tf.BertForMaskedLM):
            with pytest.raises(ValueError, match=f"{MISSING}.*a process that had not imported lln.hf") as problem:
                again.from_pretrained(tmp_path / f"{kind}-again")
            sentence(problem)
            assert again.from_pretrained(tmp_path / kind).config.lln["implementation"] == "lln_diag"


@pytest.mark.parametrize("kind", LEARNED)
def test_values_of_every_kind_are_missed(kind: str, tmp_path: Path) -> None:
    options = {"implementation": "lln_diag"} | LEARNED[kind]
    lln.hf.convert(build_model("bert", "sdpa"), **options).save_pretrained(tmp_path / "good")
    drop_values(tmp_path / "good", tmp_path / "bad")
    with pytest.raises(ValueError, match=MISSING) as problem:
        tf.AutoModel.from_pretrained(tmp_path / "bad")
    sentence(problem)


def test_layers_that_kept_softmax_are_not_missed(tmp_path: Path) -> None:
    lln.hf.convert(build_model("bert", "sdpa"), "lln", layers=[1], learnable="head").save_pretrained(tmp_path)
    tf.AutoModel.from_pretrained(tmp_path)


def test_the_remedies_work(tmp_path: Path) -> None:
    lln.hf.convert(build_model("bert", "sdpa"), "lln_diag", learnable="head").save_pretrained(tmp_path / "good")
    drop_values(tmp_path / "good", tmp_path / "bad")
    with pytest.warns(UserWarning, match=f"{MISSING}.*config.lln is forgotten"):
        model = tf.AutoModel.from_pretrained(tmp_path / "bad", attn_implementation="sdpa")
    assert model.config.lln is None
    assert not [name for name, _ in model.named_modules() if "lln" in name]
    model.save_pretrained(tmp_path / "softmax")
    assert tf.AutoModel.from_pretrained(tmp_path / "softmax").config._attn_implementation == "sdpa"
    lln.hf.convert(model, "lln_diag", learnable="head").save_pretrained(tmp_path / "anew")
    again, given = tf.AutoModel.from_pretrained(tmp_path / "anew").eval(), make_batch("bert")
    assert torch.equal(output(again, **given), output(model.eval(), **given))


def test_nothing_is_missed_where_nothing_was_claimed(tmp_path: Path) -> None:
    build_model("bert", "lln_diag").save_pretrained(tmp_path / "good")  # keeps nothing
    drop_values(tmp_path / "good", tmp_path / "bad")
    assert tf.AutoModel.from_pretrained(tmp_path / "bad").config._attn_implementation == "lln_diag"
    lln.hf.convert(build_model("bert", "sdpa"), "lln_diag", learnable="head").save_pretrained(tmp_path / "learned")
    config = tf.AutoConfig.from_pretrained(tmp_path / "learned")
    assert config.lln_values
    tf.AutoModel.from_config(config)  # a new model has new values
    build_model("bert", "sdpa").save_pretrained(tmp_path / "softmax")
    mine = make_config("bert", lln={"implementation": "lln_diag", "learnable": "head", "statistics": "fixed"})
    tf.AutoModel.from_pretrained(tmp_path / "softmax", config=mine)  # whoever wrote that claims nothing
    model = lln.hf.convert(tf.AutoModel.from_pretrained(tmp_path / "learned"), "lln", statistics="sample")
    model.save_pretrained(tmp_path / "plain")
    assert "lln_values" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_an_import_that_comes_too_late_is_told(tmp_path: Path) -> None:
    lln.hf.convert(build_model("bert", "sdpa"), "lln_diag", learnable="head").save_pretrained(tmp_path / "a")
    build_model("bert", "lln_diag").save_pretrained(tmp_path / "plain")
    *told, said = run(TOO_LATE, *(tmp_path / name for name in ("a", "b", "plain", "same"))).splitlines()
    assert len(told) == 2
    assert all("they are missing, because the model was loaded before `import lln.hf`" in one for one in told)
    assert said.count("It is saved as the softmax model that it is, without config.lln.") == 1
    for folder in ("b", "same"):
        assert tf.AutoModel.from_pretrained(tmp_path / folder).config._attn_implementation == "sdpa"


def test_a_state_dict_whose_values_find_no_place_is_told() -> None:
    model, other = lln.hf.convert(build_model("bert"), learnable="head"), build_model("bert", "sdpa")
    with pytest.warns(UserWarning, match="BertModel has no place for it; first lln.hf.convert the model"):
        other.load_state_dict(model.state_dict(), strict=False)
    lln.hf.convert(other, "lln_diag", learnable="head").load_state_dict(model.state_dict())
