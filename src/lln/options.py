"""The options of a module, checked when it is built rather than when it is first called."""

from __future__ import annotations

from typing import Literal

from lln.checks import check_block_size, check_number
from lln.functional import Coefficient, check_backend
from lln.matching.moments import MATCHINGS

Statistics = Literal["sample", "batch", "running", "fixed"]
STATISTICS = ("sample", "batch", "running", "fixed")


def check_numbers(dropout: float, momentum: float, length: int, scale: float | None, backend: str) -> None:
    for name, number in (("dropout", dropout), ("momentum", momentum)):
        if not 0.0 <= check_number(name, number) <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1; got {number}.")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be a positive int; got {length!r}.")
    if scale is not None and check_number("scale", scale) <= 0.0:
        raise ValueError(f"scale must be positive; got {scale}.")
    check_backend(backend)


def check_feature_map(feature_map: str | None, statistics: str) -> None:
    if feature_map not in (None, "linear"):
        raise ValueError(f"feature_map must be None or 'linear'; got {feature_map!r}.")
    if feature_map is not None and statistics != "fixed":
        raise ValueError(f"feature_map goes with statistics='fixed'; got statistics={statistics!r}.")


def check_convolution(convolution: int | None) -> None:
    if convolution is None:
        return
    if not isinstance(convolution, int) or isinstance(convolution, bool) or convolution < 3 or convolution % 2 == 0:
        raise ValueError(f"convolution must be an odd int of 3 or more, or None for none; got {convolution!r}.")


def check_overlap(overlap: bool, block_size: int | None) -> None:
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap must be True or False; got {overlap!r}.")
    if overlap and (block_size is None or block_size % 4):
        raise ValueError(f"overlap needs a block_size that is a multiple of 4; got block_size={block_size!r}.")


def check_options(
    num_heads: int,
    head_dim: int,
    num_key_heads: int | None,
    matching: str,
    statistics: str,
    alpha: Coefficient | None,
    beta: Coefficient | None,
    learnable: str | None,
    block_size: int | None,
    mix: float | str,
) -> None:
    for name, number in (
        ("num_heads", num_heads),
        ("head_dim", head_dim),
        ("num_key_heads", num_heads if num_key_heads is None else num_key_heads),
    ):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive int; got {number!r}.")
    if num_heads % (num_key_heads or num_heads):
        raise ValueError(f"num_heads must be a multiple of num_key_heads; got {num_heads} and {num_key_heads}.")
    for name, option, allowed in (("matching", matching, MATCHINGS), ("statistics", statistics, STATISTICS)):
        if option not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {option!r}.")
    if learnable not in (None, "head", "channel"):
        raise ValueError(f"learnable must be None, 'head' or 'channel'; got {learnable!r}.")
    if statistics != "fixed" and not (alpha is None and beta is None and learnable is None):
        raise ValueError(f"alpha, beta and learnable go with statistics='fixed'; got statistics={statistics!r}.")
    check_block_size(block_size, is_causal=True, cross=False, with_state=False)
    if isinstance(mix, str):
        if mix not in ("ratio", "scales"):
            raise ValueError(f"mix must be a number, 'ratio' or 'scales'; got {mix!r}.")
    elif not 0.0 <= check_number("mix", mix) <= 1.0:
        raise ValueError(f"mix must lie between 0 and 1; got {mix}.")
    if block_size is None and mix != 0.5:
        raise ValueError(f"mix weighs LLN against the blocks and needs block_size; got mix={mix!r}.")
