"""Linear-time attention that behaves like softmax attention."""

from lln import instruments
from lln.functional import lln_attention
from lln.matching import match_data, match_moments
from lln.nn.attention import LLNAttention
from lln.nn.multihead import MultiheadAttention
from lln.peers import attention, mechanism, mechanisms
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
