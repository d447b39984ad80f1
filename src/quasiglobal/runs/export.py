"""Export of a trained model as a plain state_dict, and its use after loading."""

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
from quasiglobal.common.imports import is_path
from quasiglobal.data.corpus import Rows, to_test
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.errors import InputError
from quasiglobal.gradients.layout import Layout
from quasiglobal.runs.building import model_of
from quasiglobal.runs.loading import as_tokens, data_of
from quasiglobal.runs.store import Run
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.rows import complete_state, state_dict_of


@dataclass(frozen=True)
class Exported:
    """A trained model and its experiment, whose classes, shape, mean and std apply to all input data."""

    experiment: Experiment
    state: dict[str, Tensor]
    frozen: str = ""
    """Hash of the frozen parameters, which are not in `state`; empty if there are none."""

    def module(self, data: Dataset) -> nn.Module:
        """The model in evaluation mode, for inputs like the data's."""
        if not data.classes:
            raise InputError(f"{data.name} has no classes; load the file's state_dict in Python to predict numbers")
        module = model_of(self.experiment, len(data.classes), data.shape, data.pad)
        frozen = _frozen(module)
        if self.frozen and self.frozen != fingerprint(frozen):
            raise InputError(f"{self.experiment.model} has other weights than in training; restore the old weights")
        try:
            module.load_state_dict(frozen | self.state)
        except RuntimeError:
            raise InputError(f"the model does not fit {data.name}: other classes, shape or norm") from None
        return module.eval()

    def predict(self, data: Dataset, examples: Examples, batch: int = 500) -> Tensor:
        """The predicted class of each example."""
        module = self.module(data)
        inputs = inputs_of(data, examples, device=torch.device("cpu"))
        with torch.no_grad():
            order = torch.split(torch.arange(len(examples.y)), batch)
            return torch.cat([module(inputs.show(index)).argmax(dim=-1) for index in order])

    def classify(self, texts: Sequence[str]) -> list[str]:
        """The name of the predicted class of each text; the texts are not cached."""
        classes = self.experiment.classes
        if not classes:
            raise InputError("the model file has no class names; export the model again")
        rows = Rows(list(texts), torch.zeros(len(texts), dtype=torch.int64))
        data = as_tokens(self.experiment, to_test("the file", rows, classes), cache=None)
        return [classes[label] for label in self.predict(data, data.test).tolist()]


def export(run: Run, node: str, data_dir: Path | None = None) -> Exported:
    """Export a node's model, or the average of the nodes in the run folder, from the newest checkpoint."""
    rows, nodes = run.rows()
    if node != "average" and not (node.isdigit() and int(node) in nodes):
        raise InputError(f"node must be average or one of {nodes[0]} to {nodes[-1]}, got {node!r}")
    experiment = _in_its_terms(run, data_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)                                # frozen weights are those of seed 0, as in training
        module = model_of(experiment, len(experiment.classes) or 1, experiment.shape)
    layout = Layout.of_experiment(module, experiment.bn)
    if layout.size != rows["x"].shape[1]:
        raise InputError(
            f"{run.folder} was trained on other classes or shapes than {experiment.data} has now; restore the old data"
        )
    at = None if node == "average" else nodes.index(int(node))
    if is_path(experiment.model):                           # its frozen weights are nowhere else
        return Exported(experiment, complete_state(module, rows, layout, at))
    frozen = _frozen(module)
    state = state_dict_of(rows, layout, at)
    return Exported(experiment, state, fingerprint(frozen) if frozen else "")


def _in_its_terms(run: Run, data_dir: Path | None) -> Experiment:
    """The experiment with classes, shape, mean and std filled in from the summary, or else from the data."""
    experiment, known = run.experiment, run.summary.terms if run.summary else None
    if known is None and not (experiment.classes and experiment.shape):
        known = data_of(experiment, data_dir).terms()
    terms: dict[str, Any] = {name: tuple(value) for name, value in (known or {}).items()}
    return replace(experiment, **terms)


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Short hash of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save(exported: Exported, path: Path) -> None:
    """Write a plain safetensors state_dict, with the experiment in the file's metadata."""
    said = {"experiment": json.dumps(asdict(exported.experiment)), "frozen": exported.frozen}
    write_tensors(path, exported.state, said)


def read(path: Path) -> Exported:
    """Read an exported model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        experiment = from_mapping(json.loads(metadata["experiment"]), str(path))
    except (OSError, SafetensorError):
        raise InputError(f"cannot read a model from {path}; write one with `qg export RUN --out {path}`") from None
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by `qg export`: its metadata names no model") from None
    return Exported(experiment, state, metadata.get("frozen", ""))
