"""`lln plan` on the command line."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli.shared import AsJson, Count
from lln.lab.core.limits import FASTEST, LONGEST_SPREAD

Length = Annotated[int, typer.Option(min=1, max=LONGEST_SPREAD)]
Gigabytes = Annotated[float, typer.Option(min=0.001, max=FASTEST)]
GigabytesOrNone = Annotated[float | None, typer.Option(min=0.001, max=FASTEST)]

HEAD = ("memory of a card", "sent, layer and card", "attention, s", "moving, s", "step, s", "longest that fits, tokens")


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "bert-base",
    length: Length = 1048576,
    cards: Count = 8,
    card: str = "h200",
    memory: GigabytesOrNone = None,
    link: GigabytesOrNone = None,
    network: Gigabytes = 50.0,
    node: Count = 8,
    batch: Count = 1,
    block_size: Count = 128,
    inference: bool = False,
    keep_activations: bool = False,
    replicate: bool = False,
    pieces: Annotated[Path | None, typer.Option()] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what one long sequence takes on several cards, without running anything: memory of a card, bytes that
    are moved in a layer, time of a step, and the longest sequence that fits. The estimate is for softmax with ring
    attention, for LLN and for LLN+Diag.

    Args:
        model: bert-base, bert-large, llama-1b or llama-8b; or a folder or Hub id with a transformers config.
        length: Number of tokens in the sequence, over all cards together.
        cards: Number of cards.
        card: Which card: a100, h100, h200 or rtx4090.
        memory: Gigabytes of memory of a card. [default: the card's]
        link: Gigabytes a second that a card sends to the others of its machine. [default: the card's]
        network: Gigabytes a second that a card sends to other machines.
        node: Number of cards in a machine.
        batch: Number of sequences that are computed at once.
        block_size: Number of tokens in a block of LLN+Diag.
        inference: Plan for inference, without gradients. Otherwise the plan is for training.
        keep_activations: Keep what the backward pass needs, which takes more memory, instead of computing it again.
        replicate: Keep all weights on every card instead of spreading them over the cards (FSDP).
        pieces: A bench.json that `lln bench` wrote. LLN attention then takes the times that were measured there.
            [default: times that are calculated from the card's data]

    Examples:
        lln plan --length 262144 --cards 2  # BERT-base, 131,072 tokens on each of two H200
        lln plan llama-8b --length 67108864 --cards 64  # 64 cards with a million tokens each
    """
    import dataclasses

    from lln.lab.bench.card_times import read_pieces
    from lln.lab.bench.cluster import CARDS, NAMES, Cluster, Job, plan_cluster

    if card not in CARDS:
        raise typer.BadParameter(f"must be one of {', '.join(CARDS)}; got {card!r}.", param_hint="--card")
    kind = CARDS[card]
    changed = {name: 1e9 * given for name, given in (("memory", memory), ("link", link)) if given is not None}
    cluster = Cluster(dataclasses.replace(kind, **changed), cards, node, 1e9 * network)
    job = Job(
        length, batch, block_size, training=not inference, checkpointing=not keep_activations, sharded=not replicate
    )
    shape = find_shape(model)
    found = plan_cluster(shape, job, cluster, read_pieces(pieces, shape.causal) if pieces else None)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return

    from lln.lab.core.tables import print_wide, terminal_table

    rows = [(NAMES[each["attention"]], *show_row(each)) for each in found["attentions"]]
    what = "inference" if inference else "training"
    title = (
        f"{model}, {what} on {length:,} tokens over {cards} x {card} ({found['parameters'] / 1e6:,.0f} M parameters)"
    )
    print_wide(terminal_table(("attention", *HEAD), rows, "lrrrrrr", title=title), "")
    typer.echo("Assumed: " + "; ".join(found["assumptions"]) + ".")


def show_row(each: dict[str, Any]) -> list[str]:
    """What is estimated for one attention, under `HEAD`."""
    seconds = (each[f"{name}_seconds"] for name in ("attention", "moving", "step"))
    return [
        f"{each['memory'] / 1e9:,.1f} GB{'' if each['fits'] else ', too much'}",
        f"{each['sent'] / 1e6:,.1f} MB" if each["sent"] < 1e9 else f"{each['sent'] / 1e9:,.1f} GB",
        *(f"{time:,.3f}" if time < 10 else f"{time:,.0f}" for time in seconds),
        f"{each['longest'] / 1e6:,.1f} M",
    ]


def find_shape(name: str) -> Any:
    """One of those that are known, or that of a transformers config."""
    from lln.lab.bench.cluster import SHAPES, Shape
    from lln.lab.cli.shared import need
    from lln.lab.core.errors import Refused, first_line
    from lln.lab.core.pretrained import is_here

    if name in SHAPES:
        return SHAPES[name]
    need("hf")
    import transformers

    try:
        here = is_here(name)  # or transformers asks for half a minute where there is no network
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=here, trust_remote_code=False)
        return Shape.read(config)
    except Exception as error:  # whatever is wrong with a file, transformers has an exception of its own for it
        raise Refused(
            f"{name!r} is neither of {', '.join(SHAPES)} nor a model with a config of the usual names: "
            f"{first_line(error)}"
        ) from error
