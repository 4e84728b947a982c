"""Text in the form of the Penn Treebank, lower-cased: a split that comes so needs the others alike.

He said "no" (twice).    he said `` no '' -lrb- twice -rrb- .
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), form)
    for pattern, form in (
        ("[\u2018\u2019\u00b4]", "'"),
        ("[\u201c\u201d]", '"'),
        (r"\s*[\u2013\u2014]\s*|(?<!-)--(?!-)", " -- "),
        ("\u2026", "..."),
        (r'(^|[\s(\[{\-/])"', r"\1 `` "),  # a quote opens where a word begins, and closes elsewhere
        ('"', " '' "),
        *((re.escape(bracket), f" {name} ") for bracket, name in BRACKETS.items()),
        (r"\.{3}", " ... "),
        (r"([;!?%&*#@])(?=\s|$)|(?<=\s)([;!?%&*#@])", r" \1\2 "),
        (r"([$£€])(?=\d)", r"\1 "),
        (r"(?<=[^\sA-Za-z$£€])([$£€])|(?<=\s)([$£€])", r" \1\2 "),
        (r"(\d)%", r"\1 %"),
        (r"([,:])(?!\d)|(?<!\d)([,:])", r" \1\2 "),  # 10,000 and 14:28 stay
        (r"(?<=[^.\s])\.(?=(\s|'|-r[rsc]b-)*$)", " . "),  # the last of a sentence
        (r"(?i)([a-z])('s|'m|'d|'ll|'re|'ve)(?![a-z])", r"\1 \2"),
        (r"(?i)([a-z])(n't)(?![a-z])", r"\1 \2"),
        (r"(?<=[^\s'`])'(?=\s|$)", " ' "),
        (r"(?i)\b(can)(not)\b", r"\1 \2"),
    )
]


def penn(text: str) -> str:
    for pattern, form in RULES:
        text = pattern.sub(form, text)
    return " ".join(text.split()).lower()


def is_penn(texts: Sequence[str]) -> bool:
    """Whether all of these are in that form: nothing in capitals, and brackets by their names."""
    return not any(has_capitals(text) for text in texts) and any("-lrb-" in text.split() for text in texts)


def has_capitals(text: str) -> bool:
    return text != text.lower()
