"""A trained model out of its run, as a plain state_dict, and back into use."""

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
from quasiglobal.data.corpus import Rows, to_test
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.errors import InputError
from quasiglobal.gradients.layout import Layout
from quasiglobal.runs import checkpoints
from quasiglobal.runs.building import as_tokens, data_of, model_of
from quasiglobal.runs.parts import newest_of_parts
from quasiglobal.runs.store import Run
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.rows import state_dict_of


@dataclass(frozen=True)
class Exported:
    """A model with the experiment that it is from, in whose classes, shape, mean and std it sees all data."""

    experiment: Experiment
    state: dict[str, Tensor]
    frozen: str = ""
    """A hash of what was not trained, and so is not in the state; empty where that is nothing."""

    def module(self, data: Dataset) -> nn.Module:
        """The model, ready to use on inputs like the data's."""
        module = model_of(self.experiment, len(data.classes), data.shape, data.pad)
        frozen = _frozen(module)
        if self.frozen and self.frozen != fingerprint(frozen):
            raise InputError(f"{self.experiment.model} has other weights than in training; bring those back")
        try:
            module.load_state_dict(frozen | self.state)
        except RuntimeError:
            raise InputError(f"the model does not fit {data.name}: other classes, shape or norm") from None
        return module.eval()

    def predict(self, data: Dataset, examples: Examples, batch: int = 500) -> Tensor:
        """The class that the model gives each example."""
        module = self.module(data)
        inputs = inputs_of(data, examples, device=torch.device("cpu"))
        with torch.no_grad():
            order = torch.split(torch.arange(len(examples.y)), batch)
            return torch.cat([module(inputs.show(index)).argmax(dim=-1) for index in order])

    def classify(self, texts: Sequence[str]) -> list[str]:
        """The name of the class that a model of texts gives each; none of them is kept in the cache."""
        classes = self.experiment.classes
        if not classes:
            raise InputError("the model does not say what its classes are called; export it again")
        rows = Rows(list(texts), torch.zeros(len(texts), dtype=torch.int64))
        data = as_tokens(self.experiment, to_test("the file", rows, classes), cache=None)
        return [classes[label] for label in self.predict(data, data.test).tolist()]


def export(run: Run, node: str, data_dir: Path | None = None) -> Exported:
    """A node's model, or the average of those that are here, from the run's newest checkpoint."""
    found = checkpoints.newest(run.folder / "checkpoint")
    if found is not None:
        rows, nodes = found[0], list(range(len(found[0]["x"])))
    else:
        rows, epoch, nodes = newest_of_parts(run.folder)
        if not epoch:
            raise InputError(f"{run.folder} has no checkpoint yet; train it first")
    if node != "average" and not (node.isdigit() and int(node) in nodes):
        raise InputError(f"node must be average or one of {nodes[0]} to {nodes[-1]}, got {node!r}")
    experiment = _in_its_terms(run, data_dir)
    module = model_of(experiment, len(experiment.classes), experiment.shape)
    layout = Layout.of_experiment(module, experiment.bn)
    if layout.size != rows["x"].shape[1]:
        raise InputError(
            f"{run.folder} was trained on other classes or shapes than {experiment.data} has now; bring its data back"
        )
    frozen = _frozen(module)
    state = state_dict_of(rows, layout, None if node == "average" else nodes.index(int(node)))
    return Exported(experiment, state, fingerprint(frozen) if frozen else "")


def _in_its_terms(run: Run, data_dir: Path | None) -> Experiment:
    """The experiment with all that its data told it; the data is asked only where the run does not know."""
    experiment, known = run.experiment, run.summary.terms if run.summary else None
    if known is None and not (experiment.classes and experiment.shape):
        known = data_of(experiment, data_dir).terms()
    terms: dict[str, Any] = {name: tuple(value) for name, value in (known or {}).items()}
    return replace(experiment, **terms)


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A short hash of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save(exported: Exported, path: Path) -> None:
    """A plain safetensors state_dict; the experiment is in the file's metadata."""
    said = {"experiment": json.dumps(asdict(exported.experiment)), "frozen": exported.frozen}
    write_tensors(path, exported.state, said)


def read(path: Path) -> Exported:
    """An exported model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        experiment = from_mapping(json.loads(metadata["experiment"]), str(path))
    except (OSError, SafetensorError):
        raise InputError(f"cannot read a model from {path}; write one with `qg export RUN --out {path}`") from None
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by `qg export`: it does not say which model it is") from None
    return Exported(experiment, state, metadata.get("frozen", ""))
