"""On paper: what one long sequence over several cards takes, in memory, bytes moved and time, by each attention.

Bytes that LLN attention sends are exact, see `count_sent`; all else is an estimate whose assumptions are `ASSUMPTIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lln.distributed import split_evenly
from lln.distributed.borders import find_block_reach, find_pieces, list_shares
from lln.lab.bench.card_times import Piece, check_pieces, tell_pieces
from lln.values import check_count, check_listed, check_positive

ATTENTIONS = ("softmax", "lln", "lln_diag")
NAMES = {"softmax": "softmax, ring attention", "lln": "LLN", "lln_diag": "LLN+Diag"}
ASSUMPTIONS = (
    "matrix products run at {efficiency:.0%} of the card's peak, memory and links at {efficiency:.0%} of theirs",
    "linear layers take 2 operations a weight and token forward and 4 backward; the loss is computed in pieces",
    "softmax takes 4 H N^2 D operations forward, half of it where causal, and 2.5 times that backward",
    "LLN attention takes 4 H N D^2 operations forward and 10 backward, or the time of reading and writing its rows",
    "ring attention passes all keys and values on R - 1 times forward, and with their gradients backward, while it "
    "computes; states are sent while nothing else is done; what is computed again is sent again",
    "weights, gradients and AdamW take 16 bytes a parameter, 2 for inference; numbers kept for the backward are "
    "{kept:.3g} a token, channel and layer, and {working:.3g} of the layer that is computed now",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A transformer, as far as it matters here."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    gated: bool = False  # three matrices in the feed-forward part
    causal: bool = False
    tied: bool = True  # the last matrix is that of the embeddings

    @property
    def linear_weights(self) -> int:
        """Of all layers, without embeddings."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.key_heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.width * self.inner)

    @property
    def activations(self) -> float:
        """Numbers a token, channel and layer that a layer's backward needs: of the feed-forward part what goes into and
        out of its activation, twice that where it is gated; keys and values; and the rest of attention, norms and
        dropout, of which those of a gated layer are in float32."""
        inner, keys = self.inner / self.width, self.key_heads / self.heads
        return (4 * inner + 10 if self.gated else 2 * inner + 8) + 2 * keys

    @property
    def parameters(self) -> int:
        return self.linear_weights + (1 if self.tied else 2) * self.vocabulary * self.width

    @classmethod
    def read(cls, config: Any) -> Shape:
        """Of a transformers config. ValueError for one without a size that is needed, and for sizes that are none."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config

        def read(name: str, otherwise: int | None = None) -> int:
            value = getattr(text, name, None)
            return check_count(name, otherwise if value is None else value)

        heads, width = read("num_attention_heads"), read("hidden_size")
        causal = any("Causal" in name or "LMHead" in name for name in getattr(config, "architectures", None) or ())
        return cls(
            layers=read("num_hidden_layers"), width=width, heads=heads, key_heads=read("num_key_value_heads", heads),
            head_dim=read("head_dim", width // heads), inner=read("intermediate_size", 4 * width),
            vocabulary=read("vocab_size"),
            gated=getattr(text, "hidden_act", "") == "silu", causal=causal,
            tied=bool(getattr(text, "tie_word_embeddings", True)),
        )  # fmt: skip


SHAPES = {
    "bert-base": Shape(12, 768, 12, 12, 64, 3072, 30522),
    "bert-large": Shape(24, 1024, 16, 16, 64, 4096, 30522),
    "llama-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, gated=True, causal=True),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, causal=True, tied=False),
}


@dataclasses.dataclass(frozen=True)
class Card:
    """By the maker's data sheet: bytes, operations a second in bfloat16, bytes a second of memory and of the links to
    other cards of its machine, one way."""

    memory: float
    operations: float
    bandwidth: float
    link: float


CARDS = {
    "a100": Card(80e9, 312e12, 2.0e12, 300e9),
    "h100": Card(80e9, 989e12, 3.35e12, 450e9),
    "h200": Card(141e9, 989e12, 4.8e12, 450e9),
    "rtx4090": Card(24e9, 165e12, 1.0e12, 25e9),
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Cards of one kind, so many in a machine."""

    card: Card
    cards: int
    node: int = 8  # cards in a machine
    network: float = 50e9  # bytes a second and card between machines, one way
    latency: float = 20e-6  # seconds a collective
    efficiency: float = 0.5

    @property
    def link(self) -> float:
        """Bytes a second of what all cards send each other: the slowest part of the way counts."""
        return self.card.link if self.cards <= self.node else min(self.card.link, self.network)


@dataclasses.dataclass(frozen=True)
class Job:
    """One sequence (or `batch` of them) over all cards."""

    length: int
    batch: int = 1
    block_size: int = 128
    training: bool = True
    checkpointing: bool = True
    sharded: bool = True  # FSDP: weights and moments over the cards
    itemsize: int = 2  # of queries, keys and values

    def count_kept(self, shape: Shape) -> float:
        """Numbers a token, channel and layer that are kept for the backward: all of them, or what goes into a layer."""
        return 0 if not self.training else 1 if self.checkpointing else shape.activations

    def count_working(self, shape: Shape) -> float:
        """Numbers a token and channel of the layer that is computed now: what its backward needs where that is computed
        again, and as many gradients."""
        return 8 if not self.training else (1 + self.checkpointing) * shape.activations


def count_state(heads: int, dim: int, value_dim: int, batch: int = 1, *, wide: bool = False) -> int:
    """Bytes of one state as it is sent: log_sum in float64, mean_value in float32, or float64 for float64 inputs.

    >>> count_state(heads=12, dim=64, value_dim=64)  # of BERT-base, whatever the length
    202752
    """
    return batch * heads * dim * (8 + (8 if wide else 4) * value_dim)


def count_sent(
    lengths: Sequence[int], rank: int, *, heads: int, dim: int, value_dim: int, batch: int = 1, itemsize: int = 2,
    is_causal: bool = False, block_size: int | None = None, backward: bool = False,
) -> int:  # fmt: skip
    """Bytes of states, keys and values that a rank sends in one layer, exactly, of sequences without a mask.

    heads: key heads. lengths: rows of every rank. Where these are not said beforehand and there are blocks, ranks also
    tell each other two numbers of 8 bytes forward.

    >>> even = dict(lengths=[4096] * 8, rank=0, heads=12, dim=64, value_dim=64)
    >>> count_sent(**even) == 7 * count_state(12, 64, 64)
    True
    >>> longer = even | {"lengths": [2**20] * 8, "block_size": 128}  # borders of whole blocks: nothing more is sent
    >>> count_sent(**longer) == count_sent(**even)
    True
    """
    ranks = range(len(lengths))
    state = count_state(heads, dim, value_dim, batch, wide=itemsize == 8)
    # Backward each rank sends back what it got, as gradients.
    pairs = [(to, rank) if backward else (rank, to) for to in ranks if to != rank]
    sent: int = state * sum(by < to or not is_causal for by, to in pairs)
    if block_size is None:
        return sent
    pieces = find_pieces(lengths, None)
    reaches = [find_block_reach(piece, block_size, is_causal, anywhere=False) for piece in pieces]
    shares = [share for by, to in pairs for share in list_shares(pieces[by], pieces[to], reaches[to])]
    rows: int = sum(share.stop - share.start for share in shares)
    return sent + rows * batch * heads * (dim + value_dim) * itemsize


def count_ring(shape: Shape, job: Job, cards: int) -> int:
    """Bytes of keys and values that a card sends in one layer of ring attention, forward and backward."""
    rows = -(-job.length // cards) * job.batch
    once = rows * shape.key_heads * 2 * shape.head_dim * job.itemsize
    forward, backward = list_ways(job)
    return (cards - 1) * once * (forward + 2 * backward)  # backward the gradients of both, too


def list_ways(job: Job) -> tuple[int, int]:
    """(how often a layer is computed forward, how often backward)"""
    return (2 if job.training and job.checkpointing else 1), int(job.training)


def count_layer(attention: str, shape: Shape, job: Job, cards: int) -> int:
    """Bytes that the card which sends most sends in one layer, forward and backward."""
    check_listed("attention", attention, ATTENTIONS)
    if attention == "softmax":
        return count_ring(shape, job, cards)
    lengths = split_evenly(job.length, cards, job.block_size)
    given: dict[str, Any] = {"heads": shape.key_heads, "dim": shape.head_dim, "value_dim": shape.head_dim}
    given |= {"batch": job.batch, "itemsize": job.itemsize, "is_causal": shape.causal}
    given["block_size"] = job.block_size if attention == "lln_diag" else None
    forward, backward = list_ways(job)

    def count(rank: int) -> int:
        ways = (count_sent(lengths, rank, **given, backward=way) for way in (False, True))
        return sum(times * sent for times, sent in zip((forward, backward), ways, strict=True))

    return max(count(rank) for rank in {0, cards - 1})


def count_memory(attention: str, shape: Shape, job: Job, cards: int) -> float:
    """Bytes on the fullest card."""
    rows = -(-job.length // cards) * job.batch
    weights = (16 if job.training else 2) * shape.parameters / (cards if job.sharded and job.training else 1)
    once = rows * shape.width * job.itemsize
    kept = job.count_kept(shape) * once * shape.layers
    working = job.count_working(shape) * once
    keys = rows * shape.key_heads * 2 * shape.head_dim * job.itemsize
    if attention == "softmax":
        # The keys and values that are used and those that arrive, and as many gradients.
        passed = keys * (4 if job.training else 2)
        if not job.training:
            passed += keys * shape.layers if shape.causal else 0  # kept for what is generated next
        return weights + kept + working + passed
    states = 2 * cards * count_state(shape.key_heads, shape.head_dim, shape.head_dim, job.batch)
    return weights + kept + working + states


def time_linear(shape: Shape, job: Job, cluster: Cluster) -> float:
    """Seconds of everything but attention."""
    rows = job.length * job.batch / cluster.cards
    passes = 1 if not job.training else 4 if job.checkpointing else 3
    return 2 * shape.linear_weights * rows * passes / (cluster.card.operations * cluster.efficiency)


def time_attention(
    attention: str, shape: Shape, job: Job, cluster: Cluster, pieces: Mapping[str, Piece] | None = None
) -> float:
    """Seconds of attention on a card, of all layers: as measured, where there is such a piece, or on paper."""
    if piece := (pieces or {}).get(attention):
        forward, backward = list_ways(job)
        once = forward * piece.forward + backward * piece.backward
        return shape.layers * shape.heads * job.length * job.batch / cluster.cards * once
    rows, half = job.length * job.batch / cluster.cards, 0.5 if shape.causal else 1.0
    passes = 1.0 if not job.training else 4.5 if job.checkpointing else 3.5  # backward is 2.5 times forward
    width = shape.heads * shape.head_dim
    products = {
        "softmax": 4 * width * job.length * half,
        "lln": 4 * width * shape.head_dim,
        "lln_diag": 4 * width * (shape.head_dim + job.block_size * half),
    }[attention]
    # Queries, keys, values and outputs, once each.
    moved = 2 * (shape.heads + shape.key_heads) * shape.head_dim * job.itemsize
    computing = products / (cluster.card.operations * cluster.efficiency)
    moving = moved / (cluster.card.bandwidth * cluster.efficiency)
    return shape.layers * rows * passes * max(computing, moving)


def estimate(
    attention: str, shape: Shape, job: Job, cluster: Cluster, pieces: Mapping[str, Piece] | None = None
) -> dict[str, Any]:
    """What a step takes with one attention: the columns of the page.

    >>> job, cluster = Job(length=2**20), Cluster(CARDS["h200"], cards=8)
    >>> ring, lln = (estimate(name, SHAPES["bert-base"], job, cluster) for name in ("softmax", "lln"))
    >>> ring["sent"] // lln["sent"]  # bytes a layer
    2647
    """
    sent = count_layer(attention, shape, job, cluster.cards)
    computing = time_attention(attention, shape, job, cluster, pieces)
    rounds = cluster.cards - 1 if attention == "softmax" else 1
    rounds *= shape.layers * sum(list_ways(job))
    moving = shape.layers * sent / (cluster.link * cluster.efficiency) + rounds * cluster.latency * (cluster.cards > 1)
    step = time_linear(shape, job, cluster)
    step += max(computing, moving) if attention == "softmax" else computing + moving
    memory = count_memory(attention, shape, job, cluster.cards)
    return {
        "attention": attention,
        "memory": memory,
        "fits": memory <= cluster.card.memory,
        "sent": sent,
        "attention_seconds": computing,
        "moving_seconds": moving,
        "step_seconds": step,
        "longest": find_longest(attention, shape, job, cluster),
    }


def find_longest(attention: str, shape: Shape, job: Job, cluster: Cluster) -> int:
    """The most tokens, in steps of 1,024 a card, that fit into the cards; 0 where the model alone does not."""
    unit = 1024 * cluster.cards

    def fits(units: int) -> bool:
        longer = dataclasses.replace(job, length=units * unit)
        return count_memory(attention, shape, longer, cluster.cards) <= cluster.card.memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def plan_cluster(shape: Shape, job: Job, cluster: Cluster, pieces: Mapping[str, Piece] | None = None) -> dict[str, Any]:
    """All three attentions, and what was assumed. pieces: what was measured on one card."""
    for name, count in (("length", job.length), ("batch", job.batch), ("cards", cluster.cards), ("node", cluster.node)):
        check_count(name, count)
    for name, number in (("network", cluster.network), ("efficiency", cluster.efficiency)):
        check_positive(name, number)
    measured = dict(pieces or {})
    check_pieces(measured, shape.head_dim)
    facts = {"efficiency": cluster.efficiency, "kept": job.count_kept(shape), "working": job.count_working(shape)}
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": shape.parameters,
        "job": dataclasses.asdict(job),
        "cluster": dataclasses.asdict(cluster),
        "attentions": [estimate(name, shape, job, cluster, measured) for name in ATTENTIONS],
        "assumptions": [*(text.format(**facts) for text in ASSUMPTIONS), *tell_pieces(measured)],
    }
