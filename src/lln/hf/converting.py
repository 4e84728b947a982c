"""Choose a model's attention and its options in one call, and attach what is measured or learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lln.checks import check_no_alpha
from lln.hf.attach import ModelAttention, attach, check_patches, undo_refused
from lln.hf.claims import check_values, warn_of_adapter
from lln.hf.find import Model, attention_modules, find_attached, find_model, list_parts
from lln.hf.layers import Plan, Wanted, find_running, name_implementation, plan_layers, read_plan
from lln.hf.options import IMPLEMENTATIONS, KINDS, LLN, OF_BLOCKS, Options, write
from lln.hf.options import read as read_config
from lln.hf.towers import list_able
from lln.hf.watch import NO_BATCHES, SoftmaxCall, show_softmax
from lln.matching.data import match_data
from lln.matching.moments import both_moments
from lln.nn.statistics import Where
from lln.values import check_listed, suggest

ROWS = 64  # of a sample's queries that data matching looks at; there are many samples
OF_PEERS = ("block_size", "mix", "value_convolution", "convolution")  # what other mechanisms than LLN take, too
Coefficients = float | Tensor | Mapping[str, float | Tensor]


def convert(
    model: Model,
    implementation: str | None = None,
    *,
    matching: str | None = None,
    statistics: str | dict[str, str] | None = None,
    block_size: int | None = None,
    mix: float | str | None = None,
    learnable: str | None = None,
    read: str | None = None,
    directions: int | str | None = None,
    feature_map: str | None = None,
    value_convolution: int | str | None = None,
    convolution: int | None = None,
    overlap: bool | None = None,
    alpha: Coefficients | None = None,
    beta: Coefficients | None = None,
    length: int | None = None,
    momentum: float | None = None,
    tile: int | None = None,
    layers: Wanted | None = None,
    batches: Iterable[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Model:
    """Let a transformers model run LLN attention, or another mechanism, with these options. An option that is left out
    stays as it is, or has the default of `lln.hf.Options`.

    The options are stored in `config.lln`. Running statistics, given or learnable alpha and beta, and a learned mix
    become part of the model's weights. Both are saved and loaded with the model.

    Args:
        model: a transformers model, or a module that holds one (a SentenceTransformer, a PeftModel); changed in place.
            Names of modules are those in the transformers model. Parts that cannot use linear attention (the text part
            of PaliGemma) stay as they are, with a warning that names them.
        implementation: "lln", "lln_diag" or another of `lln.hf.IMPLEMENTATIONS`; default: what runs already, else
            "lln_diag".
        matching: "paper", "entropy" (recommended for new models) or "variance"; "data": alpha and beta of each head are
            found on `batches`, so that LLN attention has the entropy of the model's softmax attention there
            (`lln.match_data`).
        statistics: "sample", "batch", "running", "fixed", "auto", or {"encoder": name, "decoder": name}. With "data"
            matching, and with given or learnable alpha and beta, it is "fixed".
        block_size, mix: for "lln_diag". block_size is the number of tokens in a block; mix is a number, "ratio",
            "scales" or "evidence" (see `lln.LLNAttention`). With another kernel mechanism, they add blocks to it, as in
            `lln.attention` (mix is a number then).
        learnable: "head" or "channel": alpha and beta become parameters.
        read: "paper", or "evidence": queries read channels by the keys they hold, for weights that were trained with
            softmax attention (see `lln.lln_attention`). There is no alpha then.
        directions: the channels of the evidence read: "signed", or the number of channels whose directions are learned
            (see `lln.LLNAttention`). `lln.hf.fit` finds them without gradients, and `lln.hf.distill` trains them.
        feature_map: "linear": each head learns a linear map of its queries and keys (see `lln.LLNAttention`). It starts
            at the identity, and `lln.hf.distill` can train it.
        value_convolution: an odd width: each value head learns a convolution over that many tokens, which starts at
            zero and is added to attention's output (see `lln.LLNAttention`). In image models also "3x3", over rows and
            columns of patches. It works with every implementation, but not in cross attention.
        convolution: deprecated, use value_convolution. An odd width: each head learns a convolution over the tokens of
            its queries, keys and values, which starts at zero. Not for cross attention, nor with a cache.
        overlap: for "lln_diag": overlapping windows instead of blocks (see `lln.LLNAttention`).
        alpha, beta: positive numbers or tensors [heads] or [heads, dim] for all attention modules with "fixed"
            statistics, or a dict from the name of a module (as in model.named_modules()) to them; the two go together.
        length: the number of keys that "entropy" matching assumes where it cannot count them.
        momentum: the weight of a new batch in "running" statistics.
        tile: for "lln_diag" in image models: blocks are square tiles with at most this many patches a side. Passing
            block_size later undoes it.
        layers: which layers are converted: their indices, a slice, "full_attention" (those without a sliding window),
            a function of (index, attention module), {index: implementation}, or "all". The other layers keep their
            softmax attention and windows, and give the same bits as before. Indices count in the encoder and in the
            decoder separately, so index 0 is the first layer of each. What softmax does with single scores (a cap,
            attention sinks) is left out in the layers that are named here.
        batches: inputs of the model, each a dict of arguments. The model runs on them with softmax attention, without
            gradients, and what "running" statistics and "data" matching need is measured.
        options: options of another mechanism than LLN, see `lln.mechanisms()[implementation].options`.

    Returns:
        The model.

    Raises:
        ValueError or TypeError: the message names the argument. The model is unchanged then.

    Example:
        >>> import torch, transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.BertModel(transformers.BertConfig(**shape))
        >>> batch = {"input_ids": torch.arange(8)[None]}
        >>> model = lln.hf.convert(model, "lln_diag", block_size=4, matching="data", batches=[batch])
        >>> model.config.lln["matching"], model(**batch).last_hidden_state.shape
        ('data', torch.Size([1, 8, 16]))
    """
    body = find_model(model)
    check_values(body)
    held = next((one for part in list_parts(body) if (one := read_config(part.config)) is not None), None)
    if isinstance(layers, Mapping):
        implementation = name_implementation(layers, implementation)
    if implementation is None:
        implementation = held.implementation if held and held.implementation in IMPLEMENTATIONS else "lln_diag"
    if implementation in ("sdpa", "eager"):
        raise ValueError(
            f"implementation={implementation!r} is softmax attention; "
            f"model.set_attn_implementation({implementation!r}) runs it again."
        )
    check_listed("implementation", implementation, IMPLEMENTATIONS)
    asked = {
        "matching": matching, "statistics": statistics, "block_size": block_size, "mix": mix, "learnable": learnable,
        "read": read, "directions": directions, "feature_map": feature_map,
        "value_convolution": value_convolution, "convolution": convolution, "overlap": overlap, "length": length,
        "momentum": momentum, "tile": tile,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if options and implementation in LLN:
        wrong = next(iter(options))
        hint = suggest(wrong, [*asked, "alpha", "beta", "batches", "layers"])
        raise TypeError(f"{implementation} has no option {wrong!r}; see the arguments of lln.hf.convert.{hint}")
    if implementation in LLN:
        complete(changes, implementation, held or Options(), (alpha, beta), batches is not None)
    else:
        measured = {"alpha": alpha, "beta": beta, "batches": batches}
        for name in (*changes, *(name for name, value in measured.items() if value is not None)):
            if name not in OF_PEERS:
                raise ValueError(f"{name} goes with 'lln' and 'lln_diag'; got implementation={implementation!r}.")
        mechanisms = (held or Options()).mechanisms
        changes = {"mechanisms": mechanisms | {implementation: mechanisms.get(implementation, {}) | options | changes}}
    parts = list_able(body, implementation)
    changes["implementation"] = implementation
    plan = Plan() if layers is None else plan_layers(body, layers, parts)
    changed = [(part, new) for part in parts if (new := plan.change(part.config)) is not None]
    chosen = [dataclasses.replace(read_config(part.config) or Options(), **changes, **new) for part, new in changed]
    if layers is None:
        plan = read_plan(body)
    able = {id(module) for part in parts for module in part.modules()}
    plan.kept |= {name for name, module in attention_modules(body) if id(module) not in able}
    data = matching == "data" and beta is None
    if batches is not None and not data and not any("running" in map(o.statistics_of, KINDS) for o in chosen):
        raise ValueError(
            "batches are measured only for statistics='running' or matching='data'; give one of these, or leave "
            "batches out."
        )
    modules = [name for name, _ in attention_modules(body) if name not in plan.kept]
    for what, given in (("alpha", alpha), ("beta", beta)):
        if isinstance(given, Mapping) and (unknown := sorted(set(given) - set(modules))):
            raise ValueError(f"{what}: {unknown[0]!r} is no attention module in model.named_modules().")
    found = {} if batches is None else measure(body, batches, data, plan)

    with undo_refused(body):
        for (part, _), own in zip(changed, chosen, strict=True):
            write(part.config, own)
            part.config._attn_implementation_internal = implementation
        attach(body, fresh=True)
        check_patches(body)
        for name, attention in find_running(body).items():
            if not isinstance(attention, ModelAttention):
                continue
            if beta is not None and attention.statistics == "fixed":
                attention.set_coefficients(*(pick(*given, name) for given in (("alpha", alpha), ("beta", beta))))
            if name in found:
                found[name].give(attention)
    warn_of_adapter(model, body)
    return model


def complete(
    changes: dict[str, Any], implementation: str, held: Options, given: tuple[Any, Any], measured: bool
) -> None:
    """Add to the options of LLN that were asked for what follows from them, and from those that the model held.

    given: alpha and beta. measured: whether there are batches."""
    for name, usual in OF_BLOCKS.items():
        if implementation == "lln" and changes.get(name, usual) != usual:
            raise ValueError(f"{name} goes with implementation='lln_diag'; got {changes[name]!r}.")
    if "block_size" in changes and changes.setdefault("tile") is not None:
        raise ValueError(f"tile={changes['tile']!r} takes the place of block_size; give only one of them.")
    evidence = changes.get("read", held.read) == "evidence"
    if evidence:
        check_no_alpha(given[0])
    else:
        changes.setdefault("directions", None)
    if (given[0] is None) != (given[1] is None) and not evidence:
        raise ValueError("alpha and beta go together; give both or neither.")
    matching, statistics, learnable = (changes.get(name) for name in ("matching", "statistics", "learnable"))
    if matching == "data" and given[1] is None and not measured:
        raise ValueError("matching='data' needs batches to find alpha and beta on, or alpha and beta themselves.")
    directed = isinstance(changes.get("directions", held.directions), int)
    kept = (given[1] is not None or matching == "data") and not directed
    if statistics is None and (kept or directed or learnable is not None or "feature_map" in changes):
        changes["statistics"] = "fixed"
    if kept:
        values = [value for one in given for value in (one.values() if isinstance(one, Mapping) else [one])]
        wide = any(isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] > 1 for value in values)
        changes["coefficients"] = "channel" if wide else "head"
    elif statistics not in (None, "fixed") or matching is not None:
        # What was given or found before goes when something else is asked for in its place.
        changes["coefficients"] = None
        if statistics is not None:
            changes |= {"learnable": learnable, "feature_map": changes.get("feature_map")}
        elif held.coefficients is not None and learnable is None and held.learnable is None:
            changes["statistics"] = "auto"
        if matching is None and held.matching == "data":
            changes["matching"] = "paper"


def pick(what: str, given: Coefficients | None, name: str) -> float | Tensor | None:
    if not isinstance(given, Mapping):
        return given
    if name not in given:
        raise ValueError(f"{what} has no value for {name}; got values for {', '.join(given) or 'nothing'}.")
    return given[name]


class Seen:
    """What one attention module showed: moments of queries and keys, and alpha and beta that match softmax on them."""

    def __init__(self, data: bool) -> None:
        self.data = data
        self.moments: Tensor | float = 0.0  # [2, 3, key heads]
        self.logs: tuple[Tensor | float, ...] = (0.0, 0.0)  # of alpha [heads] and beta [key heads], sums over samples
        self.samples = 0

    def look(self, call: SoftmaxCall) -> None:
        query, key = call.query, call.key
        learned = find_attached(call.module, "lln")  # LLN attention that the module has from before
        if isinstance(learned, ModelAttention):  # statistics are of what it has learned to make of them
            query, key = learned.convolve(query, key, Where(**call.where))
        masks = call.where["query_mask"], call.where["key_mask"]
        self.moments = self.moments + both_moments(query, key, key.shape[1], *masks).sum(2)
        if self.data:
            if isinstance(learned, ModelAttention) and learned.has_moved():
                raise ValueError(
                    "matching='data': the model's convolution or feature map is trained already, and data matching "
                    "would ignore that; leave out matching and batches."
                )
            found = match_data(query, key, **call.where, scale=call.scale, rows=ROWS)
            self.logs = tuple(before + new.log().sum(0) for before, new in zip(self.logs, found, strict=True))
            self.samples += len(query)

    def give(self, attention: ModelAttention) -> None:
        """Put it where the module keeps it."""
        if isinstance(self.moments, float):
            raise ValueError(
                "batches: the model did not call one of its attention modules on these inputs; give inputs that reach "
                "all parts of the model."
            )
        if attention.statistics == "running":
            attention.pending.copy_(self.moments)
            attention.running_count.zero_()  # what is brought in first replaces what was there
            attention.commit()
        if self.data and attention.stored:
            attention.set_coefficients(*(torch.as_tensor(log / self.samples).exp() for log in self.logs))


def measure(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], data: bool, plan: Plan) -> dict[str, Seen]:
    """Run the model with softmax attention, and return what each module that is converted saw, by its name."""
    seen = {name: Seen(data) for name, _ in attention_modules(model) if name not in plan.kept}
    count = 0
    with show_softmax(model, lambda call: seen[call.layer].look(call), plan) as run:
        for batch in batches:
            run(batch)
            count += 1
    if not count:
        raise ValueError(NO_BATCHES)
    return seen
