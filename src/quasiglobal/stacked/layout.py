"""A model as one flat row: its named parameters concatenated, shared ones first; and what a module can declare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors


@dataclass(frozen=True)
class Layout:
    """Position of each parameter in the row. The first `shared` columns are communicated, the rest stays local.

    >>> layout = Layout.of(nn.Linear(2, 3), personal=lambda name: name == "bias")
    >>> layout.shapes, layout.shared, layout.size
    ({'weight': (3, 2), 'bias': (3,)}, 6, 9)
    >>> row = layout.row({"weight": torch.ones(3, 2), "bias": torch.zeros(3)})
    >>> {name: tuple(view.shape) for name, view in layout.views(row).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """

    shapes: dict[str, tuple[int, ...]]
    shared: int
    pairs: frozenset[str] = frozenset()
    """Complex parameters: each number is a pair of real ones, the last dimension of the shape."""

    @classmethod
    def of(cls, module: nn.Module, personal: Callable[[str], bool] = lambda name: False) -> Layout:
        """Layout of a module's trainable parameters; those selected by `personal` stay at their node."""
        trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        shapes = {name: tuple(_real(value).shape) for name, value in trained.items()}
        ordered = sorted(shapes, key=personal)
        shared = sum(math.prod(shapes[name]) for name in ordered if not personal(name))
        pairs = frozenset(name for name, value in trained.items() if value.is_complex())
        return cls({name: shapes[name] for name in ordered}, shared, pairs)

    @classmethod
    def of_experiment(cls, module: nn.Module, bn: str) -> Layout:
        """Layout of a module; with bn = local, all BatchNorm parameters stay local to the node (FedBN)."""
        norms = tuple(
            f"{name}." for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
        )
        return cls.of(module, personal=lambda name: bn == "local" and name.startswith(norms))

    @property
    def size(self) -> int:
        """The number of columns, d."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @staticmethod
    def buffers(module: nn.Module) -> dict[str, Tensor]:
        """The tensors of a copy of a module other than its trained parameters, such as running statistics.

        These are its persistent buffers, and further tensors that its forward pass changes (`STATE`); not constants
        that it recomputes, nor sparse ones.
        """
        kept, named = own_names(module), [*module.named_buffers(), *module.named_parameters()]
        return {name: value.detach() for name, value in named if name in kept and value.layout is torch.strided}

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Named parameters as views of a row [d], or stacked [k, …] of rows [k, d]."""
        pieces = torch.split(rows, [math.prod(shape) for shape in self.shapes.values()], dim=-1)
        lead = rows.shape[:-1]
        views = {
            name: piece.reshape((*lead, *shape))
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        return views | {name: torch.complex(views[name][..., 0], views[name][..., 1]) for name in self.pairs}

    def row(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Flatten and concatenate the parameters to a row."""
        if self.pairs or len(self.shapes) < 2:              # a single tensor would be returned itself
            return torch.cat([_real(parameters[name].detach()).flatten() for name in self.shapes])
        flat = [parameters[name].detach() for name in self.shapes]
        row: Tensor = _flatten_dense_tensors(flat)  # type: ignore[no-untyped-call]
        return row


@dataclass(frozen=True)
class Stacking:
    """Value of a module's attribute `stacking`; a module without it has the defaults."""

    autograd: Literal["inside", "outside", "alone"] = "inside"
    """Where autograd runs: inside vmap, outside vmap, or for one model after the other without vmap."""
    draws: bool = False
    """Whether a step draws random numbers outside of dropout modules."""
    large: bool = False
    """Whether one copy saturates a CPU, so that stacking gains nothing there."""


def stacking_of(module: nn.Module) -> Stacking:
    """The module's attribute `stacking`, or the default.

    >>> stacking_of(nn.Linear(2, 3)).autograd
    'inside'
    """
    own = getattr(module, "stacking", None)
    return own if isinstance(own, Stacking) else Stacking()


STATE = "_quasiglobal_state"
"""Attribute of a module: names of frozen parameters and temporary buffers that its forward pass changes."""


def own_names(module: nn.Module) -> set[str]:
    """Names of persistent buffers and of the state that `own_state` declared; a module may override `state_dict`."""
    return set(getattr(module, STATE, ())) | {
        f"{name}.{key}".removeprefix(".")
        for name, part in module.named_modules()
        for key in set(part._buffers.keys()) - part._non_persistent_buffers_set     # a list, of a scripted part
    }


def own_state(module: nn.Module, names: Sequence[str]) -> None:
    """Declare frozen parameters and temporary buffers that the forward pass changes: each copy has its own."""
    for name in names:
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        if key in part._buffers:
            part.register_buffer(key, part._buffers[key])   # a persistent one, in `state_dict`
    setattr(module, STATE, tuple(names))


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module weights and buffers by their names, also temporary ones that the forward pass changes.

    `load_state_dict` of a module may be its own, or have hooks. Raise RuntimeError if a name or a shape does not fit.
    """
    temporary = [name for name, _ in module.named_buffers() if name in state.keys() - own_names(module)]
    if temporary:
        own_state(module, temporary)
    every, own = tensors_of(module), own_names(module)
    given = {id(every[name]) for name in state if name in every}
    needed = [name for name, value in every.items() if value.requires_grad or (name in own and not value.is_sparse)]
    missing = [name for name in needed if id(every[name]) not in given]
    wrong = [name for name in state if name not in every or every[name].shape != state[name].shape]
    if missing or wrong:
        raise RuntimeError(f"the weights {', '.join((missing + wrong)[:5])} are missing, or do not fit")
    with torch.no_grad():
        for name, value in state.items():
            every[name].copy_(value)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))
    }


def _real(value: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
