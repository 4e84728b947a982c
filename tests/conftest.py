"""One thread a test process: the suite runs in parallel, and two OpenMP pools on two cores wait for each other."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

torch.set_num_threads(1)

# Read when triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for repeatable sums in `poisoned_memory`

collect_ignore_glob = [] if torch.cuda.is_available() else ["triton/test_triton_cuda.py"]
if sys.platform != "linux":  # there is no triton
    collect_ignore_glob.append("triton/*")


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Chunks of 16 rows and the shortest spans, so that small inputs cross several."""
    with mock.patch("lln.kernels.common.SPAN_ELEMENTS", {"cpu": 1}), mock.patch("lln.kernels.causal.CHUNK", 16):
        yield


@pytest.fixture
def short_chunks() -> Iterator[None]:
    with shortened():
        yield


@pytest.fixture(scope="module")
def short_chunks_throughout() -> Iterator[None]:
    """For every test of a module: Hypothesis does not take fixtures that are made anew for each test."""
    with shortened():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that reading what nobody wrote shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tokenizers and tokens, which the runs of a module share."""
    return tmp_path_factory.mktemp("cache")
