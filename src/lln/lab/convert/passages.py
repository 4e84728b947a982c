"""Text files as batches of passages that a model takes: what a conversion looks at and learns from.

The text of a file is laid end to end, line ends and all, and cut into passages of `length` tokens with the model's own
special tokens around each. The rest of a file is a passage as well if it has at least `shortest` tokens, else it is
left out. Passages of different files never mix.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from lln.hf.positions import extend_positions
from lln.lab.convert.conversion_plan import ConversionPlan
from lln.lab.convert.material import Material
from lln.lab.core.errors import Refused
from lln.lab.core.pretrained import load_tokenizer
from lln.lab.inspect.inspection import count_positions

LONGEST = 1024  # tokens of a passage where nobody says how long they are to be


class Passages(Material):
    called, given_as = "passages", "input_ids"

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.length = 0  # tokens of a passage, once it is chosen

    def fingerprint(self) -> str:
        return fingerprint(self.texts)

    def load_processor(self, model: PreTrainedModel, name: str, options: dict[str, Any]) -> Any:
        self.check_model(model, name)
        return load_tokenizer(model, name, options)

    def prepare(self, model: PreTrainedModel, plan: ConversionPlan) -> list[list[int]]:
        before = self.processor.model_max_length
        self.length = choose_length(plan, model, self.processor, self.texts)
        self.changed = self.processor.model_max_length != before
        if self.length < plan.shortest:
            raise Refused(f"passages of {self.length} tokens are too short; at least {plan.shortest} are needed")
        return cut_passages(self.processor, self.texts, self.length, plan.shortest)

    def enlarge(self, model: PreTrainedModel) -> PreTrainedModel:
        return extend_positions(model, self.length) if self.length > count_positions(model) else model

    def make_batches(self, model: PreTrainedModel, some: Sequence[Any], size: int) -> list[dict[str, Tensor]]:
        return pad_batches(model, self.processor, some, size)

    def describe_size(self) -> dict[str, Any]:
        return {"tokens": self.length}

    def block_size(self, plan: ConversionPlan) -> dict[str, int]:
        return {"block_size": plan.block_size}

    def check_blocks(self, model: PreTrainedModel) -> None:
        """No passage is shorter than two blocks, see `prepare`."""


def choose_length(plan: ConversionPlan, model: PreTrainedModel, tokenizer: Any, texts: Sequence[str]) -> int:
    """Tokens of a passage: what was asked for, with the model's places made more where it has too few; else what texts
    and model have."""
    places = int(min(tokenizer.model_max_length, count_positions(model)))
    if plan.length is None:
        longest = max(len(tokenizer(text, verbose=False)["input_ids"]) for text in texts)
        return min(places, LONGEST, max(longest, plan.shortest))
    if plan.length > places:
        try:
            extend_positions(model, plan.length)
        except ValueError as error:
            raise Refused(f"length: the model has {places} places, and {error}") from error
        tokenizer.model_max_length = plan.length
    return plan.length


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


def pad_batches(model: Any, tokenizer: Any, found: Sequence[Sequence[int]], size: int) -> list[dict[str, Tensor]]:
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
