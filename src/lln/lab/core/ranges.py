"""What an option may be, said once, where the option is: `rate: Annotated[float, Range(positive=True)]`. What is out of
its range, not finite or of another type is refused in a sentence that names the option."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from lln.values import check_count, check_fraction, check_listed, check_number, check_positive

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """From `least`, or above 0 where `positive`, to `most`, or below `below`. Numbers are always finite.

    >>> Range(least=1, most=8).check("heads", 9, int)
    Traceback (most recent call last):
    ValueError: heads must be at most 8; got 9.
    """

    least: int = 0
    most: float | None = None
    below: float | None = None
    positive: bool = False

    def check(self, name: str, value: Any, kind: type) -> None:
        if kind is int:
            check_count(name, value, self.least)
        elif self.most == 1 and not self.positive:
            check_fraction(name, value)
        elif self.positive and self.most is not None and not 0 < check_number(name, value) <= self.most:
            raise ValueError(f"{name} must be above 0 and at most {self.most:,}; got {value}.")
        elif self.positive:
            check_positive(name, value)
        elif check_number(name, value) < self.least:
            raise ValueError(f"{name} must be at least {self.least:,}; got {value}.")
        if self.most is not None and value > self.most:
            raise ValueError(f"{name} must be at most {self.most:,}; got {value}.")
        if self.below is not None and value >= self.below:
            raise ValueError(f"{name} must be below {self.below:,}; got {value}.")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some names. The empty one, where it is among them, is what nobody has to choose, and is not told.

    >>> OneOf(("", "width", "torch")).check("initialisation", "zeros", str)
    Traceback (most recent call last):
    ValueError: initialisation must be one of width, torch; got 'zeros'.
    """

    names: tuple[str, ...]

    def check(self, name: str, value: Any, kind: type) -> None:
        if value != "" or "" not in self.names:
            check_listed(name, value, [known for known in self.names if known])


def check_ranges(holder: Any, prefix: str = "") -> None:
    """ValueError for the first field of a dataclass, or of a dataclass in it, that is not what its annotation says.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     rate: Annotated[float, Range(positive=True)]
    >>> check_ranges(Options(float("nan")), "optimisation.")
    Traceback (most recent call last):
    ValueError: optimisation.rate must be finite; got nan.
    """
    for name, hint in typing.get_type_hints(type(holder), include_extras=True).items():
        value = getattr(holder, name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{prefix}{name}.")
        if typing.get_origin(hint) is not Annotated:
            continue
        kind, rule = typing.get_args(hint)
        if typing.get_origin(kind) is tuple:
            for part in value:
                rule.check(f"{prefix}{name}", part, float)
        else:
            rule.check(f"{prefix}{name}", value, kind)


def make(kind: type[T], options: Mapping[str, Any], whose: str) -> T:
    """A dataclass of a config's data.options; ValueError for names that are none and for values out of their ranges.
    whose: of what they are, in the plural.

    >>> make(Range, {"least": 1, "foo": 2}, "ranges")
    Traceback (most recent call last):
    ValueError: data.options: ranges have least, most, below, positive; got 'foo'.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"data.options: {whose} have {', '.join(known) or 'none'}; got {unknown[0]!r}.")
    try:
        return kind(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"data.options: {error}") from None
