"""Tokenizers: byte-level BPE trained on the corpus, or one that exists, with a hash for the run's identity."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln.files import write_text
from lln.lab.core.errors import DataError, first_line, need
from lln.lab.core.progress import show_busy, track
from lln.lab.data.made_once import Place, build_once
from lln.lab.data.sources import Rows, ask_hub, resolve_root

FILE = "tokenizer.json"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # ids 0 to 4, the first four as in RoBERTa
NAMES = {"start": ("<s>", "[CLS]"), "pad": ("<pad>", "[PAD]"), "end": ("</s>", "[SEP]"), "mask": ("<mask>", "[MASK]")}
BYTES = 256
CHUNK = 1000  # lines handed over at once


class TextTokenizer:
    """A tokenizer of the `tokenizers` library with the four special tokens that training uses."""

    def __init__(self, text: str, origin: str) -> None:
        try:
            self.core = need("tokenizers").Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower type
            raise DataError(f"{origin} is not a tokenizer file ({first_line(error)}).") from None
        self.core.no_padding()
        self.core.no_truncation()
        self.core.encode_special_tokens = True  # "</s>" in a text is four letters, not the end of a line
        ids: list[int] = []
        for role, names in NAMES.items():
            found = [i for i in map(self.core.token_to_id, names) if i is not None]
            if not found:
                raise DataError(f"{origin} has no {role} token; it needs {' or '.join(names)}.")
            ids.append(found[0])
        self.start_id, self.pad_id, self.end_id, self.mask_id = ids
        added = self.core.get_added_tokens_decoder()
        self.special_ids = sorted({*ids, *(int(i) for i, token in added.items() if token.special)})
        self.vocab_size = int(max(self.core.get_vocab(with_added_tokens=True).values())) + 1
        self.ordinary_ids = np.setdiff1d(np.arange(self.vocab_size), self.special_ids)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # Of the settled form, so that spaces and padding settings in a file make no other tokenizer.
        canonical = json.dumps(json.loads(self.core.to_str()), sort_keys=True)
        self.sha256 = hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "vocab_size": self.vocab_size}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(which ids are special [vocabulary] bool, the others [n] int64), kept on the device"""
        if device not in self._tables:
            ordinary = torch.from_numpy(self.ordinary_ids)
            special = torch.ones(self.vocab_size, dtype=torch.bool)
            special[ordinary] = False
            self._tables[device] = special.to(device), ordinary.to(device)
        return self._tables[device]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids without special tokens."""
        return [found.ids for found in self.core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_examples(self, columns: Sequence[Sequence[str]], length: int) -> Iterator[list[int]]:
        """Ids of sentences (one column) or pairs (two), with the special tokens around them that the tokenizer
        prescribes, cut to `length` from the end of the longer sentence."""
        core = need("tokenizers").Tokenizer.from_str(self.core.to_str())  # truncation is a setting of the whole
        core.encode_special_tokens = True
        core.enable_truncation(length, strategy="longest_first")
        inputs: list[Any] = list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))
        for at in track(range(0, len(inputs), CHUNK), -(-len(inputs) // CHUNK), "Tokenising"):
            yield from (found.ids for found in core.encode_batch_fast(inputs[at : at + CHUNK]))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.core.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json into the folder, for the run or a model to carry along."""
        path = folder / FILE
        write_text(path, self.core.to_str(pretty=True))
        return path


def train_tokenizer(rows: Rows, column: str = "text", *, vocab_size: int, cache_dir: Place = None) -> TextTokenizer:
    """Byte-level BPE with RoBERTa's special tokens, trained on a column once and kept in the cache."""
    lowest = len(SPECIAL) + BYTES
    if vocab_size < lowest:
        raise ValueError(f"vocab_size must be at least {lowest}: special tokens and bytes; got {vocab_size}.")

    def build(folder: Path) -> None:
        write_text(folder / FILE, _train(rows.strings(column), vocab_size))

    version = need("tokenizers").__version__
    key = {"rows": rows.identity, "column": column, "vocab_size": vocab_size, "tokenizers": version, "form": 1}
    path = build_once("tokenizers", key, build, cache_dir) / FILE
    return TextTokenizer(path.read_text(encoding="utf-8"), str(path))


def load_tokenizer(name: str, *, data_root: Place = None) -> TextTokenizer:
    """An existing one: a tokenizer.json, a folder that holds one, or a Hub id (with a data root: the folder of that
    name in it)."""
    path = Path(name).expanduser()
    root = resolve_root(data_root)
    if path.is_dir():
        path = path / FILE
    elif not path.is_file() and root is not None:
        path = root / name / FILE
    elif not path.is_file():
        with ask_hub(f"The tokenizer {name} is no file or folder here and could not be fetched from the Hub") as hub:
            path = Path(hub.hf_hub_download(name, FILE))
    if not path.is_file():
        raise DataError(f"The tokenizer {name} is not there: expected the file {path}.")
    return TextTokenizer(path.read_text(encoding="utf-8"), str(path))


def _train(texts: Sequence[str], vocab_size: int) -> str:
    lib = need("tokenizers")
    core = lib.Tokenizer(lib.models.BPE())
    core.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[lib.AddedToken(token, special=True, lstrip=token == "<mask>") for token in SPECIAL],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with show_busy(f"Training a tokenizer of {vocab_size} tokens on {len(texts)} lines"):
        core.train_from_iterator(texts, trainer, length=len(texts))
    # By position: versions of the library name these arguments differently.
    end, start = (("</s>", SPECIAL.index("</s>")), ("<s>", SPECIAL.index("<s>")))
    core.post_processor = lib.processors.RobertaProcessing(end, start, True, False)
    return str(core.to_str(pretty=True))
