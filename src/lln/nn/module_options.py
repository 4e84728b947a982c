"""The rules of a module's options, checked when it is built rather than when it is first called."""

from __future__ import annotations

from lln.checks import (
    BACKENDS,
    MATCHINGS,
    STATISTICS,
    Coefficient,
    check_block_size,
    check_joint,
    check_no_mix,
    check_read,
)
from lln.kernels.evidence import SIGNED
from lln.nn.value_convolution import read_width
from lln.values import check_choice, check_count, check_flag, check_fraction, check_positive


def check_options(
    *,
    num_heads: int = 1,
    head_dim: int = 1,
    num_key_heads: int | None = None,
    matching: str = "paper",
    statistics: str = "fixed",
    alpha: Coefficient | None = None,
    beta: Coefficient | None = None,
    learnable: str | None = None,
    block_size: int | None = None,
    mix: float | str = 0.5,
    read: str = "paper",
    directions: int | str | None = None,
    feature_map: str | None = None,
    value_convolution: int | str | None = None,
    convolution: int | None = None,
    overlap: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    length: int = 1,
    momentum: float = 0.0,
    backend: str = "auto",
) -> None:
    """The options of a module, checked when it is built rather than when it is first called. The defaults pass."""
    key_heads = num_heads if num_key_heads is None else num_key_heads
    for name, number in (("num_heads", num_heads), ("head_dim", head_dim), ("num_key_heads", key_heads)):
        check_count(name, number)
    if num_heads % key_heads:
        raise ValueError(f"num_heads must be a multiple of num_key_heads; got {num_heads} and {num_key_heads}.")
    check_choice("matching", matching, *MATCHINGS)
    check_choice("statistics", statistics, *STATISTICS)
    check_choice("learnable", learnable, None, "head", "channel")
    if statistics != "fixed" and not (alpha is None and beta is None and learnable is None):
        raise ValueError(f"alpha, beta and learnable go with statistics='fixed'; got statistics={statistics!r}.")
    check_block_size(block_size, is_causal=True, cross=False, with_state=False)
    if not isinstance(mix, str):
        check_fraction("mix", mix)
    elif mix not in ("ratio", "scales", "evidence"):
        raise ValueError(f"mix must be a number, 'ratio', 'scales' or 'evidence'; got {mix!r}.")
    if block_size is None:
        check_no_mix(mix)
    elif mix == "evidence":
        check_joint(mix, read, block_size, overlap, 0.0)
    check_choice("feature_map", feature_map, None, "linear")
    check_read(read, alpha if read == "evidence" else 1.0, 1.0, directions)
    if isinstance(directions, int):
        check_count("directions", directions)
        if statistics != "fixed" or beta is not None or learnable is not None:
            raise ValueError(
                f"directions={directions}: learned directions hold beta themselves; use statistics='fixed' and leave "
                "out beta and learnable."
            )
    else:
        check_choice("directions", directions, None, SIGNED)
    if feature_map is not None and statistics != "fixed":
        raise ValueError(f"feature_map goes with statistics='fixed'; got statistics={statistics!r}.")
    check_convolution(convolution)
    if value_convolution is not None:
        read_width(value_convolution)
    check_overlap(overlap, block_size)
    check_fraction("dropout", dropout)
    check_fraction("momentum", momentum)
    check_count("length", length)
    if scale is not None:
        check_positive("scale", scale)
    check_choice("backend", backend, *BACKENDS)


def check_convolution(convolution: int | None) -> None:
    odd = isinstance(convolution, int) and not isinstance(convolution, bool) and convolution % 2 == 1
    if convolution is not None and not (odd and convolution >= 3):
        raise ValueError(f"convolution must be an odd int of 3 or more, or None for none; got {convolution!r}.")


def check_overlap(overlap: bool, block_size: int | None) -> None:
    check_flag("overlap", overlap)
    if overlap and (block_size is None or block_size % 4):
        raise ValueError(f"overlap needs a block_size that is a multiple of 4; got block_size={block_size!r}.")
