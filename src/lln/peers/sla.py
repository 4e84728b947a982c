"""The linear branch of SLA (Zhang et al. 2025, arXiv 2509.24006): features softmax(q) and softmax(k) over the channels.

    out_i = f(q_i) sum_j f(k_j) v_j / f(q_i) sum_j f(k_j)      f(x) = softmax(x)

without a temperature: LLN with alpha = beta = 1 whose keys are normalised before they are summed. SLA adds softmax
attention in the blocks that a compressed map finds critical, and a learned projection of this branch; here `block_size`
adds the blocks on the diagonal.
"""

from __future__ import annotations

from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.pieces import exponential_attention
from lln.peers.registry import register


@register("sla")
def sla(call: Call) -> Tensor:
    dtype = compute_dtype(call.query.dtype)
    query, key = (t.to(dtype).log_softmax(-1) for t in (call.query, call.key))
    return exponential_attention(call, query, key)
