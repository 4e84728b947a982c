"""Progress of what takes more than a moment. It goes to stderr, since stdout is for results."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")
EVERY = 30.0  # seconds between lines where there is no terminal
Progress = Callable[[str], None]  # hears a few words as each step begins


def ignore(news: object) -> None:
    """For progress that nobody watches, and results that nobody stores."""


class Bars:
    """Bars, one a task, below what is said meanwhile. `transient`: nothing is left of them in the end; `quiet`: nothing
    is shown at all, for processes that are not the first."""

    def __init__(self, *, transient: bool = False, quiet: bool = False) -> None:
        from rich import progress
        from rich.console import Console

        self.progress = progress.Progress(
            progress.TextColumn("{task.description:36}"), progress.BarColumn(), progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
            console=Console(stderr=True, quiet=quiet), transient=transient,
        )  # fmt: skip
        self.began = self.told = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        for task in self.progress.tasks:
            if error[0] is not None and not task.completed:  # beside the reason it says nothing
                self.progress.update(task.id, visible=False)
        self.progress.stop()

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def add(self, text: str, total: float | None, **options: Any) -> Callable[..., None]:
        """A new bar, as a function that changes it: what it takes is that of rich's Progress.update (completed, total,
        advance, description, visible)."""
        task = self.progress.add_task(text, total=total, **options)

        def change(**changes: Any) -> None:
            self.progress.update(task, **changes)
            self.tell(next(one for one in self.progress.tasks if one.id == task))

        return change

    def tell(self, task: Any) -> None:
        """A line now and then where nobody sees the bar: in a log, say."""
        now = time.monotonic()
        if self.progress.console.is_terminal or not task.visible or now - self.told < EVERY:
            return
        self.told = now
        done = "" if task.total is None else f", {task.percentage:.0f} %"
        self.say(f"{task.description.strip()}{done}, after {now - self.began:.0f} s")


@contextlib.contextmanager
def progress_bar(steps: int | None, *, transient: bool = False) -> Iterator[Progress]:
    """Yields a function to call with a few words as each of the steps begins. None: nobody knows how many."""
    with Bars(transient=transient) as bars:
        update = bars.add("start", steps)
        yield lambda text: update(advance=1, description=text)


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a bar that vanishes in the end, where somebody watches."""
    with Bars(transient=True) as bars:
        update = bars.add(what, total, visible=bars.progress.console.is_terminal)
        for item in items:
            yield item
            update(advance=1)


@contextlib.contextmanager
def show_busy(what: str) -> Iterator[None]:
    """A sign of life for what has no steps, where somebody watches."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


def describe_metrics(values: dict[str, float]) -> str:
    """The values of a training step that stand beside its bar.

    >>> describe_metrics({"loss": 2.5, "rate": 1e-3})
    'loss 2.500'
    """
    known = {"loss": "loss", "eval_loss": "eval", "eval_accuracy": "accuracy"}
    return ", ".join(f"{short} {values[name]:.3f}" for name, short in known.items() if name in values)
