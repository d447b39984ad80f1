"""An exported model: a plain state_dict with its experiment, and its outputs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quasiglobal.common.files import write_tensors
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.sources import SOURCES, Dataset
from quasiglobal.errors import InputError
from quasiglobal.models.language import PREFIX
from quasiglobal.runs.building import model_of
from quasiglobal.stacked.layout import load_state
from quasiglobal.stacked.one_model import arguments
from quasiglobal.training.evaluation import test_batch
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.remedies import misfit

WEIGHTS, LANGUAGE = "model.safetensors", "language"
"""Parts of an exported folder: the weights, and the configuration and tokenizer of a transformers model."""


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
        if self.frozen and self.frozen != fingerprint(frozen):
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


def save(exported: Exported, path: Path) -> None:
    """Write a plain safetensors state_dict, with the experiment in the file's metadata."""
    said = {
        "experiment": json.dumps(asdict(exported.experiment)), "frozen": exported.frozen,
        "features": json.dumps(exported.features),
    }
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


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that are not trained."""
    return {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Short hash of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


