"""What owners who share no data have to agree on: it is in the experiment, and its hash is part of every admission.

Nobody tells how many examples it has, nor which. Nothing but parameters leaves a node.
"""

from __future__ import annotations

from dataclasses import replace

from quasiglobal.data.sources import named
from quasiglobal.errors import InputError
from quasiglobal.runs.building import data_of, make_task
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

AGREED = ("classes", "shape", "steps")
"""Fields that an experiment needs where every node brings its own data."""

AGREED_OF_IMAGES = ("mean", "std")
"""Further fields where the data are not texts."""


def agreement(experiment: Experiment) -> Experiment:
    """The experiment as all nodes run it, whatever each of them calls its data."""
    text = experiment.reads_texts
    needed = AGREED if text else AGREED + AGREED_OF_IMAGES
    missing = [name for name in needed if not getattr(experiment, name)]
    if missing:
        raise InputError(
            f"nodes with their own data have to agree on {', '.join(missing)}; add it to the experiment "
            f"(`qg data {'csv' if text else 'folder'}:PATH` shows what yours has)"
        )
    refuse_faults(experiment)
    return replace(experiment, data="own", partition="whole")


def own_task(experiment: Experiment, data: str) -> Task:
    """The experiment's task on a node's own data."""
    return make_task(experiment, data_of(experiment, None, named(data)))


def check_node(experiment: Experiment, node: int) -> int:
    """The number of nodes, if `node` is one of them."""
    n = count_nodes(experiment.topology)
    if not 0 <= node < n:
        raise InputError(f"node must be from 0 to {n - 1} on {experiment.topology}, got {node}")
    return n


def refuse_faults(experiment: Experiment) -> None:
    """Refuse simulated faults: between processes they are real ones."""
    if experiment.drop or experiment.churn:
        raise InputError(
            "drop and churn are simulated, but processes lose what they lose; use --engine simulator or leave both at 0"
        )
