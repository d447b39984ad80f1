"""Errors for invalid user input: one sentence with the remedy."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import SupportsIndex


class InputError(ValueError):
    """Invalid user input. The command line prints the message and exits with status 2."""


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with ? for control characters: names in files, and neighbours' texts, may have commands of a terminal.

    >>> printable(f"{chr(27)}[31mred")
    '?[31mred'
    """
    return "".join(sign if sign.isprintable() or sign in keep else "?" for sign in text)


def whole(value: object) -> int | None:
    """Convert a value of an integer type, Python's or NumPy's, to int; None for other values.

    >>> whole(3), whole(3.0), whole(True)
    (3, None, None)
    """
    return None if isinstance(value, bool) or not isinstance(value, SupportsIndex) else operator.index(value)


def unknown(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """Build the error for a name that is not in `choices`; suggest the closest match.

    >>> print(unknown("algorithm", "qg-dsgd", ["dsgd", "qg-dsgdm", "d2"]))
    unknown algorithm 'qg-dsgd'; did you mean 'qg-dsgdm'?
    >>> print(unknown("option of dsgd", "zzz", []))
    unknown option of dsgd 'zzz'; there is none
    """
    choices = list(choices)
    near = get_close_matches(name, choices, n=1)
    if near:
        return InputError(f"unknown {kind} {name!r}; did you mean {near[0]!r}?")
    known = "there is none" if not choices else "known: " + ", ".join(choices)
    return InputError(f"unknown {kind} {name!r}; {known}")
