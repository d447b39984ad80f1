"""Imports of user-defined objects by their path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quasiglobal.errors import InputError


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
