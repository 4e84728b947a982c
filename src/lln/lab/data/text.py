"""Text for language models: tokenised once, packed into sequences of one length, and masked: which tokens a model must
guess, and what it sees in their place."""

from dataclasses import KW_ONLY, asdict, dataclass
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from lln.lab.core.errors import DataError
from lln.lab.core.progress import track
from lln.lab.core.ranges import Range, check_ranges
from lln.lab.core.seeds import UNIT, draws, pick, stream_key, to_unit
from lln.lab.data.examples import IGNORE, Examples, choose_id_type
from lln.lab.data.made_once import build_arrays
from lln.lab.data.sources import Rows, Selection, read
from lln.lab.data.tokenizer import CHUNK, TextTokenizer
from lln.values import check_count

HIGHEST = 2**63 - 1


class PlacedTokens:
    """A text's tokens [total], and a copy on every device that asked for one."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """[total] int32"""
        if device not in self.copies:
            self.copies[device] = torch.from_numpy(self.tokens.astype(np.int32)).to(device)
        return self.copies[device]


@dataclass(frozen=True)
class Masking:
    """RoBERTa's rule as in fairseq: a share of the tokens is to be guessed; of these, 80 % appear as the mask token,
    10 % as a random token, 10 % as they are.

    The number a sequence is exact (its fraction rounded up or down at random), not a coin for each token. Unlike in
    fairseq, special tokens are neither guessed nor put in.
    """

    probability: Annotated[float, Range(positive=True, most=1)] = 0.15
    random_share: Annotated[float, Range(most=1)] = 0.1
    keep_share: Annotated[float, Range(most=1)] = 0.1

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.random_share + self.keep_share > 1.0:
            raise ValueError(
                f"random_share + keep_share must be at most 1; got {self.random_share} + {self.keep_share}."
            )

    @staticmethod
    def count_draws(length: int) -> int:
        """How many random numbers a sequence takes."""
        return 3 * length + 1

    def __call__(self, ids: Tensor, tokenizer: TextTokenizer, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """(what the model sees, what it must guess: -100 elsewhere), each [B, N] int64, of ids [B, N] int64 and random
        numbers [B, count_draws(N)] of `seeds.draws`. Whole numbers alone: every device masks the same tokens."""
        special, ordinary = tokenizer.tables(ids.device)  # [vocabulary] bool, [ordinary ids]
        n = ids.shape[1]
        if n == 0:
            return ids, ids
        rank, fate, instead, rest = drawn.split([n, n, n, 1], 1)  # [B, N] each, and [B, 1]
        candidates = ~special[ids]  # [B, N]
        count = (round(self.probability * UNIT) * candidates.sum(1) + to_unit(rest[:, 0])) // UNIT  # [B]
        order = torch.where(candidates, rank, HIGHEST)
        last = order.sort(1).values.gather(1, (count - 1).clamp_min(0)[:, None])  # [B, 1]
        chosen = candidates & (order <= last) & (count > 0)[:, None]
        labels = torch.where(chosen, ids, IGNORE)
        at_random = chosen & (to_unit(fate) < round(self.random_share * UNIT))
        masked = chosen & (to_unit(fate) >= round((self.random_share + self.keep_share) * UNIT))
        seen = torch.where(at_random, ordinary[pick(instead, len(ordinary))], ids)
        return torch.where(masked, tokenizer.mask_id, seen), labels


@dataclass(eq=False)
class PackedText(Examples):
    """Sequences of `length` tokens: the start token, then a piece of the text. Lines end with the end token and go on
    over the edges of sequences, so there is no padding; what is left at the end of the text is dropped.

    Items with masking: `input_ids` and `labels` [length]; the choice depends on (seed, epoch, index) alone, so each
    epoch masks anew and evaluation (epoch 0) always asks for the same tokens. Without masking: `input_ids`.

    windows: each piece begins at a random token, which depends on (seed, epoch, index) alone, and an epoch has as many
    as there would be without: then its edges, and the blocks of attention inside, fall on other tokens each time.
    """

    tokens: np.ndarray  # [total] first, then [sequences, length - 1]
    tokenizer: TextTokenizer
    _: KW_ONLY
    length: int
    masking: Masking | None
    seed: int
    identity: dict[str, Any]
    notes: list[str]
    windows: bool = False

    def __post_init__(self) -> None:
        check_count("length", self.length, least=2)  # the start token and one more
        total, room = len(self.tokens), self.length - 1
        if total < room:
            raise DataError(f"The text has {total} tokens, too few for one sequence of length {self.length}.")
        self.placed = PlacedTokens(self.tokens)
        self.tokens = self.tokens[: total // room * room].reshape(-1, room)
        self.key, self.window_key = stream_key("mask", self.seed), stream_key("window", self.seed)
        masking = self.masking and asdict(self.masking)
        self.identity = {**self.identity, "length": self.length, "masking": masking, "mask_seed": self.seed}
        if self.windows:
            self.identity["windows"] = self.seed

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        if self.windows:
            return {}  # `finish` knows the epoch, and takes them from the text
        return {"tokens": torch.from_numpy(self.tokens[indices].astype(np.int32))}

    def cut_windows(self, index: Tensor, epoch: Tensor) -> Tensor:
        """[B, length - 1] int32"""
        text, room = self.placed.on(index.device), self.length - 1
        start = pick(draws(self.window_key, epoch, index, 1), len(text) - room + 1)  # [B, 1]
        return text[start + torch.arange(room, device=index.device)]

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        tokens = (self.cut_windows(index, epoch) if self.windows else rows["tokens"]).long()  # [B, length - 1]
        ids = torch.nn.functional.pad(tokens, (1, 0), value=self.tokenizer.start_id)
        if self.masking is None:
            return {"input_ids": ids}
        drawn = draws(self.key, epoch, index, Masking.count_draws(self.length))
        seen, labels = self.masking(ids, self.tokenizer, drawn)
        return {"input_ids": seen, "labels": labels}

    def unigram_entropy(self) -> float:
        """In nats: the loss of a model that knows how frequent each ordinary token is, and nothing else."""
        counts = np.bincount(self.tokens.reshape(-1), minlength=self.tokenizer.vocab_size).astype(np.float64)
        counts[self.tokenizer.special_ids] = 0
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def load_text(
    name: str,
    split: str,
    tokenizer: TextTokenizer,
    *,
    length: int,
    column: str = "text",
    masking: Masking | None = None,
    seed: int = 0,
    windows: bool = False,
    **selection: Unpack[Selection],
) -> PackedText:
    """Load the text of a set in sequences of one length; `masking=Masking()` masks it for masked language modelling.
    windows: see `PackedText`.
    selection: config, data_root, hold_out, limit and cache_dir, as in `read`.

    >>> import tempfile
    >>> from lln.lab.data.tokenizer import train_tokenizer
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     tokenizer = train_tokenizer(read("embedded/prose", "test"), vocab_size=300, cache_dir=cache)
    ...     text = load_text("embedded/prose", "test", tokenizer, length=32, masking=Masking(), cache_dir=cache)
    >>> item = text[0]
    >>> item["input_ids"].shape, int((item["labels"] != -100).sum()) in (4, 5)  # 15 % of 31 tokens
    (torch.Size([32]), True)
    """
    rows = read(name, split, **selection)
    tokens, identity = tokenise(rows, tokenizer, column)
    return PackedText(
        tokens, tokenizer, length=length, masking=masking, seed=seed, identity=identity, notes=rows.notes,
        windows=windows,
    )  # fmt: skip


def tokenise(rows: Rows, tokenizer: TextTokenizer, column: str = "text") -> tuple[np.ndarray, dict[str, Any]]:
    """(all lines as one stream of ids, each line ended by the end token, blank lines left out: [total], mapped from the
    cache; its identity)"""

    def make() -> dict[str, np.ndarray]:
        lines = [line for line in (text.strip() for text in rows.strings(column)) if line]
        dtype, end = choose_id_type(tokenizer.vocab_size), tokenizer.end_id
        pieces = []
        for at in track(range(0, len(lines), CHUNK), -(-len(lines) // CHUNK), f"Tokenising {rows.title}"):
            pieces += [np.array([*ids, end], dtype) for ids in tokenizer.encode(lines[at : at + CHUNK])]
        if not pieces:
            raise DataError(f"{rows.title}: column {column!r} has no text.")
        return {"tokens": np.concatenate(pieces)}

    identity = {"rows": rows.identity, "column": column, "tokenizer": tokenizer.identity}
    return build_arrays("text", identity, make, rows.cache_dir)["tokens"], identity
