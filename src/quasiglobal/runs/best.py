"""The best model of each node so far, in best/ of the run folder, next to the last in the checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from quasiglobal.common.files import finite, write_tensors
from quasiglobal.errors import InputError
from quasiglobal.training.metrics import Record
from quasiglobal.training.rows import NamedRows, complete_state

if TYPE_CHECKING:
    from quasiglobal.training.loop import Loop

NOTE = "kept"
"""Key of the `Kept` in the metadata of a file in best/: model and note are replaced at once."""


@dataclass(frozen=True)
class Kept:
    """A node's best model so far."""

    node: int
    epoch: int
    metric: str
    value: float | None
    """None: the score is not finite, and neither was any before."""


class KeepBest:
    """Keeps each node's best model, by its score on its own test data, or on all if that is missing or undefined.

    With run folders, the models are in `best/`: a safetensors state_dict per node, whose metadata has its epoch and
    value; summary.json lists them. Otherwise they are in `models[k][node]`, as state_dicts.
    """

    everywhere = True
    """With several processes, each keeps the models of its nodes."""

    def __init__(self, metric: str | None = None, lower: bool = False) -> None:
        """`metric` is a metric's name, by default the score; `lower`: lower is better, for a metric without a mark."""
        self.metric, self.lower = metric, lower
        self.best: list[dict[int, tuple[int, float]]] = []
        """For each seed: the epoch and the value of each node's best model."""
        self.models: list[dict[int, NamedRows]] = []
        """For each seed without a run folder: the state_dict of each node's best model."""

    def on_start(self, run: Loop) -> None:
        """Continue from the models that a stopped run has kept, also those of epochs after its last checkpoint."""
        run.ranking(self.metric)                            # raises for an unknown name
        self.models, self.best = [], []
        self._enter(run, trained=0)

    def _enter(self, run: Loop, trained: int) -> None:
        """Add the runs that are new in the loop, and have trained this many epochs in it."""
        score, nodes = run.ranking(self.metric).name, run.program.engine.nodes
        for k in range(len(self.best), len(run.runs)):
            before = kept_in(run.folders[k]) if run.folders and len(run.runs[k]) > trained else []
            self.models.append({})
            self.best.append({
                one.node: (one.epoch, math.nan if one.value is None else one.value)
                for one in before if one.node in nodes and one.metric == score
            })

    def on_epoch(self, run: Loop) -> None:
        """Keep the models that are better than before."""
        self._enter(run, trained=1)
        score = run.ranking(self.metric, self.lower)
        for k, record in run.latest.items():
            nodes = run.program.engine.nodes
            better = [
                (node, value) for node, value in zip(nodes, values_of(record, score.name), strict=False)
                if node not in self.best[k] or score.worth(value) > score.worth(self.best[k][node][1])
            ]
            rows = run.rows_of(k) if better else {}
            for node, value in better:
                self.best[k][node] = record["epoch"], value
                state = complete_state(run.program.task.module(0), rows, run.program.layout, nodes.index(node))
                if run.folders:
                    write_best(run.folders[k], Kept(node, record["epoch"], score.name, value), state)
                else:
                    self.models[k][node] = state


def values_of(record: Record, metric: str) -> list[float]:
    """Each node's value of a metric, on its own test data if it has such a value; empty if it was not measured."""
    found = (record.get(f"{metric}_{which}") for which in ("nodes", "own_nodes"))
    of_all, own = (values if isinstance(values, list) else [] for values in found)
    return [all_ if math.isnan(value) else value for value, all_ in zip(own or of_all, of_all, strict=True)]


def path_of(run: Path, node: int) -> Path:
    """The file of a node's best model in a run folder."""
    return run / "best" / f"node-{node}.safetensors"


def write_best(run: Path, note: Kept, state: NamedRows) -> None:
    """Replace a node's best model, and the note about it, at once."""
    write_tensors(path_of(run, note.node), state, {NOTE: json.dumps(finite(asdict(note)))})


def kept_in(run: Path) -> list[Kept]:
    """The best models in a run folder, sorted by node; damaged files are left out."""
    found = []
    for path in (run / "best").glob("node-*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                found.append(Kept(**json.loads((file.metadata() or {})[NOTE])))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda one: one.node)


def best_state(run: Path, node: str) -> NamedRows:
    """The state_dict of a node's best model; raise InputError if the run folder has none."""
    known = [one.node for one in kept_in(run)]
    if not node.isdecimal() or int(node) not in known:
        has = f"those of {', '.join(map(str, known))}" if known else "none: --keep-best keeps them during the training"
        raise InputError(f"{run} has no best model of node {node}; it has {has}")
    return load_file(path_of(run, int(node)))
