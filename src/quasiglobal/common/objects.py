"""Objects given from Python, each under a text that names its content: own:NAME@DIGEST.

An experiment consists of texts, so that it can be hashed, stored and compared. A text of this kind stands for an object
of the user's own, such as an algorithm or a function. In the process that was given the object, `recall` returns it.
Elsewhere, as in `qg compare`, only its `facts` are known: they are stored with the experiment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from quasiglobal.errors import InputError

PREFIX = "own:"


@dataclass(frozen=True)
class Known:
    """An object, if this process was given it, and its facts as JSON values."""

    thing: Any
    facts: dict[str, Any]


_KNOWN: dict[str, Known] = {}


def remember(readable: str, digest: str, thing: Any, **facts: Any) -> str:
    """The text for an object, made of a readable name and a digest of its content.

    >>> remember("my net", "0123456789abcdef", None)
    'own:my-net@01234567'
    """
    text = f"{PREFIX}{re.sub(r'[^A-Za-z0-9_.+-]+', '-', readable).strip('-') or 'object'}@{digest[:8]}"
    _KNOWN[text] = Known(thing, facts)
    return text


def note(text: str, **facts: Any) -> None:
    """Add facts about an object that a text names by its path."""
    known = _KNOWN.get(text, Known(None, {}))
    _KNOWN[text] = Known(known.thing, known.facts | facts)


def restore(text: str, facts: dict[str, Any]) -> None:
    """Restore the facts of an object from a stored experiment."""
    _KNOWN.setdefault(text, Known(None, facts))


def is_own(text: str) -> bool:
    """Whether a text stands for an object given from Python."""
    return text.startswith(PREFIX)


def is_here(text: str) -> bool:
    """Whether this process was given the object."""
    return text in _KNOWN and _KNOWN[text].thing is not None


def facts_of(text: str) -> dict[str, Any]:
    """The stored facts of an object; empty if unknown."""
    return _KNOWN[text].facts if text in _KNOWN else {}


def readable(text: str) -> str:
    """The text without its prefix and digest.

    >>> readable("own:my-net@01234567"), readable("ring:16")
    ('my-net', 'ring:16')
    """
    return text.removeprefix(PREFIX).rpartition("@")[0] if is_own(text) else text


def recall(text: str, what: str) -> Any:
    """The object; raise InputError if this process was not given it."""
    if not is_here(text):
        raise InputError(f"the {what} {readable(text)} is defined in a Python script; run that script again")
    return _KNOWN[text].thing
