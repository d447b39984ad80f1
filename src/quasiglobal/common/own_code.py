"""Which Python code a name such as package.module:Name may run.

In Python the call is the permission. On the command line a name may be imported if the user typed it, there or before,
or allowed it with --allow-code; a name that only a file has is refused, since files come by e-mail. What was typed,
allowed or given in Python is remembered with the folder of its module, so that a file of another folder with the same
name needs a permission of its own.
"""

from __future__ import annotations

import logging
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from quasiglobal.common.files import append_line, config_folder, read_lines
from quasiglobal.errors import InputError

log = logging.getLogger("quasiglobal")

OPTION = "--allow-code"
"""Option of every command: a module, or one name of it, that names in files may import."""

FILE = "code.jsonl"
"""The remembered names, in the user's configuration: one JSON object per line, `name` and `folder`."""

_PATH = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAME = re.compile(rf"(?:^(?:lazy/|every:\d+/)*|=)({_PATH}:[^\W\d]\w*)(?=[:,]|$)")

_PARTS = re.compile(r"quasiglobal\.(algorithms|metrics|models|topology)(\.|$)")
"""Modules of this library that any name may import. Others have functions that act, such as commands."""

_given: set[str] | None = None
"""Names and modules that this command may import; None in Python: all."""

_files: dict[str, str] = {}
"""The file that each name was read from."""


def names_in(text: str) -> list[str]:
    """The names of a user's objects in a setting.

    >>> names_in("every:4/mine:graph"), names_in("slowmo:tau=5,base=mine:Inner"), names_in("mine.nets:Small:beta=0.5")
    (['mine:graph'], ['mine:Inner'], ['mine.nets:Small'])
    >>> names_in("csv:folder/mine:graph"), names_in("ring:16")
    ([], [])
    """
    return _NAME.findall(text)


def texts_in(values: object) -> Iterator[str]:
    """The strings in settings, nested or not."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from texts_in(tuple(values.values()))
    elif isinstance(values, Iterable):
        for value in values:
            yield from texts_in(value)


@contextmanager
def only_given(allowed: Iterable[str]) -> Iterator[None]:
    """Refuse names that are neither allowed here, nor given by `give`, nor remembered.

    Python processes that are started meanwhile do not put the current folder first on their path.
    """
    global _given
    for name in allowed:
        if not re.fullmatch(rf"{_PATH}(:[^\W\d]\w*)?", name) or name.endswith(".py"):
            raise InputError(f"{OPTION} needs a module, or a name in it, as in package.module:Name, got {name!r}")
    before, path, safe = _given, [*sys.path], os.environ.get("PYTHONSAFEPATH")
    _given, os.environ["PYTHONSAFEPATH"] = set(allowed), "1"
    try:
        yield
    finally:
        _given, sys.path[:] = before, path
        os.environ.pop("PYTHONSAFEPATH", None)
        os.environ.update({} if safe is None else {"PYTHONSAFEPATH": safe})


def give(values: object) -> None:
    """Allow the names in values that the user typed; files of such a name are no names."""
    if _given is not None:
        for text in texts_in(values):
            _given.update(names_in(text) if not os.path.exists(text) else ())


def read_from(file: object, values: object) -> None:
    """Note the file that the names in these values come from."""
    _files.update({name: str(file) for text in texts_in(values) for name in names_in(text)})


def allowed() -> list[str]:
    """Words of the command line that allow another process what this one may import."""
    return [word for name in sorted(_given or ()) for word in (OPTION, name)]


def check(path: str, what: str) -> None:
    """Raise InputError if the user did not allow this name; if it is in the current folder, add that to the path."""
    module = path.partition(":")[0]
    top = module.partition(".")[0]
    if _given is None or _PARTS.match(module):
        return
    here = os.getcwd()
    spec = _spec(top)
    if spec is None or spec.origin is None:                 # a folder without __init__.py may have parts in both
        spec = PathFinder.find_spec(top, [here]) or spec
    if spec is None and top not in sys.modules:
        return                                              # nothing would run
    folder = _folder(spec)
    if not {path, module} & _given and not {(path, folder), (module, folder)} & _remembered():
        file = _files.get(path, "a file")
        where = f"import {module} from {_file(spec)}" if folder else f"use {path} of this Python"
        raise InputError(
            f"the {what} {path} in {file} would {where}, which you have not allowed; if you trust it, add "
            f"{OPTION} {module if folder else path}"
        )
    if here not in sys.path and ((found := _spec(top)) is None or found.origin is None):
        sys.path.append(here)


def check_all(values: object) -> None:
    """Check every name in the settings of an experiment, before other processes import them."""
    for text in texts_in(values):
        for name in names_in(text):
            check(name, "object")


@contextmanager
def from_source() -> Iterator[None]:
    """Keep Python from the compiled copies in __pycache__, which need not agree with the source that the user has read.
    """
    before, own = sys.pycache_prefix, config_folder() / "compiled"
    if _given is not None:
        sys.pycache_prefix = str(own) if own.is_absolute() else os.devnull
    try:
        yield
    finally:
        sys.pycache_prefix = before


def remember(path: str) -> None:
    """Remember a name that was imported, unless only a file has it and Python read that file."""
    module = path.partition(":")[0]
    top = module.partition(".")[0]
    new = {path} - _files.keys() if _given is None else {path, module} & _given
    if not new or _PARTS.match(module) or (spec := _spec(top)) is None or os.environ.get("RANK", "0") != "0":
        return                                              # process 0 remembers it for all
    _append(path if path in new else module, _folder(spec), config_folder() / FILE)


def other_here(path: str) -> str:
    """A hint if Python took another module than the one of this name in the current folder; else empty."""
    top = path.partition(":")[0].partition(".")[0]
    taken, here = _spec(top), PathFinder.find_spec(top, [os.getcwd()])
    if taken is None or here is None or here.origin in (None, taken.origin):
        return ""
    return f"; it is {taken.origin}, which comes before {here.origin}: give yours another name"


@lru_cache
def _append(name: str, folder: str, file: Path) -> None:
    """Add a line, which is one write, so that several processes may; a failure is logged, once a name."""
    if not file.is_absolute() or (name, folder) in _remembered():       # no home folder
        return
    try:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
        append_line(file, {"name": name, "folder": folder})
    except InputError as error:
        log.warning("%s, so %s is not remembered; where a file names it, add %s %s", error, name, OPTION, name)


def _remembered() -> set[tuple[str, str]]:
    file = config_folder() / FILE
    if not file.is_absolute():
        return set()
    try:
        return {(str(one.get("name")), str(one.get("folder"))) for one in read_lines(file)}
    except OSError:
        return set()


def _spec(top: str) -> ModuleSpec | None:
    """What Python would import, found without running any of it."""
    try:
        return find_spec(top)
    except ValueError:                                      # __main__
        return None


def _file(spec: ModuleSpec | None) -> str:
    """The file of a module, or the folder of a package: mine.py, mine.so and mine/ may lie side by side."""
    places = [] if spec is None else [*(spec.submodule_search_locations or [])]
    return f"{places[0]}{os.sep}" if places else str(spec and spec.origin)


def _folder(spec: ModuleSpec | None) -> str:
    """The folder that a module or package is in, which other modules come from too; empty if it is installed."""
    if spec is None or spec.origin in ("built-in", "frozen"):
        return ""
    places = [spec.origin or ""] if not spec.submodule_search_locations else [*spec.submodule_search_locations]
    folder = os.path.realpath(os.path.dirname(os.path.abspath(places[0])))
    kinds = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = (*kinds, f"{kinds[1]}/lib-dynload", site.getusersitepackages())
    return "" if folder in map(os.path.realpath, installed) else folder
