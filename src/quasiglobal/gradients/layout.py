"""A model as one flat row: its named parameters concatenated, shared ones first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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

    @classmethod
    def of(cls, module: nn.Module, personal: Callable[[str], bool] = lambda name: False) -> Layout:
        """Layout of a module's trainable parameters; those selected by `personal` stay at their node."""
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
        ordered = sorted(shapes, key=personal)
        shared = sum(math.prod(shapes[name]) for name in ordered if not personal(name))
        return cls({name: shapes[name] for name in ordered}, shared)

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
        """A module's persistent buffers, such as running statistics; not constants that it recomputes."""
        kept = module.state_dict().keys()
        return {name: value for name, value in module.named_buffers() if name in kept}

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Named parameters as views of a row [d], or stacked [k, …] of rows [k, d]."""
        pieces = torch.split(rows, [math.prod(shape) for shape in self.shapes.values()], dim=-1)
        lead = rows.shape[:-1]
        return {
            name: piece.reshape((*lead, *shape))
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def row(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Flatten and concatenate the parameters to a row."""
        return torch.cat([parameters[name].detach().flatten() for name in self.shapes])
