"""`lln inspect` says what a model's own weights say, compares LLN on the same queries and keys, and answers mistakes in
one line."""

import functools
import json
import math
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from PIL import Image

import lln
from helpers.command import assert_sentence, run_command
from helpers.hf_models import BERT, VOCABULARY, build_model, expect_guess, find_minilm, make_config, needs_t5
from helpers.pages import Page
from helpers.picture_files import make_pictures
from lln.instruments import entropy, lln_map, spectral_gap
from lln.lab.inspect.heatmap import show_value
from lln.lab.inspect.inspect_page import tabulate_layers, write
from lln.lab.inspect.inspection import COMPARED, TEXTS, count_positions, inspect, inspect_batches, label_layers

MINILM = find_minilm()
TEN_TOKENS = "The old man sat by the river."
run_inspect = functools.partial(run_command, "inspect", columns=100)
assert_said = functools.partial(assert_sentence, command="lln inspect")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a local folder must not touch the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    return tf.AutoModel.from_pretrained(MINILM), tf.AutoTokenizer.from_pretrained(MINILM)


def test_minilm_agrees_with_its_own_attentions(tmp_path: Path) -> None:
    code, out, _ = run_inspect(str(MINILM), "--text", TEN_TOKENS, "--out", str(tmp_path), "--json")
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((tmp_path / "inspect.json").read_text())
    assert result["tokens"] == [10]
    model = tf.AutoModel.from_pretrained(MINILM, attn_implementation="eager")
    x = tf.AutoTokenizer.from_pretrained(MINILM)(TEN_TOKENS, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**x, output_attentions=True).attentions
    assert len(result["layers"]) == len(attentions) == 6
    for layer, p in zip(result["layers"], attentions, strict=True):
        bits = -(p.double() * p.double().log2()).sum(-1)  # [1, 12, 10]
        assert layer["entropy"] == pytest.approx(bits.mean().item(), abs=1e-4)
        assert layer["max_entropy"] == pytest.approx(math.log2(10))
        own = [row for row in result["rows"] if row["label"] == layer["label"]]
        for row, head in zip(own, bits[0].mean(-1).tolist(), strict=True):
            assert row["entropy"] == pytest.approx(head, abs=1e-4)
        for row, matrix in zip(own, p[0].double(), strict=True):
            second = torch.linalg.eigvals(matrix).abs().sort(descending=True).values[1].item()
            assert row["spectral_gap"] == pytest.approx(1 - second, abs=1e-5)


def test_what_lln_would_give_is_what_it_gives(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    result = inspect(model, tokenizer, [TEN_TOKENS])
    seen: list[Any] = []
    hook = model.encoder.layer[2].attention.self
    handles = [
        part.register_forward_hook(lambda m, a, out: seen.append(out)) for part in (hook.query, hook.key)
    ]  # fmt: skip
    with torch.no_grad():
        model(**tokenizer(TEN_TOKENS, return_tensors="pt"))
    for handle in handles:
        handle.remove()
    q, k = (t.unflatten(-1, (12, 32)).transpose(1, 2).double() for t in seen)
    for matching in ("paper", "variance", "entropy"):
        for head in (0, 7):
            row = next(row for row in result["rows"] if (row["label"], row["head"]) == ("2", head))
            found = row["lln"][matching]
            one = slice(head, head + 1)
            spread = q[:, one].std().item(), k[:, one].std().item()
            alpha, beta = lln.match_moments(*spread, 32, matching, length=10)
            assert found["alpha"] == pytest.approx(alpha, rel=1e-4)
            assert found["beta"] == pytest.approx(beta, rel=1e-4)
            p = lln_map(q[:, one], k[:, one], alpha, beta)
            assert found["entropy"] == pytest.approx(entropy(p).item(), abs=1e-4)
            assert found["spectral_gap"] == pytest.approx(spectral_gap(p).item(), abs=1e-4)
            for name in ("entropy", "spectral_gap"):
                assert found[f"{name}_difference"] == pytest.approx(found[name] - row["softmax"][name], abs=1e-9)


def test_data_matching_finds_the_entropy_on_the_texts(minilm: tuple[Any, Any]) -> None:
    rows = inspect(*minilm, [TEN_TOKENS])["rows"]
    apart = [abs(row["lln"]["data"]["entropy_difference"]) for row in rows]
    assert sorted(apart)[int(0.9 * len(apart))] < 1e-3  # some heads have an entropy that no alpha gives
    assert sum(apart) < 0.1 * sum(abs(row["lln"]["paper"]["entropy_difference"]) for row in rows)


def test_padding_and_batches_change_nothing(minilm: tuple[Any, Any]) -> None:
    texts = [TEXTS[0], TEN_TOKENS, TEXTS[1]]
    together, apart = (inspect(*minilm, texts, batch_size=size) for size in (3, 1))
    assert together["tokens"] == apart["tokens"]
    for one, other in zip(together["rows"], apart["rows"], strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-5)
        assert one["lln"]["entropy"]["entropy"] == pytest.approx(other["lln"]["entropy"]["entropy"], abs=1e-5)
        assert one["spectral_gap"] == pytest.approx(other["spectral_gap"], abs=1e-4)
    assert inspect(*minilm, texts, max_length=6)["tokens"] == [6, 6, 6]


def test_the_page_stands_alone_and_text_in_it_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>my & model"
    shutil.copytree(MINILM, folder)
    nasty = 'A <script>alert(1)</script> & "quotes" [bold]walk[/bold]'
    code, out, err = run_inspect(str(folder), "--text", nasty, "--text", TEN_TOKENS, "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert "<b>my & model: means over heads and 2 texts" in out
    text = (tmp_path / "out" / "index.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;b&gt;my &amp; model" in text
    assert "[bold]walk[/bold]" in text
    assert [link for link in page.links if not link.startswith("#")] == []
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(set(names)) == len(names)  # a chart's colours are found by name
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(names)
    assert str(tmp_path) not in text
    charts = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert charts == {
        *(f"inspect-{name}" for name in ("temperature", "entropy", "spectral_gap", "lognormality")),
        *(f"inspect-{m}-{name}" for m in COMPARED for name in ("entropy", "spectral_gap")),
    }
    assert page.tags.count("svg") == len(charts)
    assert text.count('<figure role="img" aria-label=') == len(charts)


def save_model(model: Any, folder: Path, tokenizer: bool = True) -> str:
    model.save_pretrained(folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            shutil.copy(MINILM / name, folder / name)
    return str(folder)


def build_small(kind: str, **changes: Any) -> Any:
    """With the vocabulary of MiniLM's tokenizer."""
    torch.manual_seed(0)
    with expect_guess():
        return tf.AutoModel.from_config(make_config(kind, vocab_size=30522, **changes))


def test_a_model_saved_with_lln_runs_it_and_softmax_stands_beside(tmp_path: Path) -> None:
    model = build_small("bert", hidden_size=64)
    lln.hf.convert(model, "lln_diag", block_size=4)
    code, out, err = run_inspect(
        save_model(model, tmp_path / "m"), "--text", TEN_TOKENS, "--json", "--out", str(tmp_path / "o")
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["attention"] for row in rows} == {"lln_diag"}
    for row in rows:
        assert row["alpha"] > 0
        assert row["softmax"]["entropy"] != row["entropy"]


@pytest.mark.parametrize("kind", ["gpt2", "bart", "albert", "roberta", "mpnet", pytest.param("t5", marks=needs_t5)])
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if kind == "mpnet":
        shape = {name: value for name, value in BERT.items() if name != "pad_token_id"}
        model: Any = tf.MPNetModel(tf.MPNetConfig(**shape | {"vocab_size": 30522}))
    elif kind == "t5":
        model = tf.T5Model(
            tf.T5Config(d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=30522)
        )  # fmt: skip
    else:
        model = build_small(kind, **({} if kind in ("gpt2", "bart") else {"hidden_size": 64}))
    code, out, err = run_inspect(save_model(model, tmp_path / "m"), "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    result = json.loads(out)
    labels = [layer["label"] for layer in result["layers"]]
    expected = {
        "bart": ["encoder 0 self_attn", "encoder 1 self_attn", "decoder 0 self_attn", "decoder 0 encoder_attn"],
        "albert": ["0", "1"],
    }
    assert labels[: len(expected.get(kind, labels))] == expected.get(kind, labels)
    assert len(set(labels)) == len(labels)
    for row in result["rows"]:
        assert 0 <= row["entropy"] <= row["max_entropy"] + 1e-9
        biased = kind == "mpnet" or (kind == "t5" and "EncDec" not in row["layer"])
        assert (row["lln"]["paper"]["entropy"] is None) == biased
        assert (row["spectral_gap"] is None) == ("encoder_attn" in row["layer"] or "EncDec" in row["layer"])
    page = (tmp_path / "out" / "index.html").read_text()
    assert ("could not stand in" in page) == (kind == "mpnet")
    tabulate_layers(result)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["./no/such/folder"], ["there is no folder ./no/such/folder"]),
        (["/no/such/folder"], ["there is no folder"]),
        (["not a name"], ["it is no Hub id (like google-bert/bert-base-uncased)"]),
        (["{tmp}"], ["holds no config.json"]),
        (["{tmp}/empty.txt"], ["is a file; name the folder"]),
        (["{minilm}", "--file", "{tmp}/empty.txt"], ["empty.txt is empty; it should hold a text in each line"]),
        (["{minilm}", "--file", "{tmp}/none.txt"], ["there is no file", "none.txt"]),
        (["{minilm}", "--file", "{tmp}"], ["cannot be read"]),
        (["{minilm}", "--file", "{tmp}/binary"], ["it is not UTF-8 text"]),
        (["{minilm}", "--text", " "], ["nothing but blanks"]),
        (["{minilm}", "--text", "{tmp}/binary"], ["names a file; give it as --file"]),
        (["{minilm}", "--texts", "-"], ["names a file; give it as --file"]),
        (["{minilm}", "--file", "{tmp}/empty.txt", "--text", "x"], ["give --file or --text, and not both"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    given = [text.format(tmp=tmp_path, minilm=MINILM) for text in arguments]
    code, out, err = run_inspect(*given, "--out", str(tmp_path / "out"))
    assert code == 2
    assert out == ""
    assert_said(err, *parts)
    assert not (tmp_path / "out").exists()


class Answers:
    """The Hub as it is when it does not answer, or does not know."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def model_info(self, *args: Any, **kwargs: Any) -> Any:
        assert kwargs["timeout"] <= 15
        raise self.error


def test_a_hub_id_that_cannot_be_had_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Answers(OSError("Name or service not known\nmore")))
    code, _, err = run_inspect("someone/no-such-model")
    assert code == 2
    assert_said(
        err, "lln inspect", "it is not in the local cache, and the Hub does not answer (Name or service not known)"
    )
    missing = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Answers(missing))
    assert_said(run_inspect("someone/no-such-model")[2], "no public model of that name on the Hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_said(run_inspect("someone/no-such-model")[2], "HF_HUB_OFFLINE is set")


def test_models_that_cannot_be_inspected_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{not json")
    assert_said(run_inspect(str(broken))[2], "holds no model that transformers can load")
    (broken / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    assert_said(run_inspect(str(broken))[2], "holds no model that transformers can load")
    lonely = save_model(build_small("bert"), tmp_path / "lonely", tokenizer=False)
    code, _, err = run_inspect(lonely)
    assert code == 2
    assert_said(err, "tokenizer")
    images = save_model(tf.ViTModel(make_config("vit")), tmp_path / "images")
    assert_said(run_inspect(images)[2], "ViTModel", "name a folder of them with --images")
    shape = {"vocab_size": 30522, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 96}
    rotated = save_model(tf.GPTJModel(tf.GPTJConfig(**shape)), tmp_path / "rotated")
    code, _, err = run_inspect(rotated)
    assert code == 2
    assert_said(err, "GPTJModel", "is not what it computes")
    mamba = tf.MambaModel(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=30522))
    code, _, err = run_inspect(save_model(mamba, tmp_path / "mamba"))
    assert code == 2
    assert_said(err, "no attention of MambaModel can be observed")


def test_an_image_model_is_shown_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.ViTModel(make_config("vit"))
    folder = save_model(model, tmp_path / "vit", tokenizer=False)
    files = make_pictures(tmp_path / "pictures", 3)
    size = model.config.image_size
    given = "--images", tmp_path / "pictures", "--batch-size", 2, "--out", tmp_path / "out", "--json"
    assert_said(run_inspect(folder, *given)[2], "has no image processor that can be loaded")
    assert_said(run_inspect(folder)[2], "is a ViTModel, which sees pictures; name a folder of them with --images")
    processor = tf.ViTImageProcessor(size={"height": size, "width": size})
    processor.save_pretrained(folder)
    code, out, err = run_inspect(folder, *given)
    assert code == 0, err
    result = json.loads(out)
    assert (result["called"], result["texts"]) == ("picture", [file.name for file in files])
    pixels = processor(images=[Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    for row, wanted in zip(result["rows"], inspect_batches(model, [{"pixel_values": pixels}])["rows"], strict=True):
        assert row["entropy"] == pytest.approx(wanted["entropy"], abs=1e-5)
    assert '<h2 id="texts">The pictures</h2>' in (tmp_path / "out" / "index.html").read_text()
    assert_said(run_inspect(folder, *given, "--text", "x")[2], "are for different models; give one of them")
    assert_said(
        run_inspect(folder, "--images", tmp_path / "no", "--out", tmp_path / "out")[2], "--images:", "is not there"
    )


def test_texts_come_from_a_file_or_stdin(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text(f"{TEN_TOKENS}\n\n  Another one.  \n")
    folder = save_model(build_small("bert", hidden_size=64), tmp_path / "m")
    result = run_command("inspect", folder, "--file", "-", "--json", "--out", tmp_path / "o", stdin="From a pipe.\n")
    assert json.loads(result.stdout)["texts"] == ["From a pipe."]
    _, out, _ = run_inspect(folder, "--file", str(tmp_path / "texts.txt"), "--json", "--out", str(tmp_path / "o"))
    assert json.loads(out)["texts"] == [TEN_TOKENS, "Another one."]


def test_a_head_dim_beyond_the_curves_leaves_their_matchings_out(minilm: tuple[Any, Any], tmp_path: Path) -> None:
    model = build_small("bert", hidden_size=16, intermediate_size=20)  # 4 heads of 4
    result = inspect(model, minilm[1], [TEN_TOKENS])
    assert result["rows"][0]["lln"]["paper"]["entropy"] is not None
    assert result["rows"][0]["lln"]["entropy"]["entropy"] is None
    write({**result, "model": "m", "class": "C", "texts": [TEN_TOKENS], "provenance": {}}, tmp_path)
    assert "The curves of entropy matching do not cover" in (tmp_path / "index.html").read_text()


def test_names_numbers_and_places() -> None:
    assert list(label_layers([("a.0.x", 0), ("a.1.x", 0)]).values()) == ["0", "1"]
    assert list(label_layers([("attn", 0)]).values()) == ["attn"]
    assert list(label_layers([("a.0", 0), ("a.0", 1), ("b.1.c", 0)]).values()) == ["a 0 0", "a 0 1", "b 1 c"]
    assert [show_value(x, 2, False) for x in (0.051, 1.234, 0.001, 12.0)] == [".05", "1.23", "0", "12.00"]
    assert [show_value(x, 1, True) for x in (0.31, -0.31, 1.2)] == ["+.3", "-.3", "+1.2"]
    assert count_positions(build_model("roberta", "sdpa")) == 95
    assert count_positions(build_model("bert", "sdpa")) == 96
    assert VOCABULARY < 30522
