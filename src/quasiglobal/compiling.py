"""torch.compile, as it is used here: for one shape of everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Untraceable(Exception):
    """What a function that cannot be traced raises."""


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """The function, compiled at its first call. TF32, which the compiler recommends, is left alone on purpose."""
    program = torch.compile(function, dynamic=False, backend=backend)

    def call(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32")
            return program(*arguments)

    return call


def compiled_in_place(
    function: Callable[..., Sequence[Tensor]],
    outputs: Sequence[int],
    arguments: Sequence[Tensor],
    backend: str = "inductor",
) -> Callable[..., None]:
    """A pure function of tensors as a program that writes its results over the arguments at `outputs`.

    It is traced first, since what a compiler makes of Python around tensors, such as switches of precision, is less
    sure than of a list of operations.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import

    def in_place(*values: Tensor) -> None:
        results = [result.clone() for result in function(*values)]      # one may be an argument, soon overwritten
        for at, result in zip(outputs, results, strict=True):
            values[at].copy_(result)

    return compiled(make_fx(in_place)(*(value.clone() for value in arguments)), backend)
