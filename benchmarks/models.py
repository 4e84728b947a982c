"""What attention costs where people run it: a whole RoBERTa-base and a Llama of transformers, what the host takes for
one call, and a thousand lengths in a row, each beside torch's attention in the same process and in turns.

    python benchmarks/models.py --out benchmarks/results/models.json

Parts that are not asked for (`--only`) stay in the file as they were, each with the commit and machine that made it.
Needs a GPU. Models are timed as `lln bench --model` does: wall clock around calls that end with a wait for the device,
after their outputs were compared with those of the same weights in float32. Host time is the wall clock of calls that
are issued without waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import RobertaConfig, RobertaForMaskedLM

import lln
import lln.hf
from lln.files import write_json
from lln.kernels.triton import recognise, tape
from lln.lab.bench.model_times import measure_model, plan_model
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table
from lln.lab.core.timing import Timing, summarize, time_calls

DEVICE = torch.device("cuda")
NAMES = ("sdpa", "lln", "lln_diag")
# (batch, length) and what is timed there.
ENCODED = ((1, 512), (1, 4096), (32, 512), (8, 2048), (1, 16384))
TRAINED = (*ENCODED, (16, 1024))
DECODED = ((1, 1000), (16, 1000))
FAR = ((1, 100_000), (1, 1_000_000))  # of LLN alone; softmax would need a context of its own size
STATIC = ((1, 32_768), (16, 32_768))
Store = Callable[[str, Any], None]


KINDS = {"inference": "forward", "training": "training step", "token": "token"}
MODES = {"eager": "", "graph": ", CUDA graph", "compiled-graph": ", compiled, CUDA graph"}
PARTS = {
    **dict.fromkeys(("encoder", "training"), "RoBERTa"),
    **dict.fromkeys(("decoding", "far", "static", "compiled"), "Llama"),
}
HOST = {"lln_attention": "`lln_attention`", "lln_attention, blocks": "`lln_attention`, blocks of 64"}
LAYERS = {f"transformers {name}": f"attention of a transformers layer, `{name}`" for name in ("lln", "lln_diag")}


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
        rows[name] = {"forward": dataclasses.asdict(forward), "training": dataclasses.asdict(both)}
        print(f"host {name:28} forward {forward.median:6.1f} us, with backward {both.median:6.1f} us", flush=True)
    for name, layer in layers.items():
        layer.config._attn_implementation_internal = name
        attend = function(name, None)
        with torch.no_grad():
            given = {"dropout": 0.0, "scaling": layer.scaling, "is_causal": False}
            found = host_time(functools.partial(attend, layer, q, k, v, None, **given))
        rows[f"transformers {name}"] = {"forward": dataclasses.asdict(found)}
        print(f"host of a layer's attention, {name:10} {found.median:6.1f} us", flush=True)
    store("host", {"shape": list(shape), "unit": "microseconds", "rows": rows})


def measure_models(store: Store, name: str, model: str, shapes: Any, repeats: int, **options: Any) -> None:
    """Also counts what Triton compiles while calls are timed: of new lengths, nothing."""
    plan = plan_model(model=model, device=DEVICE, repeats=repeats, **options)
    compiled = count_compilations()

    def tell(result: dict[str, Any]) -> None:
        row = result["rows"][-1]
        ratios = {n: f"{t['median']:.3f} ms {row['ratios'].get(n, 0):.2f}x" for n, t in row["times"].items()}
        print(name, row["kind"], row["mode"], f"{row['batch']} x {row['length']}", ratios, row["failed"], flush=True)
        store(name, result | {"compilations": len(compiled)})

    measure_model(dataclasses.replace(plan, shapes=list(shapes)), store=tell)


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
    kept = {"known": len(recognise.KNOWN), "tapes": len(tape.TAPES)}
    print("shapes", shapes, marks, kept, f"{before.median:.3f} ms before, {after.median:.3f} ms after", flush=True)
    found = {"shapes": shapes, "marks": marks, "kept": kept}
    store("shapes", found | {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)})


def table(result: dict[str, Any]) -> str:
    """What is stored, as Markdown: a table for each kind of pass, so that none is wider than a page."""
    kinds: dict[str, list[list[str]]] = {}
    for part, model in PARTS.items():
        for r in result.get(part, {"rows": []})["rows"]:
            ms = {name: f"{t['median']:.3g} ({t['low']:.3g} to {t['high']:.3g})" for name, t in r["times"].items()}
            ratios = [f"{r['ratios'][name]:.2f}" if name in r.get("ratios", {}) else "" for name in NAMES[1:]]
            row = [f"{r['batch']} x {r['length']:,}", *(ms.get(name, "") for name in NAMES), *ratios]
            kinds.setdefault(f"{model}, {KINDS[r['kind']]}{MODES[r['mode']]}", []).append(row)
    header = ["batch x tokens", "torch's", "LLN", "LLN+Diag", "LLN / torch's", "LLN+Diag / torch's"]
    lines = [
        line for what, rows in kinds.items() for line in (f"### {what}", "", *markdown_table(header, rows, "lr"), "")
    ]
    host = result["host"]["rows"]
    shown = []
    for kind, names, base in (("training", HOST, "sdpa"), ("forward", LAYERS, "transformers sdpa")):
        for name, words in names.items():
            mine, theirs = (host[n][kind]["median"] for n in (name, base))
            shown.append([words, "forward and backward" if kind == "training" else "forward", f"{mine:.0f}",
                          f"{theirs:.0f}", f"{mine / theirs:.2f}"])  # fmt: skip
    shapes = result["shapes"]
    marks = {(mark["compilations"], mark["bytes"]) for mark in shapes["marks"][1:]}
    made: dict[str, list[str]] = {}
    for name, part in result.items():
        made.setdefault(describe_made(part), []).append(name)
    parts = "; ".join(f"{', '.join(names)}: {how}" for how, names in made.items())
    header = ["1 x 12 x 512 x 64", "what", "ours, us", "torch's, us", "ratio"]
    return "\n".join([
        "Milliseconds, medians with quartiles, wall clock around a call and a wait for the device. RoBERTa-base (an "
        "encoder's forward pass ends with its hidden states; a step of AdamW with its head) and a Llama of 16 layers "
        "(2,048 wide, 32 heads, 8 key heads), random weights, bfloat16, statistics by default; the tokens of a decoder "
        "are those before the one that is timed. Decoding's baseline is the fastest of torch's back ends without "
        "cuDNN, which plans anew for each length; in graphs it is called without the mask that transformers would hand "
        "it. Where torch's attention alone would need a context of its own size it was left out.", "",
        *lines, "### Time of the host", "",
        *markdown_table(header, shown, "llrrr"), "",
        f"{shapes['shapes']:,} lengths in a row: {'no' if len(marks) == 1 else 'some'} further compilation and no "
        f"further memory after the first half; a call takes {shapes['after']['median']:.3f} ms afterwards and "
        f"{shapes['before']['median']:.3f} before.", "",
        f"Made by `python benchmarks/models.py`: {parts}.", "",
    ])  # fmt: skip


def describe_made(part: dict[str, Any]) -> str:
    p = part["provenance"]
    return f"{p['device']}, torch {p['torch']}, {p['date'][:10]}, commit {p['commit']}"


def count_compilations() -> list[str]:
    """Grows by the name of each kernel that Triton compiles from now on."""
    from triton import knobs

    found: list[str] = []
    knobs.compilation.listener = lambda **facts: found.append(str(facts.get("metadata", {}).get("name", "")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="parts, with commas between")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    made = {"provenance": provenance(0, DEVICE) | {"transformers": transformers.__version__}}

    def store(name: str, found: Any) -> None:
        result[name] = made | found
        write_json(options.out, result)

    def times(name: str, model: str, shapes: Any, **given: Any) -> Callable[[], None]:
        return lambda: measure_models(store, name, model, shapes, options.repeats, **given)

    parts: dict[str, Callable[[], None]] = {
        "host": lambda: measure_host(store),
        "encoder": times("encoder", "roberta-base", ENCODED, kinds="inference", modes="eager,graph"),
        "training": times("training", "roberta-base", TRAINED, kinds="training", modes="eager"),
        "decoding": times("decoding", "llama-1b", DECODED, kinds="token", modes="eager"),
        "far": times("far", "llama-1b", FAR, kinds="token", modes="eager", baseline=False),
        "static": times("static", "llama-1b", STATIC, kinds="token", modes="graph"),
        "compiled": times("compiled", "llama-1b", STATIC[1:], kinds="token", modes="compiled-graph"),
        "shapes": lambda: measure_shapes(store),
    }
    for name in options.only.split(",") if options.only else parts:
        parts[name]()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
