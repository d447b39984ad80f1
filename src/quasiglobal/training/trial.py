"""Trial of a user's own model, loss and metrics on two examples, which turns any misfit into one sentence."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.data.dataset import Dataset
from quasiglobal.errors import InputError
from quasiglobal.gradients.one_model import Loss, arguments
from quasiglobal.metrics import name_of

IGNORED = -100
"""The label that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial."""

    output: Any
    """The model's output on two examples."""
    loss: float
    classifies: bool
    """Whether the targets are class numbers and the output has one number per class, [examples, classes]."""


def made(model: Callable[[], nn.Module], name: str) -> nn.Module:
    """Call a user's function, or class, that makes the model."""
    if not callable(model):
        raise InputError(f"{name} is neither an nn.Module nor a function that returns one: got {type(model).__name__}")
    with misfit(f"{name} cannot be made", "give an instance, or a function without arguments"):
        module = model()
    if not isinstance(module, nn.Module):
        raise InputError(f"{name} is neither an nn.Module nor a function that returns one: got {type(module).__name__}")
    return module


def tried(
    module: nn.Module, loss: Loss, inputs: Any, targets: Any, metrics: Mapping[str, Any], *, name: str, data: Dataset
) -> Trial:
    """Run the model in training mode, the loss and the metrics on two examples."""
    module = copy.deepcopy(module).cpu().float().train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(f"{name} has no parameters to train")
    shown, wanted = _shapes(inputs), _shapes(targets)
    given, named = arguments(module, inputs)
    with torch.random.fork_rng(devices=[]), misfit(f"{name} fails on inputs {shown}", "check the sizes of its layers"):
        output = module(*given, **named)
    if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(output)) or not tree_leaves(output):
        raise InputError(f"{name} returns a {type(output).__name__}; it has to return a tensor, or several")
    classifies = _check_classes(output, name, data)
    what, said = f"the loss {name_of(loss)}", f"outputs {_shapes(output)} and targets {wanted}"
    with misfit(f"{what} fails on {said} of {name}", "check the sizes and types of both"):
        found = loss(output, targets)
    if not isinstance(found, Tensor):
        raise InputError(f"{what} returns a {type(found).__name__}; it has to return a tensor that holds one number")
    if found.numel() != 1 or found.ndim > 0:
        raise InputError(f"{what} returns a tensor of shape {list(found.shape)}, not one number; take its mean")
    if not found.requires_grad:
        raise InputError(f"{what} does not depend on the parameters of {name}; compute it from the output itself")
    for metric, function in metrics.items():
        _check_metric(metric, function, tree_map(lambda values: values.detach(), output), targets, said)
    return Trial(output, float(found.detach()), classifies)


def _check_classes(output: Any, name: str, data: Dataset) -> bool:
    """Whether the outputs are one number per class; raise InputError if there are too few for the labels."""
    labels = [split.y for split in (data.train, data.test) if len(split)]
    whole = all(isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point() for y in labels)
    if not whole or not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        return False
    for y in labels:
        if ((y < 0) & (y != IGNORED)).any():
            raise InputError(f"there is the label {int(y.min())}; class numbers are 0, 1, …: renumber them")
    outputs, classes = output.shape[1], len(data.classes)
    if not data.own and outputs != classes:
        raise InputError(f"{name} gives {outputs} outputs, {data.name} has {classes} classes")
    if outputs < classes:
        raise InputError(
            f"{name} gives {outputs} outputs, but the highest label is {classes - 1}; it needs {classes} outputs"
        )
    return True


def _check_metric(name: str, metric: Any, output: Any, targets: Any, said: str) -> None:
    """Try a metric; a function has to give one number per example."""
    metric, what = copy.deepcopy(metric), f"metric {name!r}"
    with misfit(f"{what} fails on {said}", "check the sizes and types of both"):
        if hasattr(metric, "compute"):
            metric.reset()
            metric.update(output, targets)
            found = metric.compute()
        else:
            found = metric(output, targets)
    if hasattr(metric, "compute"):
        if getattr(found, "ndim", 0) > 0:
            raise InputError(f"{what} computes {list(found.shape)} numbers; it has to compute one, such as their mean")
        return
    examples = len(tree_leaves(targets)[0])
    if not isinstance(found, Tensor) or found.ndim < 1 or len(found) != examples:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"{what} returns {shape} for {examples} examples; it has to return one number per example, or be an object "
            "with update, compute and reset"
        )


@contextmanager
def misfit(what: str, remedy: str) -> Iterator[None]:
    """Turn an exception of the user's code, or torch's warning that shapes do not fit, into one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            yield
    except InputError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"{what}: {type(error).__name__}: {said}{_place(error)}; {remedy}") from None


def _place(error: Exception) -> str:
    """The innermost line of the user's own code in which the error occurred."""
    ours = Path(__file__).parents[1]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    own = [(name, line) for name, line in files if "site-packages" not in name and ours not in Path(name).parents]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _shapes(values: Any) -> str:
    """Shapes, and dtypes of what is not float32, of a tensor or several."""
    def one(value: Tensor) -> str:
        kind = "" if value.dtype == torch.float32 else f"{str(value.dtype).removeprefix('torch.')} "
        return f"{kind}{list(value.shape)}"

    return str(tree_map(one, values)).replace("'", "")
