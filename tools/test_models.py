"""Runs LLN and LLN+Diag in a tiny model of every architecture of the installed transformers:

    make test-models

Each attention call inside the model must agree with eq. (8) in float64 (`lln.naive`, with alpha and beta computed here,
and with the pairs that the model's own softmax attention sees), or the model must be refused in one sentence. Anything
else is a failure: another exception, another attention that goes on silently. Each architecture runs in a process of
its own, forked from one that has imported everything. results/models.json has what was found; `make pages` makes
docs/models.md of it.

A sweep that was stopped goes on where it was: the same sources, torch and transformers keep what is stored, others
begin anew. `--only` tries single architectures again and keeps the rest; their commit is stored with them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import lln.hf
from lln.files import hash_file, read_json, write_json
from lln.hf import interface
from lln.hf.attach import ModelAttention
from lln.hf.find import list_attending, list_parts, own_attention, rescale_query
from lln.hf.layers import RUNS
from lln.lab.core.provenance import provenance
from lln.naive import naive_lln, naive_lln_diag
from tiny_models import CannotShrink, Tiny, first_line, list_architectures, make_tiny

ROOT = Path(__file__).parents[1]
STORED = ROOT / "results" / "models.json"
NAMES = ("lln", "lln_diag")
BLOCK = 5  # so that a sequence of some tokens has several
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
MOST = 40_000_000  # exponentials that a comparison may take
MEMORY, SECONDS = 8 * 2**30, 120
SOFTMAX = "lln_sweep"  # softmax attention under a name of its own, which writes its masks down
# What is asked for after a refusal that names it as the remedy.
REMEDIES = (
    ("statistics=", {"statistics": "fixed"}, "with statistics='fixed'"),
    ("layers='full_attention'", {"layers": "full_attention"}, "in its global layers"),
)


class Failure(Exception):
    """What a model did that it must not."""


class Unreached(Exception):
    """The layers that were named for LLN attention are not among those that the inputs come to."""


class Watched:
    """The softmax calls of a model: what each module sees, call by call."""

    def __init__(self) -> None:
        self.masks: dict[str, list[tuple[Tensor | None, bool]]] = defaultdict(list)
        self.names: dict[int, str] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
        """Plain softmax attention: what single models add to it is no concern here, only what they hide."""
        # Where there is no mask, transformers' usual softmax ("sdpa") is causal as the module says.
        mask, said = attention_mask, given.get("is_causal")
        causal = bool(getattr(module, "is_causal", False) if said is None else said)
        self.masks[self.names.get(id(module), "")].append((mask, causal))
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        scale = given.get("scaling")
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            mask = mask[..., : key.shape[2]]
            scores = scores.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores + mask
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


WATCHED = Watched()
AttentionInterface.register(SOFTMAX, lambda *args, **given: WATCHED.attend(*args, **given))
# Never None where a model asks for a mask that hides nothing: without one, a module that calls itself causal would be
# so (that of Phi-4's image model).
AttentionMaskInterface.register(
    SOFTMAX, lambda *args, **given: eager_mask(*args, **given | {"allow_is_bidirectional_skip": False})
)


def watch_softmax(tiny: Tiny) -> dict[str, list[tuple[Tensor | None, bool]]]:
    """By module; empty where no attention of the model asks transformers for its function."""
    WATCHED.masks.clear()
    try:
        try:
            model = tiny.build(SOFTMAX)
        except KeyError:  # a part of it (SAM) looks the name up in a table of its own
            model = tiny.build("eager")
            for part in list_parts(model):
                if any(True for _ in own_attention(part)):
                    part.config._attn_implementation_internal = SOFTMAX
        WATCHED.names = {id(module): name for name, module in model.named_modules()}
        tiny.run(model)
    except Exception:  # a model that knows a few names only: refusing those of ours is all that it can do
        return {}
    return dict(WATCHED.masks)


class Spy:
    """What a model does while LLN attention is to run: its calls, and softmax that runs beside them."""

    def __init__(self, model: Any, partly: bool) -> None:
        self.partly = partly  # whether some layers keep their own attention
        self.names = {id(module): name for name, module in model.named_modules()}
        self.calls: list[tuple[str, Any, Tensor, Tensor, Tensor, Any, dict[str, Any]]] = []
        self.beside: Counter[str] = Counter()

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        attend = interface.attend

        def spy(name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
            out = attend(name, module, query, key, value, mask, **given)
            runs = vars(module).get(RUNS)
            if runs is None or runs in lln.hf.IMPLEMENTATIONS:
                self.calls.append((self.names.get(id(module), ""), module, query, key, value, out[0], given))
            return out

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(interface, "attend", spy))
            for holder, name in ((F, "softmax"), (torch, "softmax"), (Tensor, "softmax"),
                                 (F, "scaled_dot_product_attention")):  # fmt: skip
                stack.enter_context(mock.patch.object(holder, name, self.note(getattr(holder, name), name)))
            yield

    def note(self, function: Any, name: str) -> Callable[..., Any]:
        def noted(first: Tensor, *args: Any, **given: Any) -> Any:
            frame = sys._getframe(1)
            place = frame.f_code.co_filename
            if "/transformers/" in place or "nn/modules/activation" in place or "nn/functional" in place:
                owner = frame.f_locals.get("self", frame.f_locals.get("module"))
                held = vars(owner).get(RUNS) if owner is not None and hasattr(owner, "__dict__") else None
                # A part of the model that was not named runs its own attention, as it should.
                chosen = getattr(getattr(owner, "config", None), "_attn_implementation", None)
                if self.partly and chosen not in lln.hf.IMPLEMENTATIONS:
                    return function(first, *args, **given)
                # One query that pools all keys costs no more than they do, and stays.
                several = first.ndim >= 3 and min(first.shape[-2:]) > 1
                if several and (held is None or held in lln.hf.IMPLEMENTATIONS):
                    called = type(owner).__name__ if owner is not None else frame.f_code.co_name
                    if "ttention" in called or name != "softmax" or "ttention" in frame.f_code.co_name:
                        self.beside[called] += 1
            return function(first, *args, **given)

        return noted


def see(seen: tuple[Tensor | None, bool], shape: tuple[int, int, int]) -> Tensor:
    """[B, N, M]: the pairs that softmax attention forms."""
    (mask, causal), (batch, rows, keys) = seen, shape
    if mask is None:
        pairs = torch.ones(batch, rows, keys, dtype=torch.bool)
        return pairs.tril() if causal and rows == keys > 1 else pairs
    mask = mask[..., :keys]
    if mask.ndim != 4:
        raise Failure(f"softmax was given a mask of shape {list(mask.shape)}, which the sweep cannot read")
    visible = mask if mask.dtype == torch.bool else mask > -1e4
    if mask.dtype != torch.bool and bool(((mask != 0) & visible).any()):
        raise Failure("softmax adds a bias to single pairs, which LLN attention would leave out silently")
    if bool((visible != visible[:, :1]).any()):
        raise Failure("softmax hides other pairs in each head")
    return visible[:, 0].expand(batch, rows, keys)


def compare(call: Any, seen: tuple[Tensor | None, bool]) -> float:
    """The relative error of one call against eq. (8), with what softmax sees there."""
    _, module, query, key, value, out, given = call
    attention: ModelAttention = module.lln
    batch, heads, rows, dim = query.shape
    keys, key_heads = key.shape[1:3][1], key.shape[1]
    pairs = see(seen, (batch, rows, keys))
    visible = pairs.any(1)  # [B, M]
    causal = rows == keys > 1 and not bool((pairs & ~torch.ones_like(pairs).tril()).any())
    here = visible if rows == keys and not attention.cross else torch.ones(batch, rows, dtype=torch.bool)
    wanted = visible[:, None].expand_as(pairs)
    wanted = wanted.tril() if causal else wanted
    if bool(((wanted != pairs) & here[:, :, None]).any()):
        raise Failure("softmax hides other keys from each query, and LLN attention did not refuse")
    query = rescale_query(query, attention.scale, given.get("scaling"))
    group, most = heads // key_heads, MOST // max(1, rows * keys * dim)
    if most < group:
        raise Failure(f"{rows} queries and {keys} keys are too many to compare")
    if most < batch * heads:  # a sample and a key head of it stand for all
        batch, heads, key_heads = 1, group, 1
        query, key, value, out = query[:1, :group], key[:1, :1], value[:1, :1], out[:1, :, :group]
        here, visible = here[:1], visible[:1]
    sigmas = [torch.ones(batch, key_heads, dtype=torch.float64)] * 2
    if attention.statistics == "sample":
        split = query.double().reshape(batch, key_heads, group, rows, dim)
        sigmas = [
            torch.stack(
                [torch.stack([s[h][..., m, :].std() for h in range(key_heads)]) for s, m in zip(t, which, strict=True)]
            )
            for t, which in ((split, here), (key.double(), visible))
        ]
    alpha, beta = lln.match_moments(sigmas[0], sigmas[1], dim, attention.matching, attention.scale)
    alpha = torch.as_tensor(alpha).expand(batch, key_heads).repeat_interleave(group, 1)
    where: dict[str, Any] = {"is_causal": causal, "key_mask": visible}
    if attention.block_size is None or attention.cross:
        reference = naive_lln(query, key, value, alpha, beta, **where)
    else:
        reference = naive_lln_diag(
            query, key, value, alpha, beta, attention.block_size, mix=attention.mix, scale=attention.scale, **where
        )
    found = out.transpose(1, 2).double()
    rest = here[:, None, :, None]
    return float(((found - reference) * rest).norm() / (reference * rest).norm().clamp_min(1e-30))


def is_ours(problem: BaseException) -> bool:
    """Whether it is a refusal of the package, in one sentence."""
    text = str(problem)
    if not isinstance(problem, (ValueError, TypeError)) or "\n" in text or not text.endswith("."):
        return False
    frames = traceback.extract_tb(problem.__traceback__)
    return bool(frames) and "/lln/" in frames[-1].filename and "/transformers/" not in frames[-1].filename


def try_one(tiny: Tiny, name: str, options: dict[str, Any], masks: dict[str, Any]) -> dict[str, Any]:
    """What a model does with the attention `name`. Refusals are raised."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if name == "lln" and not options:
            model = tiny.build(name)
        else:
            sizes: dict[str, Any] = {"block_size": BLOCK} if name == "lln_diag" else {}
            model = lln.hf.convert(tiny.build("eager"), name, **sizes, **options)
    partly = "layers" in options or any("keeps its softmax attention" in str(w.message) for w in heard)
    spy = Spy(model, partly)
    with spy.look():
        tiny.run(model)
    turn: Counter[str] = Counter()
    errors = []
    for call in spy.calls:
        layer, tolerance = call[0], TOLERANCE.get(call[2].dtype, 1e-1)
        if turn[layer] >= len(masks.get(layer, ())):
            raise Failure(f"{type(call[1]).__name__} attends more often than with softmax")
        error = compare(call, masks[layer][turn[layer]])
        turn[layer] += 1
        if not error < tolerance:
            raise Failure(f"{type(call[1]).__name__} ({layer}) is {error:.2g} away from eq. (8)")
        errors.append(error)
    if spy.beside:
        raise Failure(f"softmax goes on to run in {', '.join(sorted(spy.beside))}")
    if not errors and partly:
        raise Unreached
    if not errors and not list_attending(model):  # a name changes nothing of it, and conversion says why
        lln.hf.convert(model, name)
    if not errors:
        raise Failure("no attention was reached" if masks else "accepted, though no attention of it can be LLN's")
    missed = [] if partly else sorted(set(masks) - set(turn))
    if missed:
        raise Failure(f"softmax goes on to run in {', '.join(missed)}")
    return {"outcome": "agrees", "calls": len(errors), "modules": len(turn), "error": max(errors)}


def try_name(tiny: Tiny, name: str, masks: dict[str, Any]) -> dict[str, Any]:
    """The same, with the remedy that a refusal names where there is one."""
    options: dict[str, Any] = {}
    said: list[str] = []
    refusal = ""
    for _ in range(len(REMEDIES) + 1):
        try:
            found = try_one(tiny, name, options, masks)
            return found | ({"with": said} if said else {})
        except Unreached:
            if not refusal:
                return {"outcome": "not tried", "reason": "these inputs reach no part that was converted"}
            return {"outcome": "refused", "reason": refusal}
        except Failure as problem:
            return {"outcome": "failed", "reason": str(problem), **({"with": said} if said else {})}
        except Exception as problem:
            text = str(problem)
            if not is_ours(problem):
                place = traceback.extract_tb(problem.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                if not refusal:
                    return {"outcome": "failed", "reason": f"{first_line(problem)} ({where})"}
                return {"outcome": "failed", "reason": f"{first_line(problem)} ({where})", "with": said}
            refusal = refusal or text
            new = [(more, words) for sign, more, words in REMEDIES if sign in text and words not in said]
            if not new:
                return {"outcome": "refused", "reason": text, **({"with": said} if said else {})}
            options, said = options | new[0][0], [*said, new[0][1]]
    return {"outcome": "refused", "reason": refusal}


def check_architecture(name: str) -> dict[str, Any]:
    """What is stored of an architecture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny = make_tiny(name)
        except CannotShrink as problem:
            return {"outcome": "not tried", "reason": str(problem)}
        masks = watch_softmax(tiny)
        row: dict[str, Any] = {"class": tiny.kind.__name__, "inputs": [n for n in tiny.inputs if n != "use_cache"]}
        return row | {each: try_name(tiny, each, masks) for each in NAMES}


def run_apart(name: str, seconds: int) -> dict[str, Any]:
    """`check_architecture` in a fork of this process, with limits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        if not (child := os.fork()):
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    os.dup2(nowhere.fileno(), 2)
                    transformers.logging.set_verbosity_error()
                    torch.set_num_threads(1)
                    row = check_architecture(name)
                path.write_text(json.dumps(row))
            finally:
                os._exit(0)
        end = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"outcome": "not tried", "reason": f"it takes more than {seconds} s"}
            time.sleep(0.02)
        if not path.exists():
            return {"outcome": "not tried", "reason": "its process ended without a word"}
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def hash_code() -> str:
    """What tells other sources of what the sweep runs."""
    digest = hashlib.sha256()
    tools = [ROOT / "tools" / name for name in ("test_models.py", "tiny_models.py")]
    for path in sorted((ROOT / "src").rglob("*.py")) + tools:
        digest.update(f"{path.relative_to(ROOT).as_posix()} {hash_file(path)}".encode())
    return digest.hexdigest()[:16]


def go_on(held: Any, said: dict[str, Any], only: bool) -> dict[str, Any]:
    """What is stored at first: what an earlier run found, where it stays true beside what runs now, else nothing."""
    fresh = {"provenance": said, "code": hash_code(), "architectures": {}}
    if held is None:
        return fresh
    same = held.get("code") == fresh["code"] and all(
        held["provenance"].get(key) == said[key] for key in ("torch", "transformers")
    )
    return dict(held) if only or same else fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="architectures with commas between, by transformers' model_type")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each architecture")
    options = parser.parse_args()
    said = provenance(0, torch.device("cpu")) | {"transformers": transformers.__version__, "command": "test_models.py"}
    only = options.only.split(",") if options.only else []
    stored = go_on(read_json(options.out, dict), said, bool(only))
    rows, started = stored["architectures"], stored["provenance"]["commit"]
    for name in only or [name for name in list_architectures() if name not in rows]:
        row = run_apart(name, options.seconds)
        rows[name] = row | ({"commit": said["commit"]} if only and said["commit"] != started else {})
        parts = [row, *(row.get(each, {}) for each in NAMES)]
        print(name, *(f"{p['outcome']} {p.get('reason', '')}".strip() for p in parts if "outcome" in p), sep="  ",
              flush=True)  # fmt: skip
        write_json(options.out, stored | {"architectures": dict(sorted(rows.items()))})
    failed = [name for name, row in rows.items() if any(row.get(e, {}).get("outcome") == "failed" for e in NAMES)]
    print(f"{len(rows)} architectures; failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
