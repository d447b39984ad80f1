"""Trial of a user's own model, loss and metrics on a few examples, which turns any misfit into one sentence."""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import converted
from quasiglobal.data.dataset import Dataset
from quasiglobal.data.randomness import restored_generators
from quasiglobal.errors import InputError
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.one_model import Loss, arguments
from quasiglobal.metrics import ambiguous, name_of, percent

CROSS_ENTROPIES = (nn.functional.cross_entropy, nn.functional.nll_loss)
"""Losses that need one output per class."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial."""

    output: Any
    """The model's output on the examples."""
    loss: float
    classifies: bool
    """Whether the targets are class numbers and the output has one number per class, [examples, classes]."""
    draws: bool = False
    """Whether the model or the loss draws random numbers of torch, as dropout does."""
    state: tuple[str, ...] = ()
    """Names of frozen parameters and temporary buffers that the model changes in training."""
    draws_elsewhere: bool = False
    """Whether it draws random numbers of NumPy or Python, which compiled and traced programs would repeat."""
    counts: bool = False
    """Whether it changes a number among its attributes, which compiled and traced programs would not."""


def made(model: Callable[[], nn.Module], name: str) -> nn.Module:
    """Call a user's function, or class, that makes the model."""
    wrong = f"{name} is neither an nn.Module nor a function that returns one: got"
    if not callable(model):
        raise InputError(f"{wrong} {type(model).__name__}")
    with misfit(f"{name} cannot be made", "give an instance, or a function without arguments"):
        module = model()
    if not isinstance(module, nn.Module):
        raise InputError(f"{wrong} {type(module).__name__}")
    return module


def tried(
    module: nn.Module,
    loss: Loss,
    batches: Sequence[tuple[Any, Any]],
    metrics: Mapping[str, Any],
    *,
    name: str,
    data: Dataset,
    original: nn.Module | None = None,
) -> Trial:
    """Run the model, the loss and the metrics on batches of a few examples; return the result of the first.

    `module` is a copy, of `original` if the user gave a module; the trial changes it.

    The model is in training mode for the first batch and in evaluation mode for the others. Batches of different sizes
    reveal code that works for one size only.
    """
    _check_kind(module, name)
    module = converted(module, torch.device("cpu"), torch.float32).train()
    loss = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(f"{name} has no parameters to train")
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    with restored_generators(), torch.no_grad():            # a teacher may start with the weights of its student
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-3 * torch.randn_like(parameter))
    values, counts = [_constants(module), _constants(loss)], [_numbers(module), _numbers(loss)]
    with restored_generators():
        first = _tried_on(module, loss, *batches[0], metrics, name, data, original)
        state, of_loss = (
            tuple(key for key, value in _constants(of).items() if key in known and not value.equal(known[key]))
            for of, known in zip((module, loss), values, strict=True)
        )
        changed = [
            [key for key, value in _numbers(of).items() if known.get(key, value) != value]
            for of, known in zip((module, loss), counts, strict=True)
        ]
        for of, keys in zip((module, loss), changed, strict=True):
            if keys:
                warnings.warn(
                    f"{type(of).__name__} changes its attribute {keys[0]} in each call, and all nodes share it; "
                    "keep it in a buffer of the model if results depend on it", stacklevel=2,
                )
        if of_loss:
            raise InputError(
                f"{_loss_in_words(loss)} changes its own {of_loss[0]}, which the nodes would share; make it a buffer "
                "of the model"
            )
        drawn = not torch.get_rng_state().equal(before[0])
        elsewhere = (str(np.random.get_state()), random.getstate()) != before[1:]
        for inputs, targets in batches[1:]:
            _tried_on(module.eval(), loss, inputs, targets, metrics, name, data)
    _warn_of_broadcasting(loss, first.output, batches[0][1])
    return replace(first, draws=drawn, draws_elsewhere=elsewhere, state=state, counts=any(changed))


def _tried_on(
    module: nn.Module, loss: Loss, inputs: Any, targets: Any, metrics: Mapping[str, Any], name: str, data: Dataset,
    original: nn.Module | None = None,
) -> Trial:
    given, named = arguments(module, inputs)
    with misfit(f"{name} fails on inputs {_shapes(inputs)}", _remedy_for(inputs), ONE_PRECISION):
        output = module(*given, **named)
    leaves, examples = tree_leaves(output), len(tree_leaves(targets)[0])
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(f"{name} returns a {type(output).__name__} with a value that is no tensor; return tensors")
    if any(leaf.ndim < 1 or len(leaf) != examples for leaf in leaves):
        raise InputError(
            f"{name} returns {_shapes(output)} for {examples} examples; each tensor needs one row per example"
        )
    classifies = _check_classes(output, loss, name, data)
    what, said = _loss_in_words(loss), f"outputs {_shapes(output)} and targets {_shapes(targets)}"
    with misfit(f"{what} fails on {said} of {name}", _remedy_for_loss(loss, output, targets)):
        found = loss(output, targets)
    if not isinstance(found, Tensor):
        raise InputError(f"{what} returns a {type(found).__name__}; it has to return a tensor that holds one number")
    if found.numel() != 1 or found.ndim > 0:
        raise InputError(f"{what} returns a tensor of shape {list(found.shape)}, not one number; take its mean")
    if module.training and not found.requires_grad:
        raise InputError(f"{what} does not depend on the parameters of {name}; compute it from the output itself")
    if module.training and original is not None:
        theirs = [one for one in original.parameters() if one.requires_grad and not is_lazy(one)]
        used = torch.autograd.grad(found, theirs, allow_unused=True) if theirs else ()
        if any(one is not None for one in used):
            raise InputError(
                f"{what}, or {name} itself, uses parameters of the module that you gave, but each node trains a copy; "
                "return what the loss needs from forward"
            )
    for metric, function in metrics.items():
        _check_meaning(metric, function, loss, output, data)
        _check_metric(metric, function, tree_map(lambda values: values.detach(), output), targets, said)
    return Trial(output, float(found.detach()), classifies)


def _numbers(of: Any) -> dict[str, Any]:
    """Numbers among the attributes of a module and its parts, such as counters of calls."""
    parts = of.named_modules() if isinstance(of, nn.Module) else ()
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, part in parts for key, value in vars(part).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _constants(of: Any) -> dict[str, Tensor]:
    """Copies of what all nodes share: a model's frozen parameters and temporary buffers, and all tensors of a loss."""
    if not isinstance(of, nn.Module):
        return {}
    own = Layout.buffers(of) if any(value.requires_grad for value in of.parameters()) else {}
    frozen = {name: value for name, value in of.named_parameters() if not value.requires_grad}
    shared = frozen | {name: value for name, value in of.named_buffers() if name not in own}
    return {name: value.detach().clone() for name, value in shared.items() if value.layout is torch.strided}


def _loss_in_words(loss: Loss) -> str:
    return f"the loss {type(loss).__name__ if isinstance(loss, nn.Module) else name_of(loss)}"


def _check_kind(module: nn.Module, name: str) -> None:
    """Refuse modules that wrap another one and cannot be copied for the nodes."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{name} is a scripted module, which cannot be stacked; give the module before torch.jit")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{name} is a {type(module).__name__}; give the module inside it, model.module")


def _warn_of_broadcasting(loss: Loss, output: Any, targets: Any) -> None:
    """Warn if a loss seems to broadcast outputs [m, 1] against targets [m], a frequent mistake in losses by hand."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or output.shape == targets.shape:
        return
    if output.numel() != targets.numel():
        return
    output = output.detach()
    try:
        drawn, again, flat = (loss(of, targets) for of in (output, output, output.reshape(targets.shape)))
    except Exception:                                       # it needs the output's own shape
        return
    if float(drawn) == float(again) and not torch.isclose(drawn, flat, equal_nan=True):
        warnings.warn(
            f"{_loss_in_words(loss)} has another value if outputs {_shapes(output)} are given the shape "
            f"{_shapes(targets)} of the targets; if it broadcasts them by mistake, flatten the output, or make the "
            "targets a column, y[:, None]", stacklevel=2,
        )


def _is_cross_entropy(loss: Loss) -> bool:
    return loss in CROSS_ENTROPIES or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _check_classes(output: Any, loss: Loss, name: str, data: Dataset) -> bool:
    """Whether the outputs are one number per class; raise InputError if there are too few for the labels."""
    if _is_cross_entropy(loss) and isinstance(output, Tensor) and output.ndim > 1 and output.shape[1] == 1:
        raise InputError(
            f"{name} gives one output, but cross-entropy needs one per class; use mse for numbers, or binary "
            "cross-entropy with logits for yes/no"
        )
    labels = [split.y for split in (data.train, data.test) if len(split)]
    whole = all(isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point() for y in labels)
    if not whole or not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        return False
    lowest, highest = min(int(y.min()) for y in labels), max(int(y.max()) for y in labels)
    outputs, classes = output.shape[1], len(data.classes)
    if not data.own and outputs != classes:
        raise InputError(f"{name} gives {outputs} outputs, {data.name} has {classes} classes")
    if not _is_cross_entropy(loss):
        return 0 <= lowest <= highest < outputs
    if lowest < 0:
        raise InputError(f"there is the label {lowest}; class numbers are 0, 1, …: renumber them")
    if highest == outputs and lowest == 1:
        raise InputError(f"the labels are 1 to {highest}; class numbers are 0, 1, …: subtract 1")
    if outputs <= highest:
        raise InputError(
            f"{name} gives {outputs} outputs, but the highest label is {highest}; it needs {highest + 1} outputs"
        )
    return True


def _remedy_for(inputs: Any) -> str:
    """What to do if a model fails on its inputs."""
    if isinstance(inputs, dict):
        return f"check that forward has the arguments {', '.join(map(str, inputs))}, or takes one dict"
    whole = any(not leaf.is_floating_point() for leaf in tree_leaves(inputs))
    return ("convert whole numbers to float, or " if whole else "") + "check the sizes of its layers"


def _remedy_for_loss(loss: Loss, output: Any, targets: Any) -> str:
    """What to do if a loss fails on outputs and targets."""
    if isinstance(output, Tensor) and isinstance(targets, Tensor):
        whole = not targets.is_floating_point()
        if _is_cross_entropy(loss):
            if not whole and targets.ndim == 1:
                return "class numbers need to be whole: y.long()"
            if whole and targets.shape == output.shape:
                return "give class numbers, y.argmax(dim=1), or probabilities, y.float()"
            if whole and targets.shape == (len(output), 1):
                return "flatten the targets: y[:, 0]"
            if output.ndim > 2 and output.shape[:-1] == targets.shape:
                return "move the classes to axis 1: output.transpose(1, -1)"
        elif whole:
            return "convert the targets to float: y.float()"
        if output.ndim == 2 and output.shape[1] == 1 and targets.ndim == 1:
            return "make the targets a column, y[:, None], or flatten the output"
    return "check the sizes and types of both"


def _check_meaning(name: str, metric: Any, loss: Loss, output: Any, data: Dataset) -> None:
    """Refuse metrics of classes for other numbers, and where the class axis of the output is unclear."""
    targets = data.train.y
    if not percent(metric) or not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return
    if targets.is_floating_point() and bool(((targets < 0) | (targets > 1)).any()):
        raise InputError(f"metric {name!r} needs class numbers or yes/no targets, 1 or 0; use mse or mae for numbers")
    if ambiguous(output, targets) and not _is_cross_entropy(loss):
        raise InputError(
            f"metric {name!r} cannot tell which axis of outputs {_shapes(output)} has the classes; use sequences of "
            "another length, or a metric of your own"
        )


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
        try:
            float(found)
        except (TypeError, ValueError, RuntimeError):
            shape = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise InputError(f"{what} computes {shape}; it has to compute one number, such as a mean") from None
        return
    examples = len(tree_leaves(targets)[0])
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if not isinstance(found, Tensor) or found.ndim < 1 or len(found) != examples:
        raise InputError(
            f"{what} returns {shape} for {examples} examples; it has to return one number per example, or be an object "
            "with update, compute and reset"
        )
    if examples > 2:
        few = metric(*(tree_map(lambda of: of[:2], values) for values in (output, targets)))
        if few.shape != (2, *found.shape[1:]):
            raise InputError(
                f"{what} returns {shape} for {examples} examples, but {list(few.shape)} for 2: it broadcasts {said}; "
                "give both the same shape in it"
            )


ONE_PRECISION = "all parts are trained in one precision: cast to that of a weight, x.to(self.layer.weight.dtype), or "
"""What to do if the types in a model do not fit."""


@contextmanager
def misfit(what: str, remedy: str, of_types: str = "") -> Iterator[None]:
    """Turn an exception of the user's code, or torch's warning that shapes do not fit, into one sentence.

    `of_types` comes before the remedy if the exception speaks of a dtype.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            yield
    except InputError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        remedy = of_types + remedy if "dtype" in said else remedy
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
