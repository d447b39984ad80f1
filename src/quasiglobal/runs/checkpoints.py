"""Files of checkpoints, and the files of each process of a distributed run in parts/0/, parts/1/, … of the run folder.

Checkpoints are written atomically, and the last two are kept. Their checksums are verified on reading: a damaged one is
not used, and a run that resumes from an older one renames it, to 000040.damaged.safetensors. Only a user deletes it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quasiglobal.common.files import Json, append_line, read_epochs, read_json, write_json, write_lines, write_tensors
from quasiglobal.errors import InputError
from quasiglobal.training.metrics import Measures, Record, combined
from quasiglobal.training.rows import Checkpoint, NamedRows, models_of

log = logging.getLogger("quasiglobal")

KEEP = 2
"""Number of checkpoints to keep: the newest, and a fallback."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then delete all but the last two up to its epoch.

    A later one is of a process that had saved when another was killed: the run has resumed from an earlier epoch.
    """
    data = folder / f"{checkpoint.epochs:06d}.safetensors"
    write_tensors(data, checkpoint.rows)
    notes = {name: value for name, value in vars(checkpoint).items() if name != "rows" and value != ""}
    write_json(data.with_suffix(".json"), notes | {"sha256": _checksum(data)})
    for old in [note for note in _notes(folder) if int(note.stem) <= checkpoint.epochs][:-KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    for unfinished in folder.glob(".*"):            # left by a process killed while writing
        unfinished.unlink(missing_ok=True)


def newest(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint, or None; say which damaged ones are newer."""
    damaged: dict[Path, Exception] = {}
    for note in reversed(_notes(folder)):
        try:
            found = _verified(note)
        except DAMAGE as error:
            damaged[note] = error
        else:
            _say_damaged(damaged)
            return found
    return None


def intact(folder: Path) -> set[int]:
    """Epochs with an intact checkpoint; say which damaged ones are newer."""
    found, damaged = set(), {}
    for note in _notes(folder):
        try:
            _described(note)
            found.add(int(note.stem))
        except DAMAGE as error:
            damaged[note] = error
    _say_damaged({note: why for note, why in damaged.items() if found and int(note.stem) > max(found)})
    return found


def epochs(folder: Path) -> list[int]:
    """Epochs with a checkpoint, intact or not."""
    return [int(note.stem) for note in _notes(folder)]


def at(folder: Path, epoch: int) -> Checkpoint | None:
    """The checkpoint after an epoch; None if missing or damaged."""
    try:
        return _verified(folder / f"{epoch:06d}.json")
    except DAMAGE:
        return None


def set_aside(folder: Path, after: float) -> None:
    """Rename the checkpoints after the newest intact one: a run that resumes before them neither counts nor uses them.
    """
    for note in _notes(folder):
        if int(note.stem) > after:
            for path in (note.with_suffix(".safetensors"), note):
                with suppress(FileNotFoundError):
                    path.rename(path.with_name(f"{path.stem}.damaged{path.suffix}"))


def common(saved: Sequence[Collection[int]]) -> set[int]:
    """Epochs from which all can resume; empty if each has saved some, and all are damaged or none is common."""
    found = set[int].intersection(*map(set, saved))
    return found if found != {0} or any(max(one) == 0 for one in saved) else set()


def nothing_intact(folder: Path) -> InputError:
    """The error if there are checkpoints, and a run cannot resume from any."""
    return InputError(
        f"no epoch has an intact checkpoint in {folder}; restore the folder from a backup, or move it elsewhere to "
        "train anew"
    )


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
    return sorted(note for note in folder.glob("*.json") if note.stem.isdecimal())


DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""Exceptions that reading a damaged checkpoint may raise."""


def _verified(note: Path) -> Checkpoint:
    """Load the checkpoint of a note; raise one of `DAMAGE` if it is not intact."""
    return replace(_described(note), rows=load_file(note.with_suffix(".safetensors")))


def _described(note: Path) -> Checkpoint:
    """The checkpoint of a note without its rows; raise one of `DAMAGE` if a file is missing or its checksum is wrong.
    """
    meta = read_json(note)
    if meta.pop("sha256") != _checksum(note.with_suffix(".safetensors")):
        raise ValueError("its checksum is wrong")
    return Checkpoint({}, **meta)


def _say_damaged(found: Mapping[Path, Exception]) -> None:
    for note, why in found.items():
        said = getattr(why, "strerror", None) or why
        log.warning("checkpoint %s is damaged (%s); using an older one", note.with_suffix(".safetensors"), said)


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
        self._own = self.folder / "checkpoint"
        self._newest = math.inf
        """Epoch of its newest intact checkpoint, once `epochs` has looked."""

    # -------------------------------------------------------------------------------------------- checkpoints

    def epochs(self) -> set[int]:
        """Epochs from which it can resume: 0, and those of intact checkpoints, its own or of the whole run.

        Empty if all checkpoints are damaged: starting anew would overwrite what can perhaps be restored.
        """
        own, whole = intact(self._own), intact(self._whole)
        self._newest = max(own, default=0)
        return {0, *own, *whole} if own or whole or not (epochs(self._own) or epochs(self._whole)) else set()

    def load(self, epoch: int) -> Checkpoint:
        """The checkpoint of its nodes after an epoch."""
        own = at(self._own, epoch)
        if own is not None:
            return own
        whole = at(self._whole, epoch)
        if whole is None:
            raise InputError(f"{self._own} has no intact checkpoint of epoch {epoch} any more; run the command again")
        return replace(whole, rows={name: value[self.nodes].contiguous() for name, value in whole.rows.items()})

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint of its nodes."""
        save(self._own, checkpoint)

    # -------------------------------------------------------------------------------------------- measures

    def data(self) -> list[Json]:
        """The fingerprints of a site's data, and the epoch from which each was used."""
        try:
            return list(read_json(self.folder / "part.json").get("data", []))
        except (OSError, ValueError, TypeError):
            return []

    def begin(self, epoch: int, data: str | None = None) -> None:
        """Create the folder; delete measures and tested models after the epoch that the run resumes from.

        Its damaged checkpoints are set aside. `data` is the fingerprint of the data from this epoch.
        """
        set_aside(self._own, self._newest)
        used = [one for one in self.data() if one["epoch"] < epoch]
        if data and data not in [one["fingerprint"] for one in used[-1:]]:
            used.append({"epoch": epoch, "fingerprint": data})
        write_json(self.folder / "part.json", {"nodes": self.nodes} | ({"data": used} if used else {}))
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
        return {int(path.stem) for path in self._tested.glob("*.safetensors") if path.stem.isdecimal()}

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
    if not parts:
        return None
    saved = common([part.epochs() for part in parts])
    if not saved:
        raise nothing_intact(parts[0].folder.parent)
    loaded = [part.load(max(saved)) for part in parts] if max(saved) else []
    return replace(loaded[0], rows=stacked([one.rows for one in loaded])) if loaded else None


def stacked(rows: Sequence[NamedRows]) -> NamedRows:
    """Concatenate the rows of several parts."""
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
