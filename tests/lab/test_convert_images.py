"""`lln convert` of image models: pictures in the place of passages, tiles in the place of blocks, all else the same."""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from helpers.command import assert_sentence, run_command
from helpers.hf_models import BERT, build_model
from helpers.runs import interrupt_learning
from lln.hf.find import attention_modules
from lln.lab.convert import pipeline
from lln.lab.convert.pictures import PictureBatches, Pictures
from lln.lab.convert.verdict import agree, classify
from lln.lab.core.picture_files import find_pictures

# 10 x 10 patches: tiles of at most 4 are 3 x 3 of them
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 20,
    "patch_size": 2, "num_labels": 3,
}  # fmt: skip
LEARN = ("--tile", "4", "--batch-size", "4", "--directions", "16", "--distill", "30", "--fine-tune", "15")
run_convert = functools.partial(run_command, "convert", columns=160)
assert_said = functools.partial(assert_sentence, command="lln convert", alone=False)


KINDS: dict[str, Callable[[], Any]] = {
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**SIZES)),
    "dinov2": lambda: tf.Dinov2WithRegistersModel(tf.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=3)),
}
# As their checkpoints have them: that of DINOv2 cuts the edges off.
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 20, "width": 20}},
    "dinov2": {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 24}, "do_center_crop": True,
        "crop_size": {"height": 20, "width": 20},
    },
}  # fmt: skip


def build_sharp(kind: str) -> Any:
    """Queries and keys large enough that attention is not the plain mean."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
                parameter *= 15
    return model


def draw_picture(file: Path, seed: int) -> None:
    """A few rectangles of chance."""
    from PIL import Image, ImageDraw

    draw = torch.Generator().manual_seed(seed)
    picture = Image.new("RGB", (31, 26), tuple(torch.randint(256, (3,), generator=draw).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(5):
        left, top, width, height, *colour = torch.randint(256, (7,), generator=draw).tolist()
        corner = left % 24, top % 20
        pen.rectangle((*corner, corner[0] + width % 12, corner[1] + height % 12), fill=tuple(colour))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small softmax models and pictures of two kinds."""
    folder = tmp_path_factory.mktemp("images")
    for kind in KINDS:
        build_sharp(kind).save_pretrained(folder / kind)
        (folder / kind / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    for number in range(72):
        draw_picture(folder / "pictures" / ("cats" if number % 2 else "dogs") / f"{number}.png", number)
    (folder / "pictures" / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def converted(place: Path) -> Path:
    """The folder with both models converted in one go."""
    for kind in KINDS:
        code, out, err = run_convert(place / kind, place / "out" / kind, "--images", place / "pictures", *LEARN)
        assert code in (0, 3), err
        assert f"{kind} with lln_diag: fitted → distilled → fine-tuned" in out
        assert "9 pictures of 20 x 20 pixels that nothing was learned from" in out
    return place / "out"


def last_hidden(model: Any, batches: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.base_model(**batch).last_hidden_state for batch in batches])


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_loads_and_is_what_the_report_says(kind: str, place: Path, converted: Path) -> None:
    out = converted / kind
    report = json.loads((out / "conversion.json").read_text())
    maker = tf.AutoModelForImageClassification if kind == "vit" else tf.AutoModel
    model, softmax = (maker.from_pretrained(folder).eval() for folder in (out, place / kind))
    assert report["class"] == type(model).__name__
    assert model.config._attn_implementation == "lln_diag"
    assert model.config.lln["tile"] == report["request"]["tile"] == 4
    assert "block_size" not in report["request"]
    assert report["passages"] == {
        "learned": 63, "reported": 4, "judged": 9, "held_out": True, "called": "pictures", "pixels": [20, 20]
    }  # fmt: skip
    errors = {stage: sum(row[stage]["error"] for row in report["layers"]) for stage in report["stages"]}
    assert errors["distilled"] < errors["fitted"]
    for row in report["layers"]:
        assert 0 < row["softmax"]["entropy"] < 6.7  # of at most 104 tokens
    # The numbers of the report, from the saved folder alone.
    material = Pictures(find_pictures([place / "pictures"]))
    material.processor = tf.AutoImageProcessor.from_pretrained(out)
    kept, learned = pipeline.split(list(material.files.values()))
    assert not set(kept) & set(learned)
    batches = PictureBatches(material, kept, 4)
    ours, theirs = (last_hidden(m, PictureBatches(material, kept[::2][:4], 4)) for m in (model, softmax))
    error = float((ours - theirs).norm() / theirs.norm())
    assert abs(error / report["hidden_error"]["fine_tuned"] - 1) < 1e-3
    means = [torch.nn.functional.normalize(last_hidden(m, batches).double().mean(1)) for m in (model, softmax)]
    pairs = [(unit @ unit.T)[tuple(torch.triu_indices(9, 9, 1))] for unit in means]
    ranks = torch.stack([pair.argsort().argsort() for pair in pairs]).double()
    verdict = report["verdict"]
    assert abs(float(ranks.corrcoef()[0, 1]) - verdict["value"]) < 1e-3
    assert verdict["verdict"] == ("kept" if verdict["value"] >= 0.95 and verdict["better_than_blocks"] else "not kept")
    if kind == "vit":
        assert verdict["same_class"] == agree(classify(model, batches), classify(softmax, batches))
        assert 0 <= verdict["same_class_blocks_alone"] <= 1
    else:
        assert "same_class" not in verdict
    card = (out / "README.md").read_text()
    assert "63 pictures of 20 x 20 pixels" in card
    assert ("have the softmax model's class" in card) == (kind == "vit")
    assert str(place) not in card + json.dumps(report)


def test_stopped_in_the_middle_it_ends_with_the_same_numbers(
    place: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after 25 steps of 30, and again after 8 of 15, with a state put away after every tenth one; the pictures
    have moved in the meantime."""
    monkeypatch.setattr(pipeline, "KEPT_EVERY", 10)
    moved = tmp_path / "elsewhere"
    for number, file in enumerate(sorted((place / "pictures").rglob("*.png"))):
        moved.mkdir(exist_ok=True)
        (moved / f"{100 - number}.PNG").write_bytes(file.read_bytes())
    for folder, moment in ((place / "pictures", 25), (moved, 18)):
        with interrupt_learning(after=moment):
            code, _, err = run_convert(place / "vit", tmp_path / "out", "--images", folder, *LEARN)
        assert code == 130, err
    assert run_convert(place / "vit", tmp_path / "out", "--images", moved, *LEARN)[0] in (0, 3)
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", converted / "vit"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    reports = [json.loads((folder / "conversion.json").read_text()) for folder in (tmp_path / "out", converted / "vit")]
    for report in reports:
        del report["provenance"]
    assert reports[0] == reports[1]


def test_larger_pictures_are_asked_for_once(place: Path, tmp_path: Path) -> None:
    """Model and image processor both take them afterwards, and as much of a picture is cut off as before."""
    for kind in KINDS:
        code, _, err = run_convert(
            place / kind, tmp_path / kind, "--images", place / "pictures", "--image-size", "28", "--tile", "4",
            "--directions", "16", "--distill", "3", "--fine-tune", "2",
        )  # fmt: skip
        assert code in (0, 3), err
        model = tf.AutoModel.from_pretrained(tmp_path / kind)
        processor = tf.AutoImageProcessor.from_pretrained(tmp_path / kind)
        from PIL import Image

        made = processor(images=Image.new("RGB", (50, 40)), return_tensors="pt")
        assert made["pixel_values"].shape == (1, 3, 28, 28)
        tokens = 14**2 + (1 if kind == "vit" else 4)
        assert model(**made).last_hidden_state.shape == (1, tokens, 32)
        (attention, *_) = (module.lln for _, module in attention_modules(model))
        assert attention.patches.grids == {14**2: (14, 14)}
    assert processor.to_dict()["size"]["shortest_edge"] == round(24 * 28 / 20)


def test_a_picture_that_is_there_twice_counts_once(place: Path, tmp_path: Path) -> None:
    for name in ("a.png", "deep/er/b.PNG"):
        draw_picture(tmp_path / name.lower(), 1)
    draw_picture(tmp_path / "other.jpg", 2)
    found = find_pictures([tmp_path, tmp_path / "deep"])
    assert len(found) == 2
    assert Pictures(found).fingerprint() != Pictures(find_pictures([tmp_path / "deep"])).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["{vit}", "{out}"],
            ["give --calibration FILE for a model of text, or --images FOLDER for a model of pictures"],
        ),
        (["{vit}", "{out}", "--images", "{pictures}", "--calibration", "{text}"], ["and not both"]),
        (
            ["{vit}", "{out}", "--calibration", "{text}"],
            ["is a ViTForImageClassification, which takes pictures; give it some with --images FOLDER in place of"],
        ),
        (
            ["{tmp}/bert", "{out}", "--images", "{pictures}"],
            ["is a BertModel, which takes text; give it some with --calibration FILE in place of --images"],
        ),
        (["{tmp}/sounds", "{out}", "--images", "{pictures}"], ["takes input_values", "lln.hf.distill", "in Python"]),
        (
            ["{tmp}/clip", "{out}", "--images", "{pictures}"],
            ["a CLIPModel, which takes text and pictures", "in Python"],
        ),
        (
            ["{tmp}/mae", "{out}", "--images", "{pictures}"],
            ["tile: ViTMAEModel drops patches", "in Python lln.hf.convert"],
        ),
        (["{tmp}/bare", "{out}", "--images", "{pictures}"], ["has no image processor", "save_pretrained"]),
        (["{vit}", "{out}", "--images", "{tmp}/none"], ["none is not there"]),
        (["{vit}", "{out}", "--images", "{text}"], ["text.txt is a file; name the folder"]),
        (["{vit}", "{out}", "--images", "{tmp}/empty"], ["there is no picture below", ".png"]),
        (["{vit}", "{out}", "--images", "{tmp}/broken"], ["half.png cannot be read as a picture", "remove or replace"]),
        (
            ["{vit}", "{out}", "--images", "{pictures}", "--tile", "10"],
            ["10 x 10 patches fit into one tile", "below 10"],
        ),
        (["{vit}", "{out}", "--images", "{pictures}", "--block-size", "8"], ["--block-size goes with --calibration"]),
        (["{vit}", "{out}", "--images", "{pictures}", "--length", "8"], ["there are --tile, --image-size"]),
        (["{vit}", "{out}", "--calibration", "{text}", "--tile", "8"], ["--tile goes with --images"]),
        (["{vit}", "{out}", "--images", "{pictures}", "--image-size", "21"], ["--image-size 21", "multiple"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], place: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the old river sings then")
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    whole = next((place / "pictures").rglob("*.png")).read_bytes()
    (tmp_path / "broken" / "half.png").write_bytes(whole[: len(whole) // 2])
    makers = {
        "bert": lambda: tf.BertModel(tf.BertConfig(**BERT)),
        "clip": lambda: tf.CLIPModel(tf.CLIPConfig(text_config=BERT, vision_config=SIZES)),
        "mae": lambda: tf.ViTMAEModel(tf.ViTMAEConfig(**SIZES)),
        "bare": lambda: tf.ViTModel(tf.ViTConfig(**SIZES)),
        "sounds": lambda: tf.Wav2Vec2Model(
            tf.Wav2Vec2Config(
                hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, conv_dim=(8,),
                conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            )
        ),
    }  # fmt: skip
    if (name := Path(arguments[0]).name) in makers:
        makers[name]().save_pretrained(tmp_path / name)
        if name in ("clip", "mae"):
            (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["vit"]))
    places = {"vit": place / "vit", "pictures": place / "pictures", "text": tmp_path / "text.txt", "tmp": tmp_path}
    code, out, err = run_convert(*(text.format(**places, out=tmp_path / "out") for text in arguments))
    assert (code, out) == (2, ""), err
    assert_said(err, *parts)
    assert not list(tmp_path.glob("out*"))


def test_the_extra_that_reads_pictures_is_named(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "PIL" else plain(name, *more))
    code, _, err = run_convert(place / "vit", tmp_path / "out", "--images", place / "pictures")
    assert code == 2
    assert_said(err, "pip install 'lln-attention[train]'")


def test_only_those_that_choose_a_class_are_classifiers() -> None:
    batches = [{"pixel_values": torch.randn(5, 3, 20, 20)}]
    model = tf.ViTForImageClassification(tf.ViTConfig(**SIZES)).eval()
    with torch.no_grad():
        wanted = model(**batches[0]).logits.argmax(-1)
    found = classify(model, batches)
    assert found is not None
    assert found.tolist() == wanted.tolist()
    assert agree(found, (found + torch.tensor([0, 0, 0, 1, 1])) % 3) == 0.6
    model.config.problem_type = "multi_label_classification"
    assert classify(model, batches) is None
    assert classify(tf.ViTModel(tf.ViTConfig(**SIZES)), batches) is None
    assert classify(build_model("bert", "sdpa").float(), []) is None
    teacher = tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**SIZES))
    assert classify(teacher.eval(), batches) is not None
