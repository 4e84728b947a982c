"""The folder of a conversion while it is being made and when it is done.

OUT.partial/request.json          what was asked for; the same command finds it again, another one is refused
OUT.partial/STAGE.safetensors     what a stage learned, with notes: what was measured when it ended
OUT.partial/learning.safetensors  the stage that is being learned, after some step
OUT/                              the model, moved here whole at the end; conversion.json in it: request and report
OUT.lock                          while a process is at it

Every file is written beside its place and moved into it, so that it is whole or not there whenever the process ends.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lln.files import Unreadable, explain_writing, read_json, replace_file, write_json
from lln.lab.core.errors import Refused
from lln.lab.train.run_folder import list_differences

DIGESTS = ("text", "pictures", "weights")  # known by a hash of what is in them, which says nothing to a reader
REQUEST, RESULT, LEARNING, MODEL = "request.json", "conversion.json", "learning", "model"


def name_differences(held: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """
    >>> name_differences({"seed": 0, "text": "ab12"}, {"seed": 1, "text": "cd34"})
    ['seed is 0 there and 1 here', 'text is not the same']
    """
    plain = ({k: v for k, v in one.items() if k not in DIGESTS} for one in (held, asked))
    other = [f"{name} {'is' if name == 'text' else 'are'} not the same" for name in DIGESTS]
    return list_differences(next(plain), next(plain)) + [
        said for name, said in zip(DIGESTS, other, strict=True) if held.get(name) != asked.get(name)
    ]


class Workplace:
    def __init__(self, out: Path, request: dict[str, Any]) -> None:
        """Refused where OUT, or what was begun of it, is not what this request would make."""
        out = out if out.name not in ("", "..") else out.resolve()  # what lies beside it has its name
        if not out.name:
            raise Refused(f"{out} is no folder that a model can be moved to; name another")
        self.out, self.place = out, out.with_name(out.name + ".partial")
        self.request = json.loads(json.dumps(request))
        if out.exists() and not out.is_dir():
            raise Refused(f"{out} is a file; name a folder for the converted model")
        self.result: dict[str, Any] | None = read_json(out / RESULT, dict)  # of a conversion that is finished
        if self.result is None and out.exists() and any(out.iterdir()):
            raise Refused(f"{out} is not empty and holds no conversion; name another folder")
        finished: Any = None if self.result is None else self.result.get("request")
        if self.result is not None and not isinstance(finished, dict):
            raise Unreadable(f"{out / RESULT} is not the report of a conversion: it has no 'request'.")
        for folder, held in ((out, finished), (self.place, read_json(self.place / REQUEST, dict))):
            asked = self.request
            if held is not None and "weights" not in held:  # of a Hub id, by an earlier version
                asked = {name: value for name, value in asked.items() if name != "weights"}
            if held is not None and (changed := name_differences(held, asked)):
                raise Refused(
                    f"{folder} holds a conversion that was asked for differently: {'; '.join(changed)}; name another "
                    "folder or remove this one"
                )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time: two would write over each other. A killed process leaves no lock behind."""
        self.place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(self.out.with_name(self.out.name + ".lock")))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise Refused(f"{self.out} is being made by another process") from None
        try:
            write_json(self.place / REQUEST, self.request)
            yield
        finally:
            lock.release()
            if [path.name for path in self.place.glob("*")] == [REQUEST]:  # nothing to go on from
                shutil.rmtree(self.place)
            Path(lock.lock_file).unlink(missing_ok=True)

    def read(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(notes, tensors) as they were kept under a name; None: nothing was."""
        path = self.place / f"{name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            notes = (file.metadata() or {}).get("notes")
            if notes is None:  # of an earlier version, which kept them elsewhere: it is made again
                return None
            return json.loads(notes), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict

    def keep(self, name: str, notes: Any, tensors: Mapping[str, Tensor]) -> None:
        # Tied weights are one tensor under two names, which safetensors refuses.
        apart = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
        file = self.place / f"{name}.safetensors"
        with explain_writing(self.place), replace_file(file) as temporary:
            save_file(apart, temporary, {"notes": json.dumps(notes, allow_nan=False)})

    def finish(self, result: dict[str, Any]) -> None:
        """Move the model that was saved in `place / MODEL` to OUT."""
        write_json(self.place / MODEL / RESULT, result)
        if self.out.exists():
            self.out.rmdir()  # empty, and not every system moves a folder onto one
        os.replace(self.place / MODEL, self.out)
        shutil.rmtree(self.place)
