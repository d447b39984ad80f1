"""Membership: find, admit, lose and reconnect neighbouring processes."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from torch import Tensor

from quasiglobal.engines.distributed.buffers import Buffers
from quasiglobal.engines.distributed.channel import Lost, Refused
from quasiglobal.engines.distributed.edge import Account, Edge, open_edge
from quasiglobal.engines.distributed.gloo import Meeting
from quasiglobal.errors import InputError

log = logging.getLogger("quasiglobal")

ATTEMPT = 10.0
"""Timeout in seconds of one attempt to open an edge."""

LONG = 3600.0
"""Timeout in seconds for an admitted neighbour to load its data and begin."""


class Membership:
    """The edges from process `rank` to its neighbours, each opened by a thread that retries until it succeeds.

    An edge opens between processes that know the same secret (QG_SECRET) and have the same `agreement`: the experiment
    and the topology. `model_here` returns the model that a late-joining neighbour may request; None before the
    first step.
    """

    def __init__(
        self,
        store: Meeting,
        rank: int,
        neighbours: Sequence[int],
        *,
        agreement: bytes,
        timeout: float,
        host: str,
        model_here: Callable[[], Tensor | None],
    ) -> None:
        self.rank, self.neighbours, self.timeout, self.host = rank, neighbours, timeout, host
        self.edges: dict[int, Edge] = {}
        self.buffers = Buffers()
        self.lost: dict[int, str] = {}
        self.models: list[Tensor] = []
        self.step = 0
        """Current step of this process."""
        self.step_of_others = 0
        """Highest step of any neighbour, as of its admission."""
        self._store, self._agreement, self._model_here = store, agreement, model_here
        self._secret = os.environ.get("QG_SECRET", "").encode()
        self._accounts = {there: Account() for there in neighbours}
        self._threads: list[threading.Thread] = []
        self._opening: dict[int, Edge] = {}
        self._admitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[Edge] = queue.SimpleQueue()
        self._ready, self._closing = threading.Event(), threading.Event()
        self._waiting_since, self._largest = math.inf, 0

    # -------------------------------------------------------------------------------------------- find

    def find(self, patience: float) -> None:
        """Connect to all neighbours within `patience` seconds; if some already train, the others may be missing."""
        for there in self.neighbours:
            self._seek(there)
        deadline, missing = time.monotonic() + patience, set(self.neighbours)
        while missing:
            try:
                missing.discard(self._admitted.get(timeout=max(deadline - time.monotonic(), 0.001)))
            except queue.Empty:
                if self.step_of_others:
                    break
                self.close()
                raise InputError(f"processes {sorted(missing)} did not connect within {patience:g} s") from None
            if self.step_of_others:
                deadline = min(deadline, time.monotonic() + self.timeout)

    @property
    def begun(self) -> bool:
        """Whether the first step has begun here."""
        return self._ready.is_set()

    def begin(self, largest: int) -> None:
        """Announce that the first step begins here, and wait until the neighbours are ready too.

        `largest` is the maximum message size in bytes.
        """
        self._largest = largest
        self._ready.set()
        self._in_background(self._send_heartbeats)
        deadline = time.monotonic() + self.timeout
        while len(self.edges) < len(self.neighbours) and time.monotonic() < deadline:
            try:
                edge = self._opened.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                break
            self.edges[edge.there] = edge
        self.lost = dict.fromkeys(set(self.neighbours) - set(self.edges), "it did not begin in time")

    # -------------------------------------------------------------------------------------------- admit

    def _seek(self, there: int) -> None:
        """Open the edge in a background thread."""
        self._in_background(self._open, there)

    def _in_background(self, work: Callable[..., None], *arguments: int) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _open(self, there: int) -> None:
        while not self._closing.is_set():
            try:
                edge = open_edge(self._store, self.rank, there, self.host, min(self.timeout, ATTEMPT))
                self._opening[there] = edge
                self._admit(edge)
                self._ready.wait()                          # neighbours never wait for a process that is loading
                edge.greet(time.monotonic() + LONG)
                edge.listen(self._largest, self.buffers)
            except Refused as error:
                log.warning("process %d refused process %d: %s", self.rank, there, error)
            except Lost:
                pass                                        # retry: it may connect later
            except RuntimeError:                            # store lost: no process can join, training continues
                self._find_store()
            else:
                del self._opening[there]
                self._opened.put(edge)
                return
            self._closing.wait(0.2)

    def _admit(self, edge: Edge) -> None:
        """Authenticate the other side, exchange steps, and send a model to a side that joins late."""
        edge.account = self._accounts[edge.there]
        edge.admit(self._agreement, self._secret, self.step, time.monotonic() + ATTEMPT)
        model = edge.share_model(self._model_here(), not self.begun, time.monotonic() + self.timeout)
        if model is not None:
            self.models.append(model)
        self.step_of_others = max(self.step_of_others, edge.step_there)
        self._admitted.put(edge.there)

    def _find_store(self) -> None:
        """Retry until the store is reachable again."""
        while not self._closing.wait(1.0):
            with suppress(RuntimeError, OSError):
                self._store.reconnect()
                return

    # -------------------------------------------------------------------------------------------- lose, take back

    @contextmanager
    def watched(self, there: int) -> Iterator[None]:
        """Catch `Lost`, drop the edge and continue the step without it."""
        try:
            yield
        except Lost as error:
            self.lose(there, str(error))

    def lose(self, there: int, why: str) -> None:
        """Close an edge and reopen it in the background."""
        edge = self.edges.pop(there, None)
        if edge is not None:
            edge.close()
            self.lost[there] = why
            log.warning("process %d continues without process %d from step %d: %s", self.rank, there, self.step, why)
            self._seek(there)

    def take_back(self) -> None:
        """Use the edges that were reopened."""
        while not self._opened.empty():
            edge = self._opened.get()
            self.edges[edge.there] = edge
            self.lost.pop(edge.there, None)
            log.warning("process %d reconnected to process %d at step %d", self.rank, edge.there, self.step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this process as waiting for messages, so that it sends heartbeats to its neighbours."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = math.inf

    def _send_heartbeats(self) -> None:
        """A waiting process sends heartbeats, so only dead peers time out."""
        while not self._closing.wait(self.timeout / 4):
            if time.monotonic() - self._waiting_since > self.timeout / 8:
                for edge in list(self.edges.values()):
                    with suppress(Lost):
                        edge.send_heartbeat(self.step)

    # -------------------------------------------------------------------------------------------- leave

    def accounts(self) -> dict[str, dict[str, float]]:
        """Return the traffic statistics of each edge, by the process at its other end."""
        return {str(there): asdict(account) for there, account in sorted(self._accounts.items())}

    def close(self) -> None:
        """Close all edges and end all threads."""
        self._closing.set()
        self._ready.set()
        for edge in list(self._opening.values()):
            edge.close()
        for thread in self._threads:
            thread.join(timeout=2 * ATTEMPT)
        for edge in self.edges.values():
            with suppress(Lost):
                edge.finish(self.timeout)
            edge.close()
        self.edges.clear()
