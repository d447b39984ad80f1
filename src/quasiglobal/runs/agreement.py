"""Settings that data owners must agree on: they are in the experiment, and admission compares its hash.

No owner reveals the number or content of its examples. Only parameters leave a node.
"""

from __future__ import annotations

from dataclasses import replace

from quasiglobal.data.sources import named
from quasiglobal.errors import InputError
from quasiglobal.runs.building import make_task
from quasiglobal.runs.loading import data_of
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

AGREED = ("classes", "shape", "steps")
"""Required fields if every node brings its own data."""

AGREED_OF_IMAGES = ("mean", "std")
"""Further required fields if the data are not texts."""


def agreement(experiment: Experiment) -> Experiment:
    """The experiment as all nodes run it, independent of the names of their data."""
    text = experiment.reads_texts
    needed = AGREED if text else AGREED + AGREED_OF_IMAGES
    missing = [name for name in needed if not getattr(experiment, name)]
    if missing:
        raise InputError(
            f"nodes with their own data have to agree on {', '.join(missing)}; add this to the experiment "
            f"(`qg data {'csv' if text else 'folder'}:PATH` shows the values of your data)"
        )
    refuse_faults(experiment)
    return replace(experiment, data="own", partition="whole")


def own_task(experiment: Experiment, data: str) -> Task:
    """The experiment's task on a node's own data."""
    return make_task(experiment, data_of(experiment, None, named(data)))


def check_node(experiment: Experiment, node: int) -> int:
    """Return the number of nodes; raise InputError if `node` is out of range."""
    n = count_nodes(experiment.topology)
    if not 0 <= node < n:
        raise InputError(f"node must be from 0 to {n - 1} on {experiment.topology}, got {node}")
    return n


def refuse_faults(experiment: Experiment) -> None:
    """Reject simulated faults: between processes, faults are real."""
    if experiment.drop or experiment.churn:
        raise InputError(
            "drop and churn work only in the simulator; use --engine simulator or leave both at 0"
        )
