"""Many copies of one model, and the choice of the route that computes their gradients.

| device | model | route |
|---|---|---|
| any | not supported by vmap (`Stacking.autograd` is alone), or with hooks on gradients | one by one |
| CPU | deep, large (`Stacking.large`), or BatchNorm in bf16 | one by one |
| any | other transformers (`Stacking.autograd` is outside), in a short training | vectorised |
| GPU | a recurrent network without convolutions, whose steps would take minutes to compile | vectorised |
| GPU | in fp64: Inductor's hardswish and hardsigmoid are correct to 3e-8 only | vectorised |
| CPU | anything else | vectorised, traced |
| GPU | a convolutional network in bf16 | our kernels |
| GPU | anything else | vectorised, compiled |

A route that fails on a model, or whose first gradient by a new program is wrong (`guard.py`), is replaced by its next
slower one (`Route.slower`), with one line in the log.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.memory import is_out_of_memory
from quasiglobal.common.modules import converted, copied
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError
from quasiglobal.stacked.compiling import Fused
from quasiglobal.stacked.guard import (
    Computed,
    check_gradient,
    numbers_of,
    numbers_restored,
    place_of,
    restore,
    works_alone,
)
from quasiglobal.stacked.kernels.network import Kernels
from quasiglobal.stacked.layout import Layout, load_state, stacking_of
from quasiglobal.stacked.one_model import Buffers, Gradients, Loss, OneModel, Right, copied_loss, with_shared_weights
from quasiglobal.stacked.precision import PRECISIONS, full_precision
from quasiglobal.stacked.routes import Compiled, OneByOne, Route, Traced, Vectorised

__all__ = ["Fused", "Gradients", "Stack", "choose_route", "draws", "rows_of"]

log = logging.getLogger("quasiglobal")

SLOW = "There is a performance drop because we have not yet implemented the batching rule for"
"""Beginning of vmap's warning."""

DEEP = 4
"""With more convolutions than this, a CPU is faster with one model after the other (`benchmarks/simulator.py`)."""


class Stack:
    """k copies of a module: their parameters are the rows of x [k, d], their buffers are stacked.

    `model` is any module, of which this takes a copy, or a function that makes one, called for each seed of `start`.
    `loss(output, target)` is a number, the mean over a batch. Frozen parameters are the same in all copies.

    >>> stack = Stack(nn.Linear(2, 1), nn.functional.mse_loss)
    >>> x, buffers = stack.start(seeds=range(3))
    >>> found = stack.gradients(x, buffers, torch.ones(3, 5, 2), torch.zeros(3, 5, 1))
    >>> found.losses.shape, found.g.shape, stack.outputs(x, buffers, torch.ones(1, 4, 2)).shape
    (torch.Size([3]), torch.Size([3, 3]), torch.Size([3, 1, 4, 1]))

    Further arguments are for trainings. `layout` says which parameters are which columns. `right` is the accuracy of a
    training example, if the task has one; `counts_hits`: it counts correct classes. `long` means a long training, for
    which compiling a transformer pays off. `route` overrides the choice.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        layout: Layout | None = None,
        precision: str = "fp32",
        *,
        device: str | torch.device | None = None,
        right: Right | None = None,
        counts_hits: bool = False,
        long: bool = False,
        route: Callable[[OneModel], Route] | None = None,
    ) -> None:
        self._made, self.device, self.precision = model, None if device is None else torch.device(device), precision
        self.module, self.loss = self._new(), loss
        self.layout = layout or Layout.of(self.module)
        self.random = draws(self.module)
        one = OneModel(self.module, loss, self.layout, precision, right=right, counts_hits=counts_hits)
        if not one.is_ours:
            one = replace(one, first=(with_shared_weights(self.module), copied_loss(loss)))
        self.route = (route or choose_route(self.module, precision, long))(one)
        """The route of the gradients."""
        self.test_route = self.route
        """The route of the outputs, which may fail on other operations."""
        self.changed = False
        """Whether a slower route took over after gradients had been returned."""
        self._worked: set[str] = set()
        """Methods of the routes that have succeeded."""
        self._writes = False
        """Whether the model writes into its inputs."""
        self._tests_need_gradients = False
        """Whether the model fails without gradients in a test."""
        self._is_slow = False
        """Whether vmap computes some operations for one model after the other."""
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _nothing  # type: ignore[method-assign]

    def start(self, seeds: Sequence[int]) -> tuple[Tensor, Buffers]:
        """The first x and buffers, a row for each seed, with which a function makes its model; others start alike."""
        modules = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                modules.append(self.module if isinstance(self._made, nn.Module) else self._new())
        return stacked_rows(self.layout, modules)

    def model(self, x: Tensor, buffers: Buffers, row: int) -> nn.Module:
        """A plain module with the weights and buffers of a row."""
        module = copied(self.module)
        load_state(module, self.layout.views(x[row]) | {name: value[row] for name, value in buffers.items()})
        return module.eval()

    def gradients(
        self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree, rows: Sequence[int] = ()
    ) -> Gradients:
        """Each row's loss, accuracy and gradient on its own batch, and the new buffers.

        `inputs` is [k, batch, …], `targets` [k, batch]. `rows` are the numbers of the rows, if these are not all.
        """
        self.module.train()
        self.route.rows = rows
        with self._full_precision(x):
            return self._by_a_route_that_works("gradients", x, buffers, inputs, targets)

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree, rows: Sequence[int] = ()) -> Tree:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …].

        The batches stay separate, for models that normalise by the batch.
        """
        self.module.eval()
        self.test_route.rows = rows
        with torch.set_grad_enabled(self._tests_need_gradients), self._full_precision(x):
            try:
                found = self._by_a_route_that_works("outputs", x, buffers, inputs)
            except RuntimeError as error:
                if self._tests_need_gradients or "outputs" in self._worked or is_out_of_memory(error):
                    raise
                self._tests_need_gradients = True           # as of a model that differentiates in its forward pass
                return self.outputs(x, buffers, inputs, rows)
        return tree_map(torch.detach, found)

    def losses(self, outputs: Tree, targets: Tree, rows: Sequence[int] = ()) -> Tensor:
        """Each row's loss [k]: its outputs [k, examples, …] against the same targets [examples, …]."""
        with torch.no_grad():
            if tree_leaves(outputs)[0].device.type != "cpu" and not isinstance(self.test_route, OneByOne):
                with suppress(Exception):                   # a loss that vmap does not support
                    result: Tensor = vmap(self.loss, in_dims=(0, None), randomness="different")(outputs, targets)
                    return result
            each = rows_of(outputs)
            if not isinstance(self.test_route, OneByOne):
                return torch.stack([self.loss(output, targets) for output in each])
            kept = (self.test_route.model(row).one.loss for row in rows or range(len(each)))   # a test changes no loss
            return torch.stack([copied_loss(loss)(output, targets) for loss, output in zip(kept, each, strict=True)])

    def must_repeat(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> bool:
        """Whether the gradients so far differ from plain PyTorch's; if so, it replaces the route, for a new start.

        Either the route disagrees by now, or it failed in a later call, so that state kept by modules may be lost.
        """
        one = self.route.one
        if isinstance(self.route, OneByOne):
            if one.is_ours or not self.changed:
                return False
            log.info(f"a slower route took over in the first epoch of {type(self.module).__name__}, which is repeated")
        elif one.is_ours:
            return False
        else:
            given = tree_map(torch.clone, (x, buffers, inputs, targets))
            try:
                with numbers_restored(self.module), torch.random.fork_rng([x.device] if x.is_cuda else []):
                    check_gradient(self.route.gradients(*given), one, x, buffers, inputs, targets)
                return False
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._replace(OneByOne(one), error, "gradients", type(self.module).__name__)
        self.route = self.test_route = OneByOne(one)
        self.changed = False
        return True

    def keep_route(self, names: Sequence[str]) -> None:
        """Compute by the slowest of these routes, if one is slower than the chosen one: a resumed run keeps its own."""
        slower = type(self.route).slower
        while slower is not None:
            if slower.__name__ in names:
                self.route = self.test_route = slower(self.route.one)
            slower = slower.slower

    def move(self, rows: Sequence[int | None]) -> None:
        """Renumber the modules of rows that move: each place gets the row of an earlier place, or a new row."""
        for route in {self.route, self.test_route}:
            if isinstance(route, OneByOne):
                before = route.models
                route.models = {to: before[at] for to, at in enumerate(rows) if at is not None and at in before}

    @property
    def has_effects(self) -> bool:
        """Whether steps have effects in Python, which a captured step would not have."""
        return isinstance(self.route, OneByOne) and not self.route.one.is_ours

    @property
    def called(self) -> nn.Module:
        """The module that is called for the first row."""
        return self.route.model(0).module if isinstance(self.route, OneByOne) else self.module

    def _new(self) -> nn.Module:
        """A new module in the precision, on the device."""
        module = copied(self._made) if isinstance(self._made, nn.Module) else self._made()
        if self.device is not None:
            module = converted(module, self.device, PRECISIONS[self.precision])
        return module

    @overload
    def _by_a_route_that_works(self, what: Literal["gradients"], x: Tensor, *batch: Tree) -> Gradients: ...

    @overload
    def _by_a_route_that_works(self, what: Literal["outputs"], x: Tensor, *batch: Tree) -> Tree: ...

    def _by_a_route_that_works(self, what: Computed, x: Tensor, *batch: Tree) -> Gradients | Tree:
        """The result of the route's method `what`; if it fails, of the first slower route that does not, from now on.

        `batch` are the buffers, the inputs and, for gradients, the targets.

        If all fail, the module itself does: raise the error of the last route, which is plain PyTorch's.
        """
        route, failure, new = self.route if what == "gradients" else self.test_route, None, what not in self._worked
        generator = torch.cuda if x.is_cuda else torch
        drawn = generator.get_rng_state() if new else None
        careful = new and not route.one.is_ours             # a user's model may write into what it gets, and keep it
        numbers = numbers_of(self.module) if careful or route.unchecked else []
        if careful and route.slower is not None:
            works_alone(route.one, what, x, *batch)         # what a module keeps from its first call is not vmap's then
        while True:
            unchecked = route.unchecked
            restore(numbers)                                # a failed attempt does not count
            if drawn is not None:                           # the numbers drawn do not depend on failed attempts
                generator.set_rng_state(drawn)
            try:
                rows = x.clone() if careful else x
                given = tree_map(torch.clone, batch) if careful or self._writes else batch
                with self._slow_operations(first=new):
                    result = getattr(route, what)(rows, *given)
                self._writes = self._writes or (careful and any(leaf._version for leaf in tree_leaves(given[1])))
                if what == "gradients" and route.unchecked:
                    with numbers_restored(self.module):
                        restore(numbers)                    # as for the gradient that it is compared with
                        check_gradient(result, route.one, x, *batch)
                    unchecked = False
                route.unchecked = unchecked
                break
            except Exception as error:
                if is_out_of_memory(error):                 # another route needs as much memory
                    raise
                if route.slower is None:
                    one = replace(route.one, precision="fp32")
                    if new and self.precision == "bf16" and works_alone(one, what, x, *batch):
                        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                        name = type(self.module).__name__
                        raise InputError(f"{name} does not work under autocast to bf16 ({said}); use fp32") from None
                    raise
                failure, asked = failure or error, route.rows
                route = route.slower(route.one)
                route.rows = asked
        if careful and what == "gradients" and not rows.equal(x):
            x.copy_(rows)                                   # what the model wrote into its own weights
        self._worked.add(what)
        if failure is not None:
            self.changed = self.changed or (what == "gradients" and not new)
            self._replace(route, failure, what, place_of(failure, self.module))
        return result

    def _replace(self, route: Route, failure: Exception, what: Computed, place: str) -> None:
        """Compute by another route from now on, and say why."""
        first, used = (self.route, "trained") if what == "gradients" else (self.test_route, "tested")
        log.warning(
            f"{place} fails on the route {type(first).__name__} ({type(failure).__name__}: "
            f"{' '.join(str(failure).split())[:160]}); the models are {used} {route.cost}"
        )
        self.test_route = route
        if what == "gradients":
            self.route = route

    @contextmanager
    def _slow_operations(self, first: bool) -> Iterator[None]:
        """Log the operations that vmap computes for one model after the other, at the first call only."""
        if not first and not self._is_slow:
            yield
            return
        with warnings.catch_warnings(record=first) as said:
            warnings.filterwarnings("always" if first else "ignore", message=SLOW)
            yield
        slow = {found[1]: None for one in said or () if (found := re.search(rf"{SLOW}.*aten::(\w+)", str(one.message)))}
        if slow:
            self._is_slow = True
            name = type(self.module).__name__
            log.warning(f"vmap computes {', '.join(slow)} of {name} for one model after the other, which is slower")
        for one in said or ():
            if not re.match(SLOW, str(one.message)):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def _full_precision(self, x: Tensor) -> AbstractContextManager[None]:
        """Compute fp32 in float32, also where cuDNN would use TF32."""
        return nullcontext() if self.precision == "bf16" else full_precision(x.device.type)


def stacked_rows(layout: Layout, modules: Sequence[nn.Module], each: int = 1) -> tuple[Tensor, Buffers]:
    """The weights and buffers of modules as rows, `each` of them several times."""
    kept = [layout.buffers(module) for module in modules]

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).repeat_interleave(each, dim=0)

    x = stacked([layout.row(dict(module.named_parameters())) for module in modules])
    return x, {name: stacked([own[name] for own in kept]) for name in kept[0]}


def rows_of(outputs: Tree) -> list[Tree]:
    """The outputs [k, …] of k models as k trees."""
    return [tree_map(lambda values, i=i: values[i], outputs) for i in range(len(tree_leaves(outputs)[0]))]


def _nothing() -> None:
    """Replace `flatten_parameters` of recurrent layers, which needs weights that are not stacked."""


def choose_route(module: nn.Module, precision: str, long: bool = False) -> Callable[[OneModel], Route]:
    """The fastest route for a module on its device: the first matching row of the table above."""
    parameter = next(module.parameters(), None)
    on_cpu = parameter is None or parameter.device.type == "cpu"
    autograd = stacking_of(module).autograd
    if autograd == "alone" or _has_gradient_hooks(module) or (on_cpu and _busy(module, precision)):
        return OneByOne
    if autograd == "outside" and not (long and not on_cpu):
        return Vectorised
    if on_cpu:
        return Traced
    recurrent = _count(module, nn.RNNBase, nn.RNNCellBase) and not _count(module, nn.modules.conv._ConvNd)
    if recurrent or precision == "fp64":
        return Vectorised
    return Kernels if precision == "bf16" and autograd == "inside" else Compiled


def _count(module: nn.Module, *kinds: type[nn.Module]) -> int:
    """Number of parts of these kinds."""
    return sum(isinstance(part, kinds) for part in module.modules())


def draws(module: nn.Module) -> bool:
    """Whether a step of the module draws random numbers, as dropout does."""
    dropout = (part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd))
    return stacking_of(module).draws or any(part.p > 0 for part in dropout)


def _busy(module: nn.Module, precision: str) -> bool:
    """Whether a CPU is faster with one model after the other, or cannot stack the models at all."""
    deep = _count(module, nn.modules.conv._ConvNd) > DEEP
    # Under vmap, these do not support bf16 inputs with float32 weights on a CPU.
    mixed = precision == "bf16" and _count(module, nn.modules.batchnorm._BatchNorm, nn.LayerNorm) > 0
    return deep or mixed or stacking_of(module).large


def _has_gradient_hooks(module: nn.Module) -> bool:
    """Whether hooks see or change gradients of single models: of parameters, or of a part's outputs or inputs."""
    return any(part._backward_hooks or part._backward_pre_hooks for part in module.modules()) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in module.parameters()
    )
