"""What attention took on one card, from a stored `lln bench`, for plans of many cards: `lln plan --pieces`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lln.lab.core.errors import Refused

KINDS = {"LLN": "lln", "LLN+Diag": "lln_diag"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Seconds of a token and head, where so many tokens lie on one card."""

    forward: float
    backward: float
    head_dim: int
    length: int
    source: str  # the device and the commit


def read_pieces(path: Path, causal: bool) -> dict[str, Piece]:
    """Of each attention the longest sequence that was measured. Softmax is not among them: its time grows with the
    length, which is another one in the plan."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings, made, rows = found["settings"], found["provenance"], found["rows"]
        shapes = {shape[2]: shape for shape in settings["shapes"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Refused(f"{path} is not the bench.json that `lln bench --out` stores: {error!r}") from None
    pieces: dict[str, Piece] = {}
    for row in sorted(rows, key=lambda one: int(one["length"])):
        name, times = KINDS.get(row["attention"]), row.get("device_ms") or {}
        if name is None or bool(row.get("causal", False)) != causal or not times.get("training"):
            continue
        batch, heads, length, dim = shapes[row["length"]]
        forward, both = (1e-3 * times[what]["median"] / (batch * heads * length) for what in ("forward", "training"))
        source = f"{made['device']}, commit {made['commit']}"
        pieces[name] = Piece(forward, both - forward, dim, length, source)
    if not pieces:
        which = "causal" if causal else "bidirectional"
        raise Refused(f"{path} has no {which} LLN or LLN+Diag with times of forward and of training.")
    return pieces


def check_pieces(pieces: dict[str, Piece], head_dim: int) -> None:
    other = {name: piece.head_dim for name, piece in pieces.items() if piece.head_dim != head_dim}
    if other:
        raise Refused(f"The pieces are of heads of {min(other.values())} channels, and the model's have {head_dim}.")


def tell_pieces(pieces: dict[str, Piece]) -> list[str]:
    """What is assumed of them, one a sentence."""
    names: dict[str, Any] = {ours: shown for shown, ours in KINDS.items()}
    return [
        f"{names[name]} takes a card {1e9 * piece.forward:.3f} ns a token and head forward and "
        f"{1e9 * piece.backward:.3f} backward, as measured at {piece.length:,} tokens ({piece.source})"
        for name, piece in pieces.items()
    ]
