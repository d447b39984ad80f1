"""Exported models, made from a run's checkpoint, their outputs and their score.

A file is a plain state_dict with its experiment. A folder is self-contained: weights, terms of the data, plain PyTorch
and ONNX files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quasiglobal.common import own_code
from quasiglobal.common.files import write_json, write_tensors
from quasiglobal.common.objects import is_path
from quasiglobal.data.dataset import Dataset
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.readers.folders import SIDE
from quasiglobal.data.sources import SOURCES
from quasiglobal.errors import InputError
from quasiglobal.models.language import PREFIX, LanguageModel, tokenizer_of
from quasiglobal.runs.best import best_state
from quasiglobal.runs.building import data_of, loss_of, model_of
from quasiglobal.runs.store import Run
from quasiglobal.stacked.layout import Layout, load_state
from quasiglobal.stacked.one_model import arguments
from quasiglobal.training.evaluation import test_batch
from quasiglobal.training.experiment import FIRST_FIELDS, Experiment, from_mapping
from quasiglobal.training.rows import complete_state, state_dict_of
from quasiglobal.training.trial import misfit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, TERMS, PROGRAM, ONNX = "model.safetensors", "model.json", "model.pt2", "model.onnx"
"""Files of an exported folder."""

LANGUAGE = "language"
"""Subfolder with the configuration and the tokenizer of a transformers model."""

SAME = 1e-4
"""Maximum difference between the outputs of a file and of the model, relative to the largest output."""

ALWAYS_WRITTEN = (
    *FIRST_FIELDS, "steps", "schedule", "clip", "drop", "churn", "wire", "communication", "classes", "shape", "mean",
    "std", "pretrained", "loss", "metric", "label", "validation", "draws", "train", "round_deadline", "weights",
)
"""Settings that every export contains; later ones are in it only if they differ from their default."""


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
        """Whether the model takes the centre of larger images, as for ImageNet."""
        name = self.experiment.data
        return name in SOURCES and SOURCES[name].augmentation == "resize-crop"

    @property
    def scale(self) -> float:
        """The pixel value that counts as 1 in the model's training images."""
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
        """The outputs for the test examples of the data, [m, outputs]; `module` is `self.module()` if built already."""
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
    if node != "average" and not (node.isdecimal() and int(node) in nodes):
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
        settings = json.loads(metadata["experiment"])
        own_code.read_from(path, settings)
        experiment = from_mapping(settings, str(path))
        features = tuple(json.loads(metadata.get("features", "[]")))
    except (OSError, SafetensorError):
        if (path / "experiment.json").is_file():
            raise InputError(f"{path} is a run; export its model first: qg export {path}") from None
        raise InputError(f"cannot read a model from {path}; `qg export RUN --out FOLDER` writes one") from None
    except (KeyError, ValueError, RecursionError):
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
    """Test a model on a data set; by default on the test examples of the one that it was trained on."""
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
    """The weights of these nodes, from the summary, or else from the data; None if they are equal."""
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


# ---------------------------------------------------------------------------------------- a self-contained folder


class Ready(nn.Module):
    """A model with its normalisation: pixels divided by their largest value, or numbers → outputs."""

    def __init__(self, module: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.module, self.normalises = module, bool(experiment.mean)
        if self.normalises:
            channels = (-1,) + (1,) * (len(experiment.shape) - 1)
            self.mean = nn.Buffer(torch.tensor(experiment.mean).view(channels))
            self.std = nn.Buffer(torch.tensor(experiment.std).view(channels))

    def forward(self, x: Tensor) -> object:
        """The outputs for inputs [batch, …]."""
        return self.module((x - self.mean) / self.std if self.normalises else x)


@dataclass(frozen=True)
class Written:
    """The files of an exported folder, and the reasons why others could not be written."""

    files: list[Path]
    left_out: dict[str, str]


def save_folder(exported: Exported, folder: Path) -> Written:
    """Write the folder; replace an earlier export there once all files are written."""
    if folder.exists() and not (folder / TERMS).is_file() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise InputError(f"{folder} is not an exported model; name another folder with --out")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        left_out = _fill(exported, temporary)
        names = sorted(path.name for path in temporary.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Written([folder / name for name in names], left_out)


def _fill(exported: Exported, folder: Path) -> dict[str, str]:
    one = exported.experiment
    tokenizer = tokenizer_of(one.model) if one.reads_texts else None
    module = exported.module(None if tokenizer is None else tokenizer.pad_token_id)
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    save(replace(exported, state=whole, frozen=""), folder / WEIGHTS)
    terms = {
        "input": "token ids" if tokenizer else _input_in_words(exported),
        "shape": list(one.shape), "classes": list(one.classes), "mean": list(one.mean), "std": list(one.std),
        "features": list(exported.features), "loss": one.loss, "model": one.model, "trained on": one.data,
    } | ({"scaled to": SIDE} if exported.crops else {}) | ({"pad": tokenizer.pad_token_id} if tokenizer else {})
    write_json(folder / TERMS, terms)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / LANGUAGE)
        cast(LanguageModel, module).model.config.save_pretrained(folder / LANGUAGE)
    ready = Ready(module, one).eval()
    left_out = {}
    for name, write in ((PROGRAM, _program), (ONNX, _onnx)):
        try:
            with _quiet(), torch.no_grad():
                write(ready, _batch(one, 2, tokenizer), folder / name)
                _check_same(ready, one, tokenizer, folder / name)
        except Exception as error:                          # torch cannot export every network
            (folder / name).unlink(missing_ok=True)
            said = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            left_out[name] = f"{kind}{said[0][:150]}"
    (folder / "README.md").write_text(_readme(exported, left_out))
    return left_out


def _batch(one: Experiment, size: int, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Random inputs for the model."""
    generator = torch.Generator().manual_seed(size)
    if tokenizer is not None:
        return torch.randint(len(tokenizer.get_vocab()), (size, *one.shape), generator=generator)
    if not one.shape:
        raise InputError("the model takes several inputs")
    return torch.rand(size, *one.shape, generator=generator)


def _program(ready: nn.Module, x: Tensor, path: Path) -> None:
    torch.export.save(torch.export.export(ready, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)), path)


def _onnx(ready: nn.Module, x: Tensor, path: Path) -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError("it needs pip install 'quasiglobal[onnx]'") from None
    torch.onnx.export(
        ready, (x,), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), input_names=["x"],
        output_names=["outputs"], verbose=False, external_data=False,
    )


def _check_same(
    ready: nn.Module, one: Experiment, tokenizer: PreTrainedTokenizerBase | None, path: Path
) -> None:
    """Raise ValueError unless the file gives the model's outputs, for other batch sizes than it was made with."""
    run = _opened(path)
    for size in (1, 3):
        x = _batch(one, size, tokenizer)
        ours, theirs = ready(x), run(x)
        difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
        if not difference <= SAME * max(1.0, largest):
            raise ValueError(f"its outputs differ from the model's by {difference:.2g}")


def _opened(path: Path) -> Callable[[Tensor], Tensor]:
    if path.name == PROGRAM:
        return torch.export.load(path).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _readme(exported: Exported, left_out: Collection[str]) -> str:
    """The README of the folder: code that loads the model, and a list of the files."""
    one = exported.experiment
    kind, then = "model outputs", ""
    if one.classes:
        kind, then = "probability of each class", ".softmax(dim=-1)"
    elif one.loss == "bce":
        kind, then = "probability of each label", ".sigmoid()"
    if one.reads_texts:
        inputs = (
            'transformers.AutoTokenizer.from_pretrained("language")(["a text"], padding="max_length", '
            f'truncation=True, max_length={one.shape[0]}, return_tensors="pt").input_ids'
        )
    else:
        example = f"torch.rand(1, {', '.join(map(str, one.shape))})" if one.shape else "…"
        inputs = f"{example}  # {_input_in_words(exported)}"
    imports, load = "import json, torch", ['model = torch.export.load("model.pt2").module()']
    imports += ", transformers" if one.reads_texts else ""
    if PROGRAM in left_out:
        imports += ", safetensors.torch"
        load = [
            "model = …  # your own module", 'model.load_state_dict(safetensors.torch.load_file("model.safetensors"))'
        ]
    names = 'print(dict(zip(terms["classes"], outputs[0].tolist())))' if one.classes else "print(outputs)"
    code = "\n".join((
        imports, 'terms = json.load(open("model.json"))', *load, f"x = {inputs}", f"outputs = model(x){then}", names,
    ))
    before = f", before {then[1:].partition('(')[0]}" if then else ""
    files = {
        WEIGHTS: "the weights, a state_dict", TERMS: "classes, shape and normalisation of the data",
        PROGRAM: "the model with its normalisation, for `torch.export.load`",
        ONNX: f"the same for ONNX: input `x`, output `outputs`{before}",
    } | ({LANGUAGE: "the tokenizer and the configuration"} if one.reads_texts else {})
    listed = "\n".join(f"- `{name}`: {what}" for name, what in files.items() if name not in left_out)
    return dedent("""\
        # {model}, trained on {data}

        The {kind}, in plain PyTorch:

        ```python
        {code}
        ```

        With quasiglobal: `qg predict FOLDER DATA`, `qg evaluate FOLDER DATA`.

        {listed}
        """).format(model=one.model, data=one.data, kind=kind, code=code, listed=listed)


def _input_in_words(exported: Exported) -> str:
    one = exported.experiment
    if exported.features:
        return f"the columns {', '.join(exported.features)}"
    if not one.mean:
        return "inputs as in the training, [batch, …]"
    if len(one.shape) == 3:
        return f"pixels divided by {exported.scale:g}, [batch, channels, height, width]"
    return "numbers, one row per example"
