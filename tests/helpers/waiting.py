"""Whether the host waits for a device."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def forbid_waiting(device: str = "cuda") -> Iterator[None]:
    """An error if the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
