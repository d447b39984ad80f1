"""Files of checkpoints, and the files of each process of a distributed run in parts/0/, parts/1/, … of the run folder.

Checkpoints are written atomically, their checksums are verified on reading, and the last two are kept.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quasiglobal.common.files import append_line, read_epochs, read_json, write_json, write_lines, write_tensors
from quasiglobal.errors import InputError
from quasiglobal.training.metrics import Measures, Record, combined
from quasiglobal.training.rows import Checkpoint, NamedRows, models_of

KEEP = 2
"""Number of checkpoints to keep: the newest, and a fallback."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then delete all but the last two."""
    data = folder / f"{checkpoint.epochs:06d}.safetensors"
    write_tensors(data, checkpoint.rows)
    notes = {name: value for name, value in vars(checkpoint).items() if name != "rows" and value != ""}
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


DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""Exceptions that reading a damaged checkpoint may raise."""


def _verified(note: Path) -> Checkpoint:
    """Load the checkpoint of a note; raise ValueError if its checksum is wrong."""
    data = note.with_suffix(".safetensors")
    meta = read_json(note)
    if meta.pop("sha256") != _checksum(data):
        raise ValueError("its checksum is wrong")
    return Checkpoint(load_file(data), **meta)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------ processes

UNREAD = 8
"""Number of tested epochs to keep models of, for process 0; older ones are deleted even if unread."""


class Part:
    """The files of one process of a run."""

    def __init__(self, run: Path, process: int, nodes: Sequence[int]) -> None:
        self.process, self.nodes = process, list(nodes)
        self.folder, self._whole = run / "parts" / str(process), run / "checkpoint"
        self._metrics, self._of_all = self.folder / "metrics.jsonl", self.folder / "of_all.jsonl"
        self._tested = self.folder / "tested"

    # -------------------------------------------------------------------------------------------- checkpoints

    def epochs(self) -> set[int]:
        """Epoch 0 and the epochs saved in its own checkpoints or in checkpoints of the whole run."""
        return {0, *epochs(self.folder / "checkpoint"), *epochs(self._whole)}

    def load(self, epoch: int) -> Checkpoint:
        """The checkpoint of its nodes after an epoch."""
        own = at(self.folder / "checkpoint", epoch)
        if own is not None:
            return own
        whole = at(self._whole, epoch)
        if whole is None:
            raise InputError(f"{self._whole} has no checkpoint of epoch {epoch} any more; start the run anew")
        return replace(whole, rows={name: value[self.nodes].contiguous() for name, value in whole.rows.items()})

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint of its nodes."""
        save(self.folder / "checkpoint", checkpoint)

    # -------------------------------------------------------------------------------------------- measures

    def begin(self, epoch: int) -> None:
        """Create the folder; delete measures and tested models after the epoch that the run resumes from."""
        write_json(self.folder / "part.json", {"nodes": self.nodes})
        for path in (self._metrics, self._of_all):
            if path.exists() or path == self._metrics:
                write_lines(path, [found for found in read_epochs(path) if found["epoch"] <= epoch])
        for later in self.tested_epochs():
            if later > epoch:
                self._tested_at(later).unlink(missing_ok=True)
        (self.folder / "summary.json").unlink(missing_ok=True)

    def read_measures(self) -> list[Measures]:
        """The measures so far, one entry per epoch; the part of process 0 also has the measures over all models."""
        of_all = {found["epoch"]: found for found in read_epochs(self._of_all)}
        return [found | of_all.get(found["epoch"], {}) for found in read_epochs(self._metrics)]

    def last_epoch(self) -> int:
        """The last epoch that was measured; 0 if none."""
        return max((found["epoch"] for found in read_epochs(self._metrics)), default=0)

    def write(self, measures: Mapping[str, object]) -> None:
        """Add an epoch's measures."""
        append_line(self._metrics, measures)

    def write_of_all(self, epoch: int, measures: Measures) -> None:
        """Add an epoch's measures over the models of all nodes."""
        append_line(self._of_all, {"epoch": epoch} | dict(measures))

    def read_status(self) -> str | None:
        """finished or diverged; None if it has not ended."""
        try:
            return str(read_json(self.folder / "summary.json")["status"])
        except (OSError, ValueError, KeyError):
            return None

    def finish(self, status: str, edges: Mapping[str, object]) -> None:
        """Write the final status and the traffic of each edge."""
        write_json(self.folder / "summary.json", {"status": status, "edges": edges})

    # -------------------------------------------------------------------------------------------- tested models

    def leave_tested(self, rows: NamedRows, epoch: int) -> None:
        """Write the models of a tested epoch for process 0, without the algorithm's state."""
        write_tensors(self._tested_at(epoch), models_of(rows))
        for old in sorted(self._tested.glob("*.safetensors"))[:-UNREAD]:
            old.unlink(missing_ok=True)

    def tested_epochs(self) -> set[int]:
        """Epochs with models left for the test of the average."""
        return {int(path.stem) for path in self._tested.glob("*.safetensors") if path.stem.isdigit()}

    def read_tested(self, epoch: int) -> NamedRows | None:
        """The models of a tested epoch; None if they are missing or unreadable."""
        try:
            return load_file(self._tested_at(epoch))
        except (OSError, SafetensorError):
            return None

    def drop_tested(self, epoch: int) -> None:
        """Delete the models of this and of earlier tested epochs."""
        for earlier in self.tested_epochs():
            if earlier <= epoch:
                self._tested_at(earlier).unlink(missing_ok=True)
        with suppress(OSError):
            self._tested.rmdir()                            # succeeds only if empty

    def _tested_at(self, epoch: int) -> Path:
        return self._tested / f"{epoch:06d}.safetensors"


def parts_of(run: Path) -> list[Part]:
    """All parts of a run, in the order of their nodes."""
    found = []
    for path in (run / "parts").glob("*/part.json"):
        try:
            found.append(Part(run, int(path.parent.name), read_json(path)["nodes"]))
        except (OSError, ValueError, TypeError, KeyError):
            raise InputError(f"{path} is damaged; restore it, or remove {path.parent} to train it again") from None
    return sorted(found, key=lambda part: part.nodes)


def records_of(parts: Sequence[Part]) -> list[Record]:
    """Records of the epochs that every process has completed or that follow its end.

    A record combines the processes that measured its epoch.
    """
    measured = [{found["epoch"]: found for found in part.read_measures()} for part in parts]
    passed = min(
        (
            math.inf if part.read_status() else max(epochs, default=0)
            for part, epochs in zip(parts, measured, strict=True)
        ),
        default=0,
    )
    at = sorted({epoch for epochs in measured for epoch in epochs if epoch <= passed})
    return [combined([epochs[epoch] for epochs in measured if epoch in epochs]) for epoch in at]


def newest_of_parts(run: Path) -> tuple[Checkpoint | None, list[int]]:
    """The checkpoint of the last epoch that all parts of a run have saved, and the nodes of its rows."""
    parts = parts_of(run)
    return joined_checkpoint(parts), [node for part in parts for node in part.nodes]


def joined_checkpoint(parts: Sequence[Part]) -> Checkpoint | None:
    """The checkpoint of the last epoch that all of these parts have saved; all but its rows is the first part's."""
    epoch = max(set.intersection(*(part.epochs() for part in parts))) if parts else 0
    saved = [part.load(epoch) for part in parts] if epoch else []
    return replace(saved[0], rows=stacked([one.rows for one in saved])) if saved else None


def stacked(rows: Sequence[NamedRows]) -> NamedRows:
    """Concatenate the rows of several parts."""
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
