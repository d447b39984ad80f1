"""A run's rows on disk: written whole or not at all, verified when read, the last two kept."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quasiglobal.common.files import read_json, write_json, write_tensors

KEEP = 2
"""How many checkpoints a run keeps: the newest, and one to fall back on."""


@dataclass(frozen=True)
class Progress:
    """How far a run was when it was saved."""

    epochs: int
    """Epochs done."""
    metrics: int
    """Bytes of metrics.jsonl written by then."""
    topology: str = ""
    """The fingerprint of the topology, where a file or Python code defines it."""


def save(folder: Path, rows: dict[str, Tensor], progress: Progress) -> None:
    """Write a checkpoint, then delete all but the last two."""
    data = folder / f"{progress.epochs:06d}.safetensors"
    write_tensors(data, rows)
    notes = {name: value for name, value in asdict(progress).items() if value != ""}
    write_json(data.with_suffix(".json"), notes | {"sha256": _checksum(data)})
    for old in _notes(folder)[:-KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    for unfinished in folder.glob(".*"):            # of a process that was killed while it wrote
        unfinished.unlink(missing_ok=True)


def newest(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The newest checkpoint that is whole; a damaged one is named and skipped."""
    for note in reversed(_notes(folder)):
        try:
            return _verified(note)
        except DAMAGE as error:
            data = note.with_suffix(".safetensors")
            warnings.warn(f"checkpoint {data} is damaged ({error}); going back to the one before it", stacklevel=2)
    return None


def epochs(folder: Path) -> list[int]:
    """The epochs after which there is a checkpoint."""
    return [int(note.stem) for note in _notes(folder)]


def at(folder: Path, epoch: int) -> dict[str, Tensor] | None:
    """The rows after an epoch, if they are there and whole."""
    try:
        rows, _ = _verified(folder / f"{epoch:06d}.json")
    except DAMAGE:
        return None
    return rows


def topologies(folder: Path) -> set[str]:
    """The fingerprints of the topologies that the checkpoints were made with, where they say."""
    found = set()
    for note in _notes(folder):
        try:
            found.add(str(read_json(note).get("topology", "")))
        except (OSError, ValueError):
            continue
    return found - {""}


def _notes(folder: Path) -> list[Path]:
    """The file that describes each checkpoint, oldest first."""
    return sorted(note for note in folder.glob("*.json") if note.stem.isdigit())


DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""What reading a damaged checkpoint may raise."""


def _verified(note: Path) -> tuple[dict[str, Tensor], Progress]:
    """The checkpoint that a note describes, if its checksum is right."""
    data = note.with_suffix(".safetensors")
    meta = json.loads(note.read_text())
    if meta.pop("sha256") != _checksum(data):
        raise ValueError("its checksum is wrong")
    return load_file(data), Progress(**meta)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
