"""Name the operation and the module at which a model fails when all its copies are computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from quasiglobal.common.modules import copied
from quasiglobal.common.trees import Tree
from quasiglobal.stacked.one_model import Buffers, OneModel
from quasiglobal.stacked.stackable import stackable


def located(one: OneModel, x: Tensor, buffers: Buffers, inputs: Tree) -> str:
    """The operation and the module at which vmap fails; the model's name if the forward pass works.

    In training, inputs are [k, batch, …]; in evaluation [batches, batch, …].
    """
    name = type(one.module).__name__
    place = Whereabouts(name)
    devices = [x.device] if x.is_cuda else []
    try:
        module = copied(one.module)
        place.follow(module)
        own = replace(one, module=module, around=stackable)
        after = tree_map(torch.clone, buffers)
        shown = tree_map(lambda values: (values if module.training else values[0]).clone(), inputs)
        with torch.no_grad(), torch.random.fork_rng(devices=devices), place:
            vmap(own.output, in_dims=(0, 0, 0 if module.training else None), randomness="different")(x, after, shown)
    except Exception:                                       # also of modules that cannot be copied, or take no hooks
        return str(place) if place.operation else name
    return name


class Whereabouts(TorchFunctionMode):
    """Record the module that a trace is in, and the operation that it called last."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.modules, self.operation = [module], ""

    def __str__(self) -> str:
        return f"{self.operation} in {self.modules[-1]}"

    def follow(self, root: nn.Module) -> None:
        """Record when a submodule is entered and left."""
        for name, part in root.named_modules():
            if name:
                text = f"{type(root).__name__}.{name} ({type(part).__name__})"
                part.register_forward_pre_hook(lambda part, args, text=text: self.modules.append(text))
                part.register_forward_hook(lambda part, args, output: self._leave())

    def _leave(self) -> None:
        self.modules.pop()

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operation = getattr(function, "__name__", str(function))
        return function(*args, **(kwargs or {}))
