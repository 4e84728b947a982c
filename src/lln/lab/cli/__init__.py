"""The command line: one file a command, arguments and printing alone; what they do is in the other rooms."""

import importlib.util

for _name in ("typer", "rich"):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"The command line needs {_name}; install it with: pip install 'lln-attention[cli]'", name=_name
        )
