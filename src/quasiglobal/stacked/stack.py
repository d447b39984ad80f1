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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.memory import is_out_of_memory
from quasiglobal.common.modules import Numbers, kept_from_vmap, numbers_restored
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError
from quasiglobal.stacked.compiling import Fused
from quasiglobal.stacked.guard import check_first_gradient
from quasiglobal.stacked.kernels.program import Kernels
from quasiglobal.stacked.layout import Layout, stacking_of
from quasiglobal.stacked.one_model import Buffers, Gradients, Loss, OneModel, Right, in_fp32
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.routes import Compiled, OneByOne, Route, Traced, Vectorised
from quasiglobal.stacked.whereabouts import located

__all__ = ["Fused", "Gradients", "StackedModel", "choose_route", "draws", "rows_of"]

log = logging.getLogger("quasiglobal")

SLOW = "There is a performance drop because we have not yet implemented the batching rule for"
"""Beginning of vmap's warning."""

DEEP = 4
"""With more convolutions than this, a CPU is faster with one model after the other (`benchmarks/simulator.py`)."""


class StackedModel:
    """k copies of a module: their parameters are the rows of x [k, d], their buffers are stacked.

    `right` is the accuracy of a training example, if the task has one; `counts_hits`: it counts correct classes. `long`
    means a long training, for which compiling a transformer pays off. `route` overrides the choice.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        layout: Layout,
        precision: str = "fp32",
        *,
        right: Right | None = None,
        counts_hits: bool = False,
        long: bool = False,
        route: Callable[[OneModel], Route] | None = None,
    ) -> None:
        self.module, self.loss, self.layout, self.precision = module, loss, layout, precision
        self.random = draws(module)
        self.route = (route or choose_route(module, precision, long))(
            OneModel(module, loss, layout, precision, right=right, counts_hits=counts_hits)
        )
        """The route of the gradients."""
        self.test_route = self.route
        """The route of the outputs, which may fail on other operations."""
        self._worked: set[str] = set()
        """Methods of the routes that have succeeded."""
        self._writes = False
        """Whether the model writes into its inputs."""
        self._tests_need_gradients = False
        """Whether the model fails without gradients in a test."""
        self._is_slow = False
        """Whether vmap computes some operations for one model after the other."""
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _nothing  # type: ignore[method-assign]

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        """Each row's loss, accuracy and gradient on its own batch, and the new buffers.

        `inputs` is [k, batch, …], `targets` [k, batch].
        """
        self.module.train()
        with self._full_precision(x):
            result: Gradients = self._by_a_route_that_works("gradients", x, buffers, inputs, targets)
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …].

        The batches stay separate, for models that normalise by the batch.
        """
        self.module.eval()
        with torch.set_grad_enabled(self._tests_need_gradients), self._full_precision(x):
            try:
                found = self._by_a_route_that_works("outputs", x, buffers, inputs)
            except RuntimeError as error:
                if self._tests_need_gradients or "outputs" in self._worked or is_out_of_memory(error):
                    raise
                self._tests_need_gradients = True           # as of a model that differentiates in its forward pass
                return self.outputs(x, buffers, inputs)
        return tree_map(torch.detach, found)

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Each row's loss [k]: its outputs [k, examples, …] against the same targets [examples, …]."""
        with torch.no_grad():
            if tree_leaves(outputs)[0].device.type != "cpu" and not isinstance(self.test_route, OneByOne):
                with suppress(Exception):                   # a loss that vmap does not support
                    result: Tensor = vmap(self.loss, in_dims=(0, None), randomness="different")(outputs, targets)
                    return result
            return torch.stack([self.loss(output, targets) for output in rows_of(outputs)])

    def _by_a_route_that_works(self, what: str, *arguments: Any) -> Any:
        """The result of the route's method `what`; if it fails, of the first slower route that does not, from now on.

        If all fail, the module itself does: raise the error of the last route, which is plain PyTorch's.
        """
        first = self.route if what == "gradients" else self.test_route
        route, failure, new = first, None, what not in self._worked
        on_gpu = arguments[0].is_cuda
        drawn = (torch.cuda if on_gpu else torch).get_rng_state() if new else None
        careful = new and not route.one.is_ours             # a user's model may write into what it gets, and keep it
        numbers = Numbers(self.module) if careful or route.unchecked else None
        counts = numbers.read() if numbers else []
        if careful and route.slower is not None:
            _works_alone(route.one, what, arguments)        # what a module keeps from its first call is not vmap's then
        while True:
            unchecked = route.unchecked
            if numbers:
                numbers.write(counts)                       # a failed attempt does not count
            if drawn is not None:                           # the numbers drawn do not depend on failed attempts
                (torch.cuda if on_gpu else torch).set_rng_state(drawn)
            try:
                given = tree_map(torch.clone, arguments) if careful else arguments[:1] + self._own(arguments[1:])
                with self._slow_operations(first=new):
                    result = getattr(route, what)(*given)
                self._writes = self._writes or (careful and any(leaf._version for leaf in tree_leaves(given[2])))
                if what == "gradients" and route.unchecked:
                    with numbers_restored(self.module):
                        if numbers:
                            numbers.write(counts)           # as for the gradient that it is compared with
                        check_first_gradient(result, route.one, *arguments)
                    unchecked = False
                route.unchecked = unchecked
                break
            except Exception as error:
                if is_out_of_memory(error):                 # another route needs as much
                    raise
                if route.slower is None:
                    if new and self.precision == "bf16" and _works_alone(in_fp32(route.one), what, arguments):
                        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                        name = type(self.module).__name__
                        raise InputError(f"{name} does not work under autocast to bf16 ({said}); use fp32") from None
                    kept = kept_from_vmap(self.module)
                    if kept:
                        raise InputError(
                            f"{type(self.module).__name__} keeps a tensor in its attribute {kept} from one call to the "
                            "next; make it a buffer, so that each node has its own"
                        ) from None
                    raise
                failure = failure or error
                route = route.slower(route.one)
        if careful and what == "gradients" and not given[0].equal(arguments[0]):
            arguments[0].copy_(given[0])                    # what the model wrote into its own weights
        self._worked.add(what)
        if failure is not None:
            place = located(route.one, *tree_map(torch.clone, arguments[:3]))
            reason = " ".join(str(failure).split())[:160]
            log.warning(
                f"{place} fails on the route {type(first).__name__} ({type(failure).__name__}: {reason}); the "
                f"models are {'trained' if what == 'gradients' else 'tested'} {route.cost}"
            )
            self.test_route = route
            if what == "gradients":
                self.route = route
        return result

    def _own(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copies, if the model writes into its inputs."""
        return tuple(tree_map(torch.clone, arguments)) if self._writes else arguments

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


def rows_of(outputs: Tree) -> list[Tree]:
    """The outputs [k, …] of k models as k trees."""
    return [tree_map(lambda values, i=i: values[i], outputs) for i in range(len(tree_leaves(outputs)[0]))]


def _works_alone(one: OneModel, what: str, arguments: tuple[Any, ...]) -> bool:
    """Whether plain PyTorch computes this for the first model."""
    first = tree_map(lambda values: values[:1].clone(), arguments)
    with suppress(Exception), numbers_restored(one.module):
        getattr(OneByOne(one), what)(*first)
        return True
    return False


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
