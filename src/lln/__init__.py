"""Linear-time attention that behaves like softmax attention."""

from lln.attention import lln_attention
from lln.state import LLNState

__version__ = "0.1.0"
__all__ = ["LLNState", "__version__", "lln_attention"]
