"""Load the data that an experiment names, and make its task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quasiglobal.common.files import cache_folder
from quasiglobal.common.memory import USABLE, free_bytes
from quasiglobal.data.dataset import validating
from quasiglobal.data.sources import MEMORY_LIMIT, Dataset, agreed, check_streams, corpus, is_text, load, load_table
from quasiglobal.data.texts import LENGTH, Corpus, check_vocabulary, tokenised
from quasiglobal.errors import InputError
from quasiglobal.models.language import tokenizer_of, vocabulary_of
from quasiglobal.runs.building import make_task
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

NUMERIC = ("mse", "mae", "huber")
"""Losses of numbers: the labels of a table are then numbers, even if all are whole."""


def task_of(experiment: Experiment, options: Options) -> Task:
    """The experiment's task, with its data."""
    return make_task(experiment, data_for(experiment, options))


def data_for(experiment: Experiment, options: Options) -> Dataset:
    """Load the experiment's data for training."""
    limit = min(MEMORY_LIMIT, free_bytes(torch.device("cpu")) * USABLE)
    if options.memory_limit is not None:
        limit = options.memory_limit * 1e9
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
