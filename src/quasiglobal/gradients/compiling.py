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
    """The function, compiled at its first call, without the compiler's hints on TF32, which is left alone on purpose,
    and on the softmax that it takes.
    """
    program = torch.compile(function, dynamic=False, backend=backend)

    def call(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"TensorFloat32|\s*Online softmax")
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
    sure than of a list of operations. Results that are arguments themselves are copied around the program: Inductor
    takes their clones for superfluous, and would read them after they are overwritten.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import

    moved: dict[int, int] = {}

    def in_place(*values: Tensor) -> None:
        for at, result in zip(outputs, function(*values), strict=True):
            source = next((k for k, value in enumerate(values) if value is result), None)
            if source is None:
                values[at].copy_(result)
            else:
                moved[at] = source

    program = compiled(make_fx(in_place)(*(value.clone() for value in arguments)), backend)

    def call(*values: Tensor) -> None:
        held = {at: values[source].clone() for at, source in moved.items() if at != source}
        program(*values)
        for at, value in held.items():
            values[at].copy_(value)

    return call
