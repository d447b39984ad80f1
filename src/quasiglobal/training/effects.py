"""What a call of a user's model or loss changes besides its result: attributes, generators, frozen weights.

All nodes share what is no parameter and no buffer, and a traced, compiled or captured step would not change it again.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from quasiglobal.common.modules import USUAL, leaves_of
from quasiglobal.common.randomness import restored_generators
from quasiglobal.errors import InputError
from quasiglobal.stacked.layout import own_names

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""Generators of random numbers that a model may have of its own."""


class Attributes:
    """The attributes of a model and its parts, or of a loss, at one time."""

    def __init__(self, of: Any) -> None:
        self._values = [
            {key: _copied(value) for key, value in own.items() if key not in USUAL} for _, own in _parts(of)
        ]
        leaves = [
            (f"{name}.{key}".removeprefix("."), leaf)
            for (name, _), values in zip(_parts(of), self._values, strict=True)
            for key, value in values.items()
            for leaf in leaves_of(value) if isinstance(leaf, (int, float, Tensor, *GENERATORS))
        ]
        self.numbers = [(key, leaf) for key, leaf in leaves if isinstance(leaf, int | float)]
        """Numbers, yes and no, and the names of their attributes, such as counters of calls."""
        self.generators = [(key, _state(leaf)) for key, leaf in leaves if isinstance(leaf, GENERATORS)]
        """States of generators of random numbers."""
        self.tensors = [(key, leaf) for key, leaf in leaves if isinstance(leaf, Tensor)]

    def restore_tensors(self, of: Any) -> None:
        """Give attributes of `of`, a copy, that have tensors now or had some here the values that they had here."""
        for (_, own), values in zip(_parts(of), self._values, strict=True):
            for key in own.keys() - USUAL:
                if any(isinstance(leaf, Tensor) for leaf in (*leaves_of(own[key]), *leaves_of(values.get(key)))):
                    own[key] = _refilled(own[key], values.get(key))


def changed(before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]) -> list[str]:
    """Names of values that are other ones; none if some have appeared, as of a table that is made at the first call."""
    if [key for key, _ in before] != [key for key, _ in after]:
        return []
    pairs = zip(before, after, strict=True)
    return [key for (key, old), (_, new) in pairs if old is not new and old != new]


def kept_tensor(of: Any, before: Attributes, copy_of: Callable[[], Any], call: Callable[[Any], Any]) -> str:
    """Name of an attribute with a tensor that the first call has changed, if the result of another call depends on it.

    `before` are the attributes before the first call. The calls are those of copies. Empty if they fail.
    """
    known = {id(value) for _, value in before.tensors}
    suspects = [key for key, value in Attributes(of).tensors if id(value) not in known]
    found = []
    with suppress(Exception):                               # the model may refuse these inputs
        for forgets in (False, True) if suspects else ():
            twin = copy_of()
            if forgets:
                before.restore_tensors(twin)
            with restored_generators(), torch.no_grad():
                found.append([leaf.clone() for leaf in tree_leaves(call(twin)) if isinstance(leaf, Tensor)])
    return suspects[0] if len(found) == 2 and not all(map(_alike, *found)) else ""


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


def constants(of: Any) -> dict[str, Tensor]:
    """What all nodes share: a model's frozen parameters and temporary buffers, and all tensors of a loss."""
    if not isinstance(of, nn.Module):
        return {}
    parameters = list(_alive(of.named_parameters()))
    own = own_names(of) if any(value.requires_grad for _, value in parameters) else set()
    frozen = [(name, value) for name, value in parameters if not value.requires_grad]
    shared = [(name, value) for name, value in [*frozen, *_alive(of.named_buffers())] if name not in own]
    return {name: value.detach() for name, value in shared if value.layout is torch.strided}


class Constants:
    """Frozen weights and temporary buffers, which all nodes share, and which parameters are trained."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sums = {name: (value.shape, value.dtype, _sum(value)) for name, value in constants(module).items()}
        self._trained = {name for name, value in _alive(module.named_parameters()) if value.requires_grad}

    def check(self) -> None:
        """Raise InputError if one has changed."""
        name, parameters = type(self._module).__name__, _alive(self._module.named_parameters())
        unfrozen = [key for key, value in parameters if value.requires_grad and key not in self._trained]
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


def _parts(of: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and attributes of a module's parts, of an object, or the variables that a function refers to."""
    if isinstance(of, nn.Module):
        return [(name, vars(part)) for name, part in of.named_modules()]
    if isinstance(of, MethodType):
        return [] if isinstance(of.__self__, nn.Module) else _parts(of.__self__)
    if isinstance(of, FunctionType):
        cells = dict(zip(of.__code__.co_freevars, of.__closure__ or (), strict=True))
        return [("", {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()})]     # not empty
    return [] if isinstance(of, type) or not hasattr(of, "__dict__") else [("", vars(of))]


def _copied(value: Any, depth: int = 3) -> Any:
    """A copy of a container and of those in it, with the same values."""
    if type(value) is dict and depth:
        return {key: _copied(one, depth - 1) for key, one in value.items()}
    if type(value) in (list, tuple) and depth:
        return type(value)(_copied(one, depth - 1) for one in value)
    return copy.copy(value) if type(value) is deque else value


def _refilled(value: Any, content: Any) -> Any:
    """The content; of a list, dict or deque in place, since other attributes may be the same object."""
    if type(value) is not type(content) or type(value) not in (list, dict, deque):
        return content
    value.clear()
    value.update(content) if isinstance(value, dict) else value.extend(content)
    return value


def _state(generator: Any) -> str:
    if isinstance(generator, random.SystemRandom):
        return ""                                           # it has none
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True)


def _sum(value: Tensor) -> int:
    """A number that changes with the bits of a tensor."""
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return int(real.contiguous().view(whole).sum(dtype=torch.int64))
