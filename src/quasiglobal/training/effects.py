"""What a call of a user's model or loss changes besides its result: attributes, generators, frozen weights.

All nodes share what is no parameter and no buffer, and a traced, compiled or captured step would not change it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quasiglobal.common.modules import USUAL, RandomGenerator, leaves_of
from quasiglobal.common.randomness import restored_generators
from quasiglobal.errors import InputError
from quasiglobal.stacked.layout import own_names


class Attributes:
    """The attributes of a model and its parts, or of a loss, at one time."""

    def __init__(self, of: object) -> None:
        leaves = [
            (f"{name}.{key}".removeprefix("."), leaf)
            for name, own in _parts(of) for key, value in own.items() if key not in USUAL for leaf in leaves_of(value)
        ]
        self.numbers = [(key, leaf) for key, leaf in leaves if isinstance(leaf, int | float)]
        """Numbers, yes and no, and the names of their attributes, such as counters of calls."""
        self.generators = [(key, _state(leaf)) for key, leaf in leaves if isinstance(leaf, RandomGenerator)]
        """States of generators of random numbers."""
        self.tensors = [(key, leaf) for key, leaf in leaves if isinstance(leaf, Tensor)]

    def keeps(self, before: Attributes) -> bool:
        """Whether there are other tensors than before."""
        return {id(value) for _, value in self.tensors} != {id(value) for _, value in before.tensors}


def changed(before: Sequence[tuple[str, object]], after: Sequence[tuple[str, object]]) -> list[str]:
    """Names of the values that changed; empty if values were added, as of a table that is made at the first call."""
    if [key for key, _ in before] != [key for key, _ in after]:
        return []
    return [key for (key, old), (_, new) in zip(before, after, strict=True) if old is not new and old != new]


def reads(original: nn.Module, module: nn.Module, value: Callable[[], Tensor]) -> bool:
    """Whether a value is another one if the original has the weights, buffers and attributes of its copy.

    Not if it is another one at each call.
    """
    pairs = list(zip(original.modules(), module.modules(), strict=False))
    before = [dict(vars(part)) for part, _ in pairs]
    results = []
    for own in (None, pairs, None):
        try:
            for part, twin in own or ():
                vars(part).update(vars(twin))
            with restored_generators(), torch.no_grad():
                results.append(value().clone())
        except Exception:
            return own is not None                          # it fails with the weights of the copy alone
        finally:
            for (part, _), values in zip(pairs, before, strict=True):
                vars(part).clear()
                vars(part).update(values)
    return _alike(results[0], results[2]) and not _alike(results[0], results[1])


def constants(of: object) -> dict[str, Tensor]:
    """What all nodes share: a model's frozen parameters and temporary buffers, and all tensors of a loss."""
    if not isinstance(of, nn.Module):
        return {}
    parameters = list(_alive(of.named_parameters()))
    own = own_names(of) if any(value.requires_grad for _, value in parameters) else set()
    frozen = [(name, value) for name, value in parameters if not value.requires_grad]
    shared = [(name, value) for name, value in [*frozen, *_alive(of.named_buffers())] if name not in own]
    return {name: value.detach() for name, value in shared if value.layout is torch.strided}


class Constants:
    """Frozen weights and temporary buffers, which all nodes share."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sums = {name: (value.shape, value.dtype, _sum(value)) for name, value in constants(module).items()}

    def check(self, called: nn.Module, trained: Collection[str]) -> None:
        """Raise InputError if one has changed, or if the module that is called trains others than these parameters."""
        name, parameters = type(self._module).__name__, _alive(called.named_parameters())
        unfrozen = [key for key, value in parameters if value.requires_grad and key not in trained]
        if unfrozen:
            raise InputError(
                f"{name} unfreezes its {unfrozen[0]} in training, but what is trained is fixed at the start; train it "
                "from the start, or in a second run"
            )
        found = constants(self._module)
        for key, (shape, dtype, before) in self._sums.items():      # a table may grow, as for longer texts
            if key in found and (found[key].shape, found[key].dtype) == (shape, dtype) and _sum(found[key]) != before:
                raise InputError(
                    f"{name} changes its frozen {key} in training, but not in its first step, so that the nodes share "
                    "it; change it in the first step too, and each node has its own"
                )


def overlapping(module: nn.Module) -> tuple[str, str] | None:
    """Names of two trained parameters that share memory without being the same, if there are any."""
    spans: list[tuple[int, int, str, Tensor]] = []
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.requires_grad and value.numel() and value.layout is torch.strided:
            extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            spans.append((value.data_ptr(), value.data_ptr() + extent * value.itemsize, name, value))
    spans.sort(key=lambda span: span[:2])
    for at, (begin, end, name, one) in enumerate(spans):
        for first, last, other, twin in spans[at + 1:]:
            if first >= end:
                break
            size = (max(end, last) - begin) // one.itemsize
            places = [
                torch.arange(size).as_strided(of.shape, of.stride(), (start - begin) // of.itemsize).flatten()
                for of, start in ((one, begin), (twin, first))
            ]
            if torch.isin(*places).any():
                return name, other
    return None


def _alive(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Without those of a call inside vmap, which has ended: some stay in parts that a module uses in two places."""
    return (one for one in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(one[1]))


def _parts(of: object) -> list[tuple[str, dict[str, object]]]:
    """Names and attributes of a module's parts, of an object, or the variables that a function refers to."""
    if isinstance(of, nn.Module):
        return [(name, vars(part)) for name, part in of.named_modules()]
    if isinstance(of, MethodType):
        return [] if isinstance(of.__self__, nn.Module) else _parts(of.__self__)
    if isinstance(of, FunctionType):
        cells = dict(zip(of.__code__.co_freevars, of.__closure__ or (), strict=True))
        return [("", {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()})]     # not empty
    return [] if isinstance(of, type) or not hasattr(of, "__dict__") else [("", vars(of))]


def _state(generator: RandomGenerator) -> str:
    if isinstance(generator, random.SystemRandom):
        return ""                                           # it has none
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True)


def _sum(value: Tensor) -> int:
    """A number that changes with the bits of a tensor."""
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return int(real.contiguous().view(whole).sum(dtype=torch.int64))
