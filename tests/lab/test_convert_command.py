"""`lln convert`: a checkpoint in, one that loads out, a report, and the same bits however often it is killed."""

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from filelock import FileLock

from helpers.command import assert_sentence, run_command
from helpers.hf_models import BERT, WORDS, build_model, make_config, make_tokenizer, needs_t5, write_words
from helpers.runs import interrupt_learning
from lln.lab.convert import pipeline as conversion
from lln.lab.convert.passages import cut_passages, pad_batches, special_tokens
from lln.lab.convert.verdict import EXITS, compare, judge
from lln.lab.convert.workplace import LEARNING
from lln.lab.core import pretrained

LOGITS = ("--fine-tune-on", "logits")
SMALL = ("--block-size", "8", "--length", "48", "--batch-size", "2", "--directions", "12")
LEARN = (*SMALL, "--distill", "7", "--fine-tune", "5")
run_convert = functools.partial(run_command, "convert", columns=160)
assert_said = functools.partial(assert_sentence, command="lln convert", alone=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small softmax models and a text."""
    folder = tmp_path_factory.mktemp("models")
    for kind, head in (("bert", tf.AutoModelForMaskedLM), ("llama", None)):
        build_model(kind, "sdpa", head).float().save_pretrained(folder / kind)
        make_tokenizer().save_pretrained(folder / kind)
    (folder / "text.txt").write_text(write_words(1147))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def read_exit(out: Path) -> int:
    """The exit code that a finished conversion has by its verdict."""
    return EXITS[json.loads((out / "conversion.json").read_text())["verdict"]["verdict"]]


def assert_same_conversion(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    reports = [json.loads((folder / "conversion.json").read_text()) for folder in (one, other)]
    for report in reports:
        del report["provenance"]
    assert reports[0] == reports[1]
    assert not one.with_name(one.name + ".partial").exists()


@pytest.fixture(scope="module")
def converted(place: Path) -> Path:
    """The folder with both models converted in one go."""
    for kind in ("bert", "llama"):
        code, out, err = run_convert(place / kind, place / "out" / kind, "--calibration", place / "text.txt", *LEARN)
        assert code == read_exit(place / "out" / kind), err
        assert "distilling" in err
        assert f"{kind} with lln_diag: fitted → distilled → fine-tuned" in out
        assert "kept apart from learning" in out
        assert "8 passages of up to 48 tokens that nothing was learned from" in out
    return place / "out"


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_result_loads_and_is_what_the_report_says(kind: str, place: Path, converted: Path) -> None:
    out = converted / kind
    report = json.loads((out / "conversion.json").read_text())
    model = (
        tf.AutoModelForMaskedLM.from_pretrained(out) if kind == "bert" else tf.AutoModelForCausalLM.from_pretrained(out)
    )
    assert report["class"] == type(model).__name__  # the head is still there
    assert model.config._attn_implementation == "lln_diag"
    assert model.config.lln["feature_map"] == "linear"
    assert [row["layer"] for row in report["layers"]] == [name for name, _ in conversion_modules(model)]
    # 1,147 words in passages of 46 and two special tokens: 24 whole ones and 43 more
    counts = {"learned": 17, "reported": 4, "judged": 8, "held_out": True, "called": "passages", "tokens": 48}
    assert report["passages"] == counts
    for row in report["layers"]:
        assert row["distilled"]["error"] < row["fitted"]["error"]
        assert 0 < row["softmax"]["entropy"] < 6
        assert 0 <= row["fine_tuned"]["spectral_gap"] <= 1
    assert list(report["hidden_error"]) == ["fitted", "distilled", "fine_tuned"]
    verdict = report["verdict"]
    assert (verdict["passages"], verdict["bar"]) == ((8, 0.95) if kind == "bert" else (8, 1.05))
    kept = verdict["value"] >= 0.95 if kind == "bert" else verdict["value"] <= 1.05
    assert verdict["verdict"] == ("kept" if kept and verdict["better_than_blocks"] else "not kept")
    # The last number of the report, from the saved model alone.
    softmax, tokenizer = type(model).from_pretrained(place / kind), tf.AutoTokenizer.from_pretrained(out)
    found = cut_passages(tokenizer, [(place / "text.txt").read_text()], 48, 16)
    kept_apart, learned = conversion.split(found)
    assert (len(kept_apart), len(learned)) == (8, 17)
    reported = pad_batches(model, tokenizer, kept_apart[::2], 2)
    with torch.no_grad():
        pairs = [[m.base_model(**batch).last_hidden_state for m in (model, softmax)] for batch in reported]
    ours, theirs = (torch.cat(states) for states in zip(*pairs, strict=True))
    error = float((ours - theirs).norm() / theirs.norm())
    assert abs(error / report["hidden_error"]["fine_tuned"] - 1) < 1e-4
    card = (out / "README.md").read_text()
    assert "## How it was converted" in card
    assert "fitted → distilled → fine-tuned" in card
    assert " the model: its " in card
    assert "| layer | entropy, softmax | entropy | gap, softmax | gap | error |" in card
    assert str(place) not in card + json.dumps(report)


def conversion_modules(model: Any) -> list[tuple[str, Any]]:
    from lln.hf.find import attention_modules

    return list(attention_modules(model))


def test_a_finished_conversion_is_shown_again_and_another_one_refused(place: Path, converted: Path) -> None:
    before = (converted / "bert" / "model.safetensors").stat().st_mtime_ns
    code, out, _ = run_convert(
        place / "bert", converted / "bert", "--calibration", place / "text.txt", *LEARN, "--json"
    )
    assert code == read_exit(converted / "bert")
    assert json.loads(out) == json.loads((converted / "bert" / "conversion.json").read_text())
    assert (converted / "bert" / "model.safetensors").stat().st_mtime_ns == before
    code, out, err = run_convert(
        place / "bert", converted / "bert", "--calibration", place / "text.txt", *LEARN, "--seed", "3"
    )
    assert (code, out) == (2, "")
    assert_said(err, "asked for differently: seed is 0 there and 3 here")


@pytest.mark.parametrize(("kind", "moments"), [("bert", [1, 5, 6]), ("llama", [3, 8])])
def test_stopped_in_the_middle_it_ends_with_the_same_numbers(
    kind: str, moments: list[int], place: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after so many steps of seven and five, with a state put away after every second one."""
    monkeypatch.setattr(conversion, "KEPT_EVERY", 2)
    arguments = (place / kind, tmp_path / "out", "--calibration", place / "text.txt", *LEARN)
    for moment in moments:
        with interrupt_learning(after=moment):
            code, _, err = run_convert(*arguments)
        assert code == 130
        assert "The same command goes on" in err
        assert not (tmp_path / "out").exists()
    code, _, err = run_convert(*arguments, "--seed", "1")
    assert code == 2
    assert_said(
        err, "lln convert", "out.partial holds a conversion that was asked for differently: seed is 0 there and 1 here"
    )
    assert run_convert(*arguments)[0] == read_exit(tmp_path / "out")
    assert_same_conversion(tmp_path / "out", converted / kind)


def test_killed_it_ends_with_the_same_numbers(place: Path, converted: Path, tmp_path: Path) -> None:
    arguments = [str(place / "bert"), str(tmp_path / "out"), "--calibration", str(place / "text.txt"), *LEARN]
    code = """
import os, signal, sys, torch
torch.set_num_threads(1)  # as here: sums over threads differ in their last bits
from lln.lab.convert import pipeline as conversion
from lln.hf.distillation import Learner
conversion.KEPT_EVERY = 2
kept = conversion.Workplace.keep
def kill(self, name, notes, tensors):
    kept(self, name, notes, tensors)
    if name == conversion.LEARNING and notes["stage"] == "fine_tuned":
        os.kill(os.getpid(), signal.SIGKILL)
conversion.Workplace.keep = kill
sys.argv = ["lln", "convert", *sys.argv[1:]]
from lln.lab.cli.app import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = tmp_path / "out.partial"
    assert (partial / f"{LEARNING}.safetensors").exists()
    assert not (tmp_path / "out").exists()
    (partial / f"{LEARNING}.safetensorsx.part").write_bytes(b"half a file")  # what a kill inside a write leaves
    assert run_convert(*arguments)[0] == read_exit(tmp_path / "out")
    assert_same_conversion(tmp_path / "out", converted / "bert")


def test_a_folder_that_another_process_works_on_is_left_alone(place: Path, tmp_path: Path) -> None:
    arguments = (place / "bert", tmp_path / "out", "--calibration", place / "text.txt", *SMALL, "--distill", "0")
    with FileLock(str(tmp_path / "out.lock")):
        code, _, err = run_convert(*arguments)
    assert code == 2
    assert_said(err, "out is being made by another process")
    assert run_convert(*arguments)[0] == read_exit(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_matching_alone_in_half_precision(place: Path, tmp_path: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tf.AutoTokenizer.from_pretrained(place / "llama").save_pretrained(tmp_path / "half")
    code, out, err = run_convert(
        tmp_path / "half", tmp_path / "out", "--calibration", place / "text.txt", "--attention", "lln", "--json",
        "--match-only",
    )  # fmt: skip
    assert code == read_exit(tmp_path / "out"), err
    report = json.loads(out)
    assert report["stages"] == ["matched"]
    assert all(row["matched"]["mix"] is None for row in report["layers"])
    for row in report["layers"]:
        assert abs(row["matched"]["entropy"] - row["softmax"]["entropy"]) < 0.3
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert again.model.layers[0].self_attn.lln.fixed_alpha.dtype == torch.float64


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_other_matchings_need_no_learning(kind: str, place: Path, tmp_path: Path) -> None:
    code, _, err = run_convert(
        place / kind, tmp_path / "out", "--calibration", place / "text.txt", "--matching", "entropy", "--block-size", 8,
        "--match-only",
    )  # fmt: skip
    assert code == read_exit(tmp_path / "out"), err
    model = tf.AutoModel.from_pretrained(tmp_path / "out")
    attention = conversion_modules(model)[0][1].lln
    assert (attention.matching, attention.statistics) == ("entropy", "sample" if kind == "bert" else "running")
    if kind == "llama":
        assert attention.running_count == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["{bert}", "{out}", "--calibration", "{tmp}/none.txt"], ["there is no file", "none.txt"]),
        (["{bert}", "{out}", "--calibration", "{tmp}/empty.txt"], ["empty.txt is empty"]),
        (["{bert}", "{out}", "--calibration", "{tmp}/binary"], ["it is not UTF-8 text"]),
        (["{bert}", "{out}", "--calibration", "{tmp}"], ["cannot be read"]),
        (
            ["{bert}", "{out}", "--calibration", "{tmp}/short.txt", "--block-size", "8"],
            ["only 5 tokens", "at least 16"],
        ),
        (["{bert}", "{out}", "--calibration", "{text}"], ["passages of 96 tokens are too short; at least 128"]),
        (
            ["{bert}", "{out}", "--calibration", "{text}", "--attention", "softmax"],
            ["attention must be 'lln' or 'lln_diag'"],
        ),
        (["{bert}", "{out}", "--calibration", "{text}", "--matching", "best"], ["matching must be 'paper'"]),
        (
            ["{bert}", "{out}", "--calibration", "{text}", "--read", "paper", "--matching", "paper"],
            ["it goes with matching='data'"],
        ),
        (
            ["{bert}", "{out}", "--calibration", "{text}", "--matching", "paper"],
            ["matching='paper' goes with read='paper' or match_only"],
        ),
        (
            ["{bert}", "{out}", "--calibration", "{text}", "--read", "paper", "--directions", "8"],
            ["directions go with read='evidence'"],
        ),
        (["{bert}", "{out}", "--calibration", "{text}", "--read", "best"], ["read must be 'paper' or 'evidence'"]),
        (["{bert}", "{out}", "--calibration", "{text}", "--rate", "0"], ["rate must be positive"]),
        (["{bert}", "{out}", "--calibration", "{text}", "--fine-tune-on", "loss"], ["must be None, 'hidden' or"]),
        (
            ["{tmp}/headless", "{out}", "--calibration", "{text}", *SMALL, "--fine-tune", "1", *LOGITS],
            ["fine_tune_on: on='logits' needs a model that chooses by its logits"],
        ),
        (["{tmp}/nowhere", "{out}", "--calibration", "{text}"], ["there is no folder"]),
        (["{tmp}/vit", "{out}", "--calibration", "{text}"], ["which takes pictures", "--images FOLDER"]),
        (["{tmp}/mpnet", "{out}", "--calibration", "{text}", "--block-size", "8"], ["MPNet", "AttentionInterface"]),
        pytest.param(
            ["{tmp}/t5", "{out}", "--calibration", "{text}", "--block-size", "8"], ["position_bias"], marks=needs_t5
        ),
        (["{tmp}/lln", "{out}", "--calibration", "{text}", "--block-size", "8"], ["runs 'lln_diag' already"]),
        (["{tmp}/mute", "{out}", "--calibration", "{text}"], ["finds no tokenizer.json", "saved beside its weights"]),
        (
            ["{bert}", "{tmp}/full", "--calibration", "{text}", "--block-size", "8"],
            ["is not empty and holds no conversion"],
        ),
        (["{bert}", "{tmp}/short.txt", "--calibration", "{text}", "--block-size", "8"], ["is a file"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], place: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("the old river sings then")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    name = Path(arguments[0]).name
    if name == "vit":
        tf.ViTModel(make_config("vit")).save_pretrained(tmp_path / name)
    elif name in ("mpnet", "t5", "lln", "mute", "headless"):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4, "vocab_size": 61}
        makers = {
            "mpnet": lambda: tf.MPNetModel(tf.MPNetConfig(**BERT)),
            "t5": lambda: tf.T5Model(tf.T5Config(**sizes)),
            "lln": lambda: build_model("bert"),
            "headless": lambda: build_model("bert", "sdpa").float(),
            "mute": lambda: build_model("llama", "sdpa").float(),
        }
        makers[name]().save_pretrained(tmp_path / name)
    if name in ("mpnet", "t5", "lln", "headless"):
        tf.AutoTokenizer.from_pretrained(place / "bert").save_pretrained(tmp_path / name)
    places = {"bert": place / "bert", "text": place / "text.txt", "tmp": tmp_path, "out": tmp_path / "out"}
    code, out, err = run_convert(*(text.format(**places) for text in arguments))
    assert (code, out) == (2, ""), err
    assert_said(err, *parts)
    assert not list(tmp_path.glob("out*"))


def test_text_is_cut_with_special_tokens_around_each_passage(place: Path) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "bert")
    assert special_tokens(tokenizer) == ([2], [3])
    words = " ".join(WORDS * 3)  # 42 tokens
    found = cut_passages(tokenizer, [words, "sun rain"], 12, 4)
    assert [len(p) for p in found] == [12, 12, 12, 12, 4, 4]
    assert all(p[0] == 2 and p[-1] == 3 for p in found)
    inside = [token for p in found for token in p[1:-1]]
    assert inside == tokenizer(f"{words} sun rain", add_special_tokens=False)["input_ids"]
    assert [len(p) for p in cut_passages(tokenizer, [words], 12, 5)] == [12, 12, 12, 12]
    model = tf.AutoModel.from_pretrained(place / "bert")
    batch = pad_batches(model, tokenizer, found[3:], 3)[0]
    assert batch["attention_mask"].sum(1).tolist() == [12, 4, 4]
    assert batch["input_ids"][1, 4:].tolist() == [0] * 8


def test_a_text_that_is_too_short_decides_nothing_and_a_longer_model_is_made_where_asked_for(
    place: Path, tmp_path: Path
) -> None:
    words = (place / "text.txt").read_text().split()
    (tmp_path / "few.txt").write_text(" ".join(words[:600]))
    small = ("--block-size", "8", "--length", "200", "--directions", "12", "--distill", "2")
    code, out, err = run_convert(place / "bert", tmp_path / "out", "--calibration", tmp_path / "few.txt", *small)
    assert code == 4, err
    assert "Whether this keeps the model is not decided" in out
    assert "of up to 200 tokens. A verdict needs 24, so there will be none" in err  # before the long part
    model = tf.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.max_position_embeddings == 200  # it had 96
    assert model(torch.full((1, 200), 5)).logits.shape[1] == 200
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 200


def test_other_weights_in_the_same_folder_are_another_model(place: Path, tmp_path: Path) -> None:
    """Old results are never passed off as new: the files have the same sizes."""
    card = "---\nlicense: apache-2.0\nbase_model: somebody/bert\n---\n# Mine\n"
    for kind in (0, 1):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "README.md").write_text(card)
        model = build_model("bert", "sdpa", tf.AutoModelForMaskedLM).float()
        with torch.no_grad():
            model.base_model.embeddings.word_embeddings.weight.add_(kind)
        model.save_pretrained(tmp_path / "model")
        tf.AutoTokenizer.from_pretrained(place / "bert").save_pretrained(tmp_path / "model")
        arguments = tmp_path / "model", tmp_path / "out", "--calibration", place / "text.txt"
        code, _, err = run_convert(*arguments, *SMALL, "--distill", "0")
        assert (code in EXITS.values()) if kind == 0 else code == 2
    assert_said(err, "asked for differently: weights are not the same; name another folder")
    told = (tmp_path / "out" / "README.md").read_text()
    for part in ("license: apache-2.0", "base_model: somebody/bert", "- lln-attention", "is apache-2.0."):
        assert part in told


def test_other_weights_of_the_same_hub_id_are_another_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load, read_config = tmp_path / "snapshot", pretrained.load, tf.AutoConfig.from_pretrained

    def find_config(name: str, **how: Any) -> Any:
        return read_config(str(folder) if name == "somebody/model" else name, **how)

    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", find_config)
    monkeypatch.setattr(conversion, "load", lambda name, *given, **how: load(str(folder), *given, **how))
    monkeypatch.setattr(conversion, "find_snapshot", lambda name: folder)
    monkeypatch.setattr(conversion, "fetch_companions", lambda name: (folder, True))
    arguments = "somebody/model", tmp_path / "out", "--calibration", place / "text.txt", *SMALL, "--match-only"
    for kind in (0, 1):
        model = build_model("bert", "sdpa", tf.AutoModelForMaskedLM).float()
        with torch.no_grad():
            model.base_model.embeddings.word_embeddings.weight.add_(kind)
        model.save_pretrained(folder)
        tf.AutoTokenizer.from_pretrained(place / "bert").save_pretrained(folder)
        code, _, err = run_convert(*arguments)
        assert (code in EXITS.values()) if kind == 0 else code == 2, err
    assert_said(err, "asked for differently: weights are not the same; name another folder")
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    del report["request"]["weights"]  # as earlier versions wrote it
    (tmp_path / "out" / "conversion.json").write_text(json.dumps(report))
    assert run_convert(*arguments)[0] in EXITS.values()


def test_a_verdict_needs_the_bar_and_more_than_blocks() -> None:
    def decide(*given: Any) -> str:
        return str(judge(*given)["verdict"])

    assert decide(0.97, 0.8, 20, True, False) == "kept"
    assert decide(0.94, 0.8, 20, True, False) == "not kept"
    assert decide(0.97, 0.98, 20, True, False) == "not kept"
    assert decide(0.97, 0.8, 7, True, False) == "not decided"
    assert decide(0.97, 0.8, 20, False, False) == "not decided"
    assert decide(1.04, 1.2, 2, True, True) == "kept"  # a perplexity over softmax's: less is better
    assert decide(1.04, 1.01, 2, True, True) == "not kept"
    ones = torch.tensor([0.1, 0.5, 0.2, 0.9])
    assert compare(ones, ones.exp()) == pytest.approx(1.0)
    assert compare(-ones, ones) == pytest.approx(-1.0)
    assert compare(torch.tensor(2.0), torch.tensor(1.0)) == pytest.approx(2.718281828)
