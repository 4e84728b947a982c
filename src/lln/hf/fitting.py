"""What LLN attention in the place of softmax can be given without gradients, in seconds: the start of a conversion.

The model runs with softmax attention, and each layer's LLN attention is asked for the same outputs on the same inputs:

1. Directions of the evidence read's channels are the centres of the queries that the head has (k-means). A channel
   along a query is exact for that query, so channels along typical queries are nearly so for most.
2. alpha and beta, or beta, or the directions are multiplied by the one of a few factors that comes nearest.
3. The mix of the linear part and the blocks is the one that comes nearest, by least squares; with mix="evidence", the
   offset of each head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.checks import Inputs, check_call, check_inputs
from lln.hf.attach import ModelAttention
from lln.hf.find import Model, find_model
from lln.hf.layers import check_runs, find_running
from lln.hf.options import LLN
from lln.hf.watch import SoftmaxCall, check_batches, check_pattern, show_softmax
from lln.kernels.evidence_mix import attend_apart
from lln.nn.value_convolution import add_near, take_near

FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
OFFSETS = tuple(i / 4 for i in range(-12, 21))  # of mix="evidence", which are tried
ROWS = 8192  # of a key head's queries that centres are found among
ROUNDS = 15  # of k-means
RIDGE = 1e-4  # of the least squares, beside the size of what is weighed: parts that are alike share the weight


def fit(
    model: Model,
    batches: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """Bring each layer of a converted model near to its softmax attention without gradients: find the directions of the
    evidence read, the size of alpha and beta, and the mix of LLN and blocks. `lln.hf.distill` can train them further.

    Args:
        model: a model that runs "lln" or "lln_diag", from `lln.hf.convert`; changed in place. The values that it keeps
            among its weights are found: learned directions, alpha and beta that are kept or learned, a learned mix.
        batches: inputs of the model, each a dict of arguments; padding does not count. A few passages are enough.
        seed: seed of the search for centres.
        progress: a function that is called with the number of batches done and of all batches.

    Returns:
        The model. Only what its attention keeps in `.lln` has changed.

    Raises:
        ValueError or TypeError: the message names the argument.

    Example:
        >>> import torch, transformers, lln.hf
        >>> _ = torch.manual_seed(0)
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.BertModel(transformers.BertConfig(**shape, initializer_range=1.0))
        >>> batches = [{"input_ids": torch.randint(9, (2, 32))} for _ in range(3)]
        >>> _ = lln.hf.convert(model, "lln_diag", block_size=8, read="evidence", directions=16, mix="scales")
        >>> model = lln.hf.fit(model, batches)
        >>> model.encoder.layer[0].attention.self.lln.lln_scale.unique().numel() > 1
        True
    """
    body = find_model(model)
    check_runs("fit", body, LLN)
    check_batches(batches)
    fits = {name: Fit(attention, seed) for name, attention in find_running(body).items() if is_open(attention)}
    if not fits:
        raise ValueError(
            "fit: the model's attention has no values that fit could find; first call lln.hf.convert(model, "
            "read='evidence', directions=..., mix='scales'), or convert with matching='data' or learnable='head'."
        )
    directed = any(one.directed for one in fits.values())
    total, done = len(batches) * (1 + directed), 0
    for look in (Fit.gather, Fit.compare)[not directed :]:

        def show(call: SoftmaxCall, look: Callable[[Fit, SoftmaxCall], None] = look) -> None:
            if call.layer in fits:
                look(fits[call.layer], call)

        with show_softmax(body, show) as run:
            for batch in batches:
                run(batch)
                done += 1
                progress(done, total)
        for name, one in fits.items():
            one.end(look, name)
    return model


def is_open(attention: Any) -> bool:
    """Whether it keeps anything among the weights that a fit finds."""
    if not isinstance(attention, ModelAttention):
        return False
    mixes = attention.block_size is not None and isinstance(attention.mix, str)
    return bool(attention.stored) or isinstance(attention.directions, int) or mixes


class Fit:
    """What is found for one attention module."""

    def __init__(self, attention: ModelAttention, seed: int) -> None:
        self.attention, self.seed = attention, seed
        self.directed = isinstance(attention.directions, int)
        self.scales = self.directed or bool(attention.stored)
        self.queries: list[Tensor] = []  # [key heads, rows, D] each
        # [factors, 6, H, E]: o o, o b, b b, o y, b y, y y over all rows; mix="evidence": errors [factors, offsets, H]
        self.sums: Tensor | float = 0.0
        if attention.has_moved():
            raise ValueError(
                "fit: the model's convolution or feature map is trained already, and fit would ignore that; call fit "
                "before lln.hf.distill."
            )

    def gather(self, call: SoftmaxCall) -> None:
        """The queries as softmax has them, scale included."""
        if not self.directed:
            return
        heads, dim = call.key.shape[1], call.query.shape[-1]
        scale = dim**-0.5 if call.scale is None else call.scale
        rows = call.query.transpose(1, 2)  # [B, N, H, D]
        mask = call.where["query_mask"]
        rows = rows.flatten(0, 1) if mask is None else rows[mask]
        found = (scale * rows.float()).unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        # All of a sequence counts, so that a few batches of long ones do not fill the memory with their beginnings.
        self.queries.append(found[:, :: max(1, found.shape[1] // ROWS)])

    def compare(self, call: SoftmaxCall) -> None:
        """Add up what the best mix follows from, for every factor."""
        check_pattern(call)
        attention, where = self.attention, call.where
        inputs = check_inputs(call.query, call.key, call.value, key_mask=where["key_mask"], cu_seqlens=None)
        alpha, beta = attention.coefficients(call.query, call.key, **where)
        mask, wanted = where["query_mask"], call.out.transpose(1, 2).double()  # [B, H, N, E]
        if attention.value_convolution is not None:  # what it adds is not asked of the rest
            here = {"is_causal": where["is_causal"], "key_mask": where["key_mask"], "cu_seqlens": None}
            wanted = add_near(wanted, -take_near(call.value, attention.value_taps, attention.patches, **here))
        if attention.mix == "evidence":
            self.sums = self.sums + torch.stack([
                self.measure_offsets(inputs, beta, factor, where, wanted) for factor in self.list_factors()
            ])  # fmt: skip
            return
        blocks = torch.zeros_like(wanted)
        if attention.block_size is not None:
            blocks = self.attend(inputs, alpha, beta, where, mix=(0.0, 1.0)).double()
        found = []
        for factor in self.list_factors():
            given: dict[str, Any] = {} if attention.block_size is None else {"mix": (1.0, 0.0)}
            if self.directed:
                given["directions"] = factor * attention.channel_directions
                linear = self.attend(inputs, alpha, beta, where, **given).double()
            else:
                scaled = None if alpha is None else factor * alpha
                linear = self.attend(inputs, scaled, factor * beta, where, **given).double()
            pairs = (linear, linear), (linear, blocks), (blocks, blocks), (linear, wanted), (blocks, wanted)
            products = [a * b for a, b in (*pairs, (wanted, wanted))]
            if mask is not None:
                products = [t * mask[:, None, :, None] for t in products]
            found.append(torch.stack([t.sum((0, 2)) for t in products]))
        self.sums = self.sums + torch.stack(found)

    def list_factors(self) -> tuple[float, ...]:
        return FACTORS if self.scales else (1.0,)

    def measure_offsets(
        self, inputs: Inputs, beta: Tensor, factor: float, where: dict[str, Any], wanted: Tensor
    ) -> Tensor:
        """[offsets, H]: |w far + (1 - w) near - y|^2 with each offset, over all rows."""
        attention, read = self.attention, self.attention.read_options()
        if self.directed:
            read["directions"] = factor * attention.channel_directions
        else:
            beta = factor * beta
        parts, _ = attend_apart(check_call(
            inputs, alpha=None, beta=beta, is_causal=where["is_causal"], block_size=attention.block_size,
            mix="evidence", overlap=attention.overlap, **read,
        ))  # fmt: skip
        far, near, advantage = (t.flatten(1, 2).double() for t in parts)
        apart, missing = far - near, wanted - near
        square, product, rest = ((a * b).sum(-1) for a, b in ((apart, apart), (apart, missing), (missing, missing)))
        mask = 1.0 if where["query_mask"] is None else where["query_mask"][:, None]
        found = []
        for offset in OFFSETS:
            weight = torch.sigmoid(advantage.squeeze(-1) + offset)
            found.append((mask * (weight * weight * square - 2 * weight * product + rest)).sum((0, 2)))
        return torch.stack(found)

    def attend(self, inputs: Inputs, alpha: Any, beta: Tensor, where: dict[str, Any], **given: Any) -> Tensor:
        out: Tensor = self.attention.run_op(inputs, alpha, beta, is_causal=where["is_causal"], **given)
        return out

    def end(self, look: Callable[..., Any], name: str) -> None:
        """Keep what a round of all batches has shown."""
        if look is Fit.gather:
            self.keep_directions(name)
        elif isinstance(self.sums, float):
            raise ValueError(
                f"batches: the model did not call {name} on these inputs; give inputs that reach all parts of the "
                "model."
            )
        else:
            self.keep_best(self.sums)

    @torch.no_grad()
    def keep_directions(self, name: str) -> None:
        if not self.directed:
            return
        directions = self.attention.channel_directions
        count = directions.shape[1]
        rows = torch.cat(self.queries, 1) if self.queries else directions.new_zeros(len(directions), 0, 1)
        self.queries.clear()
        if rows.shape[1] < count:
            raise ValueError(
                f"batches: {name} saw {rows.shape[1]} queries for each key head, which is too few to find {count} "
                "directions; give more or longer batches."
            )
        generator = torch.Generator().manual_seed(self.seed)
        some = torch.randperm(rows.shape[1], generator=generator)[:ROWS].to(rows.device)
        directions.copy_(find_centres(rows[:, some], count))

    @torch.no_grad()
    def keep_best(self, sums: Tensor) -> None:
        attention, kind = self.attention, self.attention.mix if self.attention.block_size is not None else None
        if kind == "evidence":
            least, at = sums.min(1)  # [factors, H]
            error = least / least.amin(0).clamp_min(1e-300)  # each head counts alike
            r = p = torch.tensor(OFFSETS, dtype=torch.float64, device=sums.device)[at].unsqueeze(-1)
        else:
            r, p = best_mix(sums, kind)
            error = mix_error(sums, r, p) / sums[:, 5].sum(-1).clamp_min(1e-300)  # [factors, H]
        key_heads = attention.num_key_heads
        best = error.unflatten(1, (key_heads, -1)).sum(-1).argmin(0)  # one factor for the heads that share keys
        factor = torch.tensor(self.list_factors(), dtype=torch.float64, device=sums.device)[best]
        group = attention.num_heads // key_heads
        if self.directed:
            attention.channel_directions.mul_(factor[:, None, None].to(attention.channel_directions))
        elif self.scales:
            pairs = [(held.exp() if attention.learns else held).double() for held in attention.stored]
            factors = [factor] if len(pairs) == 1 else [factor.repeat_interleave(group), factor]
            scaled = [held * each[:, None] for held, each in zip(pairs, factors, strict=True)]
            attention.set_coefficients(scaled[0], scaled[-1])
        head = torch.arange(attention.num_heads, device=sums.device)
        r, p = (t[best.repeat_interleave(group), head] for t in (r, p))  # [H, E]
        if kind == "evidence":
            attention.evidence_offset.copy_(r[:, 0])
        elif kind == "ratio":
            attention.mix_logit.copy_(r[:, 0].logit(1e-3))
        elif kind == "scales":
            attention.lln_scale.copy_(r)
            attention.block_scale.copy_(p)


def best_mix(sums: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """(r, p) [factors, H, E] that make r o + p b nearest to y: of each channel with "scales", of each head with
    r + p = 1 with "ratio"; else what is given. kind: the mix, or None without blocks."""
    oo, ob, bb, oy, by, _ = sums.unbind(1)
    if kind == "scales":
        ridge = RIDGE * (oo + bb)
        a, d = oo + ridge, bb + ridge
        # Towards the average of the two, so that a channel that is 0 everywhere has it.
        first, second = oy + 0.5 * ridge, by + 0.5 * ridge
        size = (a * d - ob * ob).clamp_min(1e-300)
        r, p = (d * first - ob * second) / size, (a * second - ob * first) / size
        known = (oo + bb) > 0
        return torch.where(known, r, 0.5), torch.where(known, p, 0.5)
    if kind == "ratio":
        apart, towards = ((oo - 2 * ob + bb).sum(-1), (oy - ob - by + bb).sum(-1))
        r = (towards / apart.clamp_min(1e-300)).clamp(0.001, 0.999).unsqueeze(-1).expand(oo.shape)
        return r, 1 - r
    r = torch.full_like(oo, 1.0 if kind is None else kind)
    return r, 1 - r


def mix_error(sums: Tensor, r: Tensor, p: Tensor) -> Tensor:
    """|r o + p b - y|^2 [factors, H]"""
    oo, ob, bb, oy, by, yy = sums.unbind(1)
    return (r * r * oo + 2 * r * p * ob + p * p * bb - 2 * r * oy - 2 * p * by + yy).sum(-1)


def find_centres(rows: Tensor, count: int) -> Tensor:
    """[H, count, D]: k-means of rows [H, n, D] in an order of chance, from the first of them. A centre that has lost
    all its rows stays where it is."""
    centres = rows[:, :count].clone()
    for _ in range(ROUNDS):
        nearest = torch.cdist(rows, centres).argmin(-1)  # [H, n]
        index = nearest.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
        sums = torch.zeros_like(centres).scatter_add_(1, index, rows)
        counts = torch.zeros_like(centres[..., 0]).scatter_add_(1, nearest, torch.ones_like(nearest, dtype=rows.dtype))
        centres = torch.where((counts > 0).unsqueeze(-1), sums / counts.clamp_min(1).unsqueeze(-1), centres)
    return centres
