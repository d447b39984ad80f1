"""Writing files so that nothing is ever half written."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quasiglobal.errors import InputError


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
