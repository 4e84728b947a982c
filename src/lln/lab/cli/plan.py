"""`lln plan` on the command line."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli.shared import AsJson, Count
from lln.lab.core.limits import LONGEST_SPREAD

HEAD = ("memory of a card", "sent, layer and card", "attention, s", "moving, s", "step, s", "longest that fits, tokens")


def plan(
    model: Annotated[str, typer.Argument()] = "bert-base",
    length: Annotated[int, typer.Option(min=1, max=LONGEST_SPREAD)] = 1048576,
    cards: Count = 8,
    card: str = "h200",
    memory: float = 0.0,
    link: float = 0.0,
    network: float = 50.0,
    node: Count = 8,
    batch: Count = 1,
    block_size: Count = 128,
    inference: bool = False,
    keep_activations: bool = False,
    replicate: bool = False,
    pieces: Annotated[Path | None, typer.Option()] = None,
    as_json: AsJson = False,
) -> None:
    """Plan one long sequence over several cards, on paper: memory a card, bytes moved a layer, time a step, and the
    longest that fits, for softmax with ring attention, LLN and LLN+Diag.

    Args:
        model: bert-base, bert-large, llama-1b, llama-8b; or a folder or Hub id with a transformers config.
        length: Tokens of the sequence, over all cards.
        cards: How many there are.
        card: a100, h100, h200 or rtx4090.
        memory: Gigabytes of a card. [default: the card's]
        link: Gigabytes a second between cards of one machine, one way. [default: the card's]
        network: Gigabytes a second and card between machines, one way.
        node: Cards in a machine.
        batch: Sequences at once.
        block_size: Of LLN+Diag.
        inference: No gradients.
        keep_activations: Keep what the backward needs instead of computing it again.
        replicate: Whole weights on every card instead of sharded ones (FSDP).
        pieces: A bench.json of lln bench: LLN attention takes the times that were measured. [default: times on paper]

    Example: [bold]lln plan llama-8b --length 67108864 --cards 64[/bold] for 64 cards of a million tokens each.
    """
    import dataclasses

    from lln.lab.bench.card_times import read_pieces
    from lln.lab.bench.cluster import CARDS, NAMES, Cluster, Job, plan_cluster

    if card not in CARDS:
        raise typer.BadParameter(f"must be one of {', '.join(CARDS)}; got {card!r}.", param_hint="--card")
    kind = CARDS[card]
    changed = {name: 1e9 * given for name, given in (("memory", memory), ("link", link)) if given}
    if any(value < 0 for value in changed.values()) or network <= 0:
        raise typer.BadParameter("must be positive.", param_hint="--memory, --link, --network")
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
    print_wide(terminal_table(("", *HEAD), rows, "lrrrrrr", title=title), "")
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
    from lln.lab.core.errors import Refused

    if name in SHAPES:
        return SHAPES[name]
    need("hf")
    import transformers

    try:
        return Shape.read(transformers.AutoConfig.from_pretrained(name))
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(
            f"{name!r} is neither of {', '.join(SHAPES)} nor a model with a config of the usual names: {error}"
        ) from None
