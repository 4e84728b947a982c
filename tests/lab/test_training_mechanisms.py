"""Every attention of the paper's tables trains, is saved, and goes on from what was saved."""

from pathlib import Path

import pytest
import torch

import lln.hf
from helpers.command import run_command
from helpers.runs import assert_goes_on
from lln.lab.recipes import recipe
from lln.lab.train.config import Config, change
from lln.lab.train.models import Sizes, build, check_attention
from lln.lab.train.run import train

SMALL = {
    "optimisation.steps": "4", "optimisation.batch": "4", "optimisation.warmup": "1", "data.evaluation": "12",
    "log_every": "1", "save_every": "2", "evaluate_every": "4", "record_every": "2",
}  # fmt: skip
WORDS = {"model.layers": "1", "data.length": "32", "data.vocabulary": "300"}
MIXERS = ["flash", "tnn"]  # in the place of the whole attention block
NAMES = ["softmax", *lln.hf.IMPLEMENTATIONS, "elu_diag", "performer_diag", "hedgehog_diag", *MIXERS]


def make_small(task: str, name: str | None, attention: str) -> Config:
    small = SMALL | (WORDS if task == "mlm" else {"data.train": "24"})
    return change(recipe(task, "tiny", attention, name), small)


@pytest.mark.parametrize("attention", NAMES)
def test_language_models_train_with_every_attention(attention: str, tmp_path: Path, cache: Path) -> None:
    assert_goes_on(make_small("mlm", None, attention), tmp_path, cache, stop=3)


@pytest.mark.parametrize(
    ("task", "name", "attention"),
    [
        ("image", None, "linformer"),
        ("lra", "listops", "reformer"),
        ("lra", "text", "performer"),
        ("lra", "retrieval", "skyformer"),
        ("lra", "retrieval", "linformer"),
        ("lra", "listops", "flash"),
        ("lra", "pathfinder", "nystromformer"),
        ("glue", "qqp", "hedgehog"),
        ("glue", "sst2", "cosformer"),
    ],
)
def test_other_tasks_train_with_the_attentions_of_the_tables(
    task: str, name: str | None, attention: str, tmp_path: Path, cache: Path
) -> None:
    assert_goes_on(make_small(task, name, attention), tmp_path, cache, stop=3)


@pytest.mark.parametrize("attention", ["hedgehog", "linformer", "tnn"])
def test_what_is_learned_is_fine_tuned(attention: str, tmp_path: Path, cache: Path) -> None:
    first = tmp_path / "first"
    train(change(recipe("mlm", "tiny", attention), SMALL | WORDS), first, cache_dir=cache)
    second = SMALL | WORDS | {"model.start": str(first / "model"), "data.train": "24"}
    config = change(recipe("glue", "tiny", attention, "sst2"), second | {"optimisation.rate": "1e-12"})
    train(config, tmp_path / "second", cache_dir=cache)
    from safetensors.torch import load_file

    held, tuned = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("first", "second"))
    own = [name for name in tuned if "lln_peer" in name or ".mixer." in name]
    assert own
    assert all(tuned[name].sub(held[name]).abs().max() < 1e-9 for name in own)


def test_blocks_are_asked_for_by_name() -> None:
    config = recipe("mlm", "tiny", "elu_diag")
    assert (config.attention.name, config.attention.options) == ("elu", {"block_size": 32})
    assert recipe("mlm", "mini", "lln").attention.options == {"statistics": "batch"}
    assert recipe("mlm", "mini", "block_diagonal").attention.options == {"block_size": 64}
    assert recipe("mlm", "mini", "nystromformer").attention.options == {}


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("tnn", {"rate": "3"}, "attention.options: .*tnn has no option 'rate'"),
        ("flash", {"chunk": "0"}, "attention.options: chunk must be"),
        ("linear", {}, "attention.name must be 'softmax', 'lln', 'lln_diag', .*; got 'linear'"),
        ("nystromformer_diag", {}, "got 'nystromformer_diag'"),
        ("softmax", {"rank": "3"}, "attention.options: softmax takes only value_convolution, .*; got rank"),
        ("lln", {"rank": "3"}, "attention.options: lln has no option 'rank'"),
        ("linformer", {"rows": "3"}, "linformer has no option 'rows'"),
        ("lln", {"statistics": "some"}, "statistics must be one of"),
    ],
)
def test_wrong_attentions_are_refused_and_leave_nothing(
    attention: str, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    config = change(recipe("mlm", "tiny", attention), {f"attention.options.{k}": v for k, v in options.items()})
    with pytest.raises((ValueError, TypeError), match=message):
        check_attention(config)
    with pytest.raises((ValueError, TypeError), match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attention", ["perfomer", "mala_diagonal"])
def test_a_dry_run_refuses_an_attention_as_a_run_does(attention: str, tmp_path: Path) -> None:
    asked = ("train", "mlm", "--attention", attention, "--out", tmp_path / "run")
    run, dry = run_command(*asked), run_command(*asked, "--dry-run")
    assert (run.exit_code, dry.exit_code) == (2, 2)
    assert dry.stderr.splitlines()[-1] == run.stderr.splitlines()[-1]
    assert dry.stderr.startswith("lln train: attention.name")


def test_a_mixer_sees_no_padding_and_goes_with_text(tmp_path: Path, cache: Path) -> None:
    torch.manual_seed(0)
    model = build(make_small("lra", "listops", "tnn"), Sizes(vocabulary=20, labels=10)).eval()
    ids = torch.randint(1, 20, (2, 9))
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    seen = [model(tokens, attention_mask=mask.long()).logits for tokens in (ids, ids.masked_fill(~mask, 3))]
    assert torch.equal(*seen)
    alone = model(ids[1:, :6], attention_mask=mask[1:, :6].long()).logits
    assert torch.allclose(seen[0][1:], alone, atol=1e-5)
    with pytest.raises(ValueError, match="goes with models of text; got it with image"):
        check_attention(make_small("image", None, "flash"))
    softmax = tmp_path / "softmax"
    train(make_small("mlm", None, "softmax"), softmax, cache_dir=cache)
    other = change(
        recipe("glue", "tiny", "flash", "sst2"), SMALL | WORDS | {"model.start": str(softmax / "model")}
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"is a model with attention; got settings .* with {'name': 'flash'}"):
        build(other, Sizes(vocabulary=300, labels=2, padding=1))
