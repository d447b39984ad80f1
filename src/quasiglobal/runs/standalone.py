"""A folder with an exported model that needs nothing else: weights, terms of the data, plain PyTorch and ONNX files."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from quasiglobal.common.files import write_json
from quasiglobal.data.readers.folders import SIDE
from quasiglobal.errors import InputError
from quasiglobal.models.language import LanguageModel, tokenizer_of
from quasiglobal.runs.export import LANGUAGE, WEIGHTS, Exported, save
from quasiglobal.training.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TERMS, PROGRAM, ONNX = "model.json", "model.pt2", "model.onnx"

SAME = 1e-4
"""Largest difference between the outputs of a file and of the model, relative to the largest output."""


class Ready(nn.Module):
    """A model with its normalisation: pixels divided by their largest value, or numbers → outputs."""

    def __init__(self, module: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.module = module
        self.mean: Tensor
        self.std: Tensor
        channels = (-1,) + (1,) * (len(experiment.shape) - 1)
        self.normalises = bool(experiment.mean)
        self.register_buffer("mean", torch.tensor(experiment.mean).view(channels) if experiment.mean else None)
        self.register_buffer("std", torch.tensor(experiment.std).view(channels) if experiment.mean else None)

    def forward(self, x: Tensor) -> object:
        """The outputs for inputs [batch, …]."""
        return self.module((x - self.mean) / self.std if self.normalises else x)


@dataclass(frozen=True)
class Written:
    """The files of an exported folder, and why others could not be written."""

    files: list[Path]
    left_out: dict[str, str]


def save_folder(exported: Exported, folder: Path) -> Written:
    """Write the folder as a whole; an earlier export there is replaced."""
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
        except Exception as error:                          # the network does not allow it, for any reason of torch's
            (folder / name).unlink(missing_ok=True)
            said = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            left_out[name] = f"{kind}{said[0][:150]}"
    (folder / "README.md").write_text(_readme(exported, PROGRAM not in left_out, ONNX not in left_out))
    return left_out


def _batch(one: Experiment, size: int, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Made-up inputs of the model."""
    generator = torch.Generator().manual_seed(size)
    if tokenizer is not None:
        return torch.randint(len(tokenizer.get_vocab()), (size, *one.shape), generator=generator)
    if not one.shape:
        raise InputError("the model takes several inputs")
    return torch.rand(size, *one.shape, generator=generator)


def _program(ready: nn.Module, x: Tensor, path: Path) -> None:
    program = torch.export.export(ready, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)


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
    """Silence the notes of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _readme(exported: Exported, has_program: bool, has_onnx: bool) -> str:
    """The README of the folder: the lines that load the model."""
    one = exported.experiment
    kind, then = "model outputs", ""
    if one.classes:
        kind, then = "probability of each class", ".softmax(dim=-1)"
    elif one.loss == "bce":
        kind, then = "probability of each label", ".sigmoid()"
    example = f"torch.rand(1, {', '.join(map(str, one.shape))})" if one.shape else "…"
    if one.reads_texts:
        inputs = (
            'transformers.AutoTokenizer.from_pretrained("language")(["a text"], padding="max_length", '
            f'truncation=True, max_length={one.shape[0]}, return_tensors="pt").input_ids'
        )
    else:
        inputs = f"{example}  # {_input_in_words(exported)}"
    load = 'model = torch.export.load("model.pt2").module()'
    if not has_program:
        load = (
            "model = …  # your own module\n"
            'model.load_state_dict(safetensors.torch.load_file("model.safetensors"))'
        )
    imports = "import json, torch" + (", transformers" if one.reads_texts else "")
    imports += "" if has_program else ", safetensors.torch"
    names = 'print(dict(zip(terms["classes"], outputs[0].tolist())))' if one.classes else "print(outputs)"
    code = "\n".join((
        imports, 'terms = json.load(open("model.json"))', load, f"x = {inputs}", f"outputs = model(x){then}", names,
    ))
    before = f", before {then[1:].partition('(')[0]}" if then else ""
    files = {
        WEIGHTS: "the weights, a state_dict", TERMS: "classes, shape and normalisation of the data",
        PROGRAM: "the model with its normalisation, for `torch.export.load`" if has_program else "",
        ONNX: f"the same for ONNX: input `x`, output `outputs`{before}" if has_onnx else "",
        LANGUAGE: "the tokenizer and the configuration" if one.reads_texts else "",
    }
    listed = "\n".join(f"- `{name}`: {what}" for name, what in files.items() if what)
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
