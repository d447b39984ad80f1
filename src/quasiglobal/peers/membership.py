"""Membership: find, admit, lose and reconnect neighbouring processes, and how long a step waits for each.

An `Opener` opens the edges: through a store (`gloo.py`), or between sites (`sites.py`).
"""

from __future__ import annotations

import logging
import math
import queue
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from quasiglobal.errors import InputError
from quasiglobal.peers.edge import (
    HEARTBEAT_FACTOR,
    LOOK,
    Account,
    Edge,
    Expected,
    Late,
    Lost,
    Moment,
    Refused,
    Rejected,
    check_step,
)
from quasiglobal.peers.memory import MessageMemory
from quasiglobal.peers.reports import Reports

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("quasiglobal")

NO_MEAN_OVER_SITES = (
    "an exact mean over all nodes needs all of them at once, and sites connect only to their neighbours; use an "
    "algorithm without exact means, such as qg-dsgdm-n, or --rendezvous within one cluster"
)

ADMISSION = 10.0
"""Timeout in seconds for both sides to authenticate each other."""

ATTEMPT = 10.0
"""Timeout in seconds of one attempt to open an edge."""

LONG = 3600.0
"""Timeout in seconds for an admitted neighbour to load its data and begin."""

WINDOW = 4
"""Exchanges over which the pace of a neighbour is measured."""

FEW = 5
"""Steps that a process may be behind and still make up for one by one."""

LEAVE = 5.0
"""Seconds that a process waits for others after it was told to stop."""

FORGIVEN = 16
"""Number of messages after which a vain wait for a neighbour does not count any more."""

MOST_VAIN = 8
"""Maximum number of vain waits that count."""


@dataclass(frozen=True)
class Terms:
    """The facts of a process that its opener needs, and that neighbours have to agree on."""

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


def _log_rest(subject: str, sums: Mapping[str, int]) -> None:
    level = logging.WARNING if sums["warnings"] else logging.INFO
    log.log(level, "… and %d more about %s in the last minute", sums["times"], subject)


class Opener(ABC):
    """Opens edges over one kind of transport; several threads call `open`, each for a different neighbour."""

    shares_memory: ClassVar[bool] = False
    """Whether edges to processes on this machine read messages from their memory."""

    def __init__(self) -> None:
        self.reports = Reports(_log_rest)

    def report(self, subject: str, sentence: str, level: int = logging.WARNING) -> None:
        """Log a sentence about somebody, unless there are too many."""
        if self.reports.pass_on(subject, sentence, {"warnings": int(level >= logging.WARNING)}):
            log.log(level, "%s", sentence)

    @abstractmethod
    def begin(self, terms: Terms) -> None:
        """Prepare to open edges on these terms."""

    @abstractmethod
    def open(self, there: int, seconds: float) -> Edge:
        """Open an edge to a neighbour that agrees on the terms; raise `Lost` if it does not within `seconds`."""

    def group(self, rank: int, size: int, seconds: float) -> ProcessGroup:
        """A group of all processes, for exact means and broadcasts."""
        raise InputError(NO_MEAN_OVER_SITES)

    def expects(self, there: int) -> bool:
        """Whether this neighbour takes part."""
        return True

    def called(self, there: int) -> str:
        """The name of a process in the log and in errors."""
        return f"process {there}"

    def stop(self) -> None:             # noqa: B027  (a store does not need it)
        """Open no further edges; calls of `open` end soon."""

    def close(self) -> None:
        """Release everything, after the edges are closed."""
        self.reports.write_rest(0.0)


class Handover(ABC):
    """The rows that two processes hand each other when an edge between them opens, if one of them is late."""

    @abstractmethod
    def offered(self, ended: bool) -> Tensor | None:
        """Rows that a neighbour may take from here, during the run or after its end; None if there are none."""

    @abstractmethod
    def wanted(self, ended: bool) -> Expected | None:
        """Rows to take from a neighbour that is in the run or has ended; None if none are needed."""

    @abstractmethod
    def take(self, there: int, rows: Tensor, ended: bool) -> None:
        """Keep the rows that came from a neighbour."""

    @abstractmethod
    def given(self, there: int, ended: bool) -> None:
        """Note that a neighbour took the rows from here."""


class Membership:
    """The edges from process `rank` to its neighbours, each opened by a thread that retries until it succeeds.

    The opener admits neighbours with the same experiment and topology. `handover` has the rows that late neighbours
    request. `drops`: edges keep only the newest messages.
    """

    def __init__(
        self,
        opener: Opener,
        rank: int,
        neighbours: Sequence[int],
        *,
        experiment: str,
        topology: str,
        timeout: float,
        handover: Handover,
        drops: bool = False,
    ) -> None:
        self.rank, self.neighbours, self.timeout = rank, neighbours, timeout
        self.edges: dict[int, Edge] = {}
        self.buffers = MessageMemory(shared=opener.shares_memory)
        self.lost: dict[int, str] = {}
        self.noted: Sequence[int] = ()
        """Signals that tell this process to stop (`patient_interrupts`)."""
        self.stops_alone = True
        """Whether it stops by itself: `LEAVE` is then for all waits after the signal, otherwise for each exchange."""
        self.step = 0
        """Current step of this process."""
        self.last_step = math.inf
        """Last step of the run. A process that has ended is at the step after it."""
        self._steps_of_others: dict[int, int] = {}
        self._opener, self.handover, self._drops = opener, handover, drops
        self.called, self.me = opener.called, opener.called(rank)
        self._terms = Terms(rank, neighbours, experiment, topology, timeout, lambda: self.step)
        self._accounts = {there: Account() for there in neighbours}
        self._threads: list[threading.Thread] = []
        self._opening: dict[int, Edge] = {}
        self._admitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[Edge] = queue.SimpleQueue()
        self._ready, self._closing = threading.Event(), threading.Event()
        self._waiting_since, self._largest = math.inf, 0
        self._ended: set[int] = set()
        self._bad_rows: set[int] = set()
        self._refused: set[int] = set()
        self._vain: dict[int, float] = {}
        """For each neighbour, the number of vain waits for it, less the messages that came since / `FORGIVEN`."""
        self._unawaited: dict[int, float] = {}
        """For each neighbour, the time until which nobody waits for it here."""
        self._time_to_leave, self._behind_since = LEAVE, math.inf
        self._why = dict.fromkeys(neighbours, "it did not connect in time")

    # -------------------------------------------------------------------------------------------- find

    def find(self, patience: float) -> None:
        """Connect to all neighbours within `patience` seconds; if some already train, the others may be missing."""
        self._opener.begin(self._terms)
        for there in self.neighbours:
            self._in_background(self._open, there)
        deadline = time.monotonic() + patience
        missing = {there for there in self.neighbours if self._opener.expects(there)}
        while missing:
            try:
                missing.discard(self._admitted.get(timeout=max(deadline - time.monotonic(), 0.001)))
            except queue.Empty:
                if any(self._steps_of_others.values()):
                    break
                why = "; to ".join(f"{self.called(there)}: {self._why[there]}" for there in sorted(missing))
                remedy = "; start them, again if they have finished, or wait longer for them (`qg node --patience`)"
                remedy = "" if missing <= self._refused else remedy
                self.close()
                raise InputError(
                    f"no connection within {patience:g} s to {why}{remedy}"
                ) from None
            if any(self._steps_of_others.values()):
                deadline = min(deadline, time.monotonic() + self.timeout)

    @property
    def step_of_others(self) -> int:
        """Median step of the neighbours as of their admission, of two the lower: a single claim does not move it."""
        return statistics.median_low(self._steps_of_others.values()) if self._steps_of_others else 0

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
        now = time.monotonic()
        deadline = now + self.timeout
        with self.waiting():
            while len(self.edges) + len(self._ended) < len(self.neighbours) and now < deadline:
                with suppress(queue.Empty):
                    edge = self._opened.get(timeout=min(deadline - now, LOOK))
                    self.edges[edge.there] = edge
                began, now = now, time.monotonic()
                self.on_wait(now - began)
        for there in set(self.neighbours) - set(self.edges):
            self.lost[there] = "it has ended" if there in self._ended else "it did not begin in time"

    # -------------------------------------------------------------------------------------------- admit

    def _in_background(self, work: Callable[..., None], *arguments: int) -> None:
        """Run the work in a thread; start it again after an unexpected error."""
        def run() -> None:
            while not self._closing.is_set():
                try:
                    work(*arguments)
                    return
                except Exception as error:
                    self.say(self.rank, f"{self.me}: {type(error).__name__}: {error}; trying again")
                    self._closing.wait(1.0)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _open(self, there: int) -> None:
        """Open an edge; retry until it succeeds, or the edge is not needed any more."""
        while not self._closing.is_set():
            try:
                edge = self._opener.open(there, min(self.timeout, ATTEMPT))
                self._opening[there] = edge
                edge.on_wait = self.on_wait
                self._welcome(edge)
                if self._has_ended(edge):                   # it neither sends nor needs anything
                    self._ended.add(there)
                    edge.close()
                    return
                if self.step > self.last_step:              # this process has ended, and has handed over its rows
                    raise Lost("the run has ended here")
                edge.listen(0, self.buffers, self._drops, greets=True)
                while not self._ready.wait(LOOK):           # neighbours never wait for a process that is loading
                    edge.check()                            # it may be killed meanwhile, and come back
                edge.greet(self._largest, LONG)
            except (Refused, Rejected) as error:
                by = error.by if isinstance(error, Refused) and error.by is not None else there
                self.say(by, f"{self.me}: {self.called(there)} is not connected: {error}")
                self._why[there] = str(error)
                self._refused.add(there)
            except Lost as error:
                self._why[there] = str(error)               # retry: it may connect later
                self._refused.discard(there)
            else:
                del self._opening[there]
                self._opened.put(edge)
                return
            if there in self._opening:
                self._opening.pop(there).close()
            self._closing.wait(0.2)

    def _welcome(self, edge: Edge) -> None:
        """Hand rows to a side that is late; take some if this side is, since it joins late or is far behind."""
        edge.account = self._accounts[edge.there]
        ended, ended_there = self.step > self.last_step, self._has_ended(edge)
        late = not self.begun or self.step + FEW < edge.step_there <= self.last_step
        wanted = self.handover.wanted(ended_there) if late and not (ended or edge.there in self._bad_rows) else None
        try:
            rows = edge.hand_over(self.handover.offered(ended), wanted, self.timeout)
        except Rejected:
            self._bad_rows.add(edge.there)                  # open the edge again, without asking for rows
            raise
        if rows is not None:
            self.handover.take(edge.there, rows, ended_there)
        if edge.gave:
            self.handover.given(edge.there, ended)
            if ended:
                self.say(edge.there, f"{self.me} gave its model to {self.called(edge.there)}, which missed the end")
        try:
            check_step(edge.step_there, self.last_step + 1)
            self._steps_of_others[edge.there] = edge.step_there
        except Rejected as error:
            self.say(edge.there, f"{self.me}: {self.called(edge.there)} is not believed: {error}")
        self._admitted.put(edge.there)

    def _has_ended(self, edge: Edge) -> bool:
        return edge.step_there == self.last_step + 1

    def say(self, there: int, sentence: str) -> None:
        """Log a sentence about a process, unless there are too many: a neighbour that lies does not fill the log."""
        self._opener.report(self.called(there), sentence)

    def ignore(self, there: int, why: str) -> None:
        """Say that a message does not count."""
        self.say(there, f"{self.me}: {self.called(there)} is ignored: {why}")

    # -------------------------------------------------------------------------------------------- lose, take back

    @contextmanager
    def watched(self, there: int) -> Iterator[None]:
        """Catch `Lost`, drop the edge and continue the step without it."""
        began = time.monotonic()
        try:
            yield
        except Lost as error:
            self.lose(there, str(error))
            if isinstance(error, Late):
                self._note_vain(there, time.monotonic() - began)

    def _note_vain(self, there: int, seconds: float) -> None:
        """Count a vain wait for a neighbour; after several, do not wait for it for longer and longer.

        A neighbour that connects again and again and keeps silent would otherwise stop this process at every step.
        """
        if there in self.unawaited:
            return
        self._vain[there] = vain = min(self._vain.get(there, 0.0) + 1.0, MOST_VAIN)
        if vain > 1:
            rest = seconds * 2 ** (vain - 2)
            self._unawaited[there] = time.monotonic() + rest
            self.say(there, f"{self.me} does not wait for {self.called(there)} in the next {rest:.3g} s")

    def heard(self, there: int) -> None:
        """Note that a message came in time."""
        if there in self._vain:
            self._vain[there] = max(self._vain[there] - 1 / FORGIVEN, 0.0)

    @property
    def unawaited(self) -> list[int]:
        """The neighbours that this process does not wait for, since it waited in vain several times."""
        now = time.monotonic()
        return [there for there, until in self._unawaited.items() if now < until]

    def lose(self, there: int, why: str) -> None:
        """Close an edge and reopen it in the background."""
        edge = self.edges.pop(there, None)
        if edge is not None:
            edge.close()
            if self._has_ended(edge):
                self._ended.add(there)
                why = "it has ended"
            self.lost[there] = why
            self.say(there, f"{self.me} continues without {self.called(there)} from step {self.step}: {why}")
            if there not in self._ended:
                self._in_background(self._open, there)

    def take_back(self) -> None:
        """Use the edges that were reopened."""
        while not self._opened.empty():
            edge = self._opened.get()
            self.edges[edge.there] = edge
            self.lost.pop(edge.there, None)
            self.say(edge.there, f"{self.me} reconnected to {self.called(edge.there)} at step {self.step}")

    def step_to_join(self, step: int, few: int) -> int:
        """The step at which to join the neighbours, if they are more than a `few` steps beyond this one; else 0."""
        if self.begun:
            self.take_back()
        return self.median([max(edge.step_there, edge.newest[0]) for edge in self.edges.values()], step + few)

    def median(self, claimed: Iterable[int], step: int) -> int:
        """The median of the steps that connected neighbours claim, of two the lower, if it is beyond `step`; else 0.

        A single liar does not move it. Neighbours without an edge count as not beyond for half a timeout: after an
        absence they reconnect one by one.
        """
        known = [claim for claim in claimed if claim <= self.last_step]
        if not any(claim > step for claim in known):
            self._behind_since = math.inf
            return 0
        now = time.monotonic()
        self._behind_since = min(self._behind_since, now)
        absent = len(self.missing) if now < self._behind_since + self.timeout / 2 else 0
        theirs = statistics.median_low([*known, *[0] * absent])
        return theirs if theirs > step else 0

    def on_wait(self, seconds: float) -> None:
        """Note that the training thread has waited; raise KeyboardInterrupt if it is to stop, and waits too long."""
        if self.noted:
            self._time_to_leave -= seconds
            if self._time_to_leave <= 0:
                raise KeyboardInterrupt

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this process as waiting for messages, so that it sends heartbeats to its neighbours."""
        self._waiting_since = time.monotonic()
        if not self.stops_alone:
            self._time_to_leave = LEAVE
        try:
            yield
        finally:
            self._waiting_since = math.inf

    def _send_heartbeats(self) -> None:
        """A waiting process sends heartbeats, so only dead peers time out."""
        while not self._closing.wait(self.timeout / 4):
            self._opener.reports.write_rest()
            if time.monotonic() - self._waiting_since > self.timeout / 8:
                for edge in list(self.edges.values()):
                    with suppress(Lost):
                        edge.send_heartbeat(self.step)

    # -------------------------------------------------------------------------------------------- leave

    @property
    def over(self) -> bool:
        """Whether at least one neighbour was found, and all that were found have ended."""
        return bool(self._steps_of_others) and min(self._steps_of_others.values()) > self.last_step

    @property
    def missing(self) -> list[int]:
        """Participating neighbours that have not ended, and have no edge to this process."""
        return [
            there for there in self.neighbours
            if there not in self.edges and there not in self._ended and self._opener.expects(there)
        ]

    def end(self) -> None:
        """Note that no step follows here, so that joining processes do not wait for this one."""
        if math.isfinite(self.last_step):
            self.step = int(self.last_step) + 1

    def hand_out(self, to: Sequence[int], seconds: float) -> None:
        """Hand over rows after the end to neighbours that request them, until all in `to` have connected."""
        self.end()
        self._opener.begin(self._terms)
        for there in self.neighbours:
            self._in_background(self._open, there)
        waiting, deadline = set(to), time.monotonic() + seconds
        try:
            while any(map(self._opener.expects, waiting)) and (left := deadline - time.monotonic()) > 0:
                with suppress(queue.Empty):                 # a newer file may remove neighbours meanwhile
                    waiting.discard(self._admitted.get(timeout=min(left, 1.0)))
        finally:
            self.close()

    def accounts(self) -> dict[str, dict[str, float]]:
        """Return the traffic statistics of each edge, by the process at its other end."""
        return {str(there): asdict(account) for there, account in sorted(self._accounts.items())}

    def close(self) -> None:
        """Close all edges and end all threads."""
        self._closing.set()
        self._ready.set()
        self._opener.stop()
        for edge in list(self._opening.values()):
            edge.close()
        deadline = time.monotonic() + (LEAVE if self.noted else 2 * ATTEMPT)
        for thread in self._threads:
            thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        self._time_to_leave = math.inf                      # what follows is short
        for edge in self.edges.values():
            with suppress(Lost):
                if self.step > self.last_step:              # tells neighbours behind that this end is regular
                    edge.send_heartbeat(self.step)
                edge.finish(LEAVE / HEARTBEAT_FACTOR if self.noted else self.timeout)
            edge.close()
        self.edges.clear()
        self._opener.close()


class Pace:
    """Decides how long to wait for each neighbour: to the end of the step's deadline, or not at all if it is late.

    A process is late if it has sent fewer than half as many messages as this one in the last exchanges. Its messages
    still count if they arrive in time. A neighbour that is only some steps behind, at the same pace, is waited for, so
    that it catches up. Without a deadline, no process is late.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._recent: dict[int, deque[int]] = {}
        """For each process, the number of its messages before each of the last exchanges and the current one."""
        self._step, self._began = 0, 0.0

    @property
    def late(self) -> list[int]:
        """The processes that are too slow to wait for."""
        return [there for there, counts in self._recent.items() if 2 * (counts[-1] - counts[0]) < len(counts) - 1]

    def begin(self, moment: Moment) -> None:
        """Begin an exchange; the deadline is for all exchanges of a step together."""
        if moment[0] != self._step:
            self._step, self._began = moment[0], time.monotonic()

    def until(self, there: int, arrived: int) -> float:
        """The time at which to continue without this process, which has sent `arrived` messages so far."""
        if self.seconds is None:
            return math.inf
        known = self._recent.get(there)
        if known is None or known[-1] > arrived:            # a new edge: it counts as punctual at first
            known = self._recent[there] = deque(range(arrived - WINDOW, arrived), maxlen=WINDOW + 1)
        known.append(arrived)
        return 0.0 if there in self.late else self._began + self.seconds
