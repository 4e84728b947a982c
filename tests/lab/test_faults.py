"""What goes wrong around a run: other data, kills between two writes, full disks, damaged files. Nothing is lost,
nothing old is passed off as new, and what cannot go on says so in a line."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers.command import run_command
from helpers.mirror import write_set
from helpers.runs import SMALLEST, Stop, make_tiny, read_metrics, stop_at, write_options
from lln.files import Unreadable, explain_writing, read_json, read_json_lines, write_json
from lln.lab.train import run as runs
from lln.lab.train.config import Config
from lln.lab.train.run import train
from lln.lab.train.run_folder import Run, find_damage, seal

SMALL = SMALLEST | {
    "optimisation.steps": "4", "optimisation.warmup": "1", "log_every": "1", "save_every": "2", "evaluate_every": "4",
    "record_every": "0", "data.evaluation": "4",
}  # fmt: skip
OF_MIRROR = SMALL | {"data.name": "corpus/mine", "data.length": "8"}


def make_config(**changes: str) -> Config:
    return make_tiny(SMALL, "lln", **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(make_config(), folder, cache_dir=cache)
    return folder


def write_mirror(root: Path, word: str) -> Path:
    lines = {"text": [f"{word} number {number} of a short text" for number in range(60)]}
    write_set(root, "corpus/mine", "default", {"train": lines, "validation": lines})
    return root


# Old results


def test_a_run_goes_on_with_its_own_data_alone(tmp_path: Path, cache: Path) -> None:
    first, second = (write_mirror(tmp_path / name, name) for name in ("first", "second"))
    config, folder = make_tiny(OF_MIRROR, "lln"), tmp_path / "run"
    with pytest.raises(Stop):
        train(config, folder, data_root=first, cache_dir=cache, progress=stop_at(3))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    for _ in ("begun", "finished"):
        with pytest.raises(ValueError, match=r"holds a run with other data: data.train is '.*--data-root"):
            train(config, folder, data_root=second, cache_dir=cache)
        assert before == sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*"))
        result = train(config, folder, data_root=first, cache_dir=cache)
        before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    said: list[str] = []
    shutil.rmtree(first / "corpus")
    assert train(config, folder, data_root=first, cache_dir=cache, say=said.append) == result
    assert said[0].startswith("Whether its data are the same is not known: corpus/mine is not in the data root")


def test_a_run_goes_on_from_its_own_weights_alone(tmp_path: Path, cache: Path, whole: Path) -> None:
    """A folder whose weights were changed in place is another start."""
    start = shutil.copytree(whole / "model", tmp_path / "start")
    config, folder = make_config(model__start=str(start)), tmp_path / "run"
    with pytest.raises(Stop):
        train(config, folder, cache_dir=cache, progress=stop_at(3))
    plain = (start / "model.safetensors").read_bytes()
    for _ in ("begun", "finished"):
        (start / "model.safetensors").write_bytes(plain[:-1] + bytes([plain[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"began with other weights: model.start.weights is '\w+' there"):
            train(config, folder, cache_dir=cache)
        (start / "model.safetensors").write_bytes(plain)
        train(config, folder, cache_dir=cache)


# Kills


def test_a_run_killed_between_its_last_measurement_and_its_result_measures_once(
    tmp_path: Path, cache: Path, whole: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "result.json").unlink()
    train(make_config(), folder, cache_dir=cache)
    assert read_metrics(folder) == read_metrics(whole)
    rows = [json.dumps(row, sort_keys=True) for row in read_metrics(folder)]
    assert len(rows) == len(set(rows))


def test_what_a_kill_leaves_of_the_first_file_blocks_nothing(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".lock", "config.json0a1b2c3d.part"):
        (folder / name).write_text('{"task": ')
    result = train(make_config(), folder, cache_dir=cache)
    assert result["config"]["task"] == "mlm"
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("names", [[], [".lock"]])
def test_a_folder_that_holds_only_a_lock_is_no_run_yet(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).touch()
    run = Run(tmp_path / "run", {"seed": 0})
    assert run.is_new
    (tmp_path / "run" / "lock").touch()
    with pytest.raises(ValueError, match="is no run"):
        Run(tmp_path / "run", {"seed": 0})


# What fails before anything was measured


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_fails_at_once_leaves_nothing_that_blocks_a_better_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a service does not answer")

    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "open_report", fail)
        with pytest.raises(ValueError, match="does not answer"):
            train(make_config(), folder, cache_dir=cache, report_to=["tensorboard"])
    assert folder.exists() == there
    assert not there or not list(folder.iterdir())
    train(make_config(seed="1"), folder, cache_dir=cache)


def test_a_begun_run_that_fails_is_kept(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(Stop):
        train(make_config(), tmp_path / "run", cache_dir=cache, progress=stop_at(2))
    assert (tmp_path / "run" / "config.json").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]


# Full disks

FULL = """
import resource, signal, sys
import numpy, torch
from pathlib import Path
from safetensors.torch import save_file
from lln.files import explain_writing, write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
folder, big = Path(sys.argv[1]), {"big": torch.zeros(2**18)}
ways = {
    "safetensors": lambda: save_file(big, folder / "a.safetensors"),
    "torch": lambda: torch.save(big, folder / "a.pt"),
    "text": lambda: write_text(folder / "a.txt", "a" * 2**17),
    "numpy": lambda: numpy.save(folder / "a.npy", numpy.zeros(2**16)),
}
try:
    with explain_writing(folder):
        ways[sys.argv[2]]()
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("way", ["safetensors", "torch", "text", "numpy"])
def test_a_file_that_cannot_grow_is_told_in_the_systems_words(way: str, tmp_path: Path) -> None:
    """A limit of the process stands for a full disk: the kernel refuses the write in the same place."""
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path), way]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == f"{os.strerror(errno.EFBIG)}\n"
    assert not list(tmp_path.glob("*.part"))


def test_the_limit_of_a_process_is_the_kernels(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # of this process: nothing leaks
    with pytest.raises(RuntimeError, match="shapes"), explain_writing(tmp_path):
        raise RuntimeError("shapes do not fit")  # another mistake stays what it is


def test_a_full_disk_while_a_checkpoint_is_saved_is_one_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLN_CACHE", str(cache))

    class SafetensorError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    command = ["train", "mlm", "--attention", "lln", *write_options(SMALL), "--out", tmp_path / "run"]
    answer = run_command(*command)
    assert answer.exit_code == 1
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith(f"No space left on device: the run in {tmp_path / 'run'} stops here"), answer.stderr


def test_a_full_disk_of_another_command_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "fig" / "fig2.json"))

    monkeypatch.setattr("lln.files.write_json", fail)
    monkeypatch.setattr("lln.lab.paper.analysis_figures.FIGURES", {"fig2": mock.MagicMock(steps=1)})
    answer = run_command("reproduce", "fig2", "--quick", "--out", tmp_path / "fig")
    assert answer.exit_code == 1
    assert answer.stderr.strip().endswith("fig2.json: No space left on device.")
    assert answer.stderr.strip().splitlines()[-1].startswith(f"lln reproduce: {tmp_path}")


def test_a_full_disk_of_the_cache_is_told_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("202921 requested and 14272 written")  # as NumPy has it

    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("numpy.save", fail)
    monkeypatch.setattr("lln.files.shutil.disk_usage", lambda path: mock.Mock(free=0))
    answer = run_command("train", "mlm", *write_options(SMALL), "--out", tmp_path / "run")
    assert answer.exit_code == 1
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'cache'}"), answer.stderr
    assert "No space left on device: the run in" in last


# Damaged files


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"task": ', "config.json cannot be read: it is not whole JSON (line 1"),
        ("config.json", "[]", "config.json must hold an object"),
        ("config.json", b"\xff\xfe", "config.json cannot be read: it is no JSON in UTF-8"),
        ("config.json", None, "config.json cannot be read: Is a directory"),
        ("result.json", "", "result.json cannot be read: it is not whole JSON"),
        ("result.json", "{}", "result.json is not the result of a run: its 'config' is missing"),
        ("result.json", '"done"', "result.json must hold an object"),
        ("environment.json", "{", "environment.json cannot be read"),
        ("environment.json", '{"data": 1}', "environment.json must hold a list"),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl cannot be read: line 2 is no JSON"),
        ("metrics.jsonl", "3\n", "metrics.jsonl cannot be read: line 1 is no JSON object"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl cannot be read: measurement 1 has no step"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    name: str, text: str | bytes | None, said: str, tmp_path: Path, cache: Path, whole: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LLN_CACHE", str(cache))
    folder = shutil.copytree(whole, tmp_path / "run")
    if name != "result.json":
        (folder / "result.json").unlink()
    (folder / name).unlink(missing_ok=True)
    if text is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    held = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    answer = run_command("train", "mlm", "--attention", "lln", *write_options(SMALL), "--out", folder)
    assert answer.exit_code == 2
    assert answer.stderr.strip().splitlines()[-1].startswith(f"lln train: {folder}/{said}"), answer.stderr
    assert held == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("text", ["", "[]", "3", '{"model.safetensors": 3}', '{"model.safetensors": {"bytes": 1}}'])
def test_a_manifest_that_cannot_be_read_is_damage(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    seal(tmp_path)
    assert find_damage(tmp_path) is None
    (tmp_path / "manifest.json").write_text(text)
    assert find_damage(tmp_path) in ("manifest.json cannot be read", "it was not written to its end")


def test_half_a_line_at_the_end_is_a_kill_and_elsewhere_damage(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_json_lines(file) == []
    file.write_text('{"step": 1}\n{"st')
    assert read_json_lines(file) == [{"step": 1}]
    file.write_text('{"step": 1}\n{"st\n')
    with pytest.raises(Unreadable, match="line 2"):
        read_json_lines(file)
    file.write_text("[" * 100_000)
    with pytest.raises(Unreadable, match=r"metrics.jsonl cannot be read: it is no JSON"):
        read_json(file)


# Who may read what is written


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "result.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o666 & ~umask
