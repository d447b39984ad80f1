"""Files: atomic writes, JSON lines, CSV and Markdown tables, locks of folders, and errors of their parsers."""

from __future__ import annotations

import csv
import json
import math
import os
import stat
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quasiglobal.errors import InputError

if sys.platform != "win32":
    import fcntl

Json: TypeAlias = dict[str, Any]
"""A JSON object."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write atomically: yield a temporary path next to `path`, then flush it to disk and rename it to `path`."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write records as JSON lines."""
    with replacing(path) as temporary:
        temporary.write_text("".join(as_line(record) + "\n" for record in records))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append a record to a file of JSON lines."""
    try:
        with open(path, "a") as file:
            file.write(as_line(record) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def read_lines(path: Path) -> list[Json]:
    """Read the records of a file of JSON lines; an empty list if the file does not exist.

    A truncated last line is ignored. Any other damaged line is skipped with a warning.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            try:
                records.append(_object(line))
            except ValueError:
                warnings.warn(f"line {number} of {path} is damaged and was skipped", stacklevel=2)
    return records


def read_epochs(path: Path) -> list[Json]:
    """Read the lines that describe an epoch; any other line is damaged and skipped with a warning."""
    found = read_lines(path)
    epochs = [one for one in found if isinstance(one.get("epoch"), int)]
    if len(epochs) < len(found):
        warnings.warn(f"{path} has {len(found) - len(epochs)} lines without an epoch, which were skipped", stacklevel=2)
    return epochs


def read_json(path: Path) -> Json:
    """Read the object in a JSON file; raise OSError or ValueError if there is none."""
    return _object(path.read_bytes())


def _object(text: bytes) -> Json:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def make_private(folder: Path) -> int:
    """Take all permissions of other users from a folder and its content; return the mode that it had, if that is wrong.

    Raise InputError if a mode cannot be changed.
    """
    found, folder = 0, folder.resolve()                     # it may be a link to another disk
    for path in (folder, *folder.rglob("*")) if sys.platform != "win32" else ():
        with suppress(FileNotFoundError):                   # it does not exist yet, or was replaced meanwhile
            if path.is_symlink() or not (mode := _open_mode(path)):
                continue
            found = found or mode * (path == folder)
            with suppress(PermissionError):
                path.chmod(mode & 0o700)
            if _open_mode(path):
                raise InputError(
                    f"{path} has mode {mode:o}, so others can use it, and it cannot be changed; run `chmod -R go= "
                    f"{folder}` as its owner, or use a disk with file permissions"
                )
    return found


def _open_mode(path: Path) -> int:
    """The mode of a path that others may use, else 0."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return mode if mode & 0o077 else 0


@contextmanager
def alone(folder: Path, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Lock a folder, creating it if necessary; raise InputError if another process holds the lock, or `wait` for it.

    Any number of processes may hold a `shared` lock, as long as none holds an exclusive one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
    if sys.platform == "win32":
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(held, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being trained by another process; wait for it, or stop it") from None
        except OSError:                                     # a file system without locks
            pass
        yield
    finally:
        os.close(held)


def as_line(record: Mapping[str, object]) -> str:
    """Encode a record as JSON; non-finite numbers, which JSON lacks, become null."""
    return json.dumps(finite(dict(record)))


def finite(value: object) -> object:
    """Replace numbers that are not finite by None."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as a safetensors file with default file permissions."""
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:                # such as a full disk
            raise InputError(f"cannot write {path}: {error}") from None
        temporary.chmod(mode)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with the same columns as a CSV file with a header."""
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["algorithm", "%"], [["dsgd", "74.5"]]))
    | algorithm | % |
    | --- | --- |
    | dsgd | 74.5 |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cache_folder(kind: str) -> Path:
    """Folder for cached results, such as tokens: $QG_CACHE, or quasiglobal in the user's cache folder."""
    own = os.environ.get("QG_CACHE")
    return Path(os.path.expanduser(own or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/quasiglobal")) / kind


def config_folder() -> Path:
    """Folder for the user's configuration: quasiglobal in $XDG_CONFIG_HOME or ~/.config."""
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config")) / "quasiglobal"


@contextmanager
def reading(path: object, what: str) -> Iterator[None]:
    """Turn any exception of a parser into an InputError of one sentence that names the file."""
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path} as {what}: it is not UTF-8; save it as UTF-8") from None
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError(f"cannot read {path} as {what}: {said.splitlines()[0][:200]}") from None
