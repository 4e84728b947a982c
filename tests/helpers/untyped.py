"""Public functions without their types: tests hand over arguments in lists and dicts, and wrong ones on purpose."""

from typing import Any

import lln
import lln.naive

attention: Any = lln.attention
lln_attention: Any = lln.lln_attention
match_moments: Any = lln.match_moments
mechanism: Any = lln.mechanism
naive_attention: Any = lln.naive.naive_attention
naive_evidence: Any = lln.naive.naive_evidence
naive_lln: Any = lln.naive.naive_lln
naive_lln_diag: Any = lln.naive.naive_lln_diag
