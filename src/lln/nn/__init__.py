"""Modules: LLN attention on q, k, v, and torch's multi-head attention with LLN inside; and torch's function likewise."""

from lln.nn.attention import LLNAttention
from lln.nn.drop_in import scaled_dot_product_attention
from lln.nn.multihead import MultiheadAttention

__all__ = ["LLNAttention", "MultiheadAttention", "scaled_dot_product_attention"]
