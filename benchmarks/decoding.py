"""One decoding step of a transformers model, its own forward, after 1,000 and after 100,000 tokens: LLN beside softmax.

    python benchmarks/decoding.py --out benchmarks/results/decoding.json

LLN's state is made by reading so many tokens; softmax's keys and values, whose number alone matters for the time, are
random. The two positions take turns. First a step after a state is compared with the forward pass of the whole
sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import lln.hf
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table, show_timing
from lln.lab.core.timing import Work, time_calls
from storing import run

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "key_heads": 2, "vocabulary": 1000}
POSITIONS = (1_000, 100_000)
NAMES = {"sdpa": "softmax, DynamicCache", "lln": "LLN, LLNCache", "lln_diag": "LLN+Diag, LLNCache"}
CHUNK = 4096  # tokens read at a time


def build(name: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=SHAPE["hidden"], num_hidden_layers=SHAPE["layers"], num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["key_heads"], intermediate_size=2 * SHAPE["hidden"], vocab_size=SHAPE["vocabulary"],
        max_position_embeddings=2**17,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    return model if name == "sdpa" else lln.hf.convert(model, name, statistics="fixed")


def fill_cache(model: PreTrainedModel, name: str, tokens: torch.Tensor) -> Any:
    """A cache that has seen the tokens."""
    if name == "sdpa":
        cache = DynamicCache()
        shape = (1, SHAPE["key_heads"], tokens.shape[1], SHAPE["hidden"] // SHAPE["heads"])
        for layer in range(SHAPE["layers"]):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache
    cache = lln.hf.LLNCache()
    for part in torch.split(tokens, CHUNK, 1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    return cache


def check(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """RuntimeError where a step after a state is not the whole sequence's last row."""
    cache = lln.hf.LLNCache()
    model(input_ids=tokens[:, :-1], past_key_values=cache)
    step = model(input_ids=tokens[:, -1:], past_key_values=cache).logits[:, -1]
    whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
    error = ((step - whole).norm() / whole.norm()).item()
    if not error < 1e-4:
        raise RuntimeError(f"a decoding step differs from the whole sequence by {error:.1e}; nothing was timed.")


def size(cache: Any) -> int:
    if isinstance(cache, lln.hf.LLNCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def stepper(model: PreTrainedModel, cache: Any, position: int) -> Work:
    token, place = torch.ones(1, 1, dtype=torch.long), torch.full((1, 1), position)

    def step() -> None:
        model(input_ids=token, position_ids=place, past_key_values=cache)
        if isinstance(cache, DynamicCache):
            cache.crop(-1)  # the next step is at this position again

    return step


@torch.no_grad()
def measure(repeats: int, threads: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    times: dict[str, dict[str, Any]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name, title in NAMES.items():
        model = build(name, seed)
        if name != "sdpa":
            check(model, torch.randint(SHAPE["vocabulary"], (1, 1_001)))
        works: dict[str, Work] = {}
        for position in POSITIONS:
            cache = fill_cache(model, name, torch.randint(SHAPE["vocabulary"], (1, position)))
            sizes.setdefault(title, {})[str(position)] = size(cache)
            works[str(position)] = stepper(model, cache, position)
        # Not in turns with the others: softmax's keys would push everything out of the processor's cache.
        found = time_calls(works, repeats=repeats, device=cpu, warmup=5)
        times[title] = {position: dataclasses.asdict(timing) for position, timing in found.items()}
    return {
        "what": "one decoding step of a Llama's forward in float32, ms (median and quartiles), and bytes of its cache",
        "shape": SHAPE,
        "positions": POSITIONS,
        "provenance": provenance(seed, cpu) | {"transformers": transformers.__version__},
        "ms": times,
        "bytes": sizes,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    near, far = (str(p) for p in result["positions"])
    shape, made = result["shape"], result["provenance"]
    header = ["one step after", f"{int(near):,} tokens, ms (quartiles)", f"{int(far):,} tokens", "ratio", "cache, KiB"]
    rows = []
    for name, ms in result["ms"].items():
        ratio = ms[far]["median"] / ms[near]["median"]
        kib = [f"{result['bytes'][name][p] / 1024:,.0f}" for p in (near, far)]
        rows.append((name, show_timing(ms[near]), show_timing(ms[far]), f"{ratio:.2f}", f"{kib[0]} and {kib[1]}"))
    lines = [
        *markdown_table(header, rows, "l"),
        "",
        f"A Llama of {shape['layers']} layers with {shape['heads']} heads of {shape['hidden'] // shape['heads']} and "
        f"{shape['key_heads']} key heads, float32, batch 1; {made['device']}, {made['threads']} thread, torch "
        f"{made['torch']}, transformers {made['transformers']}, {made['date'][:10]}, commit {made['commit']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(__doc__, measure, table, repeats=200, threads=1)
