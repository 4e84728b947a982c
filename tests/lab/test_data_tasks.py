"""GLUE, images, and Long Range Arena on stored data: columns, labels, bytes and pixels are the set's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.mirror import encode_image, write_set, write_split
from lln.lab.core.errors import DataError
from lln.lab.data.examples import Stream
from lln.lab.data.images import CATS_VS_DOGS, CIFAR10, DIGITS, load_images, to_grey
from lln.lab.data.labelled import IMDB, list_tasks, load_byte_text, load_glue, load_pixels, load_retrieval
from lln.lab.data.sources import read
from lln.lab.data.tokenizer import TextTokenizer, train_tokenizer

GLUE = "nyu-mll/glue"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    cache = tmp_path_factory.mktemp("cache")
    return train_tokenizer(read("embedded/prose", "test"), vocab_size=400, cache_dir=cache)


def glue_rows(task: str, labels: list[int]) -> dict[str, list]:
    columns = {c: [f"{c} of row {i}" for i in range(len(labels))] for c in list_tasks()[task].columns}
    return {**columns, "label": labels, "idx": list(range(len(labels)))}


@pytest.mark.parametrize("task", ["mnli", "qnli", "qqp", "sst2"])
def test_every_split_of_a_glue_task_loads_with_its_columns_and_labels(
    task: str, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    spec = list_tasks()[task]
    labels = [i % len(spec.labels) for i in range(7)]
    public, hidden = ("train", *spec.validation), [split.replace("validation", "test") for split in spec.validation]
    content = {split: glue_rows(task, labels if split in public else [-1] * 7) for split in (*public, *hidden)}
    write_set(tmp_path, GLUE, task, content)
    for split in public:
        data: Any = load_glue(task, split, tokenizer, data_root=tmp_path, cache_dir=tmp_path / "cache")
        assert [int(item["labels"]) for item in data] == labels
        assert data.num_labels == len(spec.labels)
        text = tokenizer.decode(data[3]["input_ids"].tolist())
        expected = "</s></s>".join(f"{column} of row 3" for column in spec.columns)
        assert text == f"<s>{expected}</s>"
    for split in hidden:
        data = load_glue(task, split, tokenizer, data_root=tmp_path, cache_dir=tmp_path / "cache")
        assert data.labels is None
        assert set(data[0]) == {"input_ids"}
        with pytest.raises(ValueError, match="not public"):
            data.majority  # noqa: B018
        with pytest.raises(DataError, match="has no split"):
            load_glue(task, "dev", tokenizer, data_root=tmp_path, cache_dir=tmp_path / "cache")


def test_mnli_has_a_matched_and_a_mismatched_validation() -> None:
    assert list_tasks()["mnli"].validation == ("validation_matched", "validation_mismatched")
    assert list_tasks()["mnli"].labels == ("entailment", "neutral", "contradiction")


def test_hidden_labels_never_reach_training(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    write_set(tmp_path, GLUE, "sst2", {"train": glue_rows("sst2", [0, -1]), "test": glue_rows("sst2", [1, -1])})
    for split in ("train", "test"):
        with pytest.raises(DataError, match="row 1 holds -1"):
            load_glue("sst2", split, tokenizer, data_root=tmp_path, cache_dir=tmp_path / "cache")


def test_a_pair_is_cut_at_the_longer_sentence(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = {"question": ["a b"], "sentence": ["word " * 200], "label": [1], "idx": [0]}
    write_set(tmp_path, GLUE, "qnli", {"train": rows})
    data = load_glue("qnli", "train", tokenizer, length=32, data_root=tmp_path, cache_dir=tmp_path / "cache")
    ids = data[0]["input_ids"].tolist()
    assert len(ids) == 32
    assert tokenizer.decode(ids).startswith("<s>a b</s></s>word word")
    with pytest.raises(ValueError, match="length must be at least 8"):
        load_glue("qnli", "train", tokenizer, length=7, data_root=tmp_path)
    with pytest.raises(ValueError, match=r"task must be 'mnli', 'qnli', .*; got 'cola'"):
        load_glue("cola", "train", tokenizer)


def test_the_embedded_tasks_have_the_shape_of_glue(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    topics = load_glue("topics", "train", tokenizer, cache_dir=tmp_path)
    pairs = load_glue("pairs", "validation", tokenizer, cache_dir=tmp_path)
    assert topics.num_labels == 4
    assert topics.majority < 0.45
    assert pairs.num_labels == 4
    assert pairs.majority < 0.45
    halves = tokenizer.decode(pairs[0]["input_ids"].tolist()).strip("</s>").split("</s></s>")
    assert [len(half.split()) for half in halves] == [12, 12]
    batch = topics.__getitems__(range(5))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["labels"].shape == (5,)
    assert topics.fingerprint != load_glue("topics", "train", tokenizer, length=64, cache_dir=tmp_path).fingerprint


def pictures(n: int, side: int = 6) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in range(n)]


@pytest.mark.parametrize(("name", "config", "columns"), [
    (CATS_VS_DOGS, "default", ("image", "labels")), (CIFAR10, "plain_text", ("img", "label"))
])  # fmt: skip
def test_images_are_the_stored_pixels(name: str, config: str, columns: tuple[str, str], tmp_path: Path) -> None:
    images = pictures(4)
    content = {columns[0]: [encode_image(image) for image in images], columns[1]: [0, 1, 0, 1]}
    write_set(tmp_path, name, config, {"train": content})
    data: Any = load_images(name, "train", data_root=tmp_path, cache_dir=tmp_path / "cache")
    assert np.array_equal(data.pixels, np.stack(images))
    item = data[2]
    assert item["pixel_values"].dtype == torch.float32
    restored = (item["pixel_values"].permute(1, 2, 0) + 1) * 127.5
    np.testing.assert_allclose(restored.numpy(), images[2], atol=1e-4)
    assert [int(item["labels"]) for item in data] == [0, 1, 0, 1]
    assert data.label_names[:2] == (["cat", "dog"] if name == CATS_VS_DOGS else ["airplane", "automobile"])


def test_images_of_any_shape_are_cut_to_a_square(tmp_path: Path) -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the middle square
    grey_level = np.full((12, 12), 90, np.uint8)
    content = {"image": [encode_image(wide), encode_image(grey_level, "JPEG")], "label": [0, 1]}
    write_set(tmp_path, "a/b", "c", {"train": content})
    data = load_images("a/b", "train", size=5, data_root=tmp_path, cache_dir=tmp_path / "cache")
    assert data.pixels.shape == (2, 5, 5, 3)
    assert (data.pixels[0] == 200).all()
    assert abs(data.pixels[1].astype(int) - 90).max() <= 2
    with pytest.raises(DataError, match=r"images differ in size \(12 x 12 in row 1, 30 x 10 in row 0\)"):
        load_images("a/b", "train", data_root=tmp_path, cache_dir=tmp_path / "cache")
    write_split(tmp_path / "bad", "train", {"image": [{"bytes": b"GIF8 no", "path": None}], "label": [0]})
    with pytest.raises(DataError, match="image in row 0 cannot be decoded"):
        load_images("bad", "train", data_root=tmp_path, cache_dir=tmp_path / "cache")
    write_split(tmp_path / "none", "train", {"photo": [1], "label": [0]})
    with pytest.raises(DataError, match="no column 'image' or 'img'; there are: photo, label"):
        load_images("none", "train", data_root=tmp_path, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="size must be at least 1"):
        load_images("a/b", "train", size=0, data_root=tmp_path)


def test_augmentation_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    def load(**options: Any) -> torch.Tensor:
        data = load_images(DIGITS, "validation", cache_dir=tmp_path, **options)
        return torch.stack([data.item(3, epoch)["pixel_values"] for epoch in range(8)])

    plain, moved = load(), load(augment=True)
    assert all(torch.equal(plain[0], again) for again in plain)
    assert torch.equal(moved, load(augment=True))
    assert not torch.equal(moved, load(augment=True, seed=1))
    assert len({tuple(image.flatten().tolist()) for image in moved}) > 2
    for image in moved:  # digits are shifted by at most a pixel and never mirrored
        shifts = [plain[0, :, 1 + dy : 7 + dy, 1 + dx : 7 + dx] for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        assert any(torch.equal(image[:, 1:7, 1:7], shift) for shift in shifts)


def test_photographs_are_mirrored_half_of_the_time(tmp_path: Path) -> None:
    write_set(tmp_path, "a/b", "c", {"train": {"image": [encode_image(pictures(1)[0])], "label": [0]}})
    data = load_images("a/b", "train", augment=True, data_root=tmp_path, cache_dir=tmp_path / "cache")
    stream: Any = Stream(data, seed=0, length=200)
    plain = torch.from_numpy(data.pixels[0].transpose(2, 0, 1) / 127.5 - 1).float()  # side 6: no shift
    mirrored = sum(torch.allclose(item["pixel_values"], plain.flip(2), atol=1e-6) for item in stream)
    assert 70 < mirrored < 130
    assert sum(torch.allclose(item["pixel_values"], plain, atol=1e-6) for item in stream) == 200 - mirrored


def test_digits_come_without_a_download(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    data = [load_images(DIGITS, split, cache_dir=tmp_path) for split in ("train", "validation", "test")]
    assert sum(map(len, data)) == 1797
    assert data[0].pixels.shape[1:] == (8, 8, 1)
    stored = {(d.pixels[i].tobytes(), int(d.labels[i])) for d in data for i in range(len(d))}
    bunch = load_digits()
    assert stored == {
        (np.round(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(bunch.images, bunch.target, strict=True)
    }


def test_lra_image_is_grey_pixels_row_by_row(tmp_path: Path) -> None:
    images = pictures(3, side=32)
    content = {"img": [encode_image(image) for image in images], "label": [9, 0, 4]}
    write_set(tmp_path, CIFAR10, "plain_text", {"test": content})
    data: Any = load_pixels("test", data_root=tmp_path, cache_dir=tmp_path / "cache")
    assert (data.length, data.vocab_size, data.num_labels) == (1024, 256, 10)
    expected = np.floor(images[1].astype(np.float64) @ [0.299, 0.587, 0.114] + 0.5)
    assert data[1]["input_ids"].tolist() == expected.reshape(-1).tolist()
    assert [int(item["labels"]) for item in data] == [9, 0, 4]
    digits = load_pixels("test", name=DIGITS, cache_dir=tmp_path)
    assert digits.length == 64
    assert to_grey(np.full((2, 2, 3), 255, np.uint8)).tolist() == [[255, 255], [255, 255]]


def test_lra_text_is_bytes_cut_at_the_length(tmp_path: Path) -> None:
    reviews = ["Good ½ ü!", "bad " * 50]
    write_set(tmp_path, IMDB, "plain_text", {"train": {"text": reviews, "label": [1, 0]}})
    data: Any = load_byte_text("train", length=20, data_root=tmp_path)
    for item, text in zip(data, reviews, strict=True):
        assert bytes((item["input_ids"] - 1).tolist()) == text.encode()[:20]
    assert data.vocab_size == 257
    assert data.label_names == ["negative", "positive"]
    data.fixed = True
    batch = data.__getitems__(range(2))
    assert batch["input_ids"].shape == (2, 20)
    assert batch["attention_mask"].sum(1).tolist() == [len(reviews[0].encode()), 20]
    assert (batch["input_ids"] == 0).equal(~batch["attention_mask"])  # no byte looks like padding
    with pytest.raises(ValueError, match="length must be a positive int; got 0"):
        load_byte_text("train", length=0, data_root=tmp_path)
    topics = load_byte_text("validation", name="embedded/topics")
    assert topics.num_labels == 4


def test_lra_retrieval_is_two_documents_as_bytes(tmp_path: Path) -> None:
    rows = {"text1": ["first document", "a"], "text2": ["second", "bcd"], "label": [1, 0]}
    write_set(tmp_path, "pairs/of", "x", {"train": rows})
    data = load_retrieval("train", name="pairs/of", length=8, data_root=tmp_path)
    batch = data.__getitems__([0, 1])
    texts = [
        [bytes(row[mask].sub(1).tolist()).decode() for row, mask in zip(batch[ids], batch[name], strict=True)]
        for ids, name in (("input_ids", "attention_mask"), ("pair_ids", "pair_mask"))
    ]
    assert texts == [["first do", "a"], ["second", "bcd"]]
    assert batch["labels"].tolist() == [1, 0]
    assert load_retrieval("test").majority == 0.5
