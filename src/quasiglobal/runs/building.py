"""The task that an experiment names: its data, model, loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quasiglobal.common.files import cache_folder
from quasiglobal.common.memory import USABLE, free_bytes
from quasiglobal.common.modules import copied
from quasiglobal.common.objects import imported, is_own, is_path, readable
from quasiglobal.data.dataset import Dataset, validating
from quasiglobal.data.sources import MEMORY_LIMIT, agreed, check_streams, corpus, is_text, load, load_table
from quasiglobal.data.texts import LENGTH, Corpus, check_vocabulary, tokenised
from quasiglobal.errors import InputError, unknown
from quasiglobal.metrics import BUILT_IN, Metric
from quasiglobal.models import build
from quasiglobal.models.language import language_model, tokenizer_of, vocabulary_of
from quasiglobal.runs.options import Options
from quasiglobal.stacked.one_model import Loss
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import LOSS, imported_metric, ranking_of
from quasiglobal.training.task import Task
from quasiglobal.training.trial import made

LOSSES: dict[str, Loss] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "mae": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}
"""Losses by name."""

NUMERIC = ("mse", "mae", "huber")
"""Losses of numbers: the labels of a table are then numbers, even if all are whole."""


def task_of(experiment: Experiment, options: Options) -> Task:
    """The experiment's task, with its data."""
    return make_task(experiment, data_for(experiment, options))


def make_task(experiment: Experiment, data: Dataset) -> Task:
    """The experiment's model, loss and metrics, on the data."""
    if data.numbers and not (data.own and is_path(experiment.model)):       # a model of ours returns columns
        train, test = (replace(split, y=split.y[:, None]) for split in (data.train, data.test))
        data = replace(data, train=train, test=test)
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


def loss_of(experiment: Experiment, data: Dataset) -> Loss:
    """The experiment's loss; by default cross-entropy for class numbers, else the mean squared error."""
    name = experiment.loss or ("cross-entropy" if data.classes else "mse")
    if name in LOSSES:
        return LOSSES[name]
    if not is_path(name):
        raise unknown("loss", name, [*LOSSES, "package.module:name"])
    found = imported(name, "loss")
    return made(found, name) if isinstance(found, type) else found


def metrics_of(experiment: Experiment) -> dict[str, Metric] | None:
    """The experiment's metrics by name; None for the default ones."""
    found: dict[str, Metric] = {}
    for text in experiment.metric:
        if text == LOSS:
            continue
        if text not in BUILT_IN and not is_path(text):
            raise unknown("metric", text, [*BUILT_IN, "package.module:name"])
        found[ranking_of(text).name] = BUILT_IN[text] if text in BUILT_IN else imported_metric(text)
    return found or (None if not experiment.metric else {})


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


# ------------------------------------------------------------------------------------------ data


def data_for(experiment: Experiment, options: Options) -> Dataset:
    """Load the experiment's data for training."""
    free, given = free_bytes(torch.device("cpu")) * USABLE, options.memory_limit
    limit = min(MEMORY_LIMIT, free) if given is None else given * 1e9
    data = data_of(experiment, options.data_dir, memory_limit=limit, stream=options.stream)
    return validating(data, experiment.validation) if experiment.validation else data


def data_of(
    experiment: Experiment,
    data_dir: Path | None,
    name: str | None = None,
    testing: bool = False,
    *,
    memory_limit: float = MEMORY_LIMIT,
    stream: bool = False,
    features: tuple[str, ...] = (),
) -> Dataset:
    """Load the experiment's data, or the data set `name` with the experiment's classes, shape, mean and std.

    Texts are tokenised for the experiment's model. `testing` is for a trained model: all rows of a CSV file are then
    test examples, in file order. Images beyond the memory limit in bytes, or with `stream`, stay on disk.
    `features` are the columns of a table that a trained model takes, in this order.
    """
    name = name or experiment.data
    if stream:
        check_streams(name)
    if experiment.label:
        numbers = experiment.loss in NUMERIC
        data = load_table(name, experiment.label, numbers=numbers, memory_limit=memory_limit, testing=testing)
        data = _of_columns(data, features) if features else data
    elif is_text(name):
        texts = corpus(name, data_dir, testing, memory_limit=memory_limit)
        data = as_tokens(experiment, texts, cache_folder("tokens"))
    else:
        data = load(name, data_dir, memory_limit=memory_limit, stream=stream)
    return agreed(data, experiment.classes, experiment.shape, experiment.mean, experiment.std)


def as_tokens(experiment: Experiment, texts: Corpus, cache: Path | None) -> Dataset:
    """Tokenise texts for the experiment's model, `shape` tokens per text."""
    if not experiment.reads_texts:
        raise InputError(f"{texts.name} is text, which {experiment.model} does not read; use --model hf:FOLDER")
    if len(experiment.shape) > 1:
        raise InputError(f"for texts, shape must be one number, the length in tokens; got {list(experiment.shape)}")
    (length,) = experiment.shape or (LENGTH,)
    data = tokenised(texts, tokenizer_of(experiment.model), length, cache)
    check_vocabulary(data, vocabulary_of(experiment.model), experiment.model)
    return data


def _of_columns(data: Dataset, features: tuple[str, ...]) -> Dataset:
    """A table with these columns as its input."""
    there = data.test.features
    if missing := [name for name in features if name not in there]:
        raise InputError(f"{data.name} has no column of numbers {missing[0]!r}; the model takes {', '.join(features)}")
    columns = [there.index(name) for name in features]
    splits = [replace(split, x=split.x[:, columns], features=features) for split in (data.train, data.test)]
    picked = [tuple(values[k] for k in columns) for values in (data.mean, data.std)]
    return replace(data, train=splits[0], test=splits[1], mean=picked[0], std=picked[1])
