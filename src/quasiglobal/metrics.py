"""Metrics of outputs and targets: numbers per example, F1 and the area under the ROC curve.

A metric is a function (output, target) that returns one number per example, to be averaged; or an object with
`update`, `compute` and `reset`, for metrics that are not a mean over examples.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, SupportsFloat, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError, unknown

__all__ = ["accuracy", "auc", "f1", "is_lower", "lower", "mae", "mse", "name_of", "percent", "top5"]

M = TypeVar("M")


class Gathered(Protocol):
    """A metric of all examples together."""

    def update(self, output: Tree, target: Tree) -> object:
        """Add a batch."""

    def compute(self) -> SupportsFloat:
        """The value for all batches since the last `reset`."""

    def reset(self) -> object:
        """Forget all batches."""


Metric: TypeAlias = "Callable[[Tree, Tree], Tensor] | Gathered"
"""A function (output, target) → one number per example, or an object that gathers batches."""

IGNORED = nn.CrossEntropyLoss().ignore_index
"""-100, the target that torch's cross-entropy ignores, as in padded texts."""


# ------------------------------------------------------------------------------- one number per example


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of correct predictions in each example, [m].

    Class outputs [m, C] with target [m], label images [m, C, H, W] with [m, H, W], or tokens [m, T, C] with [m, T];
    if both fit, the class axis is 1. Pixels and tokens with the target -100 do not count. Logits in the target's own
    shape, or with one class, predict yes where > 0.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    >>> accuracy(torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([0.5000])
    """
    output, axis = _classes("accuracy", output, target)
    right = (output > 0) == (target > 0.5) if axis is None else output.argmax(dim=axis) == target
    if axis is None or target.dim() < 2:
        return _mean(right.float())
    counted = (target != IGNORED).float().flatten(1)
    return (right.float().flatten(1) * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def top5(output: Tensor, target: Tensor) -> Tensor:
    """Share of targets among the 5 largest class outputs in each example, [m]; 1 with 5 classes or fewer.

    >>> top5(torch.arange(14.0).reshape(2, 7), torch.tensor([6, 0]))
    tensor([1., 0.])
    """
    output, axis = _classes("top5", output, target)
    if axis is None:
        raise InputError(f"top5 needs one output per class, got output {list(output.shape)}; use accuracy for yes/no")
    best = output.topk(min(5, output.shape[axis]), dim=axis).indices
    return _mean((best == target.unsqueeze(axis)).any(dim=axis).float())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each example, [m]; outputs [m, 1] fit targets [m], and vice versa.

    >>> mse(torch.tensor([[1.0], [5.0]]), torch.tensor([1.0, 2.0]))
    tensor([0., 9.])
    """
    return _mean(_difference("mse", output, target).square())


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error of each example, [m]; outputs [m, 1] fit targets [m], and vice versa.

    >>> mae(torch.tensor([[1.0, 2.0], [5.0, 4.0]]), torch.tensor([[1.0, 4.0], [2.0, 3.0]]))
    tensor([1., 2.])
    """
    return _mean(_difference("mae", output, target).abs())


# ------------------------------------------------------------------------------------ over all examples


@dataclass(eq=False)
class _OfAll:
    """Metric of all examples together, gathered batch by batch.

    Called with (output, target), it returns the value of this batch alone. Called with options or without arguments,
    it returns a new metric with these options and no examples.
    """

    lower: bool = field(default=False, kw_only=True)
    """Whether smaller is better; set by `lower`."""
    _width: tuple[bool, int] | None = field(default=None, init=False, repr=False)
    """Whether the outputs are of classes, and the number of classes or columns."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch."""
        raise NotImplementedError

    def compute(self) -> float:
        """The value for all batches since the last `reset`; nan without examples."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all batches."""
        self.__dict__ = dataclasses.replace(self).__dict__          # as in a new metric with the same options

    @overload
    def __call__(self, **options: Any) -> Self: ...

    @overload
    def __call__(self, output: Tensor, target: Tensor, **options: Any) -> float: ...

    def __call__(self, output: Tensor | None = None, target: Tensor | None = None, **options: Any) -> Self | float:
        known = [option.name for option in dataclasses.fields(self) if option.init and not option.kw_only]
        for name in options:
            if name not in known:
                raise unknown(f"option of {name_of(self)}", name, known)
        fresh = dataclasses.replace(self, **options)
        if output is None and target is None:
            return fresh
        if output is None or target is None:
            raise InputError(f"{name_of(self)} needs an output and a target, got one of them; give both, or none")
        fresh.update(output, target)
        return fresh.compute()

    def _table(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Outputs [rows, classes] with class numbers [rows], or outputs [rows, columns] with yes or no in this shape.

        The last result says whether the outputs are of classes. Rows are examples, pixels or tokens. Yes/no outputs
        [m, K] have K columns; those of any other shape have one.
        """
        output, axis = _classes(name_of(self), output.detach(), target)
        if axis is None:
            columns = output.shape[1] if output.dim() == 2 else 1
            output, target = (of.reshape(-1, columns) for of in (output, target > 0.5))
        else:
            output, target = output.movedim(axis, -1).flatten(0, -2), target.flatten().long()
            if bad := target[(target < 0) | (target >= output.shape[1])][:1].tolist():
                raise InputError(
                    f"{name_of(self)} has the target {bad[0]}, but classes are 0 to {output.shape[1] - 1}; "
                    "remove such targets"
                )
        width = (axis is not None, output.shape[1])
        if self._width not in (None, width):
            raise InputError(f"{name_of(self)} has {_said(width)} after {_said(self._width)}; call reset between them")
        self._width = width
        return output, target, axis is not None


@dataclass(eq=False)
class F1(_OfAll):
    """F1 score: 2 · true positives / (predicted + actual positives), 0 without true positives.

    Class outputs, in the shapes of `accuracy`: the mean over the classes that occur in targets or predictions.
    Yes/no logits, yes where > 0: the mean over the columns; for one column, the F1 of yes. average="micro" adds up the
    counts of all classes or columns first.

    >>> output, target = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0, 0])
    >>> round(f1(output, target), 4), round(f1(output, target, average="micro"), 4)
    (0.6667, 0.6667)
    >>> metric = f1()
    >>> metric.update(output, target)
    >>> round(metric.compute(), 4)
    0.6667
    """

    average: str = "macro"
    """Average over classes or columns: macro or micro."""
    _counts: Tensor | None = field(default=None, init=False, repr=False)
    """True, predicted and actual positives of each class or column, [3, classes]."""

    def __post_init__(self) -> None:
        if self.average not in ("macro", "micro"):
            raise unknown("average of f1", str(self.average), ["macro", "micro"])

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch."""
        output, target, of_classes = self._table(output, target)
        if of_classes:
            said, classes = output.argmax(dim=1), output.shape[1]
            positives = [torch.bincount(of, minlength=classes) for of in (target[said == target], said, target)]
        else:
            positives = [of.sum(dim=0) for of in ((output > 0) & target, output > 0, target)]
        counts = torch.stack(positives).cpu()
        if len(target):
            self._counts = counts if self._counts is None else self._counts + counts

    def compute(self) -> float:
        """The value for all batches since the last `reset`; nan without examples."""
        if self._counts is None or self._width is None:
            return math.nan
        counts = self._counts.sum(dim=1, keepdim=True) if self.average == "micro" else self._counts
        right, total = counts[0].double(), (counts[1] + counts[2]).double()
        score = 2 * right / total.clamp(min=1)
        return float((score[total > 0] if self._width[0] else score).mean())


@dataclass(eq=False)
class Auc(_OfAll):
    """Area under the ROC curve: the probability that a positive scores above a negative; a tie counts one half.

    Yes/no logits, or 2 class outputs: the area of yes or of class 1. Multi-label columns: the mean over the columns
    with both yes and no. More classes: each against the rest, by softmax outputs; the mean, nan if a class is absent.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """

    _batches: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    """Outputs and targets, as `_table` returns them."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch."""
        output, target, _ = self._table(output, target)
        self._batches.append((output.cpu(), target.cpu()))

    def compute(self) -> float:
        """The value for all batches since the last `reset`; nan if it is undefined."""
        if self._width is None:
            return math.nan
        of_classes, width = self._width
        scores, target = (torch.cat(parts) for parts in zip(*self._batches, strict=True))
        scores = scores.double()
        if of_classes and width == 2:
            scores, target = (scores[:, 1] - scores[:, 0])[:, None], target[:, None] == 1
        elif of_classes:
            scores, target = scores.softmax(dim=1), target[:, None] == torch.arange(width)
        if scores.isnan().any():
            return math.nan
        areas = [_area(*column) for column in zip(scores.unbind(dim=1), target.unbind(dim=1), strict=True)]
        if not of_classes:
            areas = [area for area in areas if not math.isnan(area)]
        return math.fsum(areas) / len(areas) if areas else math.nan


f1 = F1()
"""The F1 score, an `F1`. `f1(average="micro")` is a new one with this option."""
auc = Auc()
"""The area under the ROC curve, an `Auc`."""


# ---------------------------------------------------------------------------------- properties of a metric


LOWER: tuple[Metric, ...] = (mse, mae)
"""Built-in metrics that are better when smaller; a metric may be in both tuples."""

PERCENT: tuple[Metric, ...] = (accuracy, top5, f1, auc)
"""Built-in metrics whose values are shares, shown in per cent."""


def lower(f: M) -> M:
    """A copy of the metric, marked as better when smaller.

    >>> def error(output, target):
    ...     return 1 - accuracy(output, target)
    >>> marked = lower(error)
    >>> is_lower(marked), is_lower(error), name_of(marked)
    (True, False, 'error')
    """
    if isinstance(f, type) or not (callable(f) or all(hasattr(f, name) for name in ("update", "compute", "reset"))):
        raise InputError(
            f"lower needs a metric, a function or an object with update, compute and reset, got {f!r}; "
            "make an object of a class first"
        )
    marked = copy.deepcopy(f)
    if callable(marked) and (marked is f or isinstance(f, types.MethodType)):
        return cast(M, _LowerFunction(marked))
    try:
        object.__setattr__(marked, "lower", True)       # also for frozen data classes
    except AttributeError:
        raise InputError(f"{type(f).__name__} accepts no attributes; define lower = True in the class") from None
    return marked


def is_lower(f: object) -> bool:
    """Whether smaller is better: marked by `lower`, mse and mae, or `higher_is_better = False` as in torchmetrics.

    >>> is_lower(mse), is_lower(accuracy), is_lower(lower(f1))
    (True, False, True)
    """
    marked = getattr(f, "lower", None) is True or getattr(f, "higher_is_better", None) is False
    return marked or any(f is one for one in LOWER)


def name_of(f: object) -> str:
    """Name of a metric: a function's name, or the name of an object's class in lower case.

    >>> name_of(accuracy), name_of(f1), name_of(lower(mae)), name_of(torch.nn.L1Loss())
    ('accuracy', 'f1', 'mae', 'l1loss')
    """
    while isinstance(f, functools.partial):
        f = f.func
    name = getattr(f, "__name__", None)
    return name if isinstance(name, str) else type(f).__name__.lower()


def percent(f: object) -> bool:
    """Whether the values are shares, shown in per cent.

    >>> percent(accuracy), percent(f1), percent(mse)
    (True, True, False)
    """
    f = getattr(f, "__wrapped__", f)
    return any(f is one or (isinstance(one, _OfAll) and isinstance(f, type(one))) for one in PERCENT)


BUILT_IN: dict[str, Metric] = {name_of(one): one for one in (*PERCENT, *LOWER)}
"""The metrics of this module by name."""


def ambiguous(output: Tensor, target: Tensor) -> bool:
    """Whether both axis 1 and the last axis of an output could be the class axis; `accuracy` then takes axis 1.

    >>> ambiguous(torch.zeros(2, 7, 7), torch.zeros(2, 7)), ambiguous(torch.zeros(2, 7, 5), torch.zeros(2, 7))
    (True, False)
    """
    return output.dim() == target.dim() + 1 > 2 and output.shape[1:-1] == output.shape[2:] == target.shape[1:]


class _LowerFunction:
    """A function that is marked as better when smaller."""

    lower = True

    def __init__(self, f: Callable[..., object]) -> None:
        functools.update_wrapper(self, f)
        self.__wrapped__ = f

    def __call__(self, *args: object, **options: object) -> object:
        return self.__wrapped__(*args, **options)


# ---------------------------------------------------------------------------------------------- helpers


def _classes(name: str, output: Tensor, target: Tensor) -> tuple[Tensor, int | None]:
    """The output and its class axis; for yes/no logits, the output in the target's shape and None."""
    if target.dim() and output.shape == target.shape:
        return output, None
    if target.dim() and output.dim() == target.dim() + 1:
        for axis in (1, output.dim() - 1):
            if output.shape[:axis] + output.shape[axis + 1 :] == target.shape:
                return (output, axis) if output.shape[axis] > 1 else (output.squeeze(axis), None)
    raise InputError(
        f"{name} has output {list(output.shape)} and target {list(target.shape)}; it needs [m, C] and [m], "
        "[m, C, H, W] and [m, H, W], [m, T, C] and [m, T], or one shape for both"
    )


def _difference(name: str, output: Tensor, target: Tensor) -> Tensor:
    """output − target, in single precision at least, without broadcasting."""
    shapes = [tuple(of.shape[:1]) if of.shape[1:] == (1,) else tuple(of.shape) for of in (output, target)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise InputError(
            f"{name} has output {list(output.shape)} and target {list(target.shape)}; it needs one shape for both"
        )
    dtype = functools.reduce(torch.promote_types, (output.dtype, target.dtype), torch.float32)
    return output.reshape(shapes[0]).to(dtype) - target.reshape(shapes[0]).to(dtype)


def _mean(values: Tensor) -> Tensor:
    """Mean over the entries of each example, [m]."""
    return values.mean(dim=tuple(range(1, values.dim()))) if values.dim() > 1 else values


def _area(scores: Tensor, target: Tensor) -> float:
    """Area under the ROC curve, by counting pairs of a positive and a negative; nan without pairs."""
    values, place = torch.unique(scores, return_inverse=True)
    positive, negative = (torch.bincount(place[of], minlength=len(values)) for of in (target, ~target))
    pairs = int(positive.sum()) * int(negative.sum())
    below = negative.cumsum(dim=0) - negative
    return int((positive * (2 * below + negative)).sum()) / (2 * pairs) if pairs else math.nan


def _said(width: tuple[bool, int] | None) -> str:
    return "no outputs" if width is None else f"outputs of {width[1]} {'classes' if width[0] else 'yes/no columns'}"
