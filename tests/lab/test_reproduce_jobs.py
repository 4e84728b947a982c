"""Runs are run once, go on where they stopped, and one that fails is written down."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fake_runs import list_jobs, make_asked, make_result
from lln.hf.distillation import NotFinite
from lln.lab.core.tables import show_duration
from lln.lab.paper import run_jobs as driver
from lln.lab.paper.experiments import EXPERIMENTS, find_refusal
from lln.lab.paper.jobs import Job, check_jobs, configure, find_state, name_folder, parse_attention, select_changes
from lln.lab.paper.reproduction import estimate_jobs
from lln.lab.paper.run_jobs import Hooks, run_jobs
from lln.lab.paper.run_records import derive_facts
from lln.lab.recipes import RECIPES, recipe
from lln.lab.train.config import Config
from lln.lab.train.models import Sizes, build
from lln.lab.train.run_folder import list_facts


def test_the_memory_of_a_run_is_not_that_of_runs_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"memory_allocated": 100, "max_memory_allocated": 350}
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    for name in now:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: now[name])
    (tmp_path / "config.json").write_text("{}")
    with driver.attempt(tmp_path, torch.device("cuda")):
        now["memory_allocated"] = 300  # the run's own
    (found,) = json.loads((tmp_path / "attempts.json").read_text())
    assert found["bytes"] == 250


class Trainer:
    """In the place of training: writes what a run leaves behind, or does what `acts` says for a folder."""

    def __init__(self, **acts: Any) -> None:
        self.acts, self.ran = acts, list[str]()

    def __call__(self, config: Config, folder: Path, **options: Any) -> dict[str, Any]:
        self.ran.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        (folder / "checkpoint-2").mkdir(exist_ok=True)
        (folder / "model").mkdir(exist_ok=True)
        for part, error in self.acts.items():
            if part in folder.name:
                raise error
        options["progress"](config.optimisation.steps, {"loss": 1.0})
        result = make_result(config, 0.5)
        (folder / "result.json").write_text(json.dumps(result))
        return result


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    fake = Trainer()
    monkeypatch.setattr(driver, "train", fake)
    return fake


def table1(runs: Path, **changed: Any) -> list[Job]:
    return list_jobs("table1", make_asked(runs, **({"tasks": ("sst2", "qqp")} | changed)))


def test_table_1_trains_once_and_tunes_from_it(tmp_path: Path) -> None:
    found = table1(tmp_path, seeds=2, tunings=3)
    assert len(found) == 2 * 2 * (1 + 2 * 3)
    assert len({job.folder for job in found}) == len(found)
    tuning = next(job for job in found if job.config.task == "glue")
    assert tuning.after == "mlm-tiny-softmax-seed0"
    assert tuning.config.model.start == str(tmp_path / "mlm-tiny-softmax-seed0" / "model")
    # Whole rows first: all of one attention before the next, all attentions before the next seed.
    assert [job.config.attention.name for job in found[:14]] == ["softmax"] * 7 + ["lln"] * 7
    budgets = {job.config.optimisation.steps for job in found if job.config.task == "mlm"}
    assert len(budgets) == 1


def test_seeds_may_begin_anywhere(tmp_path: Path) -> None:
    found = list_jobs("table3", make_asked(tmp_path, seeds=2, first=5))
    assert sorted({job.config.seed for job in found}) == [5, 6]


def test_what_is_finished_is_not_run_again(tmp_path: Path, trainer: Trainer) -> None:
    found = table1(tmp_path)
    run_jobs(found[:2], tmp_path, device="cpu")
    assert trainer.ran == [job.folder for job in found[:2]]
    run_jobs(found, tmp_path, device="cpu")
    run_jobs(found, tmp_path, device="cpu")
    assert trainer.ran == [job.folder for job in found]


def test_a_failed_run_is_written_down_and_the_rest_goes_on(tmp_path: Path, trainer: Trainer) -> None:
    found = table1(tmp_path)
    trainer.acts = {
        "mlm-tiny-lln": NotFinite("The loss is not finite at step 7: layer 1."),
        "glue-qqp-tiny-softmax": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        "glue-sst2-tiny-softmax": ValueError("softmax does not like this.\nMore."),
    }
    ended: list[tuple[str, str]] = []
    run_jobs(found, tmp_path, device="cpu", hooks=Hooks(end=lambda job, now: ended.append((job.folder, now))))
    states = dict(ended)
    assert states["mlm-tiny-softmax-seed0"] == "finished"
    assert states["mlm-tiny-lln-seed0"] == "failed"
    assert states["glue-sst2-tiny-lln-pre0-seed0"] == "left out"  # there is no model to start from
    reasons = {p.parent.name: json.loads(p.read_text())["sentence"] for p in tmp_path.glob("*/failed.json")}
    assert reasons == {
        "mlm-tiny-lln-seed0": "The loss is not finite at step 7: layer 1.",
        "glue-qqp-tiny-softmax-pre0-seed0": "out of memory",
        "glue-sst2-tiny-softmax-pre0-seed0": "softmax does not like this.",
    }
    trainer.acts, before = {}, list(trainer.ran)
    run_jobs(found, tmp_path, device="cpu")
    assert trainer.ran == before
    run_jobs(found, tmp_path, device="cpu", retry=True)
    assert {find_state(tmp_path / job.folder) for job in found} == {"finished"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_no_failure_of_the_run_comes_through(tmp_path: Path, trainer: Trainer, error: BaseException) -> None:
    found = list_jobs("table3", make_asked(tmp_path))
    trainer.acts = {"image": error}
    with pytest.raises(type(error)):
        run_jobs(found, tmp_path, device="cpu")
    assert find_state(tmp_path / found[0].folder) == "begun"
    trainer.acts = {}
    run_jobs(found, tmp_path, device="cpu")
    assert find_state(tmp_path / found[0].folder) == "finished"
    assert len(json.loads((tmp_path / found[0].folder / "attempts.json").read_text())) == 2


def test_only_what_is_needed_is_kept(tmp_path: Path, trainer: Trainer) -> None:
    found = table1(tmp_path)[:2]
    run_jobs(found, tmp_path, device="cpu")
    before, after = (tmp_path / job.folder for job in found)
    assert (before / "model").exists()
    assert not (after / "model").exists()
    assert not list(tmp_path.glob("*/checkpoint-*"))
    run_jobs(list_jobs("table3", make_asked(tmp_path)), tmp_path, device="cpu", keep=True)
    assert len(list(tmp_path.glob("image*/checkpoint-*"))) == len(list(tmp_path.glob("image*/model"))) == 2


def test_other_settings_are_noticed_before_anything_runs(tmp_path: Path, trainer: Trainer) -> None:
    run_jobs(list_jobs("table3", make_asked(tmp_path)), tmp_path, device="cpu")
    check_jobs(list_jobs("table3", make_asked(tmp_path, changes={"log_every": "5"})), tmp_path)  # changes no result
    with pytest.raises(ValueError, match=r"softmax-seed0 holds a run with other settings: optimisation.steps"):
        check_jobs(list_jobs("table3", make_asked(tmp_path, changes={"optimisation.steps": "9"})), tmp_path)


@pytest.mark.parametrize(
    "text", ["softmax", "lln", "lln_diag", "elu", "elu_diag", "block_diagonal", "lln:alpha=2", "lln_diag:alpha=1.5",
             "lln:matching=entropy:statistics=running", "performer:features=8"],
)  # fmt: skip
@pytest.mark.parametrize("task", ["mlm", "image", "lra"])
def test_a_label_is_read_back_as_it_was_written(text: str, task: str) -> None:
    for preset in ("tiny", "mini", "paper"):
        config = configure(task, preset, text, 0, {})
        assert config.attention.label == config.attention.label == text
        assert derive_facts(config.to_dict()) == list_facts(config)
        assert configure(task, preset, config.attention.label, 0, {}) == config
        assert find_refusal(task, preset, text) is None


def test_blocks_beside_a_kernel_are_those_of_lln_diag() -> None:
    ours, elu = (configure("mlm", "tiny", name, 0, {}).attention for name in ("lln_diag", "elu_diag"))
    assert elu.name == "elu"
    assert elu.options == {"block_size": ours.options["block_size"]}
    assert ours.options["block_size"] == 32
    alone = configure("mlm", "tiny", "block_diagonal", 0, {}).attention
    assert alone.options == {"block_size": ours.options["block_size"]}


def test_given_alpha_and_beta_reach_every_layer() -> None:
    for text, beta in (("lln:alpha=3", 3.0), ("lln_diag:alpha=3:beta=1.5", 1.5)):
        model = build(configure("image", "tiny", text, 0, {}), Sizes(labels=10, channels=1))
        found = {name.rpartition(".")[2]: b for name, b in model.named_buffers() if "fixed_" in name}
        assert all((b == 3.0).all() for n, b in found.items() if n == "fixed_alpha")
        assert all((b == beta).all() for n, b in found.items() if n == "fixed_beta")
        assert len([n for n, _ in model.named_buffers() if n.endswith("fixed_alpha")]) == 2


def test_fine_tuning_on_shorter_text_keeps_the_positions(tmp_path: Path) -> None:
    sizes = Sizes(vocabulary=300, labels=2, padding=1)
    small = {"model.layers": "1", "model.width": "16", "model.inner": "16"}
    before = build(configure("mlm", "tiny", "lln_diag:alpha=3", 0, small | {"data.length": "48"}), sizes)
    before.save_pretrained(tmp_path)
    tuned = configure("glue", "tiny", "lln_diag:alpha=3", 0, small | {"data.length": "32"}, name="sst2", start=tmp_path)
    after = build(tuned, sizes)
    name = "roberta_prelayernorm.embeddings.position_embeddings.weight"
    assert torch.equal(after.state_dict()[name], before.state_dict()[name])
    longer = dataclasses.replace(tuned, data=dataclasses.replace(tuned.data, length=64))
    with pytest.raises(ValueError, match=r"knows 48 positions; got 64"):
        build(longer, sizes)


def test_options_of_attentions_are_pairs() -> None:
    assert parse_attention("lln:alpha=2:matching=entropy") == ("lln", {"alpha": 2, "matching": "entropy"})
    for text in ("lln:alpha", "lln:=2", "lln:alpha="):
        with pytest.raises(ValueError, match="options look like"):
            parse_attention(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("quantum", "is no mechanism"), ("lln:matching=guess", "matching must be"),
     ("softmax_diag", "is no mechanism"), ("softmax:mix=.5", "softmax takes only value_convolution"),
     ("performer:wings=2", "wings")],
)  # fmt: skip
def test_attentions_that_cannot_be_run_have_a_reason(text: str, reason: str) -> None:
    assert reason in (find_refusal("mlm", "tiny", text) or "")


def test_a_mixer_of_hidden_states_goes_with_texts_alone() -> None:
    assert find_refusal("mlm", "tiny", "flash") is None
    assert "goes with models of text; got it with image" in (find_refusal("image", "tiny", "flash") or "")


def test_changes_are_for_all_or_for_some() -> None:
    changes = {"glue.sst2.data.length": "3", "data.length": "1", "glue.data.length": "2", "lra.seed_of": "9"}
    assert select_changes(changes, "mlm", None) == {"data.length": "1"}
    assert select_changes(changes, "glue", "qqp") == {"data.length": "2"}
    assert select_changes(changes, "glue", "sst2") == {"data.length": "3"}
    for name in ("seed", "attention.name", "glue.model.start", "mlm"):
        with pytest.raises(ValueError, match="cannot be set here"):
            select_changes({name: "1"}, name.split(".")[0] if "." in name or name == "mlm" else "glue", None)


def test_folders_say_what_is_in_them() -> None:
    assert name_folder(configure("lra", "tiny", "lln:alpha=1.5", 3, {}, name="text"), "text") == (
        "lra-text-tiny-lln-alpha-1.5-seed3"
    )
    half = configure("mlm", "mini", "lln", 0, {}, precision="float16")
    assert name_folder(half, None) == "mlm-mini-float16-lln-seed0"


def test_the_loss_scale_needs_a_gpu(tmp_path: Path) -> None:
    for name in ("fig8", "fig10"):
        assert {j.config.precision for j in list_jobs(name, make_asked(tmp_path))} == {"float32"}
        found = list_jobs(name, make_asked(tmp_path, device="cuda"))
        assert {j.config.precision for j in found} == {"float32", "float16"}
        folders = [
            j.folder for j in list_jobs(name, make_asked(tmp_path, device="cuda", changes={"precision": "float16"}))
        ]
        assert len(set(folders)) == len(folders)  # no two processes in one
    halves = [j for j in list_jobs("fig8", make_asked(tmp_path, device="cuda", scale="mini")) if "float16" in j.folder]
    assert len(halves) == 2
    assert not any(j.config.graph for j in halves)  # a loss scale is decided on the host
    deit = [
        j
        for j in list_jobs("fig10", make_asked(tmp_path, device="cuda", scale="paper"))
        if j.config.preset == "deit-tiny"
    ]
    assert [j.config.attention.label for j in deit if j.config.attention.name == "lln"] == [
        "lln", "lln:alpha=2", "lln:alpha=4"
    ]  # fmt: skip


def test_the_paper_scale_is_the_papers_recipe(tmp_path: Path) -> None:
    for name, task in (("table1", "mlm"), ("table3", "image"), ("fig8", "mlm"), ("fig9", "image")):
        config = list_jobs(name, make_asked(tmp_path, scale="paper", attentions=("lln_diag",)))[0].config
        assert config == recipe(task, "paper", "lln_diag")
    tuning = list_jobs("table1", make_asked(tmp_path, scale="paper", attentions=("lln_diag",), tasks=("sst2",)))[
        1
    ].config
    usual = recipe("glue", "paper", "lln_diag", "sst2")
    assert dataclasses.replace(tuning, model=usual.model, record_every=usual.record_every) == usual


def test_an_estimate_is_what_runs_like_it_took(tmp_path: Path, trainer: Trainer) -> None:
    found = list_jobs("table3", make_asked(tmp_path, seeds=2))
    guesses = estimate_jobs(found, tmp_path, "cpu")
    assert set(guesses) == {job.folder for job in found}
    assert all(0 < seconds < 3600 for seconds in guesses.values())
    run_jobs(found[:1], tmp_path, device="cpu")
    (tmp_path / found[0].folder / "attempts.json").write_text(
        '[{"seconds": 40, "bytes": null}, {"seconds": 2, "bytes": null}]'
    )
    after = estimate_jobs(found, tmp_path, "cpu")
    assert found[0].folder not in after
    assert set(after.values()) == {42.0}
    longer = estimate_jobs(
        list_jobs("table3", make_asked(tmp_path, changes={"optimisation.steps": "3000"})), tmp_path / "x", "cpu"
    )
    assert longer[found[0].folder] == pytest.approx(10 * guesses[found[0].folder], rel=0.01)
    assert [show_duration(s) for s in (0.1, 20, 600, 9000)] == ["1 s", "20 s", "10 min", "2.5 h"]


def test_every_experiment_has_runs_at_every_scale_of_its_task(tmp_path: Path) -> None:
    for name, experiment in EXPERIMENTS.items():
        for scale in RECIPES[experiment.task]:
            chosen = {what: experiment.choose(what, scale) for what in ("attentions", "tasks")}
            what = make_asked(tmp_path, scale=scale, **chosen)
            assert list_jobs(name, what), (name, scale)
