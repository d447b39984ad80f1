"""A guard against silent errors: the first gradient by a new program, compared with plain PyTorch's.

Inductor has computed wrong gradients without an error: of maxima in 16 bits, of padded tensors, of loops that it had
ordered after fusion. A model that asks a tensor for its history, reads values as NumPy arrays, or keeps tensors from
one call to the next, may do something else when it is vectorised or traced. So the gradient of a model is computed by
plain autograd too: at the first step by a new program, and once more after the first epoch.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quasiglobal.common.modules import give_numbers
from quasiglobal.common.trees import Tree
from quasiglobal.stacked.one_model import Buffers, Gradients, OneModel, in_fp32
from quasiglobal.stacked.stackable import unstacked

log = logging.getLogger("quasiglobal")

ROUNDING = 4.0
"""Errors of plain PyTorch in the same precision that a gradient may have."""
SMALL = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 3e-2}
"""Relative error that a gradient may have besides, by the precision."""
ZERO = 1e-6
"""Error that a gradient of zero may have."""
ROWS = 3
"""Models whose gradient has to be wrong: that of one may jump, where rounding changes a maximum."""


class WrongGradient(ArithmeticError):
    """A gradient that is not that of plain PyTorch."""


def check_gradient(result: Gradients, one: OneModel, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> None:
    """Raise `WrongGradient` if the first models' gradients are not those of plain PyTorch, up to rounding.

    A module that draws random numbers is not checked: a compiled one draws others.
    """
    for row in range(min(ROWS, len(x))):
        alone = tree_map(lambda values, row=row: values[row].clone(), (x, buffers, inputs, targets))
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            before = _state(x.device)
            try:
                plain = _gradient(one, alone)
                exact = plain if one.precision != "bf16" else _gradient(in_fp32(one), alone)
            except Exception:                               # the model works on its route, and there alone
                return
            if not torch.equal(_state(x.device), before):
                log.info(f"{type(one.module).__name__} draws random numbers; its gradient is not checked")
                return
            if not torch.isfinite(exact).all():
                return
        error, rounding, size = (float(part.norm()) for part in (result.g[row] - exact, plain - exact, exact))
        if error <= ROUNDING * rounding + SMALL[one.precision] * size + ZERO:
            return
    raise WrongGradient(f"a gradient has an error of {error:.2g}, its norm is {size:.2g}")


def _gradient(one: OneModel, alone: tuple[Tensor, Buffers, Tree, Tree]) -> Tensor:
    """The gradient of one model by plain PyTorch, as after as many calls."""
    model = replace(one, around=unstacked).copied()
    give_numbers(one.module, model.module)
    row, buffers, inputs, targets = alone
    return model.gradients(row.clone(), buffers, inputs, targets).g


def _state(device: torch.device) -> Tensor:
    """The states of the random generators."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return torch.cat(states)
