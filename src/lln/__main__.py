"""`lln` and `python -m lln`: the command line, which is in lln.lab.cli and needs the extra `cli`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from lln.lab.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
