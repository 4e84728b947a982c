"""LLN attention in MindSpore: a function and cells, for its PYNATIVE and its GRAPH mode.

Install it with: pip install 'lln-attention[mindspore]'. Tensors are [batch, heads, length, dim], as in PyTorch.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("mindspore") is None:
    raise ModuleNotFoundError(
        "lln.mindspore needs mindspore; install it with: pip install 'lln-attention[mindspore]'", name="mindspore"
    )

from lln.mindspore.attending_ms import lln_attention
from lln.mindspore.cells import LLNAttention, MultiheadAttention
from lln.mindspore.matching_ms import match_moments

__all__ = ["LLNAttention", "MultiheadAttention", "lln_attention", "match_moments"]
