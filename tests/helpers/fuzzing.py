"""Generated cases: each follows from a kind, a seed and a number alone, so that one that went wrong can be had again. A
case is legal by how it is drawn; what is refused, crashes or differs from its reference is a fault.

`make test` runs a few of each, `make fuzz` (tools/fuzz.py) as many as its time allows.
"""

import io
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lln
from helpers.call_options import draw_coefficient, draw_mix, draw_state, make_offsets, mask_keys
from helpers.tensors import State, normal, relative_error, weighted_gradients
from helpers.untyped import lln_attention, naive_attention
from lln import LLNState

LENGTHS = (0, 1, 2, 3, 5, 8, 16, 17, 33, 64, 65)
# Of the exponents, which are float32 at least, and of an output that is rounded.
EXACT = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
ROUNDED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 8e-3, torch.float16: 1e-3}
COEFFICIENTS = ("number", "[]", "[H]", "[B, H]", "[H, D]", "[B, H, D]")
MIXES = ("number", "[]", "[H]", "[B, H]", "[H, D]", "[B, H, D]", "pair", "wide pair", "half pair")


def is_ambiguous(kind: str, batch: int, heads: int, width: int) -> bool:
    """Whether a tensor of two dimensions may be [B, H] and [H, D] alike, which the op refuses."""
    return kind in ("[B, H]", "[H, D]") and (batch, heads) == (heads, width) and batch * heads > 1


def draw_kind(rng: random.Random, kinds: tuple[str, ...], batch: int, heads: int, width: int) -> str:
    while True:
        kind = rng.choice(kinds)
        parts = {"wide pair": ("[H, D]",), "half pair": ("[B, H]",)}.get(kind, (kind,))
        if not any(is_ambiguous(part, batch, heads, width) for part in parts):
            return kind


def draw_call(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any], float]:
    """(query, key, value, alpha, beta), further arguments and the size of the exponents, all in float64."""
    is_causal, packed, evidence = rng.random() < 0.4, rng.random() < 0.25, rng.random() < 0.15
    batch, key_heads, group = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
    heads, dim = key_heads * group, rng.choice((1, 2, 3, 5, 8, 13, 16))
    value_dim = rng.choice((dim, rng.randint(1, 9)))
    length = rng.choice(LENGTHS)
    same = is_causal or rng.random() < 0.6
    key_length = length if same else rng.choice(LENGTHS)
    block_size = rng.choice((None, rng.randint(1, 20))) if same else None
    if packed:
        lengths = [rng.choice(LENGTHS[:8]) for _ in range(batch)]
        key_lengths = lengths if same else [rng.choice(LENGTHS[:8]) for _ in range(batch)]
        rows, length, key_length = 1, sum(lengths), sum(key_lengths)
    else:
        rows, lengths, key_lengths = batch, [length] * batch, [key_length] * batch
    spread, start = rng.choice((0.1, 1.0, 1.0, 4.0, 30.0)), rng.randrange(1000)
    q = spread * normal(start, rows, heads, length, dim)
    k = spread * normal(start + 1, rows, key_heads, key_length, dim)
    v = normal(start + 2, rows, key_heads, key_length, value_dim)
    options: dict[str, Any] = {"is_causal": is_causal}
    if packed:
        offsets = make_offsets(lengths), make_offsets(key_lengths)
        options["cu_seqlens"] = offsets[0] if same else offsets
    if rng.random() < 0.4:
        mask = rng.choice(("holes", "left", "right", "dead sample"))
        options["key_mask"] = mask_keys(mask, key_lengths).reshape(rows, key_length)
    if block_size is not None:
        options["block_size"] = block_size
        options["mix"] = draw_mix(draw_kind(rng, MIXES, batch, heads, value_dim), batch, heads, value_dim)
        if rng.random() < 0.3:
            options["scale"] = rng.uniform(0.05, 2.0)
    alpha = draw_coefficient(draw_kind(rng, COEFFICIENTS, batch, heads, dim), start + 3, batch, heads, dim)
    beta = draw_coefficient(draw_kind(rng, COEFFICIENTS, batch, key_heads, dim), start + 4, batch, key_heads, dim)
    if evidence:
        options |= {"read": "evidence", "directions": rng.choice((None, "signed"))}
        alpha = None
        if options["directions"] is None and rng.random() < 0.5:
            channels = rng.randint(1, 6)
            options["directions"] = normal(start + 5, key_heads, channels, dim)
            beta = rng.uniform(0.3, 2.0)
    elif (block_size is None or is_causal) and rng.random() < 0.3:
        options["state"] = draw_state(batch, key_heads, dim, value_dim, block_size)
    return (q, k, v, alpha, beta), options, spread


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple) and not isinstance(x, State):
        return tuple(cast(y, dtype) for y in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def narrow_state(state: State, dtype: torch.dtype) -> LLNState:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fields = {"mean_value": wide, "block_key": dtype, "block_value": dtype}
    given = {name: cast(x, fields[name]) if name in fields else x for name, x in state._asdict().items()}
    return LLNState(**{name: x for name, x in given.items() if x is not None})


def lay_out(rng: random.Random, t: Tensor) -> Tensor:
    """The same numbers, elsewhere in memory: as projections give them, every second row of more, or as they are."""
    way = rng.randrange(3)
    if way == 0:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if way == 1:
        return torch.stack([t, t + 1.0], 3).flatten(2, 3)[:, :, ::2]
    return t


def compare(found: Tensor, wanted: Tensor, limit: float, what: str) -> str | None:
    if found.shape != wanted.shape:
        return f"{what} has shape {list(found.shape)} and not {list(wanted.shape)}"
    error = relative_error(found, wanted, floor=1e-3 * max(wanted.numel(), 1) ** 0.5)
    return None if error <= limit else f"{what} is off by {error:.1e}, and {limit:.1e} is allowed"


def compare_gradients(
    wide: tuple[Any, Any], alpha: Any, coefficients: Any, given: dict[str, Any], reference: dict[str, Any], limit: float
) -> str | None:
    """Of a sum in which every element of the output has a weight of its own."""
    leaves = [t.clone().requires_grad_() for t in wide[0]]
    theirs, ours = (
        weighted_gradients(out, leaves)
        for out in (
            naive_attention(*leaves, alpha, wide[1][1], **reference).out,
            lln_attention(*leaves, *coefficients, **given),
        )
    )
    for name, one, other in zip("qkv", ours, theirs, strict=True):
        if fault := compare(one, other, limit, f"the gradient of {name}"):
            return fault
    return None


def check_op(rng: random.Random) -> str | None:
    """Output, returned state and gradients against the dense equation in float64."""
    arguments, options, spread = draw_call(rng)
    dtype = rng.choice(tuple(EXACT))
    narrow = cast(arguments[:3], dtype)
    coefficients = cast(arguments[3:], torch.float64 if dtype == torch.float64 else torch.float32)
    given = {name: cast(x, torch.float32) if dtype != torch.float64 else x for name, x in options.items()}
    reference = options | {"mix": cast(given["mix"], torch.float64)} if "mix" in given else dict(options)
    if "directions" in given and isinstance(given["directions"], Tensor):
        given["directions"] = given["directions"].to(dtype)
        reference["directions"] = given["directions"].double()
    if "state" in given:
        given["state"] = narrow_state(options["state"], dtype)
        held = {name: getattr(given["state"], name) for name in State._fields}
        reference["state"] = State(**{name: cast(x, torch.float64) for name, x in held.items()})
    wide = cast(narrow, torch.float64), cast(coefficients, torch.float64)
    alpha = 1.0 if wide[1][0] is None else wide[1][0]
    expected = naive_attention(*wide[0], alpha, wide[1][1], **reference)
    limit = EXACT[dtype] * (1.0 + 4.0 * spread) + ROUNDED[dtype]
    laid = tuple(lay_out(rng, t) for t in narrow)
    out = lln_attention(*laid, *coefficients, **given)
    if fault := compare(out, expected.out, limit, "the output"):
        return fault
    with_gradients, narrow_limit = dtype == torch.float64 and rng.random() < 0.5, 1e-9 * (1.0 + spread)
    if with_gradients and (fault := compare_gradients(wide, alpha, coefficients, given, reference, narrow_limit)):
        return fault
    if "block_size" not in options or options["is_causal"]:
        again, state = lln_attention(*laid, *coefficients, **given, return_state=True)
        log_sum, mean = state.log_sum.double(), state.mean_value.double()
        dead = expected.log_sum == -torch.inf
        if not torch.equal(log_sum == -torch.inf, dead):
            return "the state is empty in other places"
        sums = [t.masked_fill(dead, 0.0) for t in (log_sum, expected.log_sum)]
        return (
            compare(again, expected.out, limit, "the output beside a state")
            or compare(sums[0], sums[1], limit, "log_sum")
            or compare(mean, expected.mean_value, limit, "mean_value")
        )
    return None


def draw_kernel_case(rng: random.Random, forms: int | None) -> Any:
    """A call of the kernels. forms: how many different ones there are to compile for; None: each has one of its own.
    Lengths and how large the exponents are vary in any case."""
    from helpers.triton_cases import Case

    form = rng if forms is None else random.Random(f"form {rng.randrange(forms)}")
    packed, is_causal = form.random() < 0.3, form.random() < 0.5
    cross = not is_causal and form.random() < 0.3
    block_size = None if cross else form.choice((None, form.choice((1, 7, 16, 32, 48))))
    group, dim = form.randint(1, 2), form.choice((16, 32, 24))
    dtype = form.choice((torch.float32, torch.float32, torch.bfloat16))
    with_state = (block_size is None or is_causal) and form.random() < 0.4
    return_state = with_state and form.random() < 0.5
    mask = form.choice(("none", "none", "holes", "left", "right"))
    alpha, beta = (draw_kind(form, COEFFICIENTS, 9, 7, dim) for _ in range(2))  # of no size that says two things
    mix = draw_kind(form, MIXES, 9, 7, dim) if block_size is not None else "number"
    count, key_heads, longest = form.randint(1, 2), form.randint(1, 2), 400 if torch.cuda.is_available() else 40
    lengths, keys = (
        tuple(rng.randint(1, longest) for _ in range(count)) if packed else (rng.randint(1, longest),) * count
        for _ in range(2)
    )
    return Case(
        lengths=lengths, key_lengths=keys if cross else None, packed=packed, key_heads=key_heads, group=group, dim=dim,
        is_causal=is_causal, block_size=block_size, mask=mask, alpha=alpha, beta=beta, mix=mix, state=with_state,
        return_state=return_state, dtype=dtype, size=rng.choice((0.5, 1.0, 3.0)),
    )  # fmt: skip


def check_kernels(rng: random.Random, forms: int | None = None) -> str | None:
    """The Triton kernels, interpreted where there is no GPU, with every gradient."""
    from helpers.triton_cases import check

    case = draw_kernel_case(rng, forms)
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    tolerance = 1e-2 if case.dtype == torch.bfloat16 and not torch.cuda.is_available() else 2e-5
    try:
        check(case, tolerance, as_plain=True)
    except AssertionError as error:
        return str(error)[:300] or "it differs"
    return None


def check_states(rng: random.Random) -> str | None:
    """A sequence cut anywhere and put together again in any order is the sequence; so it is after a file."""
    batch, heads, length, dim, value_dim = (
        rng.randint(1, 3),
        rng.randint(1, 2),
        rng.randint(2, 60),
        rng.randint(1, 9),
        4,
    )
    evidence, start, beta = rng.random() < 0.3, rng.randrange(1000), rng.uniform(0.5, 3.0)
    k, v = normal(start, batch, heads, length, dim), normal(start + 1, batch, heads, length, value_dim)
    q = normal(start + 2, batch, heads, 3, dim)
    how: dict[str, Any] = {"read": "evidence"} if evidence else {"alpha": 1.3}
    cuts = sorted(rng.sample(range(length + 1), rng.randint(0, min(6, length))))
    ends = list(itertools.pairwise([0, *cuts, length]))
    parts = [lln_attention(q, k[:, :, a:b], v[:, :, a:b], beta=beta, **how, return_state=True)[1] for a, b in ends] + [
        LLNState.empty(batch, heads, dim, value_dim, read="evidence" if evidence else "paper", dtype=torch.float64)
    ]
    rng.shuffle(parts)
    while len(parts) > 1:  # in any grouping
        first = parts.pop(rng.randrange(len(parts)))
        at = rng.randrange(len(parts))
        parts[at] = rng.choice((first.merge, lambda other, one=first: other.merge(one)))(parts[at])
        if rng.random() < 0.2:
            parts[at] = parts[at].clone().detach().to("cpu").to(torch.float64)
    buffer = io.BytesIO()
    torch.save(parts[0], buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    nothing = (t[:, :, :0] for t in (k, v))
    wanted = lln_attention(q, k, v, beta=beta, **how)
    found = lln_attention(q, *nothing, beta=beta, **how, state=state)
    order = torch.tensor([rng.randrange(batch) for _ in range(rng.randint(1, 4))])
    chosen = lln_attention(
        q[order], *(t[order, :, :0] for t in (k, v)), beta=beta, **how, state=state.index_select(order)
    )
    return compare(found, wanted, 1e-10, "the merged state") or compare(
        chosen, wanted[order], 1e-10, "the chosen sequences"
    )


def check_modules(rng: random.Random) -> str | None:
    """What is padding is invisible, and what is saved is the same module again."""
    heads, dim, length = rng.choice((2, 4)), rng.choice((8, 16)), rng.randint(3, 40)
    is_causal = rng.random() < 0.4
    statistics = rng.choice(("running", "fixed") if is_causal else ("sample", "running", "fixed"))
    options: dict[str, Any] = {"statistics": statistics, "matching": rng.choice(("paper", "variance", "entropy"))}
    if rng.random() < 0.5:
        options |= {"block_size": 4 * rng.randint(1, 4), "mix": rng.choice((0.5, "ratio", "scales"))}
        options["overlap"] = rng.random() < 0.2
    if statistics == "fixed":
        options["learnable"] = rng.choice((None, "head", "channel"))
        options["feature_map"] = rng.choice((None, "linear"))
    if rng.random() < 0.3:
        options["convolution"] = rng.choice((3, 5))
    make = lambda: lln.LLNAttention(heads, dim, dtype=torch.float64, **options)  # noqa: E731
    start = rng.randrange(1000)
    layer, qkv = make().eval(), normal(start, 3, 2, heads, length, dim)
    valid = length - rng.randint(1, length - 1)
    mask = torch.arange(length)[None] < torch.tensor([[length], [valid]])
    spoiled = torch.where(mask[None, :, None, :, None], qkv, 1e3)
    where = {"is_causal": is_causal, "key_mask": mask}
    wanted, found = (layer(*t, **where) for t in (qkv, spoiled))
    rows = mask[:, None, :, None]
    if fault := compare(
        torch.where(rows, found, 0.0), torch.where(rows, wanted, 0.0), 1e-9, "the output beside padding"
    ):
        return fault
    alone = layer(*(t[1:, :, :valid] for t in qkv), is_causal=is_causal)
    if statistics != "batch" and (fault := compare(wanted[1:, :, :valid], alone, 1e-9, "the output alone")):
        return fault
    twin = make().eval()
    twin.load_state_dict(layer.state_dict())
    return compare(twin(*qkv, **where), wanted, 1e-12, "the loaded module")


def check_plugin(rng: random.Random) -> str | None:
    """In models of transformers padding is invisible, and a saved model gives what it gave."""
    import tempfile

    from helpers.hf_models import LENGTH, VOCABULARY, build_model

    warnings.simplefilter("ignore")  # that nobody has measured what a new model attends with
    kind = rng.choice(("bert", "roberta", "distilbert", "electra", "gpt2", "llama"))
    model = build_model(kind, rng.choice(("lln", "lln_diag")))
    valid = rng.randint(2, LENGTH - 1)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, valid:] = 0

    def run(one: Any, tokens: Tensor, seen: Tensor) -> Tensor:
        with torch.no_grad():
            found = one(input_ids=tokens, attention_mask=seen)
        out: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
        return out

    whole, alone = run(model, ids, mask), run(model, ids[1:, :valid], mask[1:, :valid])
    if fault := compare(whole[1:, :valid], alone, 1e-8, f"{kind}: the output beside padding"):
        return fault
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, dtype=torch.float64).eval()
    return compare(run(again, ids, mask), whole, 1e-10, f"{kind}: the loaded model")


CHECKS: dict[str, Callable[..., str | None]] = {
    "op": check_op, "kernels": check_kernels, "states": check_states, "modules": check_modules, "plugin": check_plugin,
}  # fmt: skip


def run_case(kind: str, seed: int, number: int, **how: Any) -> str | None:
    """What is wrong with a case; None: nothing. how: of the kernels, `forms`."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            return CHECKS[kind](random.Random(f"{kind} {seed} {number}"), **how)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
