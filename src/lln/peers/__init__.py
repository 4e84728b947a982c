"""Softmax and every peer of the paper, one short file each, under one signature: see `registry`.

How the ways to attend differ:

    lln.lln_attention(q, k, v, alpha, beta)    LLN and LLN+Diag as a function: alpha and beta are given
    lln.LLNAttention(heads, dim)(q, k, v)      the same as a module: alpha and beta follow q and k, or are learned
    lln.MultiheadAttention(embed, heads)(x, x, x)    that with projections, in the place of torch's
    lln.attention(name, q, k, v)               any mechanism that has no parameters, as a function, by its name
    lln.mechanism(name, num_heads=..., head_dim=...)    any mechanism as a module, by its name
    lln.register(name)                         gives attention of your own a name, which all of these then take
    lln.mechanisms()                           runs nothing: name -> what the mechanism declares, a Mechanism
"""

from importlib import import_module

from lln.peers.dispatch import attention, attention_matrix
from lln.peers.modules import mechanism
from lln.peers.own import register
from lln.peers.registry import DECLARED, REGISTRY, Mechanism, mechanisms

__all__ = ["Mechanism", "attention", "attention_matrix", "mechanism", "mechanisms", "register"]

for _name, _declared in DECLARED.items():
    import_module(f"lln.peers.{_declared.get('file', _name)}")
    REGISTRY[_name] = REGISTRY.pop(_name)  # in the order of the catalogue, whichever file came first
