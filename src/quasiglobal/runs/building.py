"""Build the data, the model and the task that an experiment names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from quasiglobal.common.imports import imported, is_path
from quasiglobal.data.corpus import LENGTH, Corpus, cache_folder, check_vocabulary, tokenised
from quasiglobal.data.dataset import Dataset, agreed
from quasiglobal.data.sources import corpus, is_text, load
from quasiglobal.errors import InputError
from quasiglobal.models import build
from quasiglobal.models.language.loading import language_model, tokenizer_of, vocabulary_of
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task


def make_task(experiment: Experiment, data: Dataset) -> Task:
    """The experiment's model, with cross-entropy, on the data."""
    model = partial(model_of, experiment, len(data.classes), data.shape, data.pad)
    return Task(model, nn.functional.cross_entropy, data)


def data_of(
    experiment: Experiment, data_dir: Path | None, name: str | None = None, testing: bool = False
) -> Dataset:
    """Load the experiment's data, or the data set `name` with the experiment's classes, shape, mean and std.

    Texts are tokenised for the experiment's model. `testing` is for a trained model: all rows of a text file are then
    test examples, in file order.
    """
    name = name or experiment.data
    if is_text(name):
        data = as_tokens(experiment, corpus(name, data_dir, testing), cache_folder())
    else:
        data = load(name, data_dir)
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


def model_of(experiment: Experiment, classes: int, shape: Sequence[int], pad: int | None = None) -> nn.Module:
    """A new model for inputs of this shape; `pad` is the id of the padding token."""
    if experiment.reads_texts:
        if len(shape) != 1:
            raise InputError(f"{experiment.model} reads texts, not examples of shape {list(shape)}; use other --data")
        return language_model(
            experiment.model, classes=classes, pretrained=experiment.pretrained, train=experiment.train, pad=pad,
            length=shape[0],
        )
    if is_path(experiment.model):
        own = imported(experiment.model, "model")
        model = copy.deepcopy(own) if isinstance(own, nn.Module) else own() if callable(own) else None
        if not isinstance(model, nn.Module):
            raise InputError(f"{experiment.model} is neither an nn.Module nor a function that returns one")
        return model
    return build(experiment.model, norm=experiment.norm, width=experiment.width, classes=classes, shape=tuple(shape))
