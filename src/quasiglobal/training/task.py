"""Learning task: a model, a loss, data and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import converted, copied
from quasiglobal.common.trees import Tree, on_device
from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.own import Columns, Given, dataset_of
from quasiglobal.errors import InputError
from quasiglobal.metrics import Metric, accuracy, name_of
from quasiglobal.stacked.layout import own_state
from quasiglobal.stacked.one_model import Loss, Right, arguments
from quasiglobal.training.metrics import SCORE, check_names
from quasiglobal.training.trial import Effects, Trial, made, misfit, tried

LARGE_LOSS = 1e4
"""Loss above which a run of class numbers counts as diverged."""

BOUND_EXAMPLES = 16
"""Number of examples whose initial loss bounds that of tasks without classes: as in a step of a small run."""


class Task:
    """A model, a loss, data and metrics: anything that PyTorch can train.

    Args:
        model: an `nn.Module`, whose weights are the initial weights of every node, or a function without arguments
            that returns a module and is called with torch seeded by the run's seed. Inputs that are a tuple or a dict
            are passed as the arguments of `forward` if it takes them, otherwise as one argument.
        loss: loss(output, target), a function or module that returns one number, the mean over a batch.
        train: a map-style `torch.utils.data.Dataset` of (input, target); a pair (x, y) of tensors or NumPy arrays; a
            Hugging Face `datasets.Dataset`, with `columns`; a data set of `qg.data.load`; or a list with one of these
            for each node, of any sizes. An input is a tensor, a tuple or a dict of tensors; a target is any tensor or
            number. Nothing is normalised.
        test: the test data, likewise; a list has the test data of each node. Without it a fixed fifth of the training
            examples is held out, of each node's part if `train` is a list; a data set of `qg.data.load` has its own.
        metrics: names and metrics: functions (output, target) → one number per example; objects with `update(output,
            target)`, `compute()` and `reset()`, as in torchmetrics; or those in `qg.metrics`. The first is the score.
            By default the accuracy if the targets are class numbers; otherwise the test loss is the score.
        cache: read a Dataset once and keep it. False: call `__getitem__` anew in each epoch, with the random generators
            of torch, NumPy and Python seeded by (seed, node, epoch, index). Test examples are read once in any case.
        columns: names of the input and the target in examples that are dicts, such as ("image", "label"). Several
            inputs, (("image", "age"), "label"), become a dict.
        memory_limit: bytes of memory for the examples of Datasets that are cached. Larger ones are written once into
            the folder $QG_CACHE, and read from there during the training; the results are the same. By default the
            free memory. 0 keeps all examples on disk.

    >>> import torch, quasiglobal as qg
    >>> x = torch.randn(100, 3)
    >>> task = qg.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, (x, x.sum(dim=1, keepdim=True)))
    >>> task
    <Task: Linear, mse_loss, 80 training examples, 20 test examples, score test_loss>
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        train: Given,
        test: Given | None = None,
        metrics: Metric | list[Metric] | Mapping[str, Metric] | None = None,
        cache: bool = True,
        columns: Columns = None,
        *,
        memory_limit: float | None = None,
        name: str = "",
        classifies: bool | None = None,
    ) -> None:
        """`name` is the model's in messages. `classifies`: whether outputs are classes, by default found by a trial."""
        self.model, self.loss = model, loss
        is_function = callable(model) and not isinstance(model, nn.Module)
        self.name = name or (name_of(model) if is_function else type(model).__name__)
        if not callable(loss):
            raise InputError(f"the loss must be a function or module of (output, target), got a {type(loss).__name__}")
        if isinstance(loss, type):
            raise InputError(f"the loss is the class {loss.__name__}; give an instance, {loss.__name__}()")
        if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
            raise InputError(f"the loss {name_of(loss)} has parameters to train; make them parameters of the model")
        self.data: Dataset = dataset_of(train, test, columns, cache, memory_limit)
        self.given_metrics, self._classifies = _named(metrics), classifies
        """The metrics that the user named; None for the default ones."""
        self.names: dict[str, str] = {}
        """Strings that name parts of the task in experiments (`api/naming.py`)."""

    def __repr__(self) -> str:
        examples = f"{len(self.data.train)} training examples, {len(self.data.test)} test examples"
        return f"<Task: {self.name}, {name_of(self.loss)}, {examples}, score {self.score}>"

    def module(self, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
        """A new copy of the model with its initial weights, in the precision `dtype`."""
        module = self._made(seed)
        if self.effects.state:
            own_state(module, self.effects.state)
        return module if dtype is None else converted(module, torch.device("cpu"), dtype)

    def _made(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(self.model, partial):             # each call makes a new module
                return made(self.model, self.name)
            if isinstance(self.model, nn.Module) or not self._makes_new:
                given = self.model if isinstance(self.model, nn.Module) else made(self.model, self.name)
                with misfit(f"{self.name} cannot be copied", "give a function that makes a new one in each call"):
                    module = copied(given)
            else:
                module = made(self.model, self.name)
            if any(map(is_lazy, module.parameters())):      # such as nn.LazyLinear, which gets its weights now
                values, named = arguments(module, self.examples()[0])
                with misfit(f"{self.name} fails on its first inputs", "check the sizes of its layers"):
                    module(*values, **named)
            return module.train()                           # some modules freeze a part then

    @cached_property
    def _makes_new(self) -> bool:
        """Whether the function that makes the model returns a new module in each call."""
        with torch.random.fork_rng(devices=[]):
            return made(self.model, self.name) is not made(self.model, self.name)

    @cached_property
    def trial(self) -> Trial:
        """The result of a trial on two and three examples; raises InputError if the parts of the task do not fit."""
        count = len(self.data.train)
        rows = _telling_rows(self.data.train) if self.data.fresh is None else torch.arange(min(2, count))
        batches = [self._shown(self.data.train, rows)]
        if count > 2 and self.data.fresh is None:
            batches.append(self.examples(3))
        if len(self.data.test):
            batches.append(self._shown(self.data.test, _telling_rows(self.data.test)))
        original = self.model if isinstance(self.model, nn.Module) else None
        metrics = self.given_metrics or {}
        return tried(self._made(0), self.loss, batches, metrics, name=self.name, data=self.data, original=original)

    @property
    def classifies(self) -> bool:
        """Whether the targets are class numbers and the outputs one number per class."""
        return self.trial.classifies if self._classifies is None else self._classifies

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the test by name; the first is the score. Empty: the test loss is the score."""
        if self.given_metrics is not None:
            return self.given_metrics
        return {SCORE: accuracy} if self.classifies else {}

    @property
    def is_own(self) -> bool:
        """Whether the model is user-defined, so that a trial has to find its properties."""
        return self._classifies is None

    @property
    def effects(self) -> Effects:
        """Side effects of a call; the library's models have none."""
        return self.trial.effects if self.is_own else Effects()

    @property
    def score(self) -> str:
        """Name of the metric that ranks tests."""
        return next(iter(self.metrics), "test_loss")

    @property
    def output_size(self) -> int:
        """Number of outputs per example."""
        if self.classifies:
            return len(self.data.classes)
        return sum(leaf[0].numel() for leaf in tree_leaves(self.trial.output))

    @cached_property
    def large_loss(self) -> float:
        """Loss above which a run counts as diverged; without classes, it grows with the initial loss."""
        if self.classifies:
            return LARGE_LOSS
        count = len(self.data.train)
        rows = torch.arange(min(2, count)) if self.data.fresh else torch.arange(0, count, -(-count // BOUND_EXAMPLES))
        inputs, targets = self._shown(self.data.train, rows)
        module = self.module(0, torch.float32).eval()
        given, named = arguments(module, inputs)
        with torch.random.fork_rng(devices=[]):             # with gradients, which a model may compute itself
            loss = self.loss(module(*given, **named), targets).detach()
        return LARGE_LOSS * max(1.0, self.trial.loss, float(loss))

    @property
    def right(self) -> Right | None:
        """Accuracy of a training example; None if the outputs are not classes."""
        return accuracy if self.classifies else None

    def examples(self, count: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tree, Tree]:
        """The first training examples as inputs and targets on the CPU."""
        return self._shown(self.data.train, torch.arange(min(count, len(self.data.train))), dtype)

    def _shown(self, split: Examples, rows: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tree, Tree]:
        few = split.at(rows.numpy())
        inputs = inputs_of(self.data, few, device=torch.device("cpu"), dtype=dtype)
        return inputs.show(torch.arange(len(rows))), on_device(few.y, None, dtype)


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of whole numbers."""


def _telling_rows(split: Examples) -> Tensor:
    """Two examples: those with the largest whole number as target and as input, if there are whole numbers."""
    largest = [
        int(leaf.reshape(len(leaf), -1).amax(dim=1).argmax())
        for values in (split.y, split.x)
        for leaf in tree_leaves(values if split.shards is None else tree_map(lambda leaf: leaf[:1024], values))
        if leaf.dtype in WHOLE and leaf[:1].numel()
    ]
    rows = dict.fromkeys([*largest, 0, 1])                  # without repetition, in this order
    return torch.tensor([row for row in rows if row < len(split)][:2])


def _named(metrics: Metric | list[Metric] | Mapping[str, Metric] | None) -> dict[str, Metric] | None:
    """Metrics by name; one metric, or a list of them, is named after itself."""
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        several = metrics if isinstance(metrics, list | tuple) else [metrics]
        names = [name_of(metric) for metric in several]
        if len(set(names)) < len(names):
            raise InputError(f"two metrics are called {max(names, key=names.count)!r}; give a dict with other names")
        metrics = dict(zip(names, several, strict=True))
    check_names(list(metrics))
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise InputError(f"metric {name!r} is a class; give an instance, {metric.__name__}()")
        if not callable(metric) and not all(hasattr(metric, needed) for needed in ("update", "compute", "reset")):
            raise InputError(
                f"metric {name!r} is a {type(metric).__name__}; it needs to be a function (output, target) → one "
                "number per example, or an object with update, compute and reset"
            )
    return dict(metrics)

