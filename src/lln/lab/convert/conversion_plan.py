"""How a checkpoint is to be converted, and which wishes do not go together."""

import dataclasses
from typing import Any

from lln.checks import MATCHINGS, READS
from lln.hf.distillation import FINE_RATE, HIDDEN, LOGITS
from lln.hf.options import LLN
from lln.values import check_choice, check_count, check_positive


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """How a checkpoint is converted. What is not said here is in `lln.hf.convert`, `distill` and `fine_tune`."""

    attention: str = "lln_diag"
    layers: str | None = None  # that are converted: "full_attention", "0,2,5" or a slice "4:"; None: all
    read: str = "evidence"
    directions: int | None = None  # channels of the evidence read; None: four times the head dim
    matching: str = "data"  # of the paper's read
    match_only: bool = False  # alpha and beta of the paper's read, and nothing else
    block_size: int = 64  # of texts
    tile: int = 8  # of pictures, in its place
    distill: int = 360  # steps
    fine_tune: int = 0  # steps
    fine_tune_on: str | None = None  # "hidden" states or "logits"; None: the logits of causal language models
    coefficients: str = (
        "channel"  # what distillation learns of the paper's alpha and beta: one each a head or a channel
    )
    mix: str | None = None  # None: "evidence" of causal models with that read, else "scales", which costs less
    overlap: bool | None = None  # windows that overlap in place of blocks; None: of causal models with that mix
    feature_map: str | None = "linear"
    length: int | None = None  # tokens of a passage at most; None: what texts and model have
    image_size: int | None = None  # pixels of a picture's side; None: what the image processor makes
    batch_size: int = 4  # passages or pictures a step
    rate: float = 0.01
    fine_rate: float = FINE_RATE
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, *LLN)
        self.name_layers()
        check_choice("read", self.read, *READS)
        for name in ("directions", "length", "image_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("matching", self.matching, *MATCHINGS, "data")
        check_choice("coefficients", self.coefficients, "head", "channel")
        check_choice("mix", self.mix, None, "ratio", "scales", "evidence")
        check_choice("overlap", self.overlap, None, False, True)
        if self.mix == "evidence" and (self.read != "evidence" or self.match_only):
            raise ValueError("mix='evidence' goes with read='evidence', and without match_only.")
        check_choice("feature_map", self.feature_map, None, "linear")
        check_choice("fine_tune_on", self.fine_tune_on, None, HIDDEN, LOGITS)
        for name in ("distill", "fine_tune", "seed"):
            check_count(name, getattr(self, name), least=0)
        for name in ("block_size", "tile", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("rate", "fine_rate"):
            check_positive(name, getattr(self, name))
        if self.distill and self.matching != "data" and not self.match_only and self.read == "paper":
            raise ValueError(
                f"distill starts from numbers that do not change with the input, so it goes with matching='data'; got "
                f"{self.matching!r}."
            )
        if self.read == "evidence" and not self.match_only:
            for name, usual in (("matching", "data"), ("coefficients", "channel")):
                if getattr(self, name) != usual:
                    raise ValueError(f"{name}={getattr(self, name)!r} goes with read='paper' or match_only.")
        if self.read == "paper" and self.directions is not None:
            raise ValueError(f"directions go with read='evidence'; got directions={self.directions} and read='paper'.")

    @property
    def shortest(self) -> int:
        """Tokens of a passage at least: within one block LLN+Diag is softmax, and nothing else could be learned."""
        return 2 * self.block_size if self.attention == "lln_diag" else 16

    def name_layers(self) -> dict[str, Any]:
        """Of `lln.hf.convert`: which layers are converted, where some are not."""
        if self.layers is None:
            return {}
        if self.layers.isidentifier():  # the name of a kind of layers
            return {"layers": self.layers}
        try:
            if ":" in self.layers:
                return {"layers": slice(*(int(part) if part.strip() else None for part in self.layers.split(":")))}
            return {"layers": [int(part) for part in self.layers.split(",")]}
        except (ValueError, TypeError):
            raise ValueError(
                f"layers must be full_attention, indices such as 0,2,5 or a slice such as 4:; got {self.layers!r}."
            ) from None

    def choose_mix(self, causal: bool) -> str:
        return self.mix or ("evidence" if causal and self.read == "evidence" and not self.match_only else "scales")

    def choose_goal(self, causal: bool) -> str:
        """Of `lln.hf.fine_tune`: what is to be as it was."""
        return self.fine_tune_on or (LOGITS if causal else HIDDEN)

    def lay_blocks(self, size: dict[str, int], causal: bool) -> dict[str, Any]:
        """How softmax attention is laid out, for `lln.hf.convert`. size: of the blocks, block_size or tile."""
        overlap = self.overlap
        if overlap is None:  # without it the first token of a block sees nothing but itself nearby
            overlap = causal and self.choose_mix(causal) == "evidence"
        return {**size, "overlap": True} if overlap else dict(size)

    def options(self, head_dim: int, size: dict[str, Any], causal: bool) -> dict[str, Any]:
        """Of `lln.hf.convert`. size: as `lay_blocks` gives it."""
        found: dict[str, Any] = {"implementation": self.attention, **self.name_layers()}
        blocks = self.attention == "lln_diag"
        found |= size if blocks else {}
        if self.match_only:
            found["matching"] = self.matching
            if self.matching != "data":
                found["statistics"] = {"encoder": "sample", "decoder": "running"}
            return found
        found |= {"mix": self.choose_mix(causal)} if blocks else {}
        found |= {"feature_map": self.feature_map} if self.distill and self.feature_map is not None else {}
        if self.read == "evidence":
            return found | {"read": "evidence", "directions": self.directions or 4 * head_dim}
        return found | {"matching": "data"} | ({"learnable": self.coefficients} if self.distill else {})
