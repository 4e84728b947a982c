"""Every row of the table of bad inputs in a process of its own, as a user would type it:

    make bad-inputs
    python tools/refuse.py --only 12 13          two of the rows again

A row is refused in a sentence that names what is wrong, with exit code 2, no traceback, and nothing left behind. The
table, most of which follows from what options say of themselves, is in tests/helpers/bad_inputs.py. The processes are
forked from one that has imported everything. Results are in results/hardening/bad-inputs.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers  # noqa: F401  imported here for all

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from campaign import Campaign, Tried, finish, make_parser
from helpers.bad_inputs import Bad, judge, lay_out, list_bad_inputs, take_stock
from lln.lab.cli.app import main as run_lln
from lln.lab.train import run  # noqa: F401

LONGEST = 60  # seconds of a row


def refuse(bad: Bad, cache: Path) -> str | None:
    """What is wrong with how a row is refused."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        place = Path(folder)
        before = lay_out(bad, place)
        child = os.fork()
        if child == 0:
            become_command(bad, place, cache, said.fileno())
        _, status = os.waitpid(child, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
        if os.WIFSIGNALED(status):
            return f"it is killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return judge(bad, os.waitstatus_to_exitcode(status), text, before, take_stock(place))


def become_command(bad: Bad, place: Path, cache: Path, said: int) -> None:
    """In the forked process: run the command, and never come back."""
    code = 1
    try:
        signal.alarm(LONGEST)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(place)
        os.environ |= {"COLUMNS": "1000", "NO_COLOR": "1", "LLN_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
        os.environ.pop("LLN_DATA_ROOT", None)
        sys.argv = ["lln", *bad.arguments]
        run_lln()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str] | None = None) -> None:
    table = list_bad_inputs()
    options: argparse.Namespace = make_parser(__doc__, len(table)).parse_args(arguments)
    options.cases = min(options.cases, len(table))
    torch.set_num_threads(1)
    campaign = Campaign("bad-inputs", options, rows=len(table))
    with tempfile.TemporaryDirectory() as cache:

        def try_one(number: int) -> Tried:
            bad = table[number]
            fault = refuse(bad, Path(cache))
            shown = " ".join(bad.arguments).encode("utf-8", "backslashreplace").decode()
            return Tried(bad.arguments[0], fault and f"lln {shown}: {fault}")

        campaign.run(try_one, time.monotonic() + options.seconds)
    finish([campaign])


if __name__ == "__main__":
    main()
