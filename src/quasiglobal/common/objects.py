"""Strings that name a user's objects: package.module:Name, or own:NAME@DIGEST for one given from Python.

An experiment consists of strings, so that it can be hashed, stored and compared. A `Named` string carries the object,
such as a user's algorithm or function, as long as the process has it; elsewhere, as in `qg compare`, only its `facts`,
which are stored with the experiment. It compares equal to the plain string.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from quasiglobal.common import own_code
from quasiglobal.errors import InputError

PREFIX = "own:"

Facts = Mapping[str, Any]
"""Known facts about an object, as JSON values."""


class Named(str):
    """A string that names an object, own:NAME@DIGEST or package.module:Name; `thing` is None if it is not here."""

    thing: object
    facts: Facts

    def __new__(cls, text: str, thing: object = None, facts: Facts | None = None) -> Named:
        """The string with an object and facts."""
        named = super().__new__(cls, text)
        named.thing, named.facts = thing, facts or {}
        return named

    def __deepcopy__(self, memo: object) -> Named:
        """The same string: `asdict` copies every value."""
        return self


def named_text(readable: str, digest: str, thing: object = None, **facts: object) -> Named:
    """The string for an object, made of a readable name and a digest of its content.

    >>> named_text("my net", "0123456789abcdef")
    'own:my-net@01234567'
    """
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", readable).strip("-") or "object"
    return Named(f"{PREFIX}{name}@{digest[:8]}", thing, facts)


def is_own(text: str) -> bool:
    """Whether a string stands for an object given from Python."""
    return text.startswith(PREFIX)


def is_here(text: str) -> bool:
    """Whether this process was given the object."""
    return isinstance(text, Named) and text.thing is not None


def facts_of(text: str) -> Facts:
    """The stored facts of an object; empty if unknown."""
    return text.facts if isinstance(text, Named) else {}


def readable(text: str) -> str:
    """The string without its prefix and digest.

    >>> readable("own:my-net@01234567"), readable("ring:16")
    ('my-net', 'ring:16')
    """
    return text.removeprefix(PREFIX).rpartition("@")[0] if is_own(text) else text


def recall(text: str, what: str) -> Any:
    """Return the object; raise InputError in a process that was not given it."""
    if not isinstance(text, Named) or text.thing is None:
        raise InputError(f"the {what} {readable(text)} is defined in a Python script; run that script again")
    return text.thing


def is_path(text: str) -> bool:
    """Whether a string has the form package.module:Name.

    >>> is_path("mine.nets:Small"), is_path("ring:16"), is_path("social")
    (True, False, False)
    """
    module, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def imported(path: str, what: str) -> Any:
    """Import the object at package.module:Name; raise InputError if the user did not allow that, or if it fails."""
    module, _, name = path.partition(":")
    own_code.check(path, what)
    try:
        with own_code.from_source():
            found = getattr(import_module(module), name, None)
    except Exception as error:
        raise InputError(f"cannot import {module} for {what} {path}: {error}") from None
    if found is None:
        hint = own_code.other_here(path) or f"; write the {what} as {module}:Name"
        raise InputError(f"module {module} has no {name!r}{hint}")
    own_code.remember(path)
    return found


def sources(module: str) -> list[Path]:
    """The loaded files of an imported module's package, or next to the module; sorted.

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
    """An error of a user's code in one clause: its innermost place in that code, its type and its message."""
    others = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"
