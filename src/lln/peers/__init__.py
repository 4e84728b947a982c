"""Softmax and every peer of the paper, one short file each, under one signature: see `registry`."""

from importlib import import_module

from lln.peers.calls import attention, attention_matrix
from lln.peers.modules import mechanism
from lln.peers.registry import Mechanism, mechanisms

__all__ = ["Mechanism", "attention", "attention_matrix", "mechanism", "mechanisms"]

FILES = (  # in the order of the documentation's table
    "softmax",
    "log_normal",
    "block_diagonal",
    "simple_kernels",
    "performer",
    "rfa",
    "cosformer",
    "hedgehog",
    "based",
    "linformer",
    "nystromformer",
    "skyformer",
    "longformer",
    "bigbird",
    "reformer",
    "transformer_ls",
    "transnormer",
    "flash",
    "tnn",
    "convolved_softmax",
)
for _file in FILES:
    import_module(f"lln.peers.{_file}")
