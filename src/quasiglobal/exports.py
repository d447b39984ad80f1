"""A trained model out of its run, as a plain state_dict, and back into use."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quasiglobal import checkpoints
from quasiglobal.errors import InputError
from quasiglobal.experiment import Experiment, from_mapping
from quasiglobal.files import write_tensors
from quasiglobal.flat import Layout
from quasiglobal.runs import Run, make_task, model_state
from quasiglobal.tasks.datasets import Dataset, Examples
from quasiglobal.tasks.images import Images


@dataclass(frozen=True)
class Exported:
    """A model with the experiment that it is from."""

    experiment: Experiment
    state: dict[str, Tensor]

    def module(self, data: Dataset) -> nn.Module:
        """The model, ready to use on inputs like the data's."""
        module = make_task(self.experiment, data).module(self.experiment.seed)
        try:
            module.load_state_dict(self.state)
        except RuntimeError:
            raise InputError(f"the model does not fit {data.name}: other classes, shape or norm") from None
        return module.eval()

    def predict(self, data: Dataset, examples: Examples, batch: int = 500) -> Tensor:
        """The class that the model gives each example."""
        module = self.module(data)
        images = Images.of(data, examples, device=torch.device("cpu"))
        with torch.no_grad():
            order = torch.split(torch.arange(len(examples.y)), batch)
            return torch.cat([module(images.show(index)).argmax(dim=-1) for index in order])


def export(run: Run, node: str, data: Dataset) -> Exported:
    """A node's model, or everybody's average, from the run's newest checkpoint."""
    found = checkpoints.newest(run.folder / "checkpoint")
    if found is None:
        raise InputError(f"{run.folder} has no checkpoint yet; train it first")
    rows, _ = found
    n = len(rows["x"])
    if node != "average" and not (node.isdigit() and int(node) < n):
        raise InputError(f"node must be average or a number from 0 to {n - 1}, got {node!r}")
    module = make_task(run.experiment, data).module(run.experiment.seed)
    layout = Layout.of_experiment(module, run.experiment.bn)
    return Exported(run.experiment, model_state(rows, layout, None if node == "average" else int(node)))


def save(exported: Exported, path: Path) -> None:
    """A plain safetensors state_dict; the experiment is in the file's metadata."""
    write_tensors(path, exported.state, {"experiment": json.dumps(asdict(exported.experiment))})


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
    return Exported(experiment, state)
