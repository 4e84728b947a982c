"""One sequence cut into shards and put together again on one device, beside one pass over it: error and cost.

    python benchmarks/distributed.py --out benchmarks/results/distributed.json
    python benchmarks/distributed.py --device cpu --length 16384 --repeats 3

Ranks are emulated: what each would do is done one after another, by the code that real ranks run, and what they would
send is handed over. So the time is that of all ranks' work, without a network, and its excess over one pass is the
cost of cutting. Errors are against float64 in plain PyTorch, of the output and of every gradient; sharded may have
twice that of one pass, or, where it is not causal, of plain PyTorch in the same dtype. A kind that --out holds already,
measured alike by the same commit on the same machine, is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lln.checks import check_call, check_inputs
from lln.distributed import split_evenly
from lln.distributed.across import Shared, attend, find_ratio
from lln.distributed.fused import Turn, can_fuse, list_partners
from lln.files import read_json, write_json
from lln.functional import attend_here, lln_attention
from lln.kernels.call import Call
from lln.lab.bench.cluster import count_sent
from lln.lab.core.progress import track
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import print_wide, show_timing, terminal_table
from lln.lab.core.timing import Work, time_calls, time_device, time_host
from lln.ranks import Ranks, share

BLOCK = 128
WAYS = "one pass", "sharded", "rank", "its rows alone"
attend_as_users_do: Any = lln_attention  # of options in a dictionary
KINDS: dict[str, dict[str, Any]] = {
    "LLN": {},
    "LLN, causal": {"is_causal": True},
    "LLN+Diag": {"block_size": BLOCK},
    "LLN+Diag, causal": {"block_size": BLOCK, "is_causal": True},
    "evidence read": {"read": "evidence"},
}


Partners = Sequence[int]
Rows = list[Tensor]  # queries, keys and values of one rank
Run = Callable[[list[Rows]], list[Tensor]]  # from the rows of all ranks to the outputs of all


def list_factors(options: dict[str, Any]) -> tuple[float | None, float]:
    return (None if options.get("read") == "evidence" else 2.0), 2.0


def run_whole(parts: list[Rows], options: dict[str, Any], backend: Any = "auto") -> list[Tensor]:
    alpha, beta = list_factors(options)
    inputs = check_inputs(*parts[0], key_mask=None, cu_seqlens=None)
    out: Any = attend_here(inputs, alpha, beta, backend=backend, **options)
    return [out]


def make_call(rows: Rows, options: dict[str, Any]) -> Call:
    alpha, beta = list_factors(options)
    return check_call(check_inputs(*rows, key_mask=None, cu_seqlens=None), alpha=alpha, beta=beta, **options)


def is_fused(parts: list[Rows], options: dict[str, Any]) -> bool:
    """Whether ranks work by `lln.distributed.fused`: borders cut no block here."""
    return can_fuse(make_call(parts[0], options), "auto", False)


def run_sharded(parts: list[Rows], options: dict[str, Any]) -> list[Tensor]:
    """What all ranks do, one after another."""
    if is_fused(parts, options) and not torch.is_grad_enabled():
        return run_turns(parts, options)[0]
    lengths, spread = tuple(rows[0].shape[2] for rows in parts), []
    for rank, rows in enumerate(parts):
        ranks = Ranks(None, rank, len(lengths), attend, lengths)  # no group: nobody talks
        spread.append(Shared(ranks, make_call(rows, options), "auto", False, find_ratio(options)))
    owns = [shared.fold() for shared in spread]
    outs = []
    for rank, shared in enumerate(spread):
        came = [giver.give(rank, own) for giver, own in zip(spread, owns, strict=True)]
        outs.append(shared.answer(owns[rank], came)[0])
    return outs


def run_turns(parts: list[Rows], options: dict[str, Any]) -> tuple[list[Tensor], list[Turn]]:
    """The same by the kernels, step by step."""
    turns = [
        Turn(make_call(rows, options), *list_partners(rank, len(parts), options.get("is_causal", False)))
        for rank, rows in enumerate(parts)
    ]
    sent = [turn.fold() for turn in turns]
    came = hand_over(sent, [turn.takers for turn in turns], [turn.givers for turn in turns])
    return [turn.read(states) for turn, states in zip(turns, came, strict=True)], turns


def hand_over(sent: list[Tensor], takers: list[Partners], givers: list[Partners]) -> list[Tensor]:
    """What every rank gets of what all send: one copy a rank stands for the network."""
    rows = [t.view(len(to), -1) if to else t for t, to in zip(sent, takers, strict=True)]
    return [
        torch.cat([rows[by][takers[by].index(rank)] for by in froms]) if froms else sent[rank][:0]
        for rank, froms in enumerate(givers)
    ]


def go_back_in_turns(parts: list[Rows], weights: list[Tensor], options: dict[str, Any]) -> list[list[Tensor]]:
    """As `go_back`."""
    with torch.no_grad():
        outs, turns = run_turns(parts, options)
        asked = [turn.ask(weight) for turn, weight in zip(turns, weights, strict=True)]
        came = hand_over(asked, [turn.givers for turn in turns], [turn.takers for turn in turns])
        return [[out, *turn.answer(grads)] for out, turn, grads in zip(outs, turns, came, strict=True)]


class Canned(Ranks):
    """One rank, to which the others always send zeros, which are there already: states, or gradients, that count for
    what any would."""

    def swap(self, outgoing: Tensor, sent: Sequence[int], expected: Sequence[int]) -> Tensor:
        return make_zeros(sum(expected), outgoing.device)


@functools.cache
def make_zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def run_rank(parts: list[Rows], options: dict[str, Any], rank: int) -> list[Tensor]:
    """What one rank does, from the call to its output."""
    alpha, beta = list_factors(options)
    lengths = tuple(rows[0].shape[2] for rows in parts)
    with share(Canned(None, rank, len(parts), attend, lengths)):
        return [attend_as_users_do(*parts[rank], alpha, beta, **options)]


def cut(tensors: Rows, lengths: tuple[int, ...]) -> list[Rows]:
    """As ranks hold them, each in memory of its own."""
    split = (torch.split(t, list(lengths), 2) for t in tensors)
    return [[t.contiguous() for t in rows] for rows in zip(*split, strict=True)]


def go_back(run: Run, parts: list[Rows], weights: list[Tensor]) -> list[list[Tensor]]:
    """Of all ranks: the output and the gradients of queries, keys and values."""
    leaves = [[t.detach().requires_grad_() for t in rows] for rows in parts]
    outs = run(leaves)
    flat = [t for rows in leaves for t in rows]
    grads = iter(torch.autograd.grad(outs, flat, [w.to(o.dtype) for w, o in zip(weights, outs, strict=True)]))
    return [[out.detach(), *(next(grads) for _ in rows)] for out, rows in zip(outs, leaves, strict=True)]


def list_errors(results: list[list[Tensor]], reference: list[list[Tensor]]) -> dict[str, float]:
    whole = [[torch.cat(parts, 2) for parts in zip(*each, strict=True)] for each in (results, reference)]
    pairs = zip(("out", "dq", "dk", "dv"), *whole, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def attend_causally(
    rows: list[Tensor], start: tuple[Tensor, Tensor], largest: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (8) of some tokens after others, by its sums: (output, and both sums over keys of what was and is)."""
    query, key, value = rows
    alpha, beta = list_factors(options)
    assert alpha is not None  # the paper's read
    read = (alpha * query + largest).softmax(-1)  # any factor of a row cancels
    written = (beta * key - largest).exp()
    seen = (read @ written.transpose(-1, -2)).tril()
    own = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    sums = seen @ own + read @ torch.cat([start[0], start[1][..., None]], -1)
    out = sums[..., :-1] / sums[..., -1:]
    if (block := options.get("block_size")) is not None:
        parts = [t.reshape(*t.shape[:2], -1, block, t.shape[3]) for t in rows]
        scores = parts[0] @ parts[1].transpose(-1, -2) * query.shape[-1] ** -0.5
        later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
        near = (scores.masked_fill(later, -torch.inf).softmax(-1) @ parts[2]).flatten(2, 3)
        out = (out + near) / 2
    return out, start[0] + written.transpose(-1, -2) @ value, start[1] + written.sum(2)


def run_densely(parts: list[Rows], options: dict[str, Any], *, chunk: int = 2048) -> list[Tensor]:
    """Causal attention in plain PyTorch, some thousand tokens at a time, which the eager back end takes by dozens: of
    a million it would be busy for minutes."""
    query, key, value = parts[0]
    largest = (list_factors(options)[1] * key).amax(2, keepdim=True).detach()
    sums = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]), key.new_zeros(*key.shape[:2], key.shape[3])
    outs = []
    for rows in zip(*(torch.split(t, chunk, 2) for t in (query, key, value)), strict=True):
        out, *sums_after = checkpoint(attend_causally, list(rows), sums, largest, options, use_reentrant=False)
        sums = (sums_after[0], sums_after[1])
        outs.append(out)
    return [torch.cat(outs, 2)]


def find_reference(wide: Rows, weights: Tensor, options: dict[str, Any]) -> list[list[Tensor]]:
    """The output and the gradients, in plain PyTorch; head by head, since all at once would not fit."""
    way = run_densely if options.get("is_causal") else functools.partial(run_whole, backend="eager")

    def run(parts: list[Rows]) -> list[Tensor]:
        return way(parts, options)

    heads = [
        go_back(run, [[t[:, h : h + 1] for t in wide]], [weights[:, h : h + 1]])[0] for h in range(wide[0].shape[1])
    ]
    return [[torch.cat(each, 1) for each in zip(*heads, strict=True)]]


def measure_kind(name: str, options: dict[str, Any], settings: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    lengths = split_evenly(settings.length, settings.shards, BLOCK)
    generator = torch.Generator(device).manual_seed(settings.seed)
    shape = (1, settings.heads, settings.length, settings.dim)
    *tensors, weights = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))
    one, many = [tensors], cut(tensors, lengths)
    fused = settings.device == "cuda" and is_fused(many, options)
    ways: dict[str, tuple[Run, list[Rows], list[Tensor]]] = {
        "one pass": (lambda parts: run_whole(parts, options), one, [weights]),
        "sharded": (lambda parts: run_sharded(parts, options), many, list(torch.split(weights, list(lengths), 2))),
    }

    def run_plainly(parts: list[Rows]) -> list[Tensor]:
        return run_whole(parts, options, "eager")

    checked = slice(settings.checked)  # heads do not know of each other
    reference = find_reference([t[:, checked].double() for t in tensors], weights[:, checked].double(), options)
    backs: dict[str, Work] = {kind: functools.partial(go_back, *way) for kind, way in ways.items()}
    if fused:
        backs["sharded"] = functools.partial(go_back_in_turns, many, ways["sharded"][2], options)
    errors = {
        kind: list_errors([[t[:, checked] for t in each] for each in back()], reference) for kind, back in backs.items()
    }
    if not options.get("is_causal"):
        first = [[t[:, checked] for t in tensors]]
        errors["plain"] = list_errors(go_back(run_plainly, first, [weights[:, checked]]), reference)
    del reference
    for what, error in errors["sharded"].items():
        allowed = 2.0 * max(each[what] for kind, each in errors.items() if kind != "sharded")
        if not error <= allowed:
            raise RuntimeError(f"{name}: {what} of shards is off by {error:.1e}, and {allowed:.1e} is allowed.")
    forward: dict[str, Work] = {kind: functools.partial(run, parts) for kind, (run, parts, _) in ways.items()}
    with torch.no_grad():
        times = time_calls(forward, repeats=settings.repeats, device=device, warmup=2)
    trained = time_calls(backs, repeats=settings.repeats, device=device, warmup=2)
    sizes: dict[str, Any] = {
        "heads": settings.heads,
        "dim": settings.dim,
        "value_dim": settings.dim,
        "itemsize": dtype.itemsize,
    }
    sizes |= {key: options.get(key, usual) for key, usual in (("is_causal", False), ("block_size", None))}
    found = {
        "errors": errors,
        "forward": {kind: dataclasses.asdict(timing) for kind, timing in times.items()},
        "training": {kind: dataclasses.asdict(timing) for kind, timing in trained.items()},
        "cost": [each["sharded"].median / each["one pass"].median - 1 for each in (times, trained)],
    }
    if fused:
        found |= time_apart(many, forward, backs, options, settings)
    if "read" not in options:
        found["sent"] = [count_sent(lengths, rank, **sizes) for rank in range(len(lengths))]
    return found


def time_apart(
    many: list[Rows], forward: dict[str, Work], backs: dict[str, Work], options: dict[str, Any],
    settings: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """What the device alone takes, as a CUDA graph, for all ranks' work and for one rank's; and that rank's host. It
    is the rank in the middle, which hears as many others where it is causal as one does in the mean."""
    device, middle = torch.device(settings.device), len(many) // 2
    weight = torch.randn_like(many[middle][0])

    def go(run: Run, parts: list[Rows]) -> Work:
        return functools.partial(go_back, run, parts, [weight])

    def run_alone(parts: list[Rows]) -> list[Tensor]:
        return [attend_as_users_do(*parts[0], *list_factors(options), **options)]

    def run_middle(parts: list[Rows]) -> list[Tensor]:
        return run_rank([*many[:middle], *parts, *many[middle + 1 :]], options, middle)

    own = [many[middle]]
    works = {
        "forward": forward
        | {"rank": functools.partial(run_middle, own), "its rows alone": functools.partial(run_alone, own)},
        "training": backs | {"rank": go(run_middle, own), "its rows alone": go(run_alone, own)},
    }
    found: dict[str, Any] = {"device": {}, "host": {}, "kernels": {}}
    for what, each in works.items():
        with torch.set_grad_enabled(what == "training"):
            for kind, work in each.items():
                timing, graph = time_device(work, repeats=min(settings.repeats, 10), device=device)
                found["device"].setdefault(what, {})[kind] = dataclasses.asdict(timing) | {"graph": graph}
            found["kernels"][what] = {kind: list_kernels(work) for kind, work in each.items()}
            for kind in ("rank", "its rows alone"):
                if (host := time_host(each[kind], device)) is not None:
                    found["host"].setdefault(what, {})[kind] = dataclasses.asdict(host)
    return found


def list_kernels(work: Work) -> dict[str, tuple[int, float]]:
    """Of one call: how often each kernel ran, and its microseconds together; the longest first."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found = {event.key[:60]: (event.count, event.self_device_time_total) for event in profiler.key_averages()}
    ran = {name: (count, round(time, 1)) for name, (count, time) in found.items() if time}
    return dict(sorted(ran.items(), key=lambda item: -item[1][1]))


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    asked = {k: v for k, v in vars(settings).items() if k not in ("out", "kinds")}
    about = provenance(settings.seed, torch.device(settings.device))
    held = read_json(settings.out, dict) if settings.out is not None else None
    found: dict[str, Any] = {}
    if held is not None and held["settings"] == asked:
        same = all(held["provenance"][name] == about[name] for name in ("commit", "device", "torch"))
        found = held["kinds"] if same else {}
    result: dict[str, Any] = {
        "what": "ms of one pass and of the same in shards, one after another on one device, and errors against float64",
        "settings": asked,
        "provenance": about,
        "kinds": found,
    }
    left = [kind for kind in settings.kinds if kind not in found]
    for name in track(left, len(left), "Measuring"):
        found[name] = measure_kind(name, KINDS[name], settings)
        if settings.out is not None:
            write_json(settings.out, result)
    return result


def show_apart(result: dict[str, Any]) -> None:
    """Of the device alone, and of one rank."""
    shards, rows = result["settings"]["shards"], []
    for name, each in result["kinds"].items():
        for what, times in each.get("device", {}).items():
            whole, cut, rank, alone = (times[kind]["median"] for kind in WAYS)
            hosts = each["host"].get(what, {})
            told = (f"{1e3 * hosts[kind]['median']:.0f}" if kind in hosts else "-" for kind in WAYS[2:])
            graphs = "" if all(times[kind]["graph"] for kind in WAYS) else "*"
            share = f"{1e3 * whole / shards:.0f}"
            costs = f"{cut / whole - 1:+.1%}", f"{1e3 * rank:.0f}", f"{1e3 * alone:.0f}", share
            rows.append([name, what, f"{whole:.3f}{graphs}", f"{cut:.3f}", *costs, *told])
    head = ["", "", "device, ms", "sharded", "cost", "a rank, us", "its rows alone", "share of one pass"]
    if rows:
        print_wide(terminal_table([*head, "host of a rank, us", "of its rows alone"], rows, "llrrrrrrrr"))


def show(result: dict[str, Any]) -> None:
    head = (
        "",
        "one pass, ms",
        "sharded",
        "cost",
        "training, ms",
        "sharded",
        "cost",
        "error of out, one pass",
        "sharded",
    )
    rows = []
    for name, each in result["kinds"].items():
        row = [name]
        for what, cost in zip(("forward", "training"), each["cost"], strict=True):
            row += [show_timing(each[what]["one pass"]), show_timing(each[what]["sharded"]), f"{cost:+.1%}"]
        rows.append([*row, *(f"{each['errors'][kind]['out']:.1e}" for kind in ("one pass", "sharded"))])
    length, shards = result["settings"]["length"], result["settings"]["shards"]
    show_apart(result)
    print_wide(terminal_table(head, rows, "lrrrrrrrr", title=f"{length:,} tokens in {shards} shards"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=2**20)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--checked", type=int, help="heads that are compared with float64; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    show(measure(parser.parse_args()))
