"""Text files as batches of passages that a model takes: what a conversion looks at and learns from.

The text of a file is laid end to end, line ends and all, and cut into passages of `length` tokens with the model's own
special tokens around each. The rest of a file is a passage as well if it has at least `shortest` tokens, else it is
left out. Passages of different files never mix.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lln.lab.core.errors import Refused, read_text


def read_texts(files: Sequence[Path]) -> list[str]:
    """The files' texts. Refused where one is not there, is no text, or holds nothing."""
    texts = [read_text(file) for file in files]
    for file, text in zip(files, texts, strict=True):
        if not text.strip():
            raise Refused(f"{file} is empty")
    return texts


def fingerprint(texts: Sequence[str]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()[:16]


def cut_passages(tokenizer: Any, texts: Sequence[str], length: int, shortest: int) -> list[list[int]]:
    """Token ids of each, special tokens included, at most `length`."""
    before, after = special_tokens(tokenizer)
    inside = length - len(before) - len(after)
    if inside < 1:
        raise Refused(f"passages of {length} tokens have no room for text beside the special tokens")
    found, tokens = [], 0
    for text in texts:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        tokens += len(ids)
        pieces = [ids[at : at + inside] for at in range(0, len(ids), inside)]
        found += [[*before, *piece, *after] for piece in pieces if len(piece) + length - inside >= shortest]
    if not found:
        raise Refused(f"the text has only {tokens} tokens; a passage needs at least {shortest}")
    return found


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    bare = list(tokenizer("text", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("text")["input_ids"])
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


def as_batches(model: Any, tokenizer: Any, found: Sequence[Sequence[int]], size: int) -> list[dict[str, Tensor]]:
    """`size` passages at a time in their order, the shorter ones padded at their end."""
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    batches = []
    for first in range(0, len(found), size):
        part = found[first : first + size]
        ids = pad_sequence([torch.tensor(one) for one in part], batch_first=True, padding_value=filler)
        mask = pad_sequence([torch.ones(len(one), dtype=torch.int64) for one in part], batch_first=True)
        batch = {"input_ids": ids, "attention_mask": mask}
        if getattr(model.config, "is_encoder_decoder", False):
            batch |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        batches.append(batch)
    return batches
