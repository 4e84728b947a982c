"""Counting what a process sends to others, whatever way it goes through torch.distributed."""

from __future__ import annotations

from typing import Any, Self

import torch.distributed as dist

# Where each collective is given what it sends.
SENDING = {"all_to_all_single": 1, "all_gather": 1, "all_reduce": 0}


class Traffic:
    """Within it, bytes that this process gives to collectives, and how many of these there are."""

    def __init__(self) -> None:
        self.sent, self.calls = 0, 0

    def __enter__(self) -> Self:
        self.kept = {name: getattr(dist, name) for name in SENDING}
        for name, place in SENDING.items():
            setattr(dist, name, self.watch(name, place))
        return self

    def watch(self, name: str, place: int) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.sent += args[place].nbytes
            return self.kept[name](*args, **kwargs)

        return called

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(dist, name, function)
