"""One link to a neighbouring process, over a channel that may be lost and reopened.

Every message is a header and a payload. The header contains the step, so that two sides at different steps (one was
absent) resynchronize: messages for an earlier step are discarded, messages for a later step wait in the inbox.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quasiglobal.engines.distributed.channel import Channel, Lost, Refused, Sending
from quasiglobal.engines.distributed.checks import Expected, Rejected, check_message
from quasiglobal.engines.distributed.gloo import GlooChannel, Meeting, Store, until

MAGIC = 0x71676D31
"""First number of every header: "qgm1" in ASCII."""

HEADER = 6
"""Numbers in a header: magic, step, exchange index in the step, element count, bytes per element, generation."""

KINDS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Allowed payload dtypes, by bytes per element."""

MOST_GENERATION = 2**62
"""Generations are random numbers up to this one."""

REPEAT = 0.5
"""Seconds after which an offer in the store is written again: a stranger may have overwritten it."""

AHEAD = 3
"""Messages that one side may be ahead of the other before it has to wait."""

FOREVER = 1e7
"""Timeout of the reader thread in seconds, in effect none; a caller with a shorter timeout closes the edge."""

Moment = tuple[int, int]
"""(step, exchange index in that step)."""

HEARTBEAT = -1
"""Exchange index of a heartbeat: no payload follows; the sender is alive and itself waits for a neighbour."""

NOTE = -2
"""Exchange index of a note: bytes that are not for the algorithm, such as a newer federation file."""

MOVE = -3
"""Exchange index of the last message on a channel: the next comes on the channel that replaces it."""

ADOPTION = 30.0
"""Seconds that one side may adopt a new channel before the other."""

OTHER_SIZES = (1, 4)
"""Bytes per element of messages that are not for the algorithm."""

MOST_NOTE = 2**21
"""Maximum size of a note in bytes."""

HEARTBEAT_FACTOR = 10
"""Factor on the timeout for a process that sends only heartbeats."""


@dataclass
class Account:
    """Traffic statistics of an edge."""

    sent: int = 0
    """Payload bytes sent; `received` counts the other direction."""
    received: int = 0
    waited: float = 0.0
    """Seconds spent waiting for the other side."""
    missed: int = 0
    """Exchanges completed without the other side."""
    clipped: int = 0
    """Exchanges in which the model of the other side was clipped."""


class Edge:
    """The link between processes `here` and `there`, open as long as its channel is."""

    def __init__(self, here: int, there: int, channel: Channel, generation: int) -> None:
        self.here, self.there, self.channel, self.generation = here, there, channel, generation
        self.account = Account()
        self.step_there = 0
        self.on_note: Callable[[bytes], None] = lambda note: None
        self._rank = 0 if here < there else 1
        self._under_way: deque[tuple[Sending, list[Sending]]] = deque()
        self._heartbeats: list[Sending] = []
        self._reader: threading.Thread | None = None
        self._line = threading.Lock()
        self._incoming = channel
        self._successor: Channel | None = None
        self._moved: Sending | None = None
        self._news = threading.Condition()
        self._inbox: deque[tuple[Moment, Tensor]] = deque()
        self._now: Moment = (0, 0)
        self._heard = self._heard_numbers = 0.0
        self._gone: Lost | None = None

    def admit(self, experiment: bytes, secret: bytes, step: int, deadline: float) -> None:
        """Authenticate both sides (same secret, same experiment), then exchange steps.

        Each side signs a nonce that the other has just drawn, so that an answer cannot be replayed.
        """
        number = secrets.token_bytes(32)
        theirs = self._swap(number, deadline)

        def proof(of: int, for_number: bytes) -> bytes:
            words = (bytes([of]), for_number, experiment, self.generation.to_bytes(8))
            return hmac.digest(secret or b"-", b"|".join(words), hashlib.sha256)

        if not hmac.compare_digest(self._swap(proof(self._rank, theirs), deadline), proof(1 - self._rank, number)):
            raise Refused("it runs another experiment, or has another secret")
        self.step_there = int.from_bytes(self._swap(step.to_bytes(32), deadline))

    def greet(self, deadline: float) -> None:
        """Wait until both sides are ready for the first step."""
        self._swap(bytes(32), deadline)

    def share_model(self, model: Tensor | None, wanted: Expected | None, deadline: float) -> Tensor | None:
        """Send a model to the other side if it requests one; receive its model if one of exactly this size is `wanted`.
        """
        count, size = (0, 0) if model is None else (model.numel(), model.element_size())
        theirs = self._swap((wanted is not None).to_bytes(8) + count.to_bytes(16) + size.to_bytes(8), deadline)
        asked, coming, size = (int.from_bytes(theirs[at]) for at in (slice(8), slice(8, 24), slice(24, 32)))
        sending = self.channel.send(model) if asked and model is not None else None
        taken = None
        if wanted is not None and coming:
            if (coming, size) != (wanted.count, wanted.dtype.itemsize):
                raise Rejected(f"it offers a model of another size than {wanted.count} numbers")
            taken = torch.empty(coming, dtype=wanted.dtype)
            self._incoming.recv_into(taken, deadline)
            check_message(0, taken, wanted)
        if sending is not None:
            sending.wait(deadline)
        return taken

    def listen(self, largest: int) -> None:
        """Start the reader thread, so that the other side can send before this side calls `receive`.

        `largest` is the maximum message size in bytes.
        """
        reader = threading.Thread(target=self._read, args=(largest,), daemon=True)
        reader.start()
        self._reader = reader

    def send(self, moment: Moment, payload: Tensor, seconds: float) -> None:
        """Start sending the payload, which must not change afterwards; block only if the other side is far behind."""
        if self._gone is not None:                          # it knows why better than its channel
            raise self._gone
        self._settle(2 * AHEAD, seconds)
        with self._line:
            for message in (self._head(moment, payload.numel(), payload.element_size()), payload):
                self._under_way.append((self.channel.send(message), self._heartbeats))  # they are sent before it
                self._heartbeats = []
        self.account.sent += payload.nbytes

    def send_note(self, note: bytes) -> None:
        """Send bytes that are not for the algorithm; do not wait for completion."""
        payload = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        with self._line:
            for message in (self._head((0, NOTE), len(note), 1), payload):
                self._heartbeats.append(self.channel.send(message))

    def adopt(self, channel: Channel) -> None:
        """Continue on another channel to the same process, which adopts the other end of it; no message is lost."""
        with self._line:
            self._moved = self.channel.send(self._head((0, MOVE), 0, 1))
            self.channel = channel
        with self._news:
            self._successor = channel
            self._news.notify_all()

    def cut(self, why: str) -> None:
        """Close the connection from any thread, without waiting; calls that need it raise `Lost` with this reason."""
        with self._news:
            self._gone = self._gone or Lost(why)
            self._news.notify_all()
        for channel in (self.channel, self._incoming):
            channel.close()

    @property
    def listening(self) -> bool:
        """Whether messages are exchanged on this edge."""
        return self._reader is not None and self._gone is None

    def send_heartbeat(self, step: int) -> None:
        """Send a heartbeat; do not wait for completion."""
        message = self._head((step, HEARTBEAT), 0, 4)
        with self._line:
            self._heartbeats.append(self.channel.send(message))

    def receive(self, moment: Moment, expected: Expected, seconds: float) -> Tensor | None:
        """Return the payload sent for this moment, or None if the other side is already past it.

        Raise `Rejected` if it is not what is expected.

        The timeout `seconds` restarts with each message, so that a side that is catching up does not time out.
        Heartbeats alone extend the wait to at most `HEARTBEAT_FACTOR` × `seconds`.
        """
        began = time.monotonic()
        with self._news:
            self._now = moment
            try:
                while True:
                    while self._inbox and self._inbox[0][0] < moment:
                        self._inbox.popleft()
                    self._news.notify_all()
                    if self._inbox:
                        break
                    if self._gone is not None:
                        raise self._gone
                    heard, numbers = max(self._heard, began), max(self._heard_numbers, began)
                    left = min(heard + seconds, numbers + HEARTBEAT_FACTOR * seconds) - time.monotonic()
                    if left <= 0:
                        raise Lost("it did not answer in time")
                    self._news.wait(left)
            finally:
                self.account.waited += time.monotonic() - began
            if moment < self._inbox[0][0] <= (expected.last_step, math.inf):
                return None
            (step, _), payload = self._inbox.popleft()
            self._news.notify_all()
        check_message(step, payload, expected)
        self.account.received += payload.nbytes
        return payload

    def finish(self, seconds: float) -> None:
        """Wait until all messages are sent."""
        self._settle(0, seconds)

    def close(self) -> None:
        """Close the connection; the other side detects this."""
        self.cut("this process closed the connection")
        if self._reader is not None:
            self._reader.join(timeout=5.0)

    def _read(self, largest: int) -> None:
        """Put messages into the inbox; discard those for past moments; pause while `AHEAD` messages are queued."""
        try:
            while True:
                moment, count, size = self._header()
                if moment[1] == NOTE:
                    self.on_note(self._note(count * size))
                elif moment[1] == MOVE:
                    self._follow()
                if moment[1] < 0:
                    with self._news:
                        self._heard = time.monotonic()
                        self._news.notify_all()
                    continue
                if count * size > largest:
                    raise Lost(f"it sent {count} numbers of {size} bytes, above the message size limit")
                payload = torch.empty(count, dtype=KINDS[size])
                self._incoming.recv_into(payload, time.monotonic() + FOREVER)
                with self._news:
                    self._heard = self._heard_numbers = time.monotonic()
                    if moment >= self._now:
                        self._inbox.append((moment, payload))
                    self._news.notify_all()
                    self._news.wait_for(lambda: len(self._inbox) < AHEAD or self._gone is not None)
        except Exception as error:                          # whatever it is, the edge is of no use any more
            with self._news:
                self._gone = self._gone or (error if isinstance(error, Lost) else Lost(f"{error}"))
                self._news.notify_all()

    def _note(self, size: int) -> bytes:
        """Receive the bytes of a note."""
        if size > MOST_NOTE:
            raise Lost(f"it sent a note of {size} bytes, above the limit of {MOST_NOTE}")
        note = torch.empty(size, dtype=torch.uint8)
        self._incoming.recv_into(note, time.monotonic() + FOREVER)
        return bytes(note.numpy())

    def _follow(self) -> None:
        """Read on from the channel that replaces this one, as soon as it is adopted here too."""
        with self._news:
            self._news.wait_for(lambda: self._successor is not None or self._gone is not None, ADOPTION)
            old, new, moved = self._incoming, self._successor, self._moved
            self._successor = None
        if new is None or moved is None:
            raise Lost("it moved to a connection that this process does not have")
        self._incoming = new
        moved.wait(time.monotonic() + ADOPTION)
        old.close()

    def _settle(self, most: int, seconds: float) -> None:
        """Wait until at most `most` sends are in flight."""
        began = time.monotonic()
        while len(self._under_way) > most:
            self._under_way.popleft()[0].wait(began + seconds)
        self.account.waited += time.monotonic() - began

    def _head(self, moment: Moment, count: int, size: int) -> Tensor:
        return torch.tensor([MAGIC, *moment, count, size, self.generation], dtype=torch.int64)

    def _header(self) -> tuple[Moment, int, int]:
        """Receive a header; return the moment, the element count and the bytes per element."""
        header = torch.empty(HEADER, dtype=torch.int64)
        self._incoming.recv_into(header, time.monotonic() + FOREVER)
        magic, step, exchange, count, size, generation = header.tolist()
        if magic != MAGIC or size not in (KINDS if exchange >= 0 else OTHER_SIZES) or count < 0:
            raise Lost("it does not speak this protocol")
        if generation != self.generation:
            raise Lost(f"its generation is {generation}, not {self.generation}")
        return (step, exchange), count, size

    def _swap(self, mine: bytes, deadline: float) -> bytes:
        """Exchange 32 bytes with the other side."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        taken = torch.empty(32, dtype=torch.uint8)
        sending = self.channel.send(sent)
        self._incoming.recv_into(taken, deadline)
        sending.wait(deadline)
        return bytes(taken.tolist())


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
