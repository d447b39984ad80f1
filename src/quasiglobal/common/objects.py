"""Objects of a user's own, each under a text: package.module:Name, or own:NAME@DIGEST for one given from Python.

An experiment consists of texts, so that it can be hashed, stored and compared. A text own:NAME@DIGEST names the content
of an object, such as an algorithm or a function. In the process that was given the object, `recall` returns it.
Elsewhere, as in `qg compare`, only its `facts` are known: they are stored with the experiment.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
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


def is_path(text: str) -> bool:
    """Whether a text has the form package.module:Name.

    >>> is_path("mine.nets:Small"), is_path("ring:16"), is_path("social")
    (True, False, False)
    """
    module, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def imported(path: str, what: str) -> Any:
    """Import the object at package.module:Name; raise InputError if that fails."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:
        raise InputError(f"cannot import {module} for {what} {path}: {error}") from None
    if found is None:
        raise InputError(f"module {module} has no {name!r}; write the {what} as {module}:Name")
    return found


def sources(module: str) -> list[Path]:
    """The files of an imported module's package, or beside the module, that Python has loaded; sorted.

    >>> "errors.py" in [path.name for path in sources("quasiglobal.errors")]
    True
    """
    top = sys.modules[module.partition(".")[0]]
    places = [Path(top.__file__).parent] if top.__file__ else [Path(place) for place in top.__path__]
    loaded = {Path(file) for one in [*sys.modules.values()] if (file := getattr(one, "__file__", None))}
    return sorted(
        path for path in loaded
        if any(path.is_relative_to(place) and "site-packages" not in path.relative_to(place).parts for place in places)
    )


def fault(error: BaseException) -> str:
    """An error of a user's code in one clause: its innermost place in that code, its type and its text."""
    others = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"
