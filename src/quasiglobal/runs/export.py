"""Export of a run's model from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasiglobal.common.objects import is_path
from quasiglobal.errors import InputError
from quasiglobal.runs.best import best_state
from quasiglobal.runs.building import model_of
from quasiglobal.runs.exported import Exported, fingerprint, frozen_of
from quasiglobal.runs.loading import data_of
from quasiglobal.runs.store import Run
from quasiglobal.stacked.layout import Layout
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.rows import complete_state, state_dict_of


def export(run: Run, node: str, data_dir: Path | None = None, best: bool = False) -> Exported:
    """Export a node's model, or the average of the nodes in the run folder, from the newest checkpoint.

    With `best`, export the node's best model so far.
    """
    rows, nodes = run.rows()
    if node != "average" and not (node.isdigit() and int(node) in nodes):
        known = f"one of {nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else str(nodes[0])
        raise InputError(f"node must be average or {known}, got {node!r}")
    experiment = _in_its_terms(run, data_dir)
    features = tuple((run.summary.features if run.summary else None) or ())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)                                # frozen weights are those of seed 0, as in training
        module = model_of(experiment, len(experiment.classes) or 1, experiment.shape)
    layout = Layout.of_experiment(module, experiment.bn)
    if layout.size != rows["x"].shape[1]:
        raise InputError(
            f"{run.folder} was trained on other classes or shapes than {experiment.data} has now; restore the old data"
        )
    if best:
        only = str(nodes[0]) if len(nodes) == 1 else node
        return Exported(experiment, best_state(run.folder, only), features=features)
    at = None if node == "average" else nodes.index(int(node))
    weights = _weights(run, data_dir, nodes) if node == "average" else None
    if is_path(experiment.model):                           # its frozen weights are nowhere else
        return Exported(experiment, complete_state(module, rows, layout, at, weights), features=features)
    frozen = frozen_of(module)
    state = state_dict_of(rows, layout, at, weights)
    return Exported(experiment, state, fingerprint(frozen) if frozen else "", features)


def _weights(run: Run, data_dir: Path | None, nodes: Sequence[int]) -> Tensor | None:
    """How much these nodes count, from the summary, or else from the data; None if all count alike."""
    if run.experiment.weights == "equal":
        return None
    known: Any = run.summary.weights if run.summary else run.experiment.resolved.weights
    if not known:
        known = run.experiment.resolved.weights_on(data_of(run.experiment, data_dir))
    return torch.tensor(known, dtype=torch.float64)[list(nodes)]


def _in_its_terms(run: Run, data_dir: Path | None) -> Experiment:
    """The experiment with classes, shape, mean and std filled in from the summary, or else from the data."""
    experiment, known = run.experiment, run.summary.terms if run.summary else None
    if known is None and not (experiment.classes and experiment.shape):
        known = data_of(experiment, data_dir).terms()
    terms: dict[str, Any] = {name: tuple(value) for name, value in (known or {}).items()}
    return replace(experiment, **terms)


