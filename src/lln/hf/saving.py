"""What a saved model says to a process that has not imported lln.hf: to transformers, which must not run softmax in the
place of what was saved, and to people."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from lln.files import write_text
from lln.hf.find import list_parts
from lln.hf.options import IMPLEMENTATIONS, runs_ours

Folder = str | os.PathLike[str]
# The end of a name that nobody registers. transformers takes the attention's name from config.json, and every class of
# it refuses, with the name, what it does not know.
NEEDS = ", which needs `import lln.hf` before the model is loaded"
CODE = "modeling_lln"
SOURCE = '''"""What trust_remote_code=True runs. `import lln.hf` before the model is loaded does the same."""

try:
    from lln.hf.saving import find_loader as __getattr__  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "This model's attention is not in transformers; install it with: pip install 'lln-attention[hf]'"
    ) from error
'''
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
import lln.hf  # before the model is loaded; without it transformers refuses to load it
from transformers import AutoModel

model = AutoModel.from_pretrained("this folder")
```

Where nothing can be imported first, as in a pipeline that others have written, `trust_remote_code=True` does the same.
"""


def is_mark(name: Any) -> bool:
    """Whether the name of an attention stands for what config.lln names."""
    return isinstance(name, str) and name.endswith(NEEDS)


def drop_marks(saved: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a config without what `mark` has put among them."""
    mine = any(str(place).startswith(f"{CODE}.") for place in (saved.get("auto_map") or {}).values())
    dropped = {"auto_map": mine, "attn_implementation": is_mark(saved.get("attn_implementation"))}
    return {name: value for name, value in saved.items() if not dropped.get(name)}


def mark(config: PreTrainedConfig, path: Path) -> None:
    """Let a config that was written to `path` be refused by transformers alone, or loaded with trust_remote_code=True,
    where config.lln of it or of a config inside it names an attention of ours."""
    written = json.loads(path.read_text(encoding="utf-8"))
    saved = drop_marks(written)
    if name_needs(saved) and "auto_map" not in saved:  # a model with code of its own keeps that
        saved["auto_map"] = {name: f"{CODE}.{name}" for name in find_auto_classes(type(config))}
        write_text(path.parent / f"{CODE}.py", SOURCE)
    if saved != written:
        write_text(path, json.dumps(saved, indent=2, sort_keys=True) + "\n")


def name_needs(saved: dict[str, Any]) -> str | None:
    """Put the name that is refused into a config and those inside it, which can be loaded alone, and return it."""
    inside = [name_needs(value) for value in saved.values() if isinstance(value, dict)]
    held = saved.get("lln")
    own = held.get("implementation") if isinstance(held, dict) else None
    name = own + NEEDS if own in IMPLEMENTATIONS else next((one for one in inside if one), None)
    if name:
        saved["attn_implementation"] = name
    return name


@functools.cache
def list_auto_names() -> list[str]:
    """All of transformers' Auto classes; once, since to list what transformers has takes a fifth of a second."""
    return [name for name in dir(transformers) if name.startswith("AutoModel")]


def find_auto_classes(kind: type[PreTrainedConfig]) -> list[str]:
    """The names of transformers' Auto classes that make a model of such a config."""
    mappings = ((name, getattr(getattr(transformers, name), "_model_mapping", None)) for name in list_auto_names())
    # Not whether a mapping is empty: to say so it would import every model of transformers, which takes seconds.
    return [name for name, mapping in mappings if mapping is not None and kind in mapping]


class Loader:
    """What stands for a model's class in `modeling_lln.py`. By now lln.hf is imported, so transformers' own class,
    which `auto` finds, does the rest."""

    auto: Any

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.auto.from_pretrained(*args, **{**kwargs, "trust_remote_code": False})

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        return cls.auto.from_config(config, **kwargs, trust_remote_code=False)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would copy the source of its own class into every folder that one is saved to."""


def find_loader(name: str) -> type[Loader]:
    """What `modeling_lln.py` gives for the name of one of transformers' Auto classes. AttributeError for other names.

    Example:
        >>> find_loader("AutoModel").auto.__name__
        'AutoModel'
    """
    if not name.startswith("AutoModel"):
        raise AttributeError(f"{CODE} has only Auto classes of transformers; got {name!r}.")
    return type(name, (Loader,), {"auto": getattr(transformers, name)})


def explain(model: PreTrainedModel, folder: Folder) -> None:
    """A README.md that says how to load the model, or that section at the end of the one that is there."""
    if os.path.isdir(folder) and any(runs_ours(part.config) for part in list_parts(model)):
        path = Path(folder) / "README.md"
        text = path.read_text(encoding="utf-8") if path.exists() else HEADER
        if "lln.hf" not in text:
            write_text(path, text.rstrip("\n") + "\n" + SECTION)
