"""Modules: LLN attention on q, k, v, and torch's multi-head attention with LLN inside."""

from lln.nn.attention import LLNAttention
from lln.nn.multihead import MultiheadAttention

__all__ = ["LLNAttention", "MultiheadAttention"]
