"""Classify documents of 8,192 tokens with a small BERT and LLN attention, on a CPU.

    pip install '.[hf]'
    python examples/long_documents.py

The documents are put together from Python's own documentation, so nothing is downloaded: most passages of a document
come from one chapter, the others from anywhere, and the question is which chapter that is.
"""

import argparse
import random
import time
import zlib
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertModel

import lln.hf

CHAPTERS = 4
BUCKETS = 2000  # a word is its checksum modulo this: no tokenizer to train
PASSAGE = 64
SHARE = 0.7  # of the passages that come from the chapter in question


def chapters() -> list[list[int]]:
    """The longest chapters as token numbers; 0 is padding, 1 stands first."""
    longest = sorted(topics, key=lambda name: len(topics[name]), reverse=True)[:CHAPTERS]
    return [[2 + zlib.crc32(word.lower().encode()) % BUCKETS for word in topics[n].split()] for n in sorted(longest)]


def document(source: list[list[int]], label: int, length: int, share: float, dice: random.Random) -> list[int]:
    found = [1]
    while len(found) < length:
        chapter = source[label] if dice.random() < share else dice.choice(source)
        start = dice.randrange(max(1, len(chapter) - PASSAGE))
        found += chapter[start : start + PASSAGE]
    return found[:length]


def batch(source: list[list[int]], size: int, length: int, dice: random.Random) -> dict[str, torch.Tensor]:
    """Documents of different lengths, padded."""
    labels = [dice.randrange(CHAPTERS) for _ in range(size)]
    lengths = [length] + [dice.randrange(length // 2, length + 1) for _ in labels[1:]]
    rows = [document(source, y, n, SHARE, dice) for y, n in zip(labels, lengths, strict=True)]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(labels)}


class Classifier(torch.nn.Module):
    """BERT, the mean over a document's tokens, and a linear layer."""

    def __init__(self, implementation: str, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=BUCKETS + 2, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.body = BertModel._from_config(config, attn_implementation=implementation)
        self.head = torch.nn.Linear(64, CHAPTERS)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1) / attention_mask.sum(-1)[:, None, None]
        return self.head((weight * hidden).sum(1))


def step(model: Classifier, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    labels, began = inputs.pop("labels"), time.perf_counter()
    loss = torch.nn.functional.cross_entropy(model(**inputs), labels)
    loss.backward()
    return loss.item(), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--attention", default="lln_diag", choices=lln.hf.IMPLEMENTATIONS)
    arguments = parser.parse_args()
    source, dice = chapters(), random.Random(0)
    model = Classifier(arguments.attention, arguments.length)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {arguments.length:,} tokens a document")
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    times = []
    for number in range(1, arguments.steps + 1):
        loss, took = step(model, batch(source, arguments.batch, arguments.length, dice))
        optimiser.step()
        optimiser.zero_grad()
        times.append(took)
        if number % 10 == 0:
            print(f"  step {number:3}  loss {loss:.3f}  {took:.2f} s", flush=True)
    model.eval()
    right = total = 0
    with torch.no_grad():
        for _ in range(8):
            test = batch(source, arguments.batch, arguments.length, dice)
            labels = test.pop("labels")
            right += (model(**test).argmax(-1) == labels).sum().item()
            total += len(labels)
    print(f"accuracy on new documents: {right / total:.3f} (chance: {1 / CHAPTERS:.3f})")
    _, softmax = step(Classifier("sdpa", arguments.length), batch(source, 1, arguments.length, dice))
    ours = sorted(times)[len(times) // 2] / arguments.batch
    print(f"a training step of one document: {ours:.2f} s; the same model with softmax attention: {softmax:.2f} s")


if __name__ == "__main__":
    main()
