"""Exported models: a plain state_dict with its experiment, made from a run's checkpoint; its outputs and its score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quasiglobal.common.files import write_tensors
from quasiglobal.common.objects import is_path
from quasiglobal.data.dataset import Dataset
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.sources import SOURCES
from quasiglobal.errors import InputError
from quasiglobal.models.language import PREFIX
from quasiglobal.runs.best import best_state
from quasiglobal.runs.building import data_of, loss_of, model_of
from quasiglobal.runs.store import Run
from quasiglobal.stacked.layout import Layout, load_state
from quasiglobal.stacked.one_model import arguments
from quasiglobal.training.evaluation import test_batch
from quasiglobal.training.experiment import FIRST_FIELDS, Experiment, from_mapping
from quasiglobal.training.rows import complete_state, state_dict_of
from quasiglobal.training.trial import misfit

WEIGHTS, LANGUAGE = "model.safetensors", "language"
"""Parts of an exported folder: the weights, and the configuration and tokenizer of a transformers model."""


ALWAYS_WRITTEN = (
    *FIRST_FIELDS, "steps", "schedule", "clip", "drop", "churn", "wire", "communication", "classes", "shape", "mean",
    "std", "pretrained", "loss", "metric", "label", "validation", "draws", "train", "round_deadline", "weights",
)
"""Settings that every export names; later ones stand in it only if they are not at their default."""


@dataclass(frozen=True)
class Exported:
    """A trained model and its experiment, whose classes, shape, mean and std apply to all input data."""

    experiment: Experiment
    state: dict[str, Tensor]
    frozen: str = ""
    """Hash of the frozen parameters, which are not in `state`; empty if there are none."""
    features: tuple[str, ...] = ()
    """Names of the columns of numbers that are the input, for a table."""

    @property
    def crops(self) -> bool:
        """Whether the model sees the middle of larger images, as for ImageNet."""
        name = self.experiment.data
        return name in SOURCES and SOURCES[name].augmentation == "resize-crop"

    @property
    def scale(self) -> float:
        """The pixel value that means 1 in the model's own images."""
        name = self.experiment.data
        return SOURCES[name].scale if name in SOURCES else 255.0

    def module(self, pad: int | None = None) -> nn.Module:
        """The model in evaluation mode; `pad` is the id of the padding token."""
        one = self.experiment
        module = model_of(one, len(one.classes) or 1, one.shape, pad)
        frozen = frozen_of(module)
        if self.frozen and self.frozen != hash_of(frozen):
            raise InputError(f"{one.model} has other weights than in training; restore the old weights")
        try:
            load_state(module, (frozen if self.frozen else {}) | self.state)
        except RuntimeError:
            raise InputError(f"the weights do not fit {one.model}: other classes, shape or norm") from None
        return module.eval()

    def outputs(self, data: Dataset, module: nn.Module | None = None) -> Tensor:
        """The outputs for the test examples of the data, [m, outputs]; `module` saves building it again."""
        module = module or self.module(data.pad)
        inputs = inputs_of(data, data.test, device=torch.device("cpu"))
        found = []
        for index in torch.split(torch.arange(len(data.test)), test_batch(module, 500)):
            given, named = arguments(module, inputs.show(index))
            with torch.no_grad(), misfit(f"{self.experiment.model} fails on {data.name}", "check the data's shape"):
                found.append(module(*given, **named))
        if not isinstance(found[0], Tensor):
            raise InputError(f"{self.experiment.model} returns several outputs; load its weights in Python instead")
        return torch.cat(found).flatten(1)


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
    return Exported(experiment, state_dict_of(rows, layout, at, weights), hash_of(frozen_of(module)), features)


def save(exported: Exported, path: Path) -> None:
    """Write a plain safetensors state_dict, with the experiment in the file's metadata."""
    one = exported.experiment
    settings = {
        name: value for name, value in asdict(one).items()
        if name in ALWAYS_WRITTEN or value != getattr(type(one), name)
    }
    said = {"experiment": json.dumps(settings), "frozen": exported.frozen, "features": json.dumps(exported.features)}
    write_tensors(path, exported.state, said)


def read(path: Path) -> Exported:
    """Read an exported model, a file or a folder."""
    file = path / WEIGHTS if path.is_dir() else path
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            state = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        experiment = from_mapping(json.loads(metadata["experiment"]), str(path))
        features = tuple(json.loads(metadata.get("features", "[]")))
    except (OSError, SafetensorError):
        if (path / "experiment.json").is_file():
            raise InputError(f"{path} is a run; export its model first: qg export {path}") from None
        raise InputError(f"cannot read a model from {path}; `qg export RUN --out FOLDER` writes one") from None
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by `qg export`: its metadata names no model") from None
    if (path / LANGUAGE).is_dir():                          # all that the model needs is in the folder
        experiment = replace(experiment, model=f"{PREFIX}{path / LANGUAGE}", pretrained=False)
    return Exported(experiment, state, metadata.get("frozen", ""), features)


@dataclass(frozen=True)
class TestScore:
    """A metric of a model on the test examples of a data set."""

    data: str
    examples: int
    metric: str
    """accuracy, or the name of the experiment's loss."""
    value: float


def score(model: Exported, name: str | None = None, data_dir: Path | None = None) -> TestScore:
    """Test a model on a data set; by default on the test examples of its own."""
    data = data_of(model.experiment, data_dir, name, testing=name is not None, features=model.features)
    outputs, targets = model.outputs(data), data.test.y
    if data.classes:
        right = (outputs.argmax(dim=-1) == targets).double().mean()
        return TestScore(data.name, len(data.test), "accuracy", float(right))
    if outputs.numel() != targets.numel():
        raise InputError(
            f"the model has {outputs[0].numel()} outputs, but {data.name} has {targets[0].numel()} targets per example"
        )
    loss = loss_of(model.experiment, data)(outputs, targets.view_as(outputs))
    return TestScore(data.name, len(data.test), model.experiment.loss or "mse", float(loss))


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that are not trained."""
    return {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}


def hash_of(frozen: dict[str, Tensor]) -> str:
    """Short hash of names and values; empty if there are none."""
    digest = hashlib.sha256()
    for name in sorted(frozen):
        digest.update(name.encode() + frozen[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16] if frozen else ""


def _weights(run: Run, data_dir: Path | None, nodes: Sequence[int]) -> Tensor | None:
    """How much these nodes count, from the summary, or else from the data; None if all count alike."""
    if run.experiment.weights == "equal":
        return None
    resolved = run.experiment.resolved
    known = run.summary.weights if run.summary else resolved.weights
    found = known or resolved.weights_on(data_of(run.experiment, data_dir))
    return torch.tensor(found, dtype=torch.float64)[list(nodes)]


def _in_its_terms(run: Run, data_dir: Path | None) -> Experiment:
    """The experiment with classes, shape, mean and std filled in from the summary, or else from the data."""
    experiment, known = run.experiment, run.summary.terms if run.summary else None
    if known is None and not (experiment.classes and experiment.shape):
        known = data_of(experiment, data_dir).terms()
    terms: dict[str, Any] = {name: tuple(value) for name, value in (known or {}).items()}
    return replace(experiment, **terms)
