"""Processes that know torch and transformers and nothing of lln. To import those takes seconds, so one process does it
for all tests of a session and then forks, for each piece of code anew."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVER = """
import json, os, sys, traceback
import torch
from transformers import (
    AlbertModel, BartModel, BertModel, CLIPModel, GPT2Model, LlamaModel, ViTModel, pipeline
)
torch.set_num_threads(1)  # as in the tests: sums over more threads differ in their last bits
assert "lln" not in sys.modules
for line in sys.stdin:
    code, arguments, *files = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, file in zip((1, 2), files):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        sys.argv, status = ["-c", *arguments], 1
        try:
            exec(compile(code, "<fresh>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def start() -> Any:
    """The process that forks; it ends with this one."""
    home = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, "HF_HOME": home.name, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip

    def stop() -> None:
        server.communicate()
        home.cleanup()

    atexit.register(stop)
    return server


def run_fresh(code: str, *arguments: str) -> str:
    """What the code prints, with these arguments in sys.argv; AssertionError where it fails."""
    server = start()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        server.stdin.write(json.dumps([code, arguments, str(out), str(err)]) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", err.read_text() if err.exists() else "it did not start"
        return out.read_text()
