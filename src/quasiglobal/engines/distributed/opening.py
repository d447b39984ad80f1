"""How a process opens the edges to its neighbours: through a store (gloo), or by TLS between sites (`sites.py`)."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quasiglobal.engines.distributed.channel import Lost
from quasiglobal.engines.distributed.edge import Edge, open_edge
from quasiglobal.engines.distributed.gloo import Group, Meeting, open_group
from quasiglobal.errors import InputError

NO_MEAN_OVER_SITES = (
    "an exact mean over all nodes needs all of them at once, and sites connect to their neighbours alone; use an "
    "algorithm without exact means, such as qg-dsgdm-n, or --rendezvous within one cluster"
)

ADMISSION = 10.0
"""Timeout in seconds for both sides to authenticate each other."""


@dataclass(frozen=True)
class Terms:
    """What a process offers its neighbours, and what they have to agree on."""

    rank: int
    neighbours: Sequence[int]
    experiment: str
    """Hash of the experiment."""
    topology: str
    """Fingerprint of the weights."""
    timeout: float
    """Seconds to wait for a neighbour in a step."""
    step: Callable[[], int]
    """Current step of this process."""


class Opener(ABC):
    """Opens edges over one kind of transport; several threads call `open`, each for another neighbour."""

    @abstractmethod
    def begin(self, terms: Terms) -> None:
        """Prepare to open edges on these terms."""

    @abstractmethod
    def open(self, there: int, seconds: float) -> Edge:
        """Open an edge to a neighbour that agrees on the terms; raise `Lost` if it does not within `seconds`."""

    def group(self, rank: int, size: int, seconds: float) -> Group:
        """A group of all processes, for exact means and broadcasts."""
        raise InputError(NO_MEAN_OVER_SITES)

    def expects(self, there: int) -> bool:
        """Whether this neighbour takes part at all."""
        return True

    def stop(self) -> None:             # noqa: B027  (a store needs neither)
        """Open no further edges; calls of `open` end soon."""

    def close(self) -> None:            # noqa: B027
        """Release everything, after the edges are closed."""


class GlooOpener(Opener):
    """Opens gloo groups of two through a store; whoever knows the same secret (QG_SECRET) is admitted."""

    def __init__(self, store: Meeting, host: str) -> None:
        self.store, self.host = store, host
        self._secret = os.environ.get("QG_SECRET", "").encode()

    def begin(self, terms: Terms) -> None:
        """Nothing is opened before it is needed."""
        self._terms = terms

    def open(self, there: int, seconds: float) -> Edge:
        """Open an edge, and authenticate both sides."""
        terms = self._terms
        try:
            edge = open_edge(self.store, terms.rank, there, self.host, seconds)
        except RuntimeError:                                # store lost: no process can join, training continues
            with suppress(RuntimeError, OSError):
                self.store.reconnect()
            raise Lost("the rendezvous is not reachable") from None
        agreement = f"{terms.experiment} {terms.topology}".encode()
        try:
            edge.admit(agreement, self._secret, terms.step(), time.monotonic() + ADMISSION)
        except Lost:
            edge.close()
            raise
        return edge

    def group(self, rank: int, size: int, seconds: float) -> Group:
        """Open a group of all processes through the store."""
        return open_group(Meeting(self.store, "world/0"), rank, size, self.host, seconds)
