"""A run's rows on disk: whole or not at all, checked when read, the last two kept."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quasiglobal.common.files import write_json, write_tensors

KEEP = 2
"""How many checkpoints a run keeps: the newest, and one to fall back on."""


@dataclass(frozen=True)
class Progress:
    """How far a run was: after this many epochs, with this many bytes of metrics written."""

    epochs: int
    metrics: int


def save(folder: Path, rows: dict[str, Tensor], progress: Progress) -> None:
    """Write a checkpoint, then forget all but the last two."""
    data = folder / f"{progress.epochs:06d}.safetensors"
    write_tensors(data, rows)
    write_json(data.with_suffix(".json"), asdict(progress) | {"sha256": _checksum(data)})
    for old in _notes(folder)[:-KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    for unfinished in folder.glob(".*"):            # of a process that was killed while it wrote
        unfinished.unlink(missing_ok=True)


def newest(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The newest checkpoint that is whole; a damaged one is named and passed over."""
    for note in reversed(_notes(folder)):
        data = note.with_suffix(".safetensors")
        try:
            return _checked(note)
        except DAMAGE as error:
            warnings.warn(f"checkpoint {data} is damaged ({error}); going back to the one before it", stacklevel=2)
    return None


def epochs(folder: Path) -> list[int]:
    """After which epochs there is a checkpoint."""
    return [int(note.stem) for note in _notes(folder)]


def at(folder: Path, epoch: int) -> dict[str, Tensor] | None:
    """The rows after an epoch, if they are there and whole."""
    try:
        rows, _ = _checked(folder / f"{epoch:06d}.json")
    except DAMAGE:
        return None
    return rows


def _notes(folder: Path) -> list[Path]:
    """What describes each checkpoint, oldest first."""
    return sorted(note for note in folder.glob("*.json") if note.stem.isdigit())


DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""What a damaged checkpoint may raise."""


def _checked(note: Path) -> tuple[dict[str, Tensor], Progress]:
    """The checkpoint that a note describes, if it is as it was written."""
    data = note.with_suffix(".safetensors")
    meta = json.loads(note.read_text())
    if meta.pop("sha256") != _checksum(data):
        raise ValueError("its checksum is wrong")
    return load_file(data), Progress(**meta)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
