"""What a folder with a saved model says about how to load it."""

from __future__ import annotations

import os
from pathlib import Path

from lln.files import write_text

HEADER = """---
library_name: transformers
tags:
- lln-attention
---

# A transformers model with attention from lln-attention
"""
SECTION = """
## How to load this model

Its attention is the one that `lln` in `config.json` names, which transformers does not know by itself:

    pip install 'lln-attention[hf]'

```python
import lln.hf  # before the model is loaded; without it transformers runs softmax attention
from transformers import AutoModel

model = AutoModel.from_pretrained("this folder")
```
"""


def write_card(folder: str | os.PathLike[str]) -> None:
    """A README.md that says so, or that section at the end of the one that is there."""
    path = Path(folder) / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else HEADER
    if "lln.hf" not in text:
        write_text(path, text.rstrip("\n") + "\n" + SECTION)


def add_section(folder: str | os.PathLike[str], title: str, text: str) -> None:
    """A section at the end of the README.md, in the place of one with the same title."""
    path = Path(folder) / "README.md"
    before = path.read_text(encoding="utf-8").partition(f"\n## {title}\n")[0]
    write_text(path, f"{before.rstrip(chr(10))}\n\n## {title}\n\n{text}")
