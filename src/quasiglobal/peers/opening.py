"""How a process opens the edges to its neighbours: through a store (gloo), or by TLS between sites (`sites.py`)."""

from __future__ import annotations

import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from quasiglobal.errors import InputError
from quasiglobal.peers.channel import Lost
from quasiglobal.peers.edge import Edge
from quasiglobal.peers.gloo import GlooChannel, Group, Meeting, Store, open_group, until

NO_MEAN_OVER_SITES = (
    "an exact mean over all nodes needs all of them at once, and sites connect to their neighbours alone; use an "
    "algorithm without exact means, such as qg-dsgdm-n, or --rendezvous within one cluster"
)

ADMISSION = 10.0
"""Timeout in seconds for both sides to authenticate each other."""

MOST_GENERATION = 2**62
"""Generations are random numbers up to this one."""

REPEAT = 0.5
"""Seconds after which an offer in the store is written again: a stranger may have overwritten it."""


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

    shares_memory: ClassVar[bool] = False
    """Whether edges to processes on this machine read messages from their memory."""

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

    def called(self, there: int) -> str:
        """A neighbour in words."""
        return str(there)

    def stop(self) -> None:             # noqa: B027  (a store needs neither)
        """Open no further edges; calls of `open` end soon."""

    def close(self) -> None:            # noqa: B027
        """Release everything, after the edges are closed."""


class GlooOpener(Opener):
    """Opens gloo groups of two through a store; whoever knows the same secret (QG_SECRET) is admitted."""

    shares_memory = True

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


def open_edge(store: Store, here: int, there: int, host: str, seconds: float) -> Edge:
    """Open the link to a process that opens it at the same time; raise `Lost` if it does not within `seconds`.

    A generation is the random number of an attempt to open this link. The lower rank offers a generation and the higher
    rank accepts it; store keys of earlier generations are never read.
    An offer is taken once, by the side that accepts it or the side that withdraws it: a stale offer is never accepted.
    The store is open to strangers: what is not an offer is ignored, and an offer that was overwritten is repeated.
    """
    low, high = sorted((here, there))
    place = Meeting(store, f"edge/{low}-{high}")
    deadline = time.monotonic() + seconds

    def takes(offer: int) -> bool:
        return place.add(f"taken/{offer}", 1) == 1

    try:
        if here == low:
            generation, offered = 1 + secrets.randbelow(MOST_GENERATION), -math.inf

            def is_taken() -> bool:
                nonlocal offered
                if time.monotonic() - offered > REPEAT:
                    place.set("offer", str(generation))
                    offered = time.monotonic()
                return place.check([f"taken/{generation}"])

            try:
                until(is_taken, seconds)
            except TimeoutError:
                if takes(generation):
                    raise
        else:
            def accepted() -> int:
                text = place.get("offer") if place.check(["offer"]) else b""
                offer = int(text) if text.isdigit() and len(text) <= len(str(MOST_GENERATION)) else 0
                return offer if 0 < offer <= MOST_GENERATION and takes(offer) else 0

            generation = until(accepted, seconds)
    except TimeoutError:
        raise Lost("it did not connect in time") from None
    left = max(deadline - time.monotonic(), 1.0)
    channel = GlooChannel(Meeting(place, str(generation)), int(here == high), host, left)
    return Edge(here, there, channel, generation)


Way = Store | Opener
"""How a process finds the others: a store, at which they meet, or an opener."""


def opener_of(way: Way, host: str) -> Opener:
    """The opener, or one through the store; neighbours reach this process at `host`."""
    return way if isinstance(way, Opener) else GlooOpener(Meeting(way), host)
