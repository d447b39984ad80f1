"""Settings that data owners must agree on: they are in the experiment, and admission compares its hash.

Nodes do not send the number of their examples. They send models, from which a neighbour may reconstruct examples
(docs/deploy.md).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch

from quasiglobal.algorithms.needs import needs_of
from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.needs import CUT_OFF, HARMED
from quasiglobal.errors import InputError
from quasiglobal.peers.membership import NO_MEAN_OVER_SITES
from quasiglobal.runs.building import make_task
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

AGREED = ("classes", "shape", "steps")
"""Required fields if every node brings its own data."""


def agreement(experiment: Experiment) -> Experiment:
    """The experiment as all nodes run it, independent of the names of their data."""
    text = experiment.reads_texts
    needed = AGREED if text else (*AGREED, "mean", "std")
    missing = [name for name in needed if not getattr(experiment, name)]
    if missing:
        raise InputError(
            f"nodes with their own data have to agree on {', '.join(missing)}; add this to the experiment "
            f"(`qg data {'csv' if text else 'folder'}:PATH` shows the values of your data)"
        )
    refuse_faults(experiment)
    if experiment.validation:
        raise InputError("owners bring their own test data; leave out validation")
    if experiment.weights == "examples":
        raise InputError(
            "nodes do not send their numbers of examples, so weights = examples is unknown here; agree on numbers, "
            'as in weights = "1200,340,80"'
        )
    return replace(experiment, data="own", partition="whole")


def has_own_data(experiment: Experiment) -> bool:
    """Whether every node brings its own data: the experiment names none, but has all fields of `AGREED`."""
    return experiment.data in ("own", Experiment().data) and all(getattr(experiment, name) for name in AGREED)


def stand_in(experiment: Experiment) -> Task:
    """The experiment's task on noise instead of the owners' data: one batch of the agreed shape and classes."""
    if experiment.reads_texts:
        raise InputError("the owners' texts are not here; estimate with your own, as in --data csv:PATH")
    rows = torch.arange(max(experiment.batch, len(experiment.classes)))
    noise = torch.randint(256, (len(rows), *experiment.shape), dtype=torch.uint8)
    examples = Examples(noise, rows % len(experiment.classes))
    return make_task(experiment, Dataset(
        "own", examples, examples, experiment.classes, 255.0, experiment.mean, experiment.std
    ))


def refuse_between_sites(experiment: Experiment) -> None:
    """Reject algorithms that average over all nodes or need every message; warn if lost messages harm the algorithm.

    A site is connected only to its neighbours, and its network may fail.
    """
    chosen = experiment.resolved.algorithm
    for effect, sentence in ((chosen.needs.loss, HARMED), (chosen.needs.absence, CUT_OFF)):
        if effect == "harmed":
            warnings.warn(sentence.format(experiment.algorithm), stacklevel=2)
    if chosen.needs.loss == "refused":
        raise InputError(f"{experiment.algorithm} collapses when a message is lost, as between sites; use qg-dsgdm-n")
    if experiment.communication or traffic(chosen).means:
        what = experiment.communication or experiment.algorithm
        raise InputError(f"{what} averages over all nodes: {NO_MEAN_OVER_SITES}")


def trust_of(experiment: Experiment, ratio: float | None, default: float = math.inf) -> float:
    """The ratio of `--trust`, or the default if it is None; inf clips nothing. Reject a finite one if it does harm."""
    why = _why_whole(experiment)
    if why is None:
        return default if ratio is None else ratio
    if ratio is not None and math.isfinite(ratio):
        raise InputError(
            f"{experiment.communication or experiment.algorithm} {why}, so that messages cannot be clipped; leave out "
            "--trust, or use an algorithm that averages models with the neighbours, such as qg-dsgdm-n"
        )
    return math.inf


def _why_whole(experiment: Experiment) -> str | None:
    """Reason why an algorithm needs whole messages; None if they may be clipped."""
    chosen = experiment.resolved.algorithm
    sent = traffic(chosen)
    if experiment.communication or sent.means:
        return "averages over all nodes at once"
    if sent.told:
        return "sends compressed differences, whose sums both sides keep"
    if sent.per_edge or needs_of(chosen).follows_messages:
        return "keeps a state that has to agree with what neighbours sent"
    return None if needs_of(chosen).bears_clipping else "keeps sums over all nodes that a clipped message would falsify"


def refuse_faults(experiment: Experiment) -> None:
    """Reject simulated faults: between processes, faults are real. Reject a deadline if late messages do harm."""
    chosen = experiment.resolved.algorithm
    if experiment.round_deadline is not None:
        why = "collapses when messages are late or lost" if chosen.needs.loss == "refused" else ""
        if traffic(chosen).means:
            why = "needs exact means over all nodes, which wait for the slowest"
        if why:
            raise InputError(f"{experiment.algorithm} {why}; leave out round_deadline, or use qg-dsgdm-n")
        if chosen.needs.loss == "harmed":
            warnings.warn(HARMED.format(experiment.algorithm), stacklevel=2)
    if experiment.drop or experiment.churn:
        raise InputError("drop and churn work only in the simulator; use --engine simulator or leave both at 0")
