"""Hugging Face transformers with LLN attention: `import lln.hf`, then attn_implementation="lln" or "lln_diag".

The import registers both names with transformers and lets models keep their options: `config.lln` is saved with a model
and read when it is loaded, so a saved model runs LLN again wherever lln.hf is imported before it is loaded; elsewhere
transformers refuses it.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ModuleNotFoundError("lln.hf needs transformers; install it with: pip install 'lln-attention[hf]'")

from lln.hf.cache import LLNCache
from lln.hf.converting import convert
from lln.hf.distillation import distill, fine_tune
from lln.hf.fitting import fit
from lln.hf.hooks import install
from lln.hf.interface import register
from lln.hf.layers import make_cache
from lln.hf.options import IMPLEMENTATIONS, Options
from lln.hf.positions import extend_positions
from lln.hf.spreading import prefill, spread

register()
install()

__all__ = [
    "IMPLEMENTATIONS",
    "LLNCache",
    "Options",
    "convert",
    "distill",
    "extend_positions",
    "fine_tune",
    "fit",
    "make_cache",
    "prefill",
    "spread",
]
