"""The experiment of a task: a string with a digest of the content names each object that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quasiglobal import algorithms
from quasiglobal.algorithms import Algorithm
from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.objects import named_text
from quasiglobal.errors import InputError
from quasiglobal.metrics import BUILT_IN, is_lower, name_of, percent
from quasiglobal.runs.building import LOSSES
from quasiglobal.topology.mixing import entries
from quasiglobal.topology.parsing import Graph, is_external, parse
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.metrics import LOSS
from quasiglobal.training.task import Task

AlgorithmLike = str | Algorithm | type[Algorithm]
"""An algorithm as string or object: see `algorithms.algorithm`."""

OF_TASK = {
    "data", "model", "loss", "metric", "classes", "shape", "mean", "std", "norm", "width", "pretrained", "train",
    "label", "validation",
}
"""Fields of `Experiment` that the task sets."""

LIST = "list"
"""Name of the partition of data that are given as one data set per node."""


def experiment_of(task: Task, algorithm: AlgorithmLike, graph: Graph, values: Mapping[str, object]) -> Experiment:
    """The experiment that trains a task; `values` are further fields, with objects or functions for some."""
    values = dict(values)
    for name in OF_TASK & values.keys():
        raise InputError(f"{name} belongs to the task; give it to qg.Task, or leave it out")
    schedule = _schedule(values)
    named = {
        "data": _data(task),
        "model": named_text(task.name, fingerprint(task.module(0), task.model)),
        "loss": _loss(task),
        "metric": _metrics(task),
        "algorithm": algorithms.text_of(algorithm),
        "topology": _topology(graph),
        "partition": _partition(task, values.pop("partition", None), "alpha" in values),
    }
    one = from_mapping(values | named | schedule, "qg.train")
    if "warmup" in values and not {"warmup_from", "recipe"} & values.keys() and one.peak_lr <= one.warmup_from:
        one = replace(one, warmup_from=one.peak_lr / 10)    # the usual start would be above the peak
    return one


def _data(task: Task) -> str:
    """The name of the data, found once: training may change counters in a user's data set."""
    data = task.data
    if not data.own and ":" not in data.name:               # a published data set
        return data.name
    if "data" not in task.names:
        tensors = (data.train.x, data.train.y, data.test.x, data.test.y)
        content = (*tensors, data.parts, data.test_parts, data.mean, data.std)
        digest = fingerprint(content, data.fresh.sources if data.fresh else ())
        task.names["data"] = named_text(data.name, digest, train=len(data.train), test=len(data.test))
    return task.names["data"]


def _loss(task: Task) -> str:
    default = "cross-entropy" if task.data.classes else "mse"
    known = next((name for name, loss in LOSSES.items() if loss is task.loss), None)
    if known is not None:
        return "" if known == default else known
    return named_text(name_of(task.loss), fingerprint(task.loss))


def _metrics(task: Task) -> tuple[str, ...]:
    if task.given_metrics == {}:                            # none, on purpose
        return (LOSS,)
    return tuple(_metric(task, name, metric) for name, metric in (task.given_metrics or {}).items())


def _metric(task: Task, name: str, metric: object) -> str:
    if BUILT_IN.get(name) is metric:
        return name
    text = named_text(name, fingerprint(metric), name=name, lower=is_lower(metric), percent=percent(metric))
    if hasattr(metric, "compute"):                          # training changes its counters
        return task.names.setdefault(f"metric {name}", text)
    return text


def _topology(given: Graph) -> str:
    """The string from which `topology.parse` returns an equal topology, in other processes from its stored weights."""
    if isinstance(given, str) and not is_external(given):
        return given
    graph = parse(given)
    if graph.shares is not None:
        raise InputError("qg.train weighs the nodes itself: leave out weighted(…) of the topology, and give weights=…")
    try:
        if not is_external(graph.name) and parse(graph.name) == graph:
            return graph.name
    except InputError:                                      # its name is not one of ours
        pass
    name = graph.name.removeprefix("file:").rpartition("/")[2]
    weights = {} if graph.period is None else {"weights": [entries(W) for W in graph.matrices]}
    return named_text(name, graph.fingerprint, graph, n=graph.n, **weights)


def _partition(task: Task, partition: object, has_alpha: bool) -> str:
    if task.data.parts is not None:
        if partition is not None or has_alpha:
            raise InputError("train is a list, so nothing is split; leave out partition and alpha")
        return LIST
    if partition is None:
        return "dirichlet" if has_alpha else "iid"
    if isinstance(partition, str):
        return partition
    if not callable(partition):
        raise InputError(f"partition must be a name or a function (targets, n, rng), got {partition!r}")
    return named_text(name_of(partition), fingerprint(partition), partition)


def _schedule(values: dict[str, object]) -> dict[str, object]:
    """The fields of the learning rate schedule; removes the functions among `values`."""
    lr, schedule = values.get("lr"), values.pop("schedule", "constant")
    for name, needed in (("decay", "milestones"), ("warmup_from", "warmup")):
        if name in values and needed not in values and "recipe" not in values:
            raise InputError(f"{name} has no effect without {needed}; give both, or leave out {name}")
    asked = {"warmup", "milestones", "recipe"} & values.keys()
    if callable(lr):
        if asked or schedule != "constant":
            raise InputError("lr is a function of the step; leave out schedule, warmup, milestones and recipe")
        values.pop("lr")
        return {"schedule": _function(lr, by_step=True)}
    if callable(schedule):
        if asked:
            raise InputError("schedule is a function; leave out warmup, milestones and recipe")
        return {"schedule": _function(schedule, by_step=False)}
    if "recipe" in values:
        return {} if schedule == "constant" else {"schedule": schedule}
    if schedule == "steps":                                 # the rest is the paper's, except for what is given
        return {"schedule": schedule}
    if schedule != "constant" and "milestones" in values:
        raise InputError(f"milestones belong to schedule='steps'; leave them out with {schedule!r}")
    rest = {"warmup": values.get("warmup", 0.0), "milestones": values.get("milestones", ())}
    return rest | {"schedule": "steps" if schedule == "constant" and asked else schedule}


def _function(function: Callable[..., object], by_step: bool) -> str:
    return named_text(name_of(function), fingerprint(function, by_step), (function, by_step))
