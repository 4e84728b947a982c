"""From the options of `lln bench` to what will be measured. A wrong option is answered by its name."""

import dataclasses
import importlib.util
import re

import torch

from lln.lab.bench.attentions import ATTENTIONS, Shape
from lln.lab.core.errors import WrongOption
from lln.lab.core.limits import LONGEST, WIDEST

LENGTHS = {"cpu": [2**i for i in range(9, 13)], "cuda": [2**i for i in range(9, 17)]}
QUICK_LENGTHS = {"cpu": [256, 512, 1024], "cuda": [1024, 4096]}
REPEATS, QUICK_REPEATS = {"cpu": 5, "cuda": 50}, {"cpu": 2, "cuda": 10}
PEERS = {"fla": "flash-linear-attention"}  # module and what pip calls it
# Beside a peer, what it is judged by: a run with a peer is a run of its own.
BESIDE_PEERS = "flash", "cudnn", "LLN", "LLN+Diag"


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    shapes: list[Shape]
    attentions: list[str]  # names of ATTENTIONS
    causal: list[bool]
    dtype: torch.dtype
    device: torch.device
    repeats: int
    seed: int
    tokens: int | None = None  # a batch, where the batch follows from the length
    dropout: float = 0.0  # in what is timed; what is checked has none

    def choose(self, causal: bool) -> list[str]:
        return [name for name in self.attentions if causal in ATTENTIONS[name].causality]

    def steps(self) -> int:
        """How often `measure` reports progress."""
        turns = 1 if self.device.type == "cpu" else 0
        return 2 + len(self.shapes) * sum(
            len(self.choose(causal)) + turns for causal in self.causal if self.choose(causal)
        )


def parse_shapes(text: str) -> list[Shape]:
    shapes = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[1-9]\d*(x[1-9]\d*){3}\s*", part):
            raise WrongOption(
                "--shapes", f"must be batch x heads x length x dim, like 16x12x4096x64,1x12x16384x64; got {part!r}"
            )
        shapes.append(shape := Shape(*map(int, part.split("x"))))
        if max(shape) > LONGEST or shape[-1] > WIDEST:
            raise WrongOption("--shapes", f"must be at most {LONGEST:,} long and {WIDEST:,} wide; got {part!r}")
    return list(dict.fromkeys(shapes))


def choose_attentions(
    only: str | None, peers: str | None, causality: list[bool], device: torch.device, drops: bool = False
) -> list[str]:
    """The names of the attentions to measure."""
    if peers is not None:
        if peers not in PEERS:
            raise WrongOption("--peers", f"must be {' or '.join(PEERS)}; got {peers!r}")
        if device.type != "cuda":
            raise WrongOption(
                "--peers", f"{peers} runs on CUDA devices only, and this run is on {device}; leave it out"
            )
        if importlib.util.find_spec(peers) is None:
            raise WrongOption("--peers", f"{peers} is not installed; install it with: pip install {PEERS[peers]}")
    here = [
        name
        for name, attention in ATTENTIONS.items()
        if device.type in attention.devices and attention.peer in (None, peers)
    ]
    names = [name for name in here if peers is None or name in BESIDE_PEERS or ATTENTIONS[name].peer == peers]
    if only is not None:
        by_lower = {name.lower(): name for name in here}
        wanted = [part.strip().lower() for part in only.split(",")]
        if unknown := [part for part in wanted if part not in by_lower]:
            raise WrongOption("--attentions", f"{unknown[0]!r} is not among those that run here: {', '.join(here)}")
        names = [name for name in here if name.lower() in wanted]
    if drops:
        if only is not None and (without := [name for name in names if not ATTENTIONS[name].drops]):
            raise WrongOption("--dropout", f"{without[0]} has none; leave one of them out")
        names = [name for name in names if ATTENTIONS[name].drops]
    if not any(causal in ATTENTIONS[name].causality for name in names for causal in causality):
        raise WrongOption("--causal", f"nothing is left to measure: {', '.join(names)} cannot do that")
    return names


def make_plan(
    *,
    device: torch.device,
    seed: int = 0,
    lengths: list[int] | None = None,
    heads: int | None = None,
    dim: int | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    shapes: str | None = None,
    dtype: str | None = None,
    causal: str | None = None,
    only: str | None = None,
    peers: str | None = None,
    repeats: int | None = None,
    dropout: float = 0.0,
    quick: bool = False,
) -> BenchPlan:
    if device.type not in REPEATS:
        raise WrongOption("--device", f"times are taken on cpu and cuda; got {str(device)!r}")
    if shapes is not None:
        replaced = {"lengths": lengths, "heads": heads, "dim": dim, "batch": batch, "tokens": tokens}
        if given := [name for name, value in replaced.items() if value is not None]:
            raise WrongOption("--shapes", f"names whole shapes, so leave out --{given[0]}")
        chosen = parse_shapes(shapes)
    elif batch is not None and tokens is not None:
        raise WrongOption("--tokens", "already sets the batch at each length; leave out --batch or --tokens")
    else:
        usual = (QUICK_LENGTHS if quick else LENGTHS)[device.type]
        batches = {n: max(1, tokens // n) if tokens else batch or 1 for n in lengths or usual}
        chosen = [Shape(size, heads or 12, n, dim or 64) for n, size in batches.items()]
    causality = {"no": [False], "yes": [True], "both": [False, True]}[causal or ("yes" if peers else "both")]
    return BenchPlan(
        shapes=chosen,
        attentions=choose_attentions(only, peers, causality, device, dropout > 0),
        causal=causality,
        dtype=getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32")),
        device=device,
        repeats=repeats or (QUICK_REPEATS if quick else REPEATS)[device.type],
        seed=seed,
        tokens=tokens,
        dropout=dropout,
    )
