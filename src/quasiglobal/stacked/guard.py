"""A guard against silent errors: gradients by a new program, compared with plain PyTorch's.

Inductor has computed wrong gradients without an error: of maxima in 16 bits, of padded tensors, of loops that it had
ordered after fusion. A model that asks a tensor for its history, reads values as NumPy arrays, or keeps tensors from
one call to the next, may do something else when it is vectorised or traced. So the gradient of a model is computed by
plain autograd too: at the first step by a new program, and once more after the first epoch.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quasiglobal.common.modules import USUAL
from quasiglobal.common.trees import Tree
from quasiglobal.stacked.one_model import Buffers, Gradients, OneModel, RealModel
from quasiglobal.stacked.stackable import Replacing, unstacked

log = logging.getLogger("quasiglobal")

ROUNDING = 4.0
"""Allowed error of a gradient, in multiples of plain PyTorch's error in the same precision."""
SMALL = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 3e-2}
"""Relative error that is allowed in addition, by precision."""
ZERO = 1e-6
"""Allowed absolute error of a gradient of zero."""
ROWS = 3
"""Number of models that must have a wrong gradient: a single one may jump where rounding changes a maximum."""

Computed = Literal["gradients", "outputs"]
"""Name of a route's method."""


class WrongGradient(ArithmeticError):
    """A gradient that is not that of plain PyTorch."""


def check_gradient(result: Gradients, one: OneModel, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> None:
    """Raise `WrongGradient` if the first models' gradients are not those of plain PyTorch, up to rounding.

    A module that draws random numbers is not checked: a compiled one draws others. The log says so.
    """
    unchecked = f"{type(one.module).__name__} %s; its gradient is not checked"
    for row in range(min(ROWS, len(x))):
        alone = tree_map(lambda values, row=row: values[row].clone(), (x, buffers, inputs, targets))
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            before = _state(x.device)
            try:
                plain = _gradient(one, alone)
                exact = plain if one.precision != "bf16" else _gradient(replace(one, precision="fp32"), alone)
            except Exception as failure:                    # the model works on its route, and there alone
                log.info(unchecked, f"fails by itself ({' '.join(str(failure).split())[:160]})")
                return
            if not torch.equal(_state(x.device), before):
                log.info(unchecked, "draws random numbers")
                return
            if not torch.isfinite(exact).all():
                log.info(unchecked, "has a gradient that is not finite")
                return
        error, rounding, size = (float(part.norm()) for part in (result.g[row] - exact, plain - exact, exact))
        if error <= ROUNDING * rounding + SMALL[one.precision] * size + ZERO:
            return
    raise WrongGradient(f"a gradient has an error of {error:.2g}, its norm is {size:.2g}")


def _gradient(one: OneModel, alone: tuple[Tensor, Buffers, Tree, Tree]) -> Tensor:
    """The gradient of one model by plain PyTorch, after the same number of calls."""
    model = replace(one, around=unstacked).copied()
    for part, (_, numbers) in zip(model.module.modules(), numbers_of(one.module), strict=False):
        vars(part).update(numbers)
    row, buffers, inputs, targets = alone
    return model.gradients(row.clone(), buffers, inputs, targets).g


def _state(device: torch.device) -> Tensor:
    """The states of the random generators."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return torch.cat(states)


def works_alone(one: OneModel, what: Computed, x: Tensor, buffers: Buffers, inputs: Tree, *targets: Tree) -> bool:
    """Whether the module itself computes this for the first row, by plain PyTorch."""
    x, buffers, inputs, targets = tree_map(torch.clone, (x, buffers, inputs, targets))
    with suppress(Exception), numbers_restored(one.module):
        model = RealModel(replace(one, around=unstacked))
        row, own = tree_map(lambda values: values[0], (x, buffers))
        if what == "gradients":
            model.gradients(row, own, *tree_map(lambda values: values[0], (inputs, *targets)))
        else:
            model.outputs(row, own, tree_map(lambda values: values[:1], inputs))
        return True
    return False


def place_of(error: Exception, module: nn.Module) -> str:
    """The operation and the part of a module at which an error occurred; the module's name if it was not in a call."""
    name, parts, operations = type(module).__name__, list[nn.Module](), list[str]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        if isinstance(own, Replacing):
            operations.append(str(frame.f_locals.get("name")))
        elif isinstance(own, nn.Module) and (parts or type(own) is type(module)):       # which may be a copy
            parts.append(own)
    if not parts or not operations:
        return name
    inside = {id(part): f"{name}.{key} ({type(part).__name__})" for key, part in parts[0].named_modules() if key}
    within = [inside[id(part)] for part in parts if id(part) in inside]
    return f"{operations[-1]} in {within[-1] if within else name}"


Numbers = Sequence[tuple[dict[str, object], dict[str, object]]]
"""The attributes of each part of a module, and the earlier values of the numbers and booleans among them."""


def numbers_of(module: nn.Module) -> Numbers:
    """The numbers among the attributes of a module: counters of calls, and flags of one-time actions."""
    every = [vars(part) for part in module.modules()]
    return [
        (own, {key: value for key, value in own.items() if key not in USUAL and isinstance(value, int | float)})
        for own in every
    ]


def restore(numbers: Numbers) -> None:
    """Reset the numbers among the attributes: the calls since then do not count."""
    for own, before in numbers:
        own.update(before)


@contextmanager
def numbers_restored(module: nn.Module) -> Iterator[None]:
    """Restore the numbers of a module afterwards."""
    numbers = numbers_of(module)
    try:
        yield
    finally:
        restore(numbers)
