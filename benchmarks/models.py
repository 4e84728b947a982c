"""Whole models of transformers, as users run them: RoBERTa-base for inference and training, a Llama for decoding, and
what the host takes for one call, each beside torch's attention in the same process and in turns.

    python benchmarks/models.py --out benchmarks/results/models.json

Needs a GPU. Times are wall clock around calls that end with a wait for the device, median and quartiles; host time is
the wall clock of calls that are issued without waiting. First the models' outputs are compared with those of the same
weights in float32 with plain PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM, StaticCache

import lln
import lln.hf
from lln.files import write_json
from lln.kernels.triton import known, tape
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Timing, summarize, time_calls

DEVICE = torch.device("cuda")
NAMES = ("sdpa", "lln", "lln_diag")
ENCODED = ((1, 512), (1, 4096), (32, 512), (8, 2048), (1, 16384))
TRAINED = (*ENCODED, (16, 1024))
LLAMA = {"layers": 16, "hidden": 2048, "inside": 8192, "heads": 32, "key_heads": 8, "vocabulary": 128_256}
Store = Callable[[str, Any], None]


def show(timing: Timing) -> dict[str, Any]:
    return dataclasses.asdict(timing)


def compare(label: str, works: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Of each work its time, and the ratio to torch's."""
    found = {name: show(t) for name, t in time_calls(works, repeats=repeats, device=DEVICE, warmup=5).items()}
    ratios = {name: found[name]["median"] / found["sdpa"]["median"] for name in found}
    print(f"{label:34}", {n: f"{found[n]['median']:.3f} ms {ratios[n]:.2f}x" for n in found}, flush=True)
    return {"times": found, "ratios": ratios}


# What the host takes


def host_time(work: Callable[[], Any], calls: int = 200, rounds: int = 7) -> Timing:
    """Microseconds a call, issued without waiting."""
    for _ in range(20):
        work()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        found.append(1e6 * (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return summarize(found)


def differentiate(attend: Callable[..., Any], leaves: list[torch.Tensor], grad: torch.Tensor) -> Any:
    return torch.autograd.grad(attend(*leaves), leaves, grad)


def measure_host(store: Store) -> None:
    shape = (1, 12, 512, 64)
    q, k, v, g = (torch.randn(1, 512, 12, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    sample = {size: lln.LLNAttention(12, 64, block_size=size).to(DEVICE) for size in (None, 64)}
    attends: dict[str, Callable[..., Any]] = {
        "sdpa": functional.scaled_dot_product_attention,
        "lln_attention": lambda q, k, v: lln.lln_attention(q, k, v, 2.1, 2.1),
        "lln_attention, blocks": lambda q, k, v: lln.lln_attention(q, k, v, 2.1, 2.1, block_size=64),
        "LLNAttention": sample[None],
        "LLNAttention, blocks": sample[64],
    }
    layers: dict[str, Any] = {}
    for name in NAMES:
        model = RobertaForMaskedLM(RobertaConfig(num_hidden_layers=1)).to(DEVICE, torch.bfloat16).eval()
        model.set_attn_implementation(name)
        layers[name] = model.roberta.encoder.layer[0].attention.self
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface
    rows = {}
    for name, attend in attends.items():
        with torch.no_grad():
            forward = host_time(functools.partial(attend, q, k, v))
        both = host_time(functools.partial(differentiate, attend, leaves, g))
        rows[name] = {"forward": show(forward), "training": show(both)}
        print(f"host {name:28} forward {forward.median:6.1f} us, with backward {both.median:6.1f} us", flush=True)
    for name, layer in layers.items():
        layer.config._attn_implementation_internal = name
        attend = function(name, None)
        with torch.no_grad():
            given = {"dropout": 0.0, "scaling": layer.scaling, "is_causal": False}
            found = host_time(functools.partial(attend, layer, q, k, v, None, **given))
        rows[f"transformers {name}"] = {"forward": show(found)}
        print(f"host of a layer's attention, {name:10} {found.median:6.1f} us", flush=True)
    store("host", {"shape": list(shape), "unit": "microseconds", "rows": rows})


# An encoder


def build_encoders(dropout: float = 0.0) -> dict[str, Any]:
    models = {}
    for name in NAMES:
        torch.manual_seed(0)
        config = RobertaConfig(
            max_position_embeddings=16_386, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout,
            vocab_size=50_265, type_vocab_size=1, initializer_range=0.05,
        )  # fmt: skip
        model = RobertaForMaskedLM(config).to(DEVICE, torch.bfloat16).eval()
        model.set_attn_implementation(name)
        models[name] = model
    return models


def check_encoders(models: dict[str, Any]) -> dict[str, float]:
    """Relative error of the hidden states against the same model in float32 with plain PyTorch."""
    tokens = torch.randint(5, 50_000, (2, 300), device=DEVICE)
    found = {}
    for name, model in models.items():
        with torch.no_grad():
            narrow = model.roberta(tokens).last_hidden_state.double()
            wide = model.roberta.float()
            for module in wide.modules():
                if isinstance(module, lln.LLNAttention):
                    module.backend = "eager"
            expected = wide(tokens).last_hidden_state.double()
            for module in wide.modules():
                if isinstance(module, lln.LLNAttention):
                    module.backend = "auto"
            model.to(torch.bfloat16)
        found[name] = float((narrow - expected).norm() / expected.norm())
    print("errors", found, flush=True)
    return found


def measure_encoders(store: Store, repeats: int) -> None:
    models = build_encoders()
    rows: list[dict[str, Any]] = []
    errors = check_encoders(models)
    for batch, length in ENCODED:
        tokens = torch.randint(5, 50_000, (batch, length), device=DEVICE)
        for masked in (False, True):
            mask = torch.ones_like(tokens) if masked else None
            if mask is not None:
                mask[-1, length - 7 :] = 0
            row: dict[str, Any] = {"batch": batch, "length": length, "mask": masked}
            with torch.inference_mode():
                works: dict[str, Any] = {
                    n: functools.partial(m.roberta, tokens, attention_mask=mask) for n, m in models.items()
                }
                label = f"encoder {batch} x {length}{' masked' if masked else ''}"
                row["eager"] = compare(label, works, repeats)
                row["bytes"] = {name: peak(work) for name, work in works.items()}
                if not masked:
                    graphs = {name: graph(work) for name, work in works.items()}
                    row["graph"] = compare(label + " graph", {n: g.replay for n, g in graphs.items()}, repeats)
            rows.append(row)
            store("encoder", {"errors": errors, "rows": rows})


def peak(work: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=side):
        work()
    return made


def measure_training(store: Store, repeats: int) -> None:
    rows: list[dict[str, Any]] = []
    for dropout in (0.0, 0.1):
        models = build_encoders(dropout)
        optimizers = {n: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for n, m in models.items()}
        for model in models.values():
            model.train()
        for batch, length in TRAINED if dropout == 0.0 else TRAINED[:3]:
            tokens = torch.randint(5, 50_000, (batch, length), device=DEVICE)
            works = {n: functools.partial(train, m, optimizers[n], tokens) for n, m in models.items()}
            found = compare(f"training {batch} x {length}, dropout {dropout}", works, max(repeats // 2, 5))
            rows.append({"batch": batch, "length": length, "dropout": dropout, **found})
            store("training", {"rows": rows})
        del models, optimizers
        gc.collect()


def train(model: Any, optimizer: Any, tokens: torch.Tensor) -> None:
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def measure_shapes(store: Store, shapes: int = 1000) -> None:
    """A thousand lengths in a row: what is kept of them, what they compile, and whether calls become slower."""
    module = lln.LLNAttention(12, 64, block_size=64).to(DEVICE)
    compiled = count_compilations()

    def call(length: int) -> Any:
        q = torch.randn(1, length, 12, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        return module(q, q, q)

    works: dict[str, Any] = {"512": functools.partial(call, 512)}
    before = time_calls(works, repeats=100, device=DEVICE, warmup=20)["512"]
    marks = []
    for length in range(65, 65 + 2 * shapes, 2):
        call(length)
        if (length - 65) % (shapes // 2) == 0:
            torch.cuda.synchronize()
            marks.append({"length": length, "bytes": torch.cuda.memory_allocated(), "compilations": len(compiled)})
    after = time_calls(works, repeats=100, device=DEVICE, warmup=20)["512"]
    kept = {"known": len(known.KNOWN), "tapes": len(tape.TAPES)}
    print("shapes", shapes, marks, kept, f"{before.median:.3f} ms before, {after.median:.3f} ms after", flush=True)
    store("shapes", {"shapes": shapes, "marks": marks, "kept": kept, "before": show(before), "after": show(after)})


# A decoder


def build_decoder(name: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=LLAMA["hidden"], intermediate_size=LLAMA["inside"], num_hidden_layers=LLAMA["layers"],
        num_attention_heads=LLAMA["heads"], num_key_value_heads=LLAMA["key_heads"], vocab_size=LLAMA["vocabulary"],
        tie_word_embeddings=True, max_position_embeddings=2**21,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return model if name == "sdpa" else lln.hf.convert(model, name, statistics="fixed")


def no_cudnn() -> Any:
    """cuDNN builds a plan for each new length, which takes many times a step."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def filled(model: Any, name: str, batch: int, context: int) -> Any:
    if name == "sdpa":
        cache = transformers.DynamicCache()
        shape = (batch, LLAMA["key_heads"], context, LLAMA["hidden"] // LLAMA["heads"])
        for layer in range(LLAMA["layers"]):
            keys = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
            cache.update(keys, torch.randn_like(keys), layer)
        return cache
    cache = lln.hf.LLNCache()
    tokens = torch.randint(5, 50_000, (batch, context), device=DEVICE)
    for part in torch.split(tokens, 8192, 1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def measure_decoding(store: Store, repeats: int) -> None:
    """A step at a time, eager, after contexts of some lengths, in turns."""
    rows: list[dict[str, Any]] = []
    models = {name: build_decoder(name) for name in NAMES}
    compiled = count_compilations()
    for batch in (1, 16):
        token = torch.randint(5, 50_000, (batch, 1), device=DEVICE)
        for context in (1000, 100_000, 1_000_000) if batch == 1 else (1000,):
            names = (
                NAMES if context == 1000 else NAMES[1:]
            )  # softmax's keys and values of a million would be all there is
            caches = {name: filled(models[name], name, batch, context) for name in names}
            before = len(compiled)
            works: dict[str, Any] = {n: functools.partial(models[n], token, past_key_values=caches[n]) for n in names}
            with no_cudnn():
                found = {
                    n: show(t) for n, t in time_calls(works, repeats=4 * repeats, device=DEVICE, warmup=10).items()
                }
            row: dict[str, Any] = {"batch": batch, "context": context, "times": found}
            row["compilations"] = len(compiled) - before
            if "sdpa" in found:
                row["ratios"] = {n: found[n]["median"] / found["sdpa"]["median"] for n in found}
            print(f"decoding, batch {batch}, context {context}", {n: f"{t['median']:.3f} ms" for n, t in found.items()},
                  row.get("ratios", ""), f"{row['compilations']} compilations", flush=True)  # fmt: skip
            rows.append(row)
            store("decoding", {"model": LLAMA, "rows": rows})
            del caches, works


def count_compilations() -> list[str]:
    """Grows by the name of each kernel that Triton compiles from now on."""
    from triton import knobs

    found: list[str] = []
    knobs.compilation.listener = lambda **facts: found.append(str(facts.get("metadata", {}).get("name", "")))
    return found


def attend_without_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
    """torch's attention at its best with a static cache that is full: no mask, and heads that are not repeated."""
    out = functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("without_mask", attend_without_mask)
transformers.AttentionMaskInterface.register("without_mask", lambda *args, **kwargs: None)


@torch.inference_mode()
def measure_static(store: Store, repeats: int, context: int = 32_768) -> None:
    """A step with a static cache in a CUDA graph, beside torch's attention at its best: a full cache without a mask."""
    rows: list[dict[str, Any]] = []
    for batch in (1, 16):
        works: dict[str, Callable[[], Any]] = {}
        kept: list[Any] = []
        for name in NAMES:
            model = build_decoder(name)
            token = torch.randint(5, 50_000, (batch, 1), device=DEVICE)
            positions = torch.full((batch, 1), context, device=DEVICE)
            if name == "sdpa":
                model.config._attn_implementation_internal = "without_mask"
                cache: Any = StaticCache(
                    config=model.config, max_cache_len=context
                )  # all of which is read, whether written or not
                keys = torch.randn(batch, LLAMA["key_heads"], context - 2048, 64, device=DEVICE, dtype=torch.bfloat16)
                for layer in range(LLAMA["layers"]):
                    cache.update(keys, keys, layer)
            else:
                cache = lln.hf.LLNCache(LLAMA["layers"], static=True)
                model(torch.randint(5, 50_000, (batch, 256), device=DEVICE), past_key_values=cache, logits_to_keep=1)
            run = functools.partial(model, token, past_key_values=cache, position_ids=positions)
            try:
                with no_cudnn():
                    made = graph(run)
            except Exception as error:
                print(f"static {name}, batch {batch}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                continue
            kept += [model, cache, made]
            works[name] = made.replay
        if "sdpa" in works:
            found = compare(f"static cache, graph, batch {batch}", works, 2 * repeats)
            rows.append({"batch": batch, "context": context, "how": "graph", **found})
            store("static", {"model": LLAMA, "rows": rows})
        del works, kept
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", default="host,encoder,training,decoding,static,shapes", help="parts, with commas between"
    )
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(0, DEVICE), "transformers": transformers.__version__}

    def store(name: str, found: Any) -> None:
        result[name] = found
        write_json(options.out, result)

    parts: dict[str, Callable[[], None]] = {
        "host": lambda: measure_host(store),
        "encoder": lambda: measure_encoders(store, options.repeats),
        "training": lambda: measure_training(store, options.repeats),
        "decoding": lambda: measure_decoding(store, options.repeats),
        "static": lambda: measure_static(store, options.repeats),
        "shapes": lambda: measure_shapes(store),
    }
    for name in options.only.split(","):
        parts[name]()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
