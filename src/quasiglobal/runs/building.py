"""Build the model and the task that an experiment names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from quasiglobal.common.modules import copied
from quasiglobal.common.objects import imported, is_own, is_path, readable
from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.errors import InputError, unknown
from quasiglobal.metrics import BUILT_IN
from quasiglobal.models import build
from quasiglobal.models.language import language_model
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import LOSS, imported_metric, ranking_of
from quasiglobal.training.task import Task
from quasiglobal.training.trial import made

LOSSES: dict[str, Callable[..., Any]] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "mae": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}
"""Losses by name."""


def make_task(experiment: Experiment, data: Dataset) -> Task:
    """The experiment's model, loss and metrics, on the data."""
    if data.numbers and not (data.own and is_path(experiment.model)):       # a model of ours returns columns
        data = replace(data, train=_as_columns(data.train), test=_as_columns(data.test))
    outputs = len(data.classes) or math.prod(tree_leaves(data.train.y)[0].shape[1:])
    model = partial(model_of, experiment, outputs, data.shape, data.pad)
    known = experiment.loss in ("", "cross-entropy") and bool(data.classes) and not is_path(experiment.model)
    task = Task(
        model, loss_of(experiment, data), data, metrics=metrics_of(experiment), name=experiment.model,
        classifies=True if known else None,
    )
    if not known or experiment.metric:
        task.trial                                          # noqa: B018  (raises if the parts do not fit)
    return task


def loss_of(experiment: Experiment, data: Dataset) -> Callable[..., Any]:
    """The experiment's loss; by default cross-entropy for class numbers, else the mean squared error."""
    name = experiment.loss or ("cross-entropy" if data.classes else "mse")
    if name in LOSSES:
        return LOSSES[name]
    if not is_path(name):
        raise unknown("loss", name, [*LOSSES, "package.module:name"])
    found = imported(name, "loss")
    return made(found, name) if isinstance(found, type) else found


def metrics_of(experiment: Experiment) -> dict[str, Any] | None:
    """The experiment's metrics by name; None for the default ones."""
    found = {}
    for text in experiment.metric:
        if text == LOSS:
            continue
        if text not in BUILT_IN and not is_path(text):
            raise unknown("metric", text, [*BUILT_IN, "package.module:name"])
        found[ranking_of(text).name] = BUILT_IN[text] if text in BUILT_IN else imported_metric(text)
    return found or (None if not experiment.metric else {})


def _as_columns(examples: Examples) -> Examples:
    """Targets [m] as [m, 1], the shape of a model's outputs."""
    return replace(examples, y=examples.y[:, None])


def model_of(experiment: Experiment, classes: int, shape: Sequence[int], pad: int | None = None) -> nn.Module:
    """A new model for inputs of this shape; `pad` is the id of the padding token."""
    if experiment.reads_texts:
        if len(shape) != 1:
            raise InputError(f"{experiment.model} reads texts, not examples of shape {list(shape)}; use other --data")
        return language_model(
            experiment.model, classes=classes, pretrained=experiment.pretrained, train=experiment.train, pad=pad,
            length=shape[0],
        )
    if is_own(experiment.model):
        raise InputError(f"the model {readable(experiment.model)} is defined in Python; save run.average() there")
    if is_path(experiment.model):
        own = imported(experiment.model, "model")
        return copied(own) if isinstance(own, nn.Module) else made(own, experiment.model)
    return build(experiment.model, norm=experiment.norm, width=experiment.width, classes=classes, shape=tuple(shape))
