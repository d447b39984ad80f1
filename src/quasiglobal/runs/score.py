"""Score of an exported model on labelled data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quasiglobal.errors import InputError
from quasiglobal.runs.building import loss_of
from quasiglobal.runs.exported import Exported
from quasiglobal.runs.loading import data_of


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
