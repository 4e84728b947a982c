"""A name alone puts LLN attention into a trained model without teaching it anything; that is said, once."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import lln.hf
from helpers.fresh import run_fresh
from helpers.hf_models import build_model, expect_guess, expect_harm, make_batch, make_config, output
from helpers.tensors import relative_error

NAMES = ("lln", "lln_diag")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    build_model("bert", "sdpa").save_pretrained(folder)
    return folder


def load_with_config(folder: Path, name: str) -> Any:
    held = tf.AutoConfig.from_pretrained(folder)
    held._attn_implementation = name
    return tf.AutoModel.from_pretrained(folder, config=held)


HARMFUL: dict[str, Callable[[Path, str], Any]] = {
    "auto class": lambda folder, name: tf.AutoModel.from_pretrained(folder, attn_implementation=name),
    "own class": lambda folder, name: tf.BertModel.from_pretrained(folder, attn_implementation=name),
    "new head": lambda folder, name: tf.BertForSequenceClassification.from_pretrained(folder, attn_implementation=name),
    "config": load_with_config,
    "switch": lambda folder, name: tf.AutoModel.from_pretrained(folder).set_attn_implementation(name),
    "switch in part": lambda folder, name: tf.AutoModel.from_pretrained(folder).set_attn_implementation({"": name}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", HARMFUL)
def test_a_name_on_a_softmax_checkpoint_warns_and_names_the_remedies(way: str, name: str, trained: Path) -> None:
    with pytest.warns(UserWarning, match="makes the model worse") as seen:
        assert len([HARMFUL[way](trained, name) for _ in range(2)]) == 2
    (said,) = [str(warning.message) for warning in seen]
    assert all(remedy in said for remedy in ("`lln convert ", "lln.hf.convert(", "lln.hf.distill("))


def test_a_model_that_was_loaded_before_the_import_counts(trained: Path) -> None:
    code = f"""
import warnings, transformers
model, other = (transformers.AutoModel.from_pretrained({str(trained)!r}) for _ in range(2))
import lln.hf
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model.set_attn_implementation("lln")
    other.set_attn_implementation("lln_diag")
print(*("makes the model worse" in str(warning.message) for warning in seen))
"""
    assert run_fresh(code).split() == ["True"]


def test_a_decoder_of_two_models_warns(tmp_path: Path) -> None:
    build_model("bart", "sdpa").save_pretrained(tmp_path)
    with expect_guess(), expect_harm():
        tf.AutoModel.from_pretrained(tmp_path, attn_implementation="lln")


def convert_and_reload(folder: Path, out: Path) -> Any:
    lln.hf.convert(tf.AutoModel.from_pretrained(folder), "lln_diag").save_pretrained(out)
    return tf.AutoModel.from_pretrained(out, attn_implementation="lln_diag")


def switch_back_and_forth(folder: Path) -> None:
    model = lln.hf.convert(tf.AutoModel.from_pretrained(folder), "lln")
    for name in ("sdpa", "lln_diag"):
        model.set_attn_implementation(name)


HARMLESS: dict[str, Callable[[Path, Path], Any]] = {
    "new model": lambda folder, out: tf.BertModel(make_config("bert", _attn_implementation="lln")),
    "new model, switched": lambda folder, out: build_model("bert", "sdpa").set_attn_implementation("lln"),
    "new model of a trained one's config": lambda folder, out: tf.AutoModel.from_config(
        tf.AutoConfig.from_pretrained(folder), attn_implementation="lln"
    ),
    "new model of that config, switched": lambda folder, out: tf.AutoModel.from_config(
        tf.AutoConfig.from_pretrained(folder)
    ).set_attn_implementation("lln"),
    "conversion": lambda folder, out: lln.hf.convert(tf.AutoModel.from_pretrained(folder), "lln"),
    "converted and saved": convert_and_reload,
    "converted and switched": lambda folder, out: switch_back_and_forth(folder),
    "chosen in the config": lambda folder, out: tf.AutoModel.from_pretrained(
        folder, config=make_config("bert", lln={"implementation": "lln"})
    ),
    "softmax": lambda folder, out: tf.AutoModel.from_pretrained(folder, attn_implementation="eager"),
}


@pytest.mark.parametrize("way", HARMLESS)
def test_nothing_is_said_where_nothing_was_trained_or_the_change_is_meant(
    way: str, trained: Path, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        HARMLESS[way](trained, tmp_path)


def test_the_warning_changes_nothing(trained: Path) -> None:
    given = make_batch("bert")
    with expect_harm():
        named = tf.AutoModel.from_pretrained(trained, attn_implementation="lln_diag")
    meant = lln.hf.convert(tf.AutoModel.from_pretrained(trained), "lln_diag")
    assert relative_error(output(named, **given), output(meant, **given)) < 1e-12
