"""Strategies to compute the gradients of many copies of one model: one class per strategy.

The model is any `nn.Module`, unmodified. `stack.py` chooses the route.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import Tree
from quasiglobal.stacked.compiling import Computation, Programs, by_inductor, traced
from quasiglobal.stacked.one_model import Buffers, Gradients, OneModel, RealModel
from quasiglobal.stacked.recording import Untraceable
from quasiglobal.stacked.stackable import cross_entropy, stackable, unstacked

log = logging.getLogger("quasiglobal")

CALLS_BEFORE_TRACING = 50
"""Calls of one shape before it is traced; tracing pays off after a few hundred calls."""

CALLS_BEFORE_COMPILING = 20
"""Outside of training, calls of one shape before it is compiled: a short evaluation finishes sooner uncompiled."""

MOST_OPERATIONS = 2500
"""Operations of a program above which it is not compiled: that would take minutes."""


class Route(ABC):
    """Strategy to compute the gradients and outputs of k models, whose parameters are the rows of x [k, d]."""

    slower: ClassVar[type[Route] | None] = None
    """The route to try if this one fails; None if there is none."""
    cost: ClassVar[str] = ""
    """How this route computes and what that costs, for the log line of a fallback to it."""

    def __init__(self, one: OneModel) -> None:
        self.one = one
        self.fuses = False
        """Whether the training is so long that compiling small parts of a step pays off."""
        self.unchecked = not one.is_ours
        """Whether the next gradient is to be compared with plain PyTorch's: it is the first one of a new program."""
        self.rows: Sequence[int] = ()
        """Numbers of the requested rows, empty for all; a route with a module for each row needs them."""

    @abstractmethod
    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        """Each row's loss and gradient on its own batch: inputs [k, batch, …], targets [k, batch]."""

    @abstractmethod
    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …]."""


class OneByOne(Route):
    """One model after the other, each a module of its own, by ordinary autograd: whatever the module does.

    For deep networks on a CPU, where stacking gains nothing, and for modules that other routes do not compute right.
    """

    cost = "one by one, which on a GPU takes about as long as a loop over the models"

    def __init__(self, one: OneModel) -> None:
        super().__init__(replace(one, around=unstacked))
        self.unchecked = False                              # it is plain PyTorch
        self.models: dict[int, RealModel] = {}
        """The module of each row; other rows, such as averages, have negative numbers."""

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        models = map(self.model, self.rows or range(len(x)))
        result: Gradients = for_each_row(lambda *of: next(models).gradients(*of), x, buffers, inputs, targets)
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        models = map(self.model, self.rows or range(len(x)))
        return for_each_row(lambda row, own: next(models).outputs(row, own, inputs), x, buffers)

    def model(self, row: int) -> RealModel:
        """The module of a row."""
        if row not in self.models:
            self.models[row] = self.one.copied()
        return self.models[row]


class Vectorised(Route):
    """All models at once: vmap over the rows, with autograd around it.

    Inside vmap, some backward passes would run model by model, or fail. Frozen parameters are shared by all models, and
    are applied to all batches at once.
    """

    slower: ClassVar[type[Route] | None] = OneByOne
    cost = "by vmap, uncompiled, which often takes 2 to 5 times as long as compiled"

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self._stacked_one = replace(one, around=stackable)
        self._programs = Programs()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        result: Gradients = self._on_new_tensors(
            lambda one: by_autograd(vmap(one.loss_at, randomness="different"), x, buffers, inputs, targets)
        )
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        return self._on_new_tensors(
            lambda one: vmap(one.outputs, in_dims=(0, 0, None), randomness="different")(x, buffers, inputs)
        )

    def _on_new_tensors(self, compute: Callable[[OneModel], Tree]) -> Tree:
        """Compute with the stacked model; if it writes into constants that it made, such as ones, stack these too."""
        try:
            return compute(self._stacked_one)
        except RuntimeError as error:
            if "vmap: inplace arithmetic" not in str(error) or isinstance(self._stacked_one.around, partial):
                raise
            self._stacked_one = replace(self._stacked_one, around=partial(stackable, writable=True))
            return compute(self._stacked_one)


class Traced(Vectorised):
    """On a CPU: vectorised, and traced to plain tensor operations once that pays off.

    Evaluation uses large batches, where stacking gains nothing: it runs one model after the other.
    """

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        if one.loss is nn.functional.cross_entropy:
            self._stacked_one = replace(self._stacked_one, loss=cross_entropy)

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        given = x, buffers, inputs, targets
        return Gradients(*self._programs(super().gradients, given, self._traced, CALLS_BEFORE_TRACING))

    def _traced(self, function: Computation, given: tuple[Tree, ...]) -> Computation:
        """The function traced; itself if that fails, as for the checks of `torch.distributions`."""
        try:
            program = traced(function, given)
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            log.warning(f"{type(self.one.module).__name__} is trained by vmap, untraced, which is slower: {reason}")
            return function
        self.unchecked = not self.one.is_ours
        return program

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        def of_batch(row: Tensor, own: Buffers, batch: Tree) -> Tree:
            return self.one.output(row, dict(own), tree_map(torch.clone, batch))    # it may write into its inputs

        def of_one(row: Tensor, own: Buffers) -> Tree:
            weights = row.clone().requires_grad_(torch.is_grad_enabled())   # for derivatives in the forward pass
            return for_each_row(partial(of_batch, weights, own), inputs)

        return for_each_row(of_one, x, buffers)


class Compiled(Vectorised):
    """On a GPU: vectorised, traced and compiled."""

    slower = Vectorised
    cost = "compiled, without the kernels, which often takes 2 to 4 times as long"

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        return Gradients(*self._programs(super().gradients, (x, buffers, inputs, targets), self._compiled))

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        return self._programs(super().outputs, (x, buffers, inputs), self._compiled, CALLS_BEFORE_COMPILING)

    def _compiled(self, function: Computation, arguments: tuple[Tree, ...]) -> Computation:
        """The function traced, and compiled unless that takes minutes."""
        program, self.unchecked = traced(function, arguments), True
        count, name = len(program.graph.nodes), type(self.one.module).__name__
        if count > MOST_OPERATIONS:
            log.warning(f"{name} has {count} operations, as of a long recurrence: they run uncompiled, which is slower")
            return program
        log.info(f"compiling {name} ({count} operations)")
        return by_inductor(program)


def by_autograd(loss_at: Computation, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
    """Gradients at x of all rows, by a stacked `OneModel.loss_at`."""
    after, version = {name: value.clone() for name, value in buffers.items()}, x._version
    leaf = x.detach().requires_grad_()
    losses, (right, after) = loss_at(leaf, after, inputs, targets)
    (g,) = torch.autograd.grad(losses.sum(), leaf)
    if x._version != version:
        raise Untraceable("the model writes into its own weights")
    return Gradients(losses.detach(), right, g, {name: value.detach() for name, value in after.items()})


def for_each_row(function: Computation, *arguments: Tree) -> Tree:
    """Same result as vmap, computed one row after the other."""
    count = len(tree_leaves(arguments)[0])
    results = [function(*tree_map(lambda values, i=i: values[i], arguments)) for i in range(count)]
    return tree_map(lambda *rows: torch.stack(rows), *results)
