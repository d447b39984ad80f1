"""One copy of a model as pure functions of its row of parameters, its buffers and its batch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import USUAL, RandomGenerator, attributes_of, copied
from quasiglobal.common.trees import Tree
from quasiglobal.stacked.layout import Layout

Loss = Callable[[Tree, Tree], Tensor]
"""loss(output, target) → a number, the mean over the batch."""

Right = Callable[[Tree, Tree], Tensor]
"""right(output, target) → one number per example, such as 1 for a correct class."""

Buffers = dict[str, Tensor]
"""A model's buffers, such as BatchNorm's running statistics, stacked over models: never communicated."""


class Gradients(NamedTuple):
    """Losses, accuracies, gradients and buffers of a step, stacked over k models."""

    losses: Tensor
    """[k]"""
    right: Tensor
    """[k], the accuracy on the batch; 0 if the model has none."""
    g: Tensor
    """[k, d]"""
    buffers: Buffers
    """The buffers after the forward pass."""


@dataclass(frozen=True)
class OneModel:
    """A module, its loss and the layout of its parameters in a row."""

    module: nn.Module
    loss: Loss
    layout: Layout
    precision: str
    around: Callable[[Tree], AbstractContextManager[object]] = nullcontext
    """Additional context of the forward pass, inside autocast, and of the loss, for the tensors that they get."""
    right: Right | None = None
    """Accuracy of each training example; None if the task has none."""
    counts_hits: bool = False
    """Whether `right` is 1 for class outputs whose largest is the target's, else 0, so that a kernel may count."""
    first: tuple[nn.Module, Loss] | None = None
    """The module and the loss as they were before any call, of which further copies are made; None: they still are."""
    @property
    def is_ours(self) -> bool:
        """Whether the module is the library's, which keeps nothing between calls and asks no tensor for its history."""
        return type(self.module).__module__.startswith("quasiglobal.")

    def copied(self) -> RealModel:
        """A copy with attributes of its own, as they were before any call; its weights are set in each call."""
        module, loss = self.first or (self.module, self.loss)
        return RealModel(replace(self, module=with_shared_weights(module), loss=copied_loss(loss), first=None))

    def output(self, row: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """The output on one batch; in training, `buffers` gets the new values, as BatchNorm writes them."""
        given, named = arguments(self.module, inputs)
        values = self.layout.views(row) | buffers
        with self.autocast(row.device), self.around((row, inputs)):
            output = functional_call(self.module, values, given, named)
        buffers.update({name: values[name] for name in buffers})            # buffers that `forward` replaced
        return output

    def outputs(self, row: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """The outputs on several batches [batches, batch, …], kept separate: some models normalise by the batch."""
        if len(tree_leaves(inputs)[0]) == 1:
            output = self.output(row, buffers, tree_map(lambda values: values[0], inputs))
            return tree_map(lambda values: values[None], output)
        return vmap(self.output, in_dims=(None, None, 0), randomness="different")(row, buffers, inputs)

    def score(self, output: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """The loss and the accuracy."""
        with self.around((output, targets)):
            loss = self.loss(output, targets)
        right = torch.zeros_like(loss) if self.right is None else self.right(output, targets).to(loss.dtype).mean()
        return loss, right

    def loss_at(
        self, row: Tensor, buffers: Buffers, inputs: Tree, targets: Tree
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        """The loss on a batch; as auxiliary output, the accuracy and the buffers."""
        loss, right = self.score(in_dtype(self.output(row, buffers, inputs), row.dtype), targets)
        return loss, (right, buffers)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Autocast to bf16 inside the model, if that is its precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


class RealModel:
    """One model as its user would call it: a module of its own, whose weights are set to those of a row in each call.

    So hooks, activation checkpointing, other references to the parameters and attributes of the module work
    as in the user's own loop.
    """

    def __init__(self, one: OneModel) -> None:
        self.one, self.module = one, one.module
        parameters = dict(self.module.named_parameters())
        self._trained = {name: parameters[name] for name in one.layout.shapes}
        self._places: dict[int, list[tuple[dict[str, Tensor | None], str]]] = defaultdict(list)
        for part in self.module.modules():
            for key, value in part._buffers.items():
                self._places[id(value)].append((part._buffers, key))
        self._buffers = {name: self._places[id(value)] for name, value in self.module.named_buffers()}
        self._frozen = {name: value for name, value in parameters.items() if name not in self._trained}

    def gradients(self, row: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        """Gradients at a row; values that the model writes into its own weights are copied to the row."""
        one, layout = self.one, self.one.layout
        with self._at(row, buffers):
            self.module.train()
            loss, right = one.score(in_dtype(self._output(row, inputs), row.dtype), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            g = layout.row({name: _gradient(parameter) for name, parameter in self._trained.items()})
            written, after = layout.row(self._trained), {name: self._buffer(name).detach() for name in buffers}
        if row.is_cuda or not written.equal(row):           # on a GPU, a comparison would wait
            row.copy_(written)
        return Gradients(loss.detach(), right.detach(), g, after)

    def outputs(self, row: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """The outputs on one batch after the other, [batches, batch, …], in evaluation mode.

        The attributes of the module are then as before.
        """
        found, before = [], [] if self.one.is_ours else own_attributes(self.module)
        for k in range(len(tree_leaves(inputs)[0])):
            with self._at(row, buffers):
                self.module.eval()
                found.append(self._output(row, tree_map(lambda values, k=k: values[k].clone(), inputs)))
        for attributes, own in before:
            for name in attributes.keys() - USUAL - own.keys():
                del attributes[name]
            attributes.update(own)
        return tree_map(lambda *of: torch.stack(of), *found)

    def _output(self, row: Tensor, inputs: Tree) -> Tree:
        given, named = arguments(self.module, inputs)
        with self.one.autocast(row.device), self.one.around((row, inputs)):
            return self.module(*given, **named)

    @contextmanager
    def _at(self, row: Tensor, buffers: Buffers) -> Iterator[None]:
        """Set the weights and buffers; the memory of the weights is given back afterwards."""
        before = [(parameter, parameter.data) for parameter in (*self._trained.values(), *self._frozen.values())]
        for parameter, view in zip(self._trained.values(), self.one.layout.views(row.detach()).values(), strict=True):
            parameter.data = view.clone()
        for name, value in buffers.items():
            if name in self._frozen:
                self._frozen[name].data = value.clone()
            else:
                own = value.clone()                         # one tensor for all parts that share it
                for part, key in self._buffers[name]:
                    part[key] = own
        try:
            yield
        finally:
            for parameter, data in before:
                parameter.data, parameter.grad = data, None

    def _buffer(self, name: str) -> Tensor:
        """A buffer, which forward may have assigned anew, or a frozen parameter that it changes."""
        if name in self._frozen:
            return self._frozen[name]
        part, key = self._buffers[name][0]
        return cast(Tensor, part[key])


def _gradient(parameter: Tensor) -> Tensor:
    g = parameter.grad
    return torch.zeros_like(parameter) if g is None else g.to_dense() if g.is_sparse else g


def with_shared_weights(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own in the same memory, and the same generators of random numbers.

    The module itself if it cannot be copied.
    """
    plain = (one for one in module.parameters() if type(one) is nn.Parameter)
    own = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in plain}
    with suppress(Exception):
        generators = {id(one): one for one in attributes_of(module) if isinstance(one, RandomGenerator)}
        return copied(module, shared={**own, **generators})
    return module


def own_attributes(module: nn.Module) -> list[tuple[dict[str, object], dict[str, object]]]:
    """The attributes of each part of a module, and copies of those that the part has added to the usual ones.

    Generators of random numbers and tensors with a history are shared, or everything if a value cannot be copied.
    """
    parts = [vars(part) for part in module.modules()]
    added = [{key: value for key, value in own.items() if key not in USUAL} for own in parts]
    kept = [
        one for one in attributes_of(module)
        if isinstance(one, RandomGenerator) or (isinstance(one, Tensor) and not one.is_leaf)
    ]
    memo = {id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers(), *kept)}
    with suppress(Exception):
        added = copy.deepcopy(added, memo)
    return list(zip(parts, added, strict=True))


def copied_loss(loss: Loss) -> Loss:
    """A copy of a loss that is an object, which may keep something between calls; functions are as they are."""
    if not isinstance(loss, FunctionType | BuiltinFunctionType | MethodType | partial):
        with suppress(Exception):
            return copy.deepcopy(loss)
    return loss


def arguments(module: nn.Module, inputs: Tree) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """The positional and the named arguments of `module` for these inputs.

    A tuple or dict of inputs is spread over the parameters of `forward` if it has these; otherwise it is one argument.

    >>> arguments(nn.Bilinear(2, 2, 1), (1, 2)), arguments(nn.Linear(2, 1), (1, 2)), arguments(nn.Linear(2, 1), 3)
    (((1, 2), {}), (((1, 2),), {}), ((3,), {}))
    """
    given, named = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs) if isinstance(inputs, dict) else ((), {})
    if given or named:
        try:
            signature(module.forward).bind(*given, **named)
        except (TypeError, ValueError):
            return (inputs,), {}
        return given, named
    return (inputs,), {}


def in_dtype(values: Tree, dtype: torch.dtype) -> Tree:
    """Convert the floating-point tensors to a dtype."""
    return tree_map(lambda value: value.to(dtype) if value.is_floating_point() else value, values)
