"""Writing files so that nothing is ever half written."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quasiglobal.errors import InputError

if sys.platform != "win32":
    import fcntl


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it becomes `path` once it is whole and on disk."""
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
    """A value as a JSON file."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Records as JSON, a line each."""
    with replacing(path) as temporary:
        temporary.write_text("".join(as_line(record) + "\n" for record in records))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """One record more."""
    try:
        with open(path, "a") as file:
            file.write(as_line(record) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of such a file, none if it is not there.

    A last line that was cut off does not count; another that is damaged is named and passed over.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            try:
                records.append(_object(line))
            except ValueError:
                warnings.warn(f"line {number} of {path} is damaged and passed over", stacklevel=2)
    return records


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises OSError or ValueError where there is none."""
    return _object(path.read_bytes())


def _object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


@contextmanager
def alone(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock a folder, made if necessary; raises InputError if another process has it.

    Any number of processes may have it `shared`, as long as nobody has it alone.
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
            fcntl.flock(held, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being trained by another process; wait for it, or stop it") from None
        except OSError:                                     # a file system without locks
            pass
        yield
    finally:
        os.close(held)


def as_line(record: Mapping[str, object]) -> str:
    """A record as JSON. JSON has no numbers that are not finite: null stands for them."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Tensors by name as a safetensors file, readable by whom other files are."""
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:                # how it says that the disk is full
            raise InputError(f"cannot write {path}: {error}") from None
        temporary.chmod(mode)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with the same columns, as a CSV file with a header."""
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
