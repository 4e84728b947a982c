"""alpha and beta from the spread of queries and keys, so that LLN attention is as concentrated as softmax attention."""

from lln.matching.data import match_data
from lln.matching.moments import match_moments

__all__ = ["match_data", "match_moments"]
