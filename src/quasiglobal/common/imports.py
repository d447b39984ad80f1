"""Imports of user-defined objects by their path."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from quasiglobal.errors import InputError


def is_path(text: str) -> bool:
    """Whether a text has the form package.module:Name.

    >>> is_path("mine.nets:Small"), is_path("ring:16"), is_path("social")
    (True, False, False)
    """
    module, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


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
