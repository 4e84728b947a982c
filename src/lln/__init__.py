"""Linear-time attention that behaves like softmax attention."""

from lln import instruments
from lln.attention import lln_attention
from lln.mechanisms import attention, mechanism, mechanisms
from lln.moments import match_data, match_moments
from lln.multihead import MultiheadAttention
from lln.nn import LLNAttention
from lln.state import LLNState

__version__ = "0.1.0"
__all__ = [
    "LLNAttention",
    "LLNState",
    "MultiheadAttention",
    "__version__",
    "attention",
    "instruments",
    "lln_attention",
    "match_data",
    "match_moments",
    "mechanism",
    "mechanisms",
]
