"""One thread a test process: the suite runs in parallel, and two OpenMP pools on two cores wait for each other."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

torch.set_num_threads(1)


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
