"""Ranks as threads of one process, of which one runs at a time: Triton's interpreter knows no more."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.distributed import across
from lln.ranks import Ranks


class Room:
    """Where ranks meet: each waits until all have brought what they send."""

    def __init__(self, size: int) -> None:
        self.baton, self.all_there = threading.Lock(), threading.Barrier(size, timeout=60)
        self.brought: list[list[Tensor]] = [[] for _ in range(size)]
        self.sent: list[int] = []


class Present(Ranks):
    """A rank of a room. The bytes of all go from hand to hand."""

    def __init__(self, room: Room, rank: int, lengths: Sequence[int]) -> None:
        super().__init__(None, rank, len(lengths), across.attend, tuple(lengths))
        object.__setattr__(self, "room", room)

    room: Room

    def swap(self, outgoing: Tensor, sent: Sequence[int], expected: Sequence[int]) -> Tensor:
        room = self.room
        room.sent.append(outgoing.numel())
        room.brought[self.rank] = list(outgoing.split(list(sent)))
        room.baton.release()
        room.all_there.wait()
        found = torch.cat([room.brought[by][self.rank] for by in range(self.size)])
        room.all_there.wait()
        room.baton.acquire()
        assert found.numel() == sum(expected)
        return found


def run_ranks(lengths: Sequence[int], work: Callable[[Ranks], Any]) -> tuple[list[Any], list[int]]:
    """(what `work` makes of each rank, how many bytes were sent)"""
    room, found = Room(len(lengths)), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            with room.baton:
                found[rank] = work(Present(room, rank, lengths))
        except BaseException as error:
            found[rank] = error
            room.all_there.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found.values():
        if isinstance(one, BaseException) and not isinstance(one, threading.BrokenBarrierError):
            raise one
    return [found[rank] for rank in range(len(lengths))], room.sent
