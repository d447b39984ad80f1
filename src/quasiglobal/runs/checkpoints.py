"""Files of checkpoints: atomic writes, checksums verified on reading, the last two kept."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from quasiglobal.common.files import read_json, write_json, write_tensors
from quasiglobal.training.rows import Checkpoint

KEEP = 2
"""Number of checkpoints to keep: the newest, and a fallback."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then delete all but the last two."""
    data = folder / f"{checkpoint.epochs:06d}.safetensors"
    write_tensors(data, checkpoint.rows)
    values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint) if field.name != "rows"}
    notes = {name: value for name, value in values.items() if value != ""}
    write_json(data.with_suffix(".json"), notes | {"sha256": _checksum(data)})
    for old in _notes(folder)[:-KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    for unfinished in folder.glob(".*"):            # left by a process killed while writing
        unfinished.unlink(missing_ok=True)


def newest(folder: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint; skip damaged ones with a warning."""
    for note in reversed(_notes(folder)):
        try:
            return _verified(note)
        except DAMAGE as error:
            data = note.with_suffix(".safetensors")
            warnings.warn(f"checkpoint {data} is damaged ({error}); using the previous one", stacklevel=2)
    return None


def epochs(folder: Path) -> list[int]:
    """Epochs with a checkpoint."""
    return [int(note.stem) for note in _notes(folder)]


def at(folder: Path, epoch: int) -> Checkpoint | None:
    """The checkpoint after an epoch; None if missing or damaged."""
    try:
        return _verified(folder / f"{epoch:06d}.json")
    except DAMAGE:
        return None


def topologies(folder: Path) -> set[str]:
    """Topology fingerprints recorded in the checkpoints."""
    found = set()
    for note in _notes(folder):
        try:
            found.add(str(read_json(note).get("topology", "")))
        except (OSError, ValueError):
            continue
    return found - {""}


def _notes(folder: Path) -> list[Path]:
    """The JSON file of each checkpoint, oldest first."""
    return sorted(note for note in folder.glob("*.json") if note.stem.isdigit())


DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""Exceptions that reading a damaged checkpoint may raise."""


def _verified(note: Path) -> Checkpoint:
    """Load the checkpoint of a note; raise ValueError if its checksum is wrong."""
    data = note.with_suffix(".safetensors")
    meta = json.loads(note.read_text())
    if meta.pop("sha256") != _checksum(data):
        raise ValueError("its checksum is wrong")
    return Checkpoint(load_file(data), **meta)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
