"""Processes that talk through gloo, started once for all tests of a session: each runs what it is told, in order."""

import importlib
import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "lln",
    "lln.distributed",
    "lln.nn",
    "lln.hf",
]
WAIT = 20.0  # seconds for one exchange: what a rank raises must not keep the others for long
LIMIT = 120.0  # seconds for one answer


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def serve(rank: int, size: int, port: int, tasks: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    meshes = {}
    for count in range(1, size + 1):
        group = dist.new_group(list(range(count)), timeout=timedelta(seconds=WAIT))
        if rank < count:
            meshes[count] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    while (task := tasks.get()) is not None:
        module, name, count, arguments = task
        try:
            function = getattr(importlib.import_module(module), name)
            answers.put((rank, function(meshes[count], rank, *arguments), None))
        except BaseException as error:
            answers.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc(-4, chain=False)}"))


class Processes:
    """So many ranks; `run` gives a function to the first few of them and returns what each makes of it."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.answers, port = context.Queue(), find_port()
        self.tasks = [context.Queue() for _ in range(size)]
        self.workers = [
            context.Process(target=serve, args=(rank, size, port, tasks, self.answers), daemon=True)
            for rank, tasks in enumerate(self.tasks)
        ]
        for worker in self.workers:
            worker.start()

    def start(self, count: int, function: Callable[..., Any], *arguments: Any) -> None:
        """function(mesh, rank, *arguments) on the first `count` ranks."""
        for tasks in self.tasks[:count]:
            tasks.put((function.__module__, function.__name__, count, arguments))

    def collect(self, count: int) -> dict[int, tuple[Any, str | None]]:
        found: dict[int, tuple[Any, str | None]] = {}
        for _ in range(count):
            try:
                rank, value, error = self.answers.get(timeout=LIMIT)
            except queue.Empty:
                raise TimeoutError(f"only ranks {sorted(found)} of {count} answered: {found}") from None
            found[rank] = value, error
        return found

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.start(count, function, *arguments)
        found = self.collect(count)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in sorted(found.items()) if error is not None]
        assert not errors, "\n".join(errors)
        return [found[rank][0] for rank in range(count)]

    def stop(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
        for worker in self.workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
