"""Algorithms as the local step of a wrapper that communicates in its own way."""

from __future__ import annotations

from torch import Tensor

from quasiglobal.algorithms.adam import DAdam
from quasiglobal.algorithms.base import Algorithm, NodeView, OneOrMore
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.errors import InputError


class Local(NodeView):
    """Node view for a local step: `mix` changes nothing."""

    def mix(self, *tensors: Tensor) -> OneOrMore:
        return tensors[0] if len(tensors) == 1 else tensors


def check_local(base: Algorithm, name: str) -> None:
    """Raise InputError unless an algorithm is a local step, followed by one average of the models."""
    plain = isinstance(base, DSGD | DAdam) or (isinstance(base, DSGDm) and base.sync == "none")
    if not plain:
        raise InputError(
            f"the base of {name} makes the local step: dsgd, dsgdm, dsgdm-n (without sync), dadam or dadamw, got {base}"
        )


def refuses_optimizer(base: Algorithm) -> str | None:
    """`Algorithm.refuses_base` of a wrapper that averages after the base's step: only a plain step can be replaced."""
    return None if base in (DSGD(), DSGDm(beta=0.0)) else "makes the local step by a base of its own"
