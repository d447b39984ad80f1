"""Trial of a user's own model, loss and metrics on a few examples, which turns any misfit into one sentence."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import converted, copied
from quasiglobal.common.randomness import restored_generators
from quasiglobal.common.trees import Tree
from quasiglobal.data.dataset import Dataset
from quasiglobal.errors import InputError
from quasiglobal.metrics import ambiguous, name_of, percent
from quasiglobal.stacked.one_model import Loss, arguments
from quasiglobal.training.effects import Attributes, changed, constants, overlapping, reads
from quasiglobal.training.remedies import (
    is_cross_entropy,
    misfit,
    remedy_for,
    remedy_for_loss,
    shapes,
)


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
    keeps: bool = False
    """Whether each call changes tensors among its attributes, or the loss does; what is made once does not count."""


def made(model: Callable[[], nn.Module], name: str) -> nn.Module:
    """Call a user's function, or class, that makes the model."""
    wrong = f"{name} is neither an nn.Module nor a function that returns one: got"
    if not callable(model):
        raise InputError(f"{wrong} {type(model).__name__}; give an instance, or a function without arguments")
    with misfit(f"{name} cannot be made", "give an instance, or a function without arguments"):
        module = model()
    if not isinstance(module, nn.Module):
        raise InputError(f"{wrong} {type(module).__name__}")
    return module


def copy_of(module: nn.Module, name: str) -> nn.Module:
    """A copy of a user's module."""
    with misfit(f"{name} cannot be copied", "give a function that makes a new one in each call"):
        return copied(module)


def initialised(module: nn.Module, inputs: Any, name: str) -> None:
    """Call a module with lazy layers, such as `nn.LazyLinear`, which get their weights then."""
    given, named = arguments(module, inputs)
    with misfit(f"{name} fails on its first inputs", "check the sizes of its layers"):
        module(*given, **named)


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
    shared = overlapping(module if original is None else original)
    if shared:
        raise InputError(
            f"{shared[0]} and {shared[1]} of {name} share memory, but each node's would not; give them the same "
            "parameter, or compute one from the other in forward"
        )
    module = converted(module, torch.device("cpu"), torch.float32).train()
    loss = _own_loss(loss, original)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(f"{name} has no parameters to train")
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    with restored_generators(), torch.no_grad():            # a teacher may start with the weights of its student
        for parameter in module.parameters():
            if parameter.requires_grad:                     # small ones stay small, and positive ones positive
                new = 1e-3 * torch.rand_like(parameter)
                parameter.copy_(torch.where(parameter == 0, new, parameter * (1 + new)))
    both = (module, loss)
    values = [{key: value.clone() for key, value in constants(of).items()} for of in both]
    attributes = [Attributes(of) for of in both]
    with restored_generators():
        first = _tried_on(module, loss, *batches[0], metrics, name, data, original)
        state, of_loss = (
            tuple(key for key, value in constants(of).items() if key in known and _differs(value, known[key]))
            for of, known in zip(both, values, strict=True)
        )
        drawn = not torch.get_rng_state().equal(before[0])
        elsewhere = (str(np.random.get_state()), random.getstate()) != before[1:]
        counted, drawing, keeps = _attributes_changed(both, attributes, batches[0][0])
        if of_loss:
            raise InputError(
                f"{_loss_in_words(loss)} changes its own {of_loss[0]}, which the nodes would share; make it a buffer "
                "of the model"
            )
        for inputs, targets in batches[1:]:
            _tried_on(module.eval(), loss, inputs, targets, metrics, name, data, original)
    _warn_of_broadcasting(loss, first.output, batches[0][1])
    return replace(first, draws=drawn, draws_elsewhere=elsewhere or drawing, state=state, counts=counted, keeps=keeps)


def _attributes_changed(
    both: tuple[nn.Module, Loss], before: Sequence[Attributes], inputs: Tree
) -> tuple[bool, bool, bool]:
    """Whether the model or the loss counts its calls, draws from its own generator, or keeps tensors of each call.

    Warn of the first two. What a further call of the model does not change is made once, as a table.
    """
    counts = draws = keeps = False
    for of, old in zip(both, before, strict=True):
        new = Attributes(of)
        counted, keeping = changed(old.numbers, new.numbers), new.keeps(old)
        drawing = changed(old.generators, new.generators)
        if (counted or keeping) and isinstance(of, nn.Module) and of is both[0]:
            again = _called_again(of, inputs)
            if again is not None:
                counted, keeping = changed(again[0].numbers, again[1].numbers), again[1].keeps(again[0])
        if counted:
            warnings.warn(
                f"{_kind(of)} changes its attribute {counted[0]} in each call, and all nodes share it; "
                "keep it in a buffer of the model if results depend on it", stacklevel=3,
            )
        if drawing:
            warnings.warn(
                f"{_kind(of)} draws from its own generator {drawing[0]}, which all nodes share and a resumed run "
                "starts again; draw from torch's own, as torch.rand does", stacklevel=3,
            )
        counts, draws, keeps = counts or bool(counted), draws or bool(drawing), keeps or keeping
    return counts, draws, keeps


def _called_again(module: nn.Module, inputs: Tree) -> tuple[Attributes, Attributes] | None:
    """The attributes of a copy before and after a further call; None if it fails."""
    twin = copied(module)
    before, (given, named) = Attributes(twin), arguments(twin, inputs)
    try:
        with restored_generators(), torch.no_grad():
            twin(*given, **named)
    except Exception:
        return None
    return before, Attributes(twin)


def _own_loss(loss: Loss, original: nn.Module | None) -> Loss:
    """A copy of a loss that is an object, since the trial changes its state; it refers to the same module."""
    if isinstance(loss, FunctionType | BuiltinFunctionType | MethodType | partial):
        return loss
    known = [] if original is None else [*original.modules(), *original.parameters(), *original.buffers()]
    memo = {id(one): one for one in known}
    if isinstance(loss, nn.Module):                         # of which each program has a copy
        with misfit(f"{_loss_in_words(loss)} cannot be copied", UNCOPIED):
            return copy.deepcopy(loss, memo)
    try:
        return copy.deepcopy(loss, memo)
    except Exception:
        return loss


UNCOPIED = "keep what cannot be copied, such as a lock, out of it"
"""What to do about a loss or a metric that cannot be copied."""


def _differs(value: Tensor, before: Tensor) -> bool:
    """Whether a tensor has other values; a table that has grown is none that a step changes."""
    return value.shape == before.shape and not value.equal(before)


def _kind(of: Any) -> str:
    return type(of).__name__ if isinstance(of, nn.Module) else f"the loss {name_of(of)}"


def _tried_on(
    module: nn.Module, loss: Loss, inputs: Any, targets: Any, metrics: Mapping[str, Any], name: str, data: Dataset,
    original: nn.Module | None = None,
) -> Trial:
    given, named = arguments(module, inputs)
    with misfit(f"{name} fails on inputs {shapes(inputs)}", partial(remedy_for, inputs, original)):
        output = module(*given, **named)
    leaves, examples = tree_leaves(output), len(tree_leaves(targets)[0])
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(f"{name} returns a {type(output).__name__} with a value that is no tensor; return tensors")
    if any(leaf.ndim < 1 or len(leaf) != examples for leaf in leaves):
        raise InputError(
            f"{name} returns {shapes(output)} for {examples} examples; each tensor needs one row per example"
        )
    classifies = _check_classes(output, loss, name, data)
    what, said = _loss_in_words(loss), f"outputs {shapes(output)} and targets {shapes(targets)}"
    with misfit(f"{what} fails on {said} of {name}", partial(remedy_for_loss, loss, output, targets)):
        found = loss(output, targets)
    if not isinstance(found, Tensor):
        raise InputError(f"{what} returns a {type(found).__name__}; it has to return a tensor that holds one number")
    if found.isnan().any() and any(leaf.is_floating_point() and leaf.isnan().any() for leaf in leaves):
        raise InputError(f"{name} returns NaN for its first inputs, before any training; check its weights and inputs")
    if found.numel() != 1 or found.ndim > 0:
        raise InputError(f"{what} returns a tensor of shape {list(found.shape)}, not one number; take its mean")
    if module.training and not found.requires_grad:
        raise InputError(f"{what} does not depend on the parameters of {name}; compute it from the output itself")
    if module.training and original is not None:
        theirs = [one for one in original.parameters() if one.requires_grad and not is_lazy(one)]
        used = torch.autograd.grad(found, theirs, allow_unused=True, retain_graph=True) if theirs else ()
        if any(one is not None for one in used) or reads(original, module, lambda: loss(output, targets)):
            raise InputError(
                f"{what}, or {name} itself, uses values of the module that you gave, but each node trains a copy; "
                "return what the loss needs from forward"
            )
    for metric, function in metrics.items():
        _check_meaning(metric, function, loss, output, data)
        _check_metric(metric, function, tree_map(lambda values: values.detach(), output), targets, said)
    return Trial(output, float(found.detach()), classifies)


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
            f"{_loss_in_words(loss)} has another value if outputs {shapes(output)} are given the shape "
            f"{shapes(targets)} of the targets; if it broadcasts them by mistake, flatten the output, or make the "
            "targets a column, y[:, None]", stacklevel=2,
        )


def _check_classes(output: Any, loss: Loss, name: str, data: Dataset) -> bool:
    """Whether the outputs are one number per class; raise InputError if there are too few for the labels."""
    if is_cross_entropy(loss) and isinstance(output, Tensor) and output.ndim > 1 and output.shape[1] == 1:
        raise InputError(
            f"{name} gives one output, but cross-entropy needs one per class; use mse for numbers, or binary "
            "cross-entropy with logits for yes/no"
        )
    labels = [split.y for split in (data.train, data.test) if len(split)]
    whole = all(isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point() for y in labels)
    if not whole or not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        return False
    ignored = getattr(loss, "ignore_index", -100) if is_cross_entropy(loss) else None
    counted = [y[y != ignored] for y in labels if (y != ignored).any()] if ignored is not None else labels
    if not counted:
        raise InputError(f"all labels are {ignored}, which {_loss_in_words(loss)} ignores")
    lowest, highest = min(int(y.min()) for y in counted), max(int(y.max()) for y in counted)
    outputs, classes = output.shape[1], len(data.classes)
    if not data.own and outputs != classes:
        raise InputError(f"{name} gives {outputs} outputs, {data.name} has {classes} classes")
    if not is_cross_entropy(loss):
        return 0 <= lowest <= highest < outputs
    if lowest < 0:
        raise InputError(f"there is the label {lowest}; class numbers are 0, 1, …: renumber them")
    if highest == outputs and lowest == 1:
        raise InputError(f"the labels are 1 to {highest}; class numbers are 0, 1, …: subtract 1")
    if outputs <= highest:
        raise InputError(
            f"{name} gives {outputs} outputs, but the highest label is {highest}; it needs {highest + 1} outputs"
        )
    return all(len(some) == len(y) for some, y in zip(counted, labels, strict=False))


def _check_meaning(name: str, metric: Any, loss: Loss, output: Any, data: Dataset) -> None:
    """Refuse metrics of classes for other numbers, and where the class axis of the output is unclear."""
    targets = data.train.y
    if not percent(metric) or not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return
    if targets.is_floating_point() and bool(((targets < 0) | (targets > 1)).any()):
        raise InputError(f"metric {name!r} needs class numbers or yes/no targets, 1 or 0; use mse or mae for numbers")
    if ambiguous(output, targets) and not is_cross_entropy(loss):
        raise InputError(
            f"metric {name!r} cannot tell which axis of outputs {shapes(output)} has the classes; use sequences of "
            "another length, or a metric of your own"
        )


def _check_metric(name: str, metric: Any, output: Any, targets: Any, said: str) -> None:
    """Try a metric; a function has to give one number per example."""
    what = f"metric {name!r}"
    with misfit(f"{what} cannot be copied", UNCOPIED):
        metric = copy.deepcopy(metric)
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
