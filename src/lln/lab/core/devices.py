"""Whether torch can use a device here, and what to do where it cannot."""

import torch

from lln.lab.core.errors import first_line


def find_device_problem(name: str, instead: str = "--device cpu") -> str | None:
    """Why torch cannot use a device on this machine, in one sentence with the remedy. None where it can. instead: how
    the CPU is asked for in the place where the device was named.

    >>> find_device_problem("cpu")
    >>> find_device_problem("abacus")
    "torch cannot use 'abacus' here: there is no such kind of device; use cpu, cuda, or cuda:1 for the second GPU."
    """
    why = explain(name)
    if why is None:
        return None
    if not why.endswith(HERE):
        why += f", or use {instead}"
    return f"torch cannot use {name!r} here: {why}."


HERE = "there is no such kind of device; use cpu, cuda, or cuda:1 for the second GPU"


def explain(name: str) -> str | None:
    try:
        device = torch.device(name)
    except RuntimeError:
        return HERE
    kind, index = device.type, device.index or 0
    if kind == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return "this build of torch knows the CPU alone; install a CUDA build of torch"
        return "it finds no GPU; see whether nvidia-smi lists one, and whether its driver fits this build of torch"
    if kind == "cuda" and index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        return f"the last GPU is cuda:{count - 1}" if count > 1 else "there is one GPU, cuda:0; use that"
    if kind == "meta":
        return "on it tensors have shapes and no numbers; use a device that computes"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if kind == "cuda":
            return f"{first_line(error)}; free the GPU or choose another"
        return f"there is no {kind} device that this build of torch can use; install a build for it"
    return None
