"""The operators that torch.compile sees. Not torch.library.custom_op: its wrapper takes longer than the launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("lln", "FRAGMENT")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], layout: torch.Tag) -> None:
    """`fake` makes results without values; `layout`: what inductor may do to the strides of arguments."""
    name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, layout))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lln::{name}", fake, lib=LIBRARY)
