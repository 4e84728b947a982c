"""Packed text holds the text; masking follows RoBERTa's rule; the order is the same whoever reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers.mirror import write_set
from lln.lab.core.errors import DataError
from lln.lab.core.seeds import UNIT, draws, fingerprint, generator, stream_key, to_unit
from lln.lab.data.examples import IGNORE, Pad, Sequences, Stream, flatten
from lln.lab.data.sources import read
from lln.lab.data.text import Masking, PackedText, load_text, tokenise
from lln.lab.data.tokenizer import FILE, SPECIAL, TextTokenizer, load_tokenizer, train_tokenizer

VOCAB = 700


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> TextTokenizer:
    return train_tokenizer(read("embedded/prose", "validation"), vocab_size=VOCAB, cache_dir=cache)


@pytest.fixture(scope="module")
def packed(cache: Path, tokenizer: TextTokenizer) -> PackedText:
    return load_text("embedded/prose", "validation", tokenizer, length=65, masking=Masking(), seed=3, cache_dir=cache)


def test_a_trained_tokenizer_says_every_text_and_has_its_special_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB
    assert [tokenizer.core.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert (tokenizer.start_id, tokenizer.pad_id, tokenizer.end_id, tokenizer.mask_id) == (0, 1, 2, 4)
    assert tokenizer.special_ids == [0, 1, 2, 3, 4]
    for text in ("The while statement", "  naïve ½ 東京 \x00 🙂", "<mask>ed"):
        [ids] = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text
        [around] = tokenizer.encode_examples([[text]], 100)
        assert around == [0, *ids, 2]
    [ids] = tokenizer.encode(["</s> in a text is text"])
    assert not set(ids) & set(tokenizer.special_ids)
    [ids] = tokenizer.encode(["statement"])
    assert len(ids) < 5  # words of the corpus are not spelled out


def test_a_tokenizer_is_trained_once_and_saved_with_its_hash(
    tokenizer: TextTokenizer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lln.lab.data.tokenizer._train", None)
    again = train_tokenizer(read("embedded/prose", "validation"), vocab_size=VOCAB, cache_dir=cache)
    assert again.identity == tokenizer.identity
    tokenizer.save(tmp_path / "org" / "name")
    for name, root in ((tmp_path / "org" / "name", None), (tmp_path / "org/name" / FILE, None), ("org/name", tmp_path)):
        assert load_tokenizer(str(name), data_root=root).sha256 == tokenizer.sha256
    changed = json.loads(tokenizer.core.to_str())
    changed["model"]["merges"].pop()
    assert TextTokenizer(json.dumps(changed), "x").sha256 != tokenizer.sha256


def test_wrong_tokenizers_are_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be at least 261.*; got 260"):
        train_tokenizer(read("embedded/prose", "validation"), vocab_size=260, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"expected the file .*org/name/tokenizer.json"):
        load_tokenizer("org/name", data_root=tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer file"):
        load_tokenizer(str(tmp_path))
    text = json.loads(tokenizer.core.to_str())
    text["added_tokens"] = [token for token in text["added_tokens"] if token["content"] != "<mask>"]
    del text["model"]["vocab"]["<mask>"]
    with pytest.raises(DataError, match=r"has no mask token; it needs <mask> or \[MASK\]"):
        TextTokenizer(json.dumps(text), "this")


def test_sequences_are_the_text_and_nothing_else(tokenizer: TextTokenizer, cache: Path, packed: PackedText) -> None:
    rows = read("embedded/prose", "validation", cache_dir=cache)
    stream, _ = tokenise(rows, tokenizer)
    lines = [line for line in rows.strings("text") if line.strip()]
    assert tokenizer.decode(stream.tolist()).split("</s>") == [*lines, ""]
    plain = load_text("embedded/prose", "validation", tokenizer, length=65, cache_dir=cache)
    assert len(packed) == len(plain) == len(stream) // 64
    assert np.array_equal(
        np.concatenate([plain[i]["input_ids"][1:] for i in range(len(plain))]), stream[: len(packed) * 64]
    )
    assert all(plain[i]["input_ids"][0] == tokenizer.start_id for i in range(len(plain)))


def test_blank_lines_and_short_texts(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    write_set(tmp_path, "a/b", "c", {"train": {"text": ["", " = Title = \n", "   \n", "two"]}, "test": {"text": [" "]}})
    text = load_text("a/b", "train", tokenizer, length=2, data_root=tmp_path, cache_dir=tmp_path)
    whole = np.concatenate([text[i]["input_ids"][1:] for i in range(len(text))])
    assert tokenizer.decode(whole.tolist()) == "= Title =</s>two</s>"
    assert set(text[0]) == {"input_ids"}
    with pytest.raises(DataError, match="too few for one sequence of length 4096"):
        load_text("a/b", "train", tokenizer, length=4096, data_root=tmp_path, cache_dir=tmp_path)
    with pytest.raises(DataError, match="column 'text' has no text"):
        load_text("a/b", "test", tokenizer, length=4, data_root=tmp_path, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="length must be an int of at least 2; got 1"):
        load_text("a/b", "train", tokenizer, length=1, data_root=tmp_path, cache_dir=tmp_path)


def test_masking_is_fifteen_in_a_hundred_and_eighty_ten_ten(tokenizer: TextTokenizer) -> None:
    ids = torch.from_numpy(generator("ids").choice(tokenizer.ordinary_ids, 2000)).expand(40, -1).clone()
    ids[:, ::100] = tokenizer.end_id
    seen, labels = Masking()(ids, tokenizer, some_draws(40, 2000))
    chosen = labels != IGNORE
    counts = chosen.sum(1)  # 15 % of 1,980, and a fraction is rounded to either side
    assert set(Masking(0.1503)(ids, tokenizer, some_draws(40, 2000))[1].ne(IGNORE).sum(1).tolist()) == {297, 298}
    assert counts.eq(297).all()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(seen[~chosen], ids[~chosen])
    assert not chosen[:, ::100].any()  # special tokens are not guessed
    other = (seen != ids) & (seen != tokenizer.mask_id)
    assert not torch.isin(seen[other], torch.tensor(tokenizer.special_ids)).any()  # nor put in
    masked, kept = (seen[chosen] == tokenizer.mask_id).sum(), (seen[chosen] == ids[chosen]).sum()
    random, total = other.sum(), chosen.sum()
    # Every place is as likely as another, and rows differ.
    assert chosen.sum(0)[1:100].max() < 20
    assert len({tuple(row.tolist()) for row in chosen}) == 40
    # 5 standard deviations of a share among 11,880 tokens
    for share, count in ((0.8, masked), (0.1, kept), (0.1, random)):
        assert abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5 + 1 / VOCAB


def some_draws(rows: int, length: int, key: str = "test") -> torch.Tensor:
    zeros = torch.zeros(rows, dtype=torch.int64)
    return draws(stream_key(key), zeros, torch.arange(rows), Masking.count_draws(length))


def test_draws_are_splitmix64_and_spread_evenly() -> None:
    """Against the published algorithm in Python's own whole numbers."""

    def draw_published(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert draw_published(1234567) == 6457827717110365317  # its first published value
    key, epoch, index = stream_key("k", 5), 3, 11
    start = draw_published((draw_published((key + epoch) % 2**64) + index) % 2**64)
    wanted = [draw_published((start + i * 0x9E3779B97F4A7C15) % 2**64) >> 1 for i in range(5)]
    assert draws(key, torch.tensor([epoch]), torch.tensor([index]), 5).tolist() == [wanted]
    many = to_unit(draws(key, torch.arange(3).repeat(50), torch.arange(150), 1000)).double() / UNIT
    assert abs(float(many.mean()) - 0.5) < 5 * (1 / 12 / many.numel()) ** 0.5
    assert len(many.unique()) > 149_900


@given(n=st.integers(0, 40), probability=st.floats(0.01, 1), r=st.floats(0, 1), k=st.floats(0, 1), seed=st.integers(0))
@settings(max_examples=50, deadline=None)
def test_any_share_is_met_to_within_one_token(
    tokenizer: TextTokenizer, n: int, probability: float, r: float, k: float, seed: int
) -> None:
    if r + k > 1:
        r, k = r / 2, k / 2
    ids = torch.cat([torch.tensor([0]), torch.arange(5, 5 + n)])[None]
    seen, labels = (t[0] for t in Masking(probability, r, k)(ids, tokenizer, some_draws(1, n + 1, str(seed))))
    count = int((labels != IGNORE).sum())
    assert abs(count - probability * n) < 1 + 1e-9
    assert seen[0] == 0
    if r + k == 0:
        assert (seen[labels != IGNORE] == tokenizer.mask_id).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 0}, "probability must be above 0"),
        ({"random_share": -0.1}, "random_share must lie between"),
        ({"random_share": 0.6, "keep_share": 0.6}, "at most 1; got 0.6 [+] 0.6"),
    ],
)
def test_wrong_shares_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Masking(**options)


def test_masks_depend_on_seed_epoch_and_index_alone(packed: PackedText, cache: Path, tokenizer: TextTokenizer) -> None:
    def labels(text: PackedText, index: int, epoch: int) -> list[int]:
        return text.item(index, epoch)["labels"].tolist()

    assert labels(packed, 5, 2) == labels(packed, 5, 2)
    assert labels(packed, 5, 2) != labels(packed, 5, 1)
    other = load_text("embedded/prose", "validation", tokenizer, length=65, masking=Masking(), seed=4, cache_dir=cache)
    assert labels(packed, 5, 2) != labels(other, 5, 2)
    assert packed.fingerprint != other.fingerprint
    assert torch.equal(packed[5]["input_ids"], packed.item(5, 0)["input_ids"])


def test_unigram_entropy_is_that_of_the_ordinary_tokens(tokenizer: TextTokenizer) -> None:
    tokens = np.array([10, 10, 11, 12, 2, 2, 2, 2], np.uint16)
    text = PackedText(tokens, tokenizer, length=9, masking=None, seed=0, identity={}, notes=[])
    assert text.unigram_entropy() == pytest.approx(1.5 * np.log(2))


def test_an_epoch_shows_everything_once_and_the_next_in_another_order(packed: PackedText) -> None:
    n = len(packed)
    stream = Stream(packed, seed=1, length=2 * n + 5)
    first, second = (stream.find_places(np.arange(e * n, (e + 1) * n))[0].tolist() for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(n))
    assert first != second
    assert first != list(range(n))
    assert stream.find_places(np.array([0, n - 1, n, 2 * n]))[1].tolist() == [0, 0, 1, 2]
    assert first != Stream(packed, seed=2, length=n).find_places(np.arange(n))[0].tolist()
    with pytest.raises(IndexError):
        stream[2 * n + 5]


def are_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_stream_goes_on_from_anywhere(packed: PackedText) -> None:
    """Also across epochs, with nothing read before."""
    n = len(packed)
    whole, other = (Stream(packed, seed=1, length=n + 9) for _ in range(2))
    before = [whole[p] for p in range(n + 9)]
    rest = other.__getitems__(range(n - 2, n + 9))
    for p in range(11):
        assert are_same({name: rows[p] for name, rows in rest.items()}, before[n - 2 + p])


def test_workers_and_ranks_see_what_one_process_sees(packed: PackedText, tokenizer: TextTokenizer) -> None:
    stream = Stream(packed, seed=1, length=16)
    one = list(DataLoader(stream, batch_size=4, collate_fn=dict))
    apart = DataLoader(stream, batch_size=4, collate_fn=dict, num_workers=1, multiprocessing_context="spawn")
    two = list(apart)
    assert all(are_same(a, b) for a, b in zip(one, two, strict=True))
    # Two ranks that take turns with half batches see the same global batches.
    halves = list(DataLoader(stream, batch_size=2, collate_fn=dict))
    for step, batch in enumerate(one):
        joined = {key: torch.cat([halves[2 * step][key], halves[2 * step + 1][key]]) for key in batch}
        assert are_same(joined, batch)


OTHER_PROCESS = """
import sys
from lln.lab.data.sources import read
from lln.lab.data.text import Masking, load_text
from lln.lab.data.tokenizer import train_tokenizer
from test_data_text import summary

tokenizer = train_tokenizer(read("embedded/prose", "validation"), vocab_size=700, cache_dir=sys.argv[1])
text = load_text("embedded/prose", "validation", tokenizer, length=65, masking=Masking(), seed=3, cache_dir=sys.argv[1])
print(*summary(text))
"""


def summary(text: PackedText) -> list[str]:
    stream = Stream(text, seed=1, length=30)
    items = [{key: value.tolist() for key, value in stream[p].items()} for p in range(30)]
    return [text.tokenizer.sha256, text.fingerprint, fingerprint(items)]


def test_another_process_makes_the_same_of_nothing(tmp_path: Path, packed: PackedText) -> None:
    """With a cache of its own, other hashes of strings, and other threads."""
    environment = {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == summary(packed)


def test_a_batch_is_padded_and_masked() -> None:
    ids, offsets = flatten([[5, 6, 7], [8], [], [9, 9, 9, 9]], np.uint8).values()
    data = Sequences(
        [(ids, offsets)], np.array([1, 0, 1, 0]), pad_id=1, length=7, label_names=["a", "b"], identity={}, notes=[]
    )
    batch = data.__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["labels"].tolist() == [1, 0]
    assert data.__getitems__([2])["attention_mask"].tolist() == [[False]]
    for fixed in (False, True):
        data.fixed = fixed
        assert {name: value.tolist() for name, value in data[1].items()} == {"input_ids": [8], "labels": 0}
        assert len(data[2]["input_ids"]) == 0
    assert data.__getitems__([0, 1])["input_ids"].tolist() == [[5, 6, 7, 1, 1, 1, 1], [8, 1, 1, 1, 1, 1, 1]]


def test_a_batch_of_examples_is_padded_as_in_the_last_release() -> None:
    items = [
        {
            "input_ids": torch.tensor([5, 6, 7]),
            "labels": torch.tensor([IGNORE, 6, IGNORE]),
            "weight": torch.tensor(0.5),
        },
        {"input_ids": torch.tensor([8]), "labels": torch.tensor([8]), "weight": torch.tensor(1.0)},
    ]
    batch = Pad(1, multiple=4)(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100], [8, -100, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 1.0]
    wider = Pad(1, length=7)(items)
    assert wider["input_ids"].shape == (2, 7)
    made_already = Pad(1, length=7)(batch)  # what a DataLoader hands on from a set of this release
    assert {name: rows.tolist() for name, rows in made_already.items()} == {n: r.tolist() for n, r in wider.items()}
    assert Pad(1)([{"input_ids": torch.tensor([], dtype=torch.int64)}])["attention_mask"].tolist() == [[False]]
    with pytest.raises(ValueError, match="length = 2 is too short for a sequence of 3 tokens"):
        Pad(1, length=2)(items)
    with pytest.raises(ValueError, match="multiple must be at least 1"):
        Pad(1, multiple=0)
