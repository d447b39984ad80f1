"""The open connections of a site: one per neighbour, and earlier ones until they are closed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from quasiglobal.peers.edge import Edge
from quasiglobal.peers.greeting import Greeting
from quasiglobal.peers.site import Identity
from quasiglobal.peers.tls import TLSChannel


@dataclass(eq=False)
class Link:
    """An open connection to a neighbour, and what was known when it was opened."""

    edge: Edge
    channel: TLSChannel
    identity: Identity
    greeting: Greeting
    dialled: bool
    begun: datetime
    ends: datetime
    """When the first of the two certificates ends."""
    serial: int
    """Serial number of the federation file that the neighbour is known to have."""

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as known here."""
        return self.channel.alive

    @property
    def has_ended(self) -> bool:
        """Whether a certificate has ended."""
        return datetime.now(UTC) > self.ends

    @property
    def is_due(self) -> bool:
        """Whether a certificate ends soon: after three quarters of the time that was left when it was opened."""
        return datetime.now(UTC) > self.ends - (self.ends - self.begun) / 4


class Connections:
    """The newest connection to each neighbour; many threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, Link] = {}
        self._former: list[Link] = []

    def take(self, link: Link) -> None:
        """Make this the connection to its neighbour; an earlier one is cut, unless it is of the same edge."""
        there = link.identity.node
        with self._lock:
            before, self._newest[there] = self._newest.get(there), link
            self._former += [before] if before is not None else []
        if before is not None and before.edge is not link.edge:
            before.edge.cut("it connected again")

    def to(self, there: int) -> Link | None:
        """The connection to a neighbour, if it is open."""
        link = self._newest.get(there)
        return link if link is not None and link.alive else None

    def open(self) -> list[Link]:
        """All that are open."""
        return [link for link in list(self._newest.values()) if link.alive]

    def take_ended(self, seconds: float = 0.0) -> list[Link]:
        """Forget connections that are closed, and return them; wait for each up to this long."""
        with self._lock:
            links = [*self._former, *self._newest.values()]
        ended = [link for link in links if link.channel.ended.wait(seconds)]
        with self._lock:
            self._former = [link for link in self._former if link not in ended]
            self._newest = {there: link for there, link in self._newest.items() if link not in ended}
        return ended
