"""Trial of a user's own model, loss and metrics on a few examples; it reports any misfit in one sentence.

Training takes a module as a function of its inputs, parameters, buffers and torch's generator. Nodes share any other
state, and a traced, compiled or captured step would not change it again: the trial finds such state as far as one call
shows it. `RealModel` (`stacked/one_model.py`) is for models that keep other values between calls.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.memory import is_out_of_memory
from quasiglobal.common.modules import USUAL, RandomGenerator, converted, copied, leaves_of
from quasiglobal.common.randomness import restored_generators
from quasiglobal.common.trees import Tree
from quasiglobal.data.dataset import Dataset
from quasiglobal.errors import InputError
from quasiglobal.metrics import Gathered, Metric, ambiguous, name_of, percent
from quasiglobal.stacked.layout import own_names
from quasiglobal.stacked.one_model import Loss, arguments

if TYPE_CHECKING:
    from typing_extensions import TypeIs

CROSS_ENTROPIES = (nn.functional.cross_entropy, nn.functional.nll_loss)
"""Losses that need one output per class."""

UNCOPIED = "keep what cannot be copied, such as a lock, out of it"
"""Remedy for a loss or a metric that cannot be copied."""


@dataclass(frozen=True)
class Effects:
    """Side effects of a call of a model and its loss, as far as a trial has seen them."""

    draws: bool = False
    """Whether it draws random numbers of torch, as dropout does."""
    draws_elsewhere: bool = False
    """Whether it draws random numbers of NumPy or Python, which compiled and traced programs would repeat."""
    counts: bool = False
    """Whether it changes a number among its attributes, which compiled and traced programs would not."""
    state: tuple[str, ...] = ()
    """Names of frozen parameters and temporary buffers that the model changes in training."""

    @property
    def in_python(self) -> bool:
        """Whether a call does something in Python that a captured step would not do again."""
        return self.counts or self.draws_elsewhere


@dataclass(frozen=True)
class Trial:
    """Result of a trial."""

    output: Tree
    """The model's output on the examples."""
    loss: float
    classifies: bool
    """Whether the targets are class numbers and the output has one number per class, [examples, classes]."""
    effects: Effects = Effects()


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


def tried(
    module: nn.Module,
    loss: Loss,
    batches: Sequence[tuple[Tree, Tree]],
    metrics: Mapping[str, Metric],
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
    numbers, generators = [_numbers(of) for of in both], [_generators(of) for of in both]
    with restored_generators():
        first = _tried_on(module, loss, *batches[0], metrics, name, data, original)
        state, of_loss = (
            tuple(
                key for key, value in constants(of).items()     # a table that has grown is not changed by a step
                if key in known and value.shape == known[key].shape and not value.equal(known[key])
            )
            for of, known in zip(both, values, strict=True)
        )
        if of_loss:
            raise InputError(
                f"{_loss_in_words(loss)} changes its own {of_loss[0]}, which the nodes would share; make it a buffer "
                "of the model"
            )
        drawn = not torch.get_rng_state().equal(before[0])
        elsewhere = (str(np.random.get_state()), random.getstate()) != before[1:]
        counted = [_changed(numbers[0], _numbers(module)), _changed(numbers[1], _numbers(loss))]
        counted[0] = counted[0] and _counted_again(module, batches[0][0], counted[0])
        drawing = [_changed(old, _generators(of)) for of, old in zip(both, generators, strict=True)]
        for effects in zip(both, counted, drawing, strict=True):
            _warn_of_effects(*effects)
        for inputs, targets in batches[1:]:
            _tried_on(module.eval(), loss, inputs, targets, metrics, name, data, original)
    _warn_of_broadcasting(loss, first.output, batches[0][1])
    return replace(first, effects=Effects(drawn, elsewhere or any(drawing), any(counted), state))


@contextmanager
def misfit(what: str, remedy: str | Callable[[str], str]) -> Iterator[None]:
    """Turn an exception of the user's code, or torch's warning that shapes do not fit, into one sentence.

    `remedy` may be a function of the exception's message.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200].rstrip(".")
        told = remedy if isinstance(remedy, str) else remedy(said)
        raise InputError(f"{what}: {type(error).__name__}: {said}{_place(error)}; {told}") from None


def _place(error: Exception) -> str:
    """The innermost line of the user's own code in which the error occurred."""
    ours = Path(__file__).parents[1]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    own = [(name, line) for name, line in files if "site-packages" not in name and ours not in Path(name).parents]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


# ---------------------------------------------------------------------------------------------- checks


def _tried_on(
    module: nn.Module, loss: Loss, inputs: Tree, targets: Tree, metrics: Mapping[str, Metric], name: str, data: Dataset,
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


def _own_loss(loss: Loss, original: nn.Module | None) -> Loss:
    """A copy of a loss that is an object, since the trial changes its state; it refers to the same module."""
    if isinstance(loss, FunctionType | BuiltinFunctionType | MethodType | partial):
        return loss
    known = [] if original is None else [*original.modules(), *original.parameters(), *original.buffers()]
    memo = {id(one): one for one in known}
    if isinstance(loss, nn.Module):                         # each program has a copy of it
        with misfit(f"{_loss_in_words(loss)} cannot be copied", UNCOPIED):
            return copy.deepcopy(loss, memo)
    try:
        return copy.deepcopy(loss, memo)
    except Exception:
        return loss


def _loss_in_words(loss: Loss) -> str:
    return f"the loss {type(loss).__name__ if isinstance(loss, nn.Module) else name_of(loss)}"


def _check_kind(module: nn.Module, name: str) -> None:
    """Refuse modules that wrap another one and cannot be copied for the nodes."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{name} is a scripted module, which cannot be stacked; give the module before torch.jit")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{name} is a {type(module).__name__}; give the module inside it, model.module")


def _warn_of_broadcasting(loss: Loss, output: Tree, targets: Tree) -> None:
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


def _check_classes(output: Tree, loss: Loss, name: str, data: Dataset) -> bool:
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


def _check_meaning(name: str, metric: Metric, loss: Loss, output: Tree, data: Dataset) -> None:
    """Refuse metrics of classes for other targets, and for outputs whose class axis is unclear."""
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


def _check_metric(name: str, metric: Metric, output: Tree, targets: Tree, said: str) -> None:
    """Try a metric; a function has to give one number per example."""
    what = f"metric {name!r}"
    with misfit(f"{what} cannot be copied", UNCOPIED):
        metric = copy.deepcopy(metric)
    with misfit(f"{what} fails on {said}", "check the sizes and types of both"):
        if gathers(metric):
            metric.reset()
            metric.update(output, targets)
            found = metric.compute()
        else:
            found = metric(output, targets)
    if gathers(metric):
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


def gathers(metric: Metric) -> TypeIs[Gathered]:
    """Whether a metric is an object that gathers batches, not a function."""
    return hasattr(metric, "compute")


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss needs one output per class."""
    return any(loss is one for one in CROSS_ENTROPIES) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def shapes(values: Tree) -> str:
    """Shapes of one or several tensors, with the dtypes other than float32."""
    def one(value: Tensor) -> str:
        kind = "" if value.dtype == torch.float32 else f"{str(value.dtype).removeprefix('torch.')} "
        return f"{kind}{list(value.shape)}"

    return str(tree_map(one, values)).replace("'", "")


# ---------------------------------------------------------------------------------------------- remedies


def remedy_for(inputs: Tree, original: nn.Module | None, said: str) -> str:
    """Remedy for a model that fails on its inputs; `original` is the user's module if the model is a copy of it."""
    if "dtype" in said and all(leaf.is_floating_point() for leaf in tree_leaves(inputs)):
        return "all parts are trained in one precision: cast to that of a weight, x.to(self.layer.weight.dtype)"
    if original is not None and _works(original, inputs):
        return "your module works, but a copy of it does not, as with a hook that refers to it; give its class"
    if isinstance(inputs, dict):
        return f"check that forward has the arguments {', '.join(map(str, inputs))}, or takes one dict"
    whole = any(not leaf.is_floating_point() for leaf in tree_leaves(inputs))
    return ("convert whole numbers to float, or " if whole else "") + "check the sizes of its layers"


def _works(module: nn.Module, inputs: Tree) -> bool:
    """Whether a module works in evaluation mode."""
    given, named = arguments(module, inputs)
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(*given, **named)
    except Exception:
        return False
    finally:
        module.train(training)
    return True


def remedy_for_loss(loss: Loss, output: Tree, targets: Tree, said: str) -> str:
    """Remedy for a loss that fails on outputs and targets."""
    try:
        inspect.signature(loss).bind(output, targets)
    except TypeError:
        return "it is called with two arguments, (output, target)"
    except ValueError:                                      # it has no signature
        pass
    if isinstance(output, Tensor) and isinstance(targets, Tensor):
        whole = not targets.is_floating_point()
        if is_cross_entropy(loss):
            if not whole and targets.ndim == 1:
                return "class numbers need to be whole: y.long()"
            if whole and targets.shape == output.shape:
                return "give class numbers, y.argmax(dim=1), or probabilities, y.float()"
            if whole and targets.shape == (len(output), 1):
                return "flatten the targets: y[:, 0]"
            if output.ndim > 2 and output.shape[:-1] == targets.shape:
                return "move the classes to axis 1: output.transpose(1, -1)"
        elif whole and re.search("dtype|result type", said):
            return "convert the targets to float: y.float()"
        if output.ndim == 2 and output.shape[1] == 1 and targets.ndim == 1:
            return "make the targets a column, y[:, None], or flatten the output"
        if output.ndim == 1 and targets.shape == (len(output), 1):
            return "flatten the targets: y[:, 0]"
    return "check the sizes and types of both, and their order: (output, target)"


# ---------------------------------------------------------------------------------------------- effects


class Constants:
    """Frozen weights and temporary buffers, which all nodes share."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sums = {name: (value.shape, value.dtype, _sum(value)) for name, value in constants(module).items()}

    def check(self, called: nn.Module, trained: Collection[str]) -> None:
        """Raise InputError if one has changed, or if the called module trains parameters other than `trained`."""
        name, parameters = type(self._module).__name__, _alive(called.named_parameters())
        unfrozen = [key for key, value in parameters if value.requires_grad and key not in trained]
        if unfrozen:
            raise InputError(
                f"{name} unfreezes its {unfrozen[0]} in training, but what is trained is fixed at the start; train it "
                "from the start, or in a second run"
            )
        found = constants(self._module)
        for key, (shape, dtype, before) in self._sums.items():      # a table may grow, as for longer texts
            if key in found and (found[key].shape, found[key].dtype) == (shape, dtype) and _sum(found[key]) != before:
                raise InputError(
                    f"{name} changes its frozen {key} in training, but not in its first step, so that the nodes share "
                    "it; change it in the first step too, and each node has its own"
                )


def _warn_of_effects(of: object, counters: Sequence[str], generators: Sequence[str]) -> None:
    """Warn of the counters, and of the generators, among the attributes of a model or a loss."""
    kind = type(of).__name__ if isinstance(of, nn.Module) else f"the loss {name_of(of)}"
    if counters:
        warnings.warn(
            f"{kind} changes its attribute {counters[0]} in each call, and all nodes share it; "
            "keep it in a buffer of the model if results depend on it", stacklevel=3,
        )
    if generators:
        warnings.warn(
            f"{kind} draws from its own generator {generators[0]}, which all nodes share and a resumed run "
            "starts again; draw from torch's own, as torch.rand does", stacklevel=3,
        )


def _counted_again(module: nn.Module, inputs: Tree, counted: list[str]) -> list[str]:
    """Names of the numbers that another call changes again, unlike a table's; the given ones if it fails."""
    twin = copied(module)
    before, (given, named) = _numbers(twin), arguments(twin, inputs)
    with suppress(Exception), restored_generators(), torch.no_grad():
        twin(*given, **named)
        return _changed(before, _numbers(twin))
    return counted


def _numbers(of: object) -> list[tuple[str, object]]:
    """Numbers and booleans with the names of their attributes, such as counters of calls."""
    return [(key, leaf) for key, leaf in _leaves(of) if isinstance(leaf, int | float)]


def _generators(of: object) -> list[tuple[str, object]]:
    """States of random generators with the names of their attributes."""
    return [(key, _state(leaf)) for key, leaf in _leaves(of) if isinstance(leaf, RandomGenerator)]


def _leaves(of: object) -> Iterator[tuple[str, object]]:
    """Names and values of the attributes of a model and its parts, of a loss, or those in their containers."""
    for name, own in _parts(of):
        for key, value in own.items():
            if key not in USUAL:
                for leaf in leaves_of(value):
                    yield f"{name}.{key}".removeprefix("."), leaf


def _changed(before: Sequence[tuple[str, object]], after: Sequence[tuple[str, object]]) -> list[str]:
    """Names of the values that changed; empty if values were added, as of a table that is made at the first call."""
    if [key for key, _ in before] != [key for key, _ in after]:
        return []
    return [key for (key, old), (_, new) in zip(before, after, strict=True) if old is not new and old != new]


def reads(original: nn.Module, module: nn.Module, value: Callable[[], Tensor]) -> bool:
    """Whether a value changes if the original gets the weights, buffers and attributes of its copy.

    False if it changes at each call anyway.
    """
    pairs = list(zip(original.modules(), module.modules(), strict=False))
    before = [dict(vars(part)) for part, _ in pairs]
    results = []
    for own in (None, pairs, None):
        try:
            for part, twin in own or ():
                vars(part).update(vars(twin))
            with restored_generators(), torch.no_grad():
                results.append(value().clone())
        except Exception:
            return own is not None                          # it fails with the weights of the copy alone
        finally:
            for (part, _), values in zip(pairs, before, strict=True):
                vars(part).clear()
                vars(part).update(values)
    return _alike(results[0], results[2]) and not _alike(results[0], results[1])


def overlapping(module: nn.Module) -> tuple[str, str] | None:
    """Names of two trained parameters that share memory without being the same, if there are any."""
    spans: list[tuple[int, int, str, Tensor]] = []
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.requires_grad and value.numel() and value.layout is torch.strided:
            extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            spans.append((value.data_ptr(), value.data_ptr() + extent * value.itemsize, name, value))
    spans.sort(key=lambda span: span[:2])
    for at, (begin, end, name, one) in enumerate(spans):
        for first, last, other, twin in spans[at + 1:]:
            if first >= end:
                break
            size = (max(end, last) - begin) // one.itemsize
            places = [
                torch.arange(size).as_strided(of.shape, of.stride(), (start - begin) // of.itemsize).flatten()
                for of, start in ((one, begin), (twin, first))
            ]
            if torch.isin(*places).any():
                return name, other
    return None


def constants(of: object) -> dict[str, Tensor]:
    """Tensors that all nodes share: a model's frozen parameters and temporary buffers, and all tensors of a loss."""
    if not isinstance(of, nn.Module):
        return {}
    parameters = list(_alive(of.named_parameters()))
    own = own_names(of) if any(value.requires_grad for _, value in parameters) else set()
    frozen = [(name, value) for name, value in parameters if not value.requires_grad]
    shared = [(name, value) for name, value in [*frozen, *_alive(of.named_buffers())] if name not in own]
    return {name: value.detach() for name, value in shared if value.layout is torch.strided}


def _alive(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Drop wrappers left over from a finished vmap call: some stay in parts that a module uses in two places."""
    return (one for one in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(one[1]))


def _parts(of: object) -> list[tuple[str, dict[str, object]]]:
    """Names and attributes of a module's parts, of an object, or the variables that a function refers to."""
    if isinstance(of, nn.Module):
        return [(name, vars(part)) for name, part in of.named_modules()]
    if isinstance(of, MethodType):
        return [] if isinstance(of.__self__, nn.Module) else _parts(of.__self__)
    if isinstance(of, FunctionType):
        cells = dict(zip(of.__code__.co_freevars, of.__closure__ or (), strict=True))
        return [("", {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()})]     # not empty
    return [] if isinstance(of, type) or not hasattr(of, "__dict__") else [("", vars(of))]


def _state(generator: RandomGenerator) -> str:
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, random.Random):                # the system's has none
        return "" if isinstance(generator, random.SystemRandom) else str(generator.getstate())
    state = generator.get_state()
    return str(state.tolist() if isinstance(state, Tensor) else state)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True)


def _sum(value: Tensor) -> int:
    """A number that changes with the bits of a tensor."""
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return int(real.contiguous().view(whole).sum(dtype=torch.int64))
