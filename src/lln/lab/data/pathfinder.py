"""Pathfinder, generated: are two dots the ends of one dashed path?

Every image has two long dashed paths and shorter ones that distract. In the positive class the dots sit at both ends of
one long path, in the negative class at one end of each, so that nothing near a dot tells the classes apart. Within a
path, neighbouring pixels are at most `reach` apart (the larger of the distances in x and y); different paths are
further apart than that, everywhere. So each image has one right answer, and whoever follows the dashes finds it.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np

from lln.lab.core.errors import DataError
from lln.lab.core.ranges import Range, check_ranges
from lln.lab.core.seeds import generator
from lln.lab.data.examples import Sequences, cut_evenly
from lln.lab.data.made_once import Place, generate

Point = tuple[int, int]  # (y, x)
TURN = 0.25  # how strongly a path bends from step to step, in radians
DETOURS = (0.0, 0.35, -0.35, 0.7, -0.7, 1.05, -1.05)  # tried in turn where the way is blocked
PATH_TRIES, SCENE_TRIES = 30, 300
INK = np.uint8(255)
DOT = 1  # how far a dot reaches around its pixel


@dataclass(frozen=True)
class Scene:
    """dashes: of each long path; distractors: how many shorter paths, of a third as many dashes. dash, gap: pixels."""

    size: Annotated[int, Range(least=12, most=2**12)] = 32
    dashes: Annotated[int, Range(least=2, most=1000)] = 6
    distractors: Annotated[int, Range(most=1000)] = 2
    dash: Annotated[int, Range(least=1, most=1000)] = 2
    gap: Annotated[int, Range(least=1, most=1000)] = 1

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def reach(self) -> int:
        return self.gap + 1

    @property
    def period(self) -> int:
        return self.dash + self.gap


# The lengths of Linsley et al. (2018) in Long Range Arena's resolution; its published task is the hard one.
DIFFICULTY = {
    "easy": Scene(dashes=6, distractors=2),
    "medium": Scene(dashes=9, distractors=3),
    "hard": Scene(dashes=14, distractors=4),
}


@dataclass(frozen=True)
class Drawing:
    image: np.ndarray  # [size, size] uint8, 0 or 255
    label: int  # 1: the dots are the ends of one path
    dots: tuple[Point, Point]
    paths: list[list[Point]]  # all pixels along each path, gaps included; the long ones first


def load_pathfinder(
    split: str,
    *,
    count: int,
    scene: Scene | None = None,
    seed: int = 0,
    cache_dir: Place = None,
) -> Sequences:
    """Make `count` Pathfinder images as sequences of size * size pixels, 0 or 255; classes alternate. A larger count
    begins with the same images. Long Range Arena has 160,000, 20,000 and 20,000 (train, validation, test).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     data = load_pathfinder("test", count=3, scene=Scene(size=16, dashes=2, distractors=0), cache_dir=cache)
    >>> data[0]["input_ids"].shape, [int(item["labels"]) for item in data]
    (torch.Size([256]), [0, 1, 0])
    """
    scene = scene or DIFFICULTY["easy"]
    rows = (draw(scene, split, seed, index).image for index in itertools.count())
    arrays, identity = generate(
        "Pathfinder", split, count, seed, scene, rows, lambda images: {"pixels": np.stack(images)}, cache_dir
    )
    return Sequences(
        [cut_evenly(arrays["pixels"])],
        np.arange(count) % 2,
        length=scene.size**2,
        label_names=["apart", "connected"],
        identity=identity,
        notes=["Pathfinder was generated here; it is not the published set of images."],
    )


def draw(scene: Scene, split: str, seed: int, index: int) -> Drawing:
    """Image `index` of a split; its label is index % 2."""
    numbers = generator("pathfinder", split, seed, index, *asdict(scene).values())
    for _ in range(SCENE_TRIES):
        paths = _place(scene, numbers)
        if paths is not None:
            return _finish(scene, paths, index % 2)
    raise DataError(
        f"Pathfinder: two paths of {scene.dashes} dashes and {scene.distractors} distractors do not fit into "
        f"{scene.size} x {scene.size} pixels; take a larger size or shorter paths."
    )


def _place(scene: Scene, numbers: np.random.Generator) -> list[list[Point]] | None:
    taken = np.zeros((scene.size, scene.size), bool)  # pixels within reach of a path
    paths = []
    short = max(2, scene.dashes // 3)
    for dashes, dotted in [(scene.dashes, True)] * 2 + [(short, False)] * scene.distractors:
        for _ in range(PATH_TRIES):
            path = _walk(scene, numbers, dashes * scene.period - scene.gap, taken, dotted)
            if path is not None:
                break
        else:
            return None
        paths.append(path)
        _mark(taken, path, scene.reach)
        if dotted:
            _mark(taken, [path[0], path[-1]], DOT + scene.reach)
    return paths


def _walk(
    scene: Scene, numbers: np.random.Generator, length: int, taken: np.ndarray, dotted: bool
) -> list[Point] | None:
    """Pixels of a curve of so many steps of one pixel, or None where it ran into something."""
    y, x = numbers.uniform(1, scene.size - 2, 2).tolist()
    angle = float(numbers.uniform(0, 2 * math.pi))
    turns = (TURN * numbers.standard_normal(length)).tolist()
    blocked = np.pad(taken[1:-1, 1:-1], 1, constant_values=True)  # the edge, too
    long_gone = 2 * scene.reach + 3
    path = [(round(y), round(x))]
    if blocked[path[0]]:
        return None
    for step in range(1, length):
        if step >= long_gone:  # it may follow itself, but not come back to itself
            _mark(blocked, [path[step - long_gone]], scene.reach)
        angle += turns[step]
        for detour in DETOURS:
            to_y, to_x = y + math.sin(angle + detour), x + math.cos(angle + detour)
            pixel = (round(to_y), round(to_x))
            if not blocked[pixel]:
                break
        else:
            return None
        y, x, angle = to_y, to_x, angle + detour
        path.append(pixel)
    ends = np.zeros_like(taken)
    _mark(ends, [path[0], path[-1]] if dotted else [], DOT)
    return None if (ends & taken).any() else path


def _finish(scene: Scene, paths: list[list[Point]], label: int) -> Drawing:
    one, other = paths[0], paths[1]
    dots = (one[0], one[-1])
    if not label:
        # About as far from each other as in the positive class: the distance must not give the answer away.
        apart, pairs = math.dist(*dots), itertools.product(dots, (other[0], other[-1]))
        dots = min(pairs, key=lambda pair: abs(math.dist(*pair) - apart))
    image = np.zeros((scene.size, scene.size), np.uint8)
    for path in paths:
        _mark(image, [pixel for step, pixel in enumerate(path) if step % scene.period < scene.dash], 0)
    _mark(image, dots, DOT)
    return Drawing(image * INK, label, dots, paths)


def _mark(image: np.ndarray, pixels: Iterable[Point], reach: int) -> None:
    """Set all that lies within reach of these pixels to 1."""
    for y, x in pixels:
        image[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1] = 1
