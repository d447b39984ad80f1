"""What each process of a distributed run leaves in the run's folder: parts/0/, parts/1/, …"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasiglobal.common.files import append_line, read_lines, write_json, write_lines
from quasiglobal.errors import InputError
from quasiglobal.runs import checkpoints
from quasiglobal.training.metrics import Record, combined


class Part:
    """A process's share of a run on disk."""

    def __init__(self, run: Path, process: int, nodes: Sequence[int]) -> None:
        self.nodes = list(nodes)
        self.folder, self._whole = run / "parts" / str(process), run / "checkpoint"
        self._metrics = self.folder / "metrics.jsonl"

    def epochs(self) -> set[int]:
        """After which epochs there is a state of all its nodes, its own or of the run as a whole."""
        return {0, *checkpoints.epochs(self.folder / "checkpoint"), *checkpoints.epochs(self._whole)}

    def load(self, epoch: int) -> dict[str, Tensor]:
        """Its nodes' rows after an epoch."""
        rows = checkpoints.at(self.folder / "checkpoint", epoch)
        if rows is not None:
            return rows
        rows = checkpoints.at(self._whole, epoch)
        if rows is None:
            raise InputError(f"{self._whole} has no state after epoch {epoch} any more; start the run anew")
        return {name: value[self.nodes].contiguous() for name, value in rows.items()}

    def begin(self, epoch: int) -> None:
        """Make the folder, and forget what was measured after the epoch that the run goes on from."""
        write_json(self.folder / "part.json", {"nodes": self.nodes})
        write_lines(self._metrics, [found for found in self.measures if found["epoch"] <= epoch])
        (self.folder / "summary.json").unlink(missing_ok=True)

    @property
    def measures(self) -> list[dict[str, Any]]:
        """What was measured so far, an entry an epoch."""
        return read_lines(self._metrics)

    @property
    def status(self) -> str | None:
        """How it ended, once it has."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text())["status"] if path.exists() else None

    def write(self, measures: Mapping[str, Any]) -> None:
        """Add an epoch's measures."""
        append_line(self._metrics, measures)

    def save(self, rows: dict[str, Tensor], epoch: int) -> None:
        """Save its nodes' rows."""
        checkpoints.save(self.folder / "checkpoint", rows, checkpoints.Progress(epoch, 0))

    def finish(self, status: str, edges: Mapping[str, Any]) -> None:
        """Say how it ended, and what each of its edges has carried."""
        write_json(self.folder / "summary.json", {"status": status, "edges": edges})


def parts_of(run: Path) -> list[Part]:
    """All parts of a run, in the order of their nodes."""
    found = [
        Part(run, int(path.parent.name), json.loads(path.read_text())["nodes"])
        for path in (run / "parts").glob("*/part.json")
    ]
    return sorted(found, key=lambda part: part.nodes)


def records_of(parts: Sequence[Part]) -> list[Record]:
    """The records of the epochs that everybody has passed, each of those who were there."""
    measured = [{found["epoch"]: found for found in part.measures} for part in parts]
    passed = min(
        (math.inf if part.status else max(epochs, default=0) for part, epochs in zip(parts, measured, strict=True)),
        default=0,
    )
    at = sorted({epoch for epochs in measured for epoch in epochs if epoch <= passed})
    return [combined([epochs[epoch] for epochs in measured if epoch in epochs]) for epoch in at]


def newest(run: Path) -> tuple[dict[str, Tensor], int, list[int]]:
    """The rows after the last epoch that all parts here have saved, that epoch (0: none), and whose rows they are."""
    parts = parts_of(run)
    epoch = max(set.intersection(*(part.epochs() for part in parts))) if parts else 0
    rows = [part.load(epoch) for part in parts] if epoch else []
    nodes = [node for part in parts for node in part.nodes]
    return {name: torch.cat([part[name] for part in rows]) for name in (rows[0] if rows else ())}, epoch, nodes
