"""One link to a neighbouring process, over a channel that may be lost and reopened.

Every message is a header and a payload. The header contains the step, so that two sides at different steps (one was
absent) resynchronize: messages for an earlier step are discarded, messages for a later step wait in the inbox.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from quasiglobal.engines.distributed.buffers import Buffers
from quasiglobal.engines.distributed.channel import Channel, Lost, Refused, Sending
from quasiglobal.engines.distributed.gloo import GlooChannel, Meeting, Store, until

MAGIC = 0x71676D31
"""First number of every header: "qgm1" in ASCII."""

HEADER = 6
"""Numbers in a header: magic, step, exchange index in the step, element count, bytes per element, generation."""

KINDS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Allowed payload dtypes, by bytes per element."""

LARGEST = 2**34
"""Maximum size of a model in bytes."""

AHEAD = 3
"""Messages that one side may be ahead of the other before it has to wait."""

FOREVER = 1e7
"""Timeout of the reader thread in seconds, in effect none; a caller with a shorter timeout closes the edge."""

Moment = tuple[int, int]
"""(step, exchange index in that step)."""

HEARTBEAT = -1
"""Exchange index of a heartbeat: no payload follows; the sender is alive and itself waits for a neighbour."""

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


class Edge:
    """The link between processes `here` and `there`, open as long as its channel is."""

    def __init__(self, here: int, there: int, channel: Channel, generation: int) -> None:
        self.here, self.there, self.channel, self.generation = here, there, channel, generation
        self.account = Account()
        self.step_there = 0
        self._rank = 0 if here < there else 1
        self._under_way: deque[tuple[Sending, bool]] = deque()
        """Messages on their way, and whether they are payloads."""
        self._threads: list[threading.Thread] = []
        self._line = threading.Lock()
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

    def share_model(self, model: Tensor | None, wanted: bool, deadline: float) -> Tensor | None:
        """Send a model to the other side if it requests one; receive its model if `wanted`."""
        count = 0 if model is None else model.numel()
        offer = wanted.to_bytes(8) + count.to_bytes(16) + (0 if model is None else model.element_size()).to_bytes(8)
        theirs = self._swap(offer, deadline)
        asked, coming, size = (int.from_bytes(theirs[at]) for at in (slice(8), slice(8, 24), slice(24, 32)))
        sending = self.channel.send(model) if asked and model is not None else None
        taken = None
        if wanted and coming and size in KINDS and coming * size <= LARGEST:
            taken = torch.empty(coming, dtype=KINDS[size])
            self.channel.recv_into(taken, deadline)
        if sending is not None:
            sending.wait(deadline)
        return taken

    def listen(self, largest: int, buffers: Buffers) -> None:
        """Start to read into buffers, so that the other side can send before this side calls `receive`.

        `largest` is the maximum message size in bytes.
        """
        for work in (lambda: self._read(largest, buffers), self._drop_sent):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, moment: Moment, payload: Tensor, seconds: float) -> None:
        """Start sending the payload, which must not change afterwards; block only if the other side is far behind."""
        self._settle(AHEAD, seconds)
        with self._line:
            self._start(self._head(moment, payload.numel(), payload.element_size()))
            self._start(payload, counts=True)
        self.account.sent += payload.nbytes

    def send_heartbeat(self, step: int) -> None:
        """Send a heartbeat; do not wait for completion."""
        with self._line:
            self._start(self._head((step, HEARTBEAT), 0, 4))

    def receive(self, moment: Moment, expected: int, dtype: torch.dtype, seconds: float) -> Tensor | None:
        """Return the payload sent for this moment, or None if the other side is already past it.

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
            if self._inbox[0][0] > moment:
                return None
            _, payload = self._inbox.popleft()
            self._news.notify_all()
        if (payload.numel(), payload.dtype) != (expected, dtype):
            found = f"{payload.numel()} numbers of {payload.element_size()} bytes"
            raise Lost(f"it sent {found}, not {expected} of {dtype.itemsize}")
        self.account.received += payload.nbytes
        return payload

    def finish(self, seconds: float) -> None:
        """Wait until all messages are sent."""
        self._settle(0, seconds)

    def close(self) -> None:
        """Close the connection; the other side detects this."""
        self._end(Lost("this process closed the connection"))
        self.channel.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _read(self, largest: int, buffers: Buffers) -> None:
        """Put messages into the inbox; discard those for past moments; pause while `AHEAD` messages are queued."""
        try:
            while True:
                moment, count, size = self._header()
                if moment[1] == HEARTBEAT:
                    with self._news:
                        self._heard = time.monotonic()
                        self._news.notify_all()
                    continue
                if count * size > largest:
                    raise Lost(f"it sent {count} numbers of {size} bytes, above the message size limit")
                payload = buffers.empty(count, KINDS[size])
                self.channel.recv_into(payload, time.monotonic() + FOREVER)
                with self._news:
                    self._heard = self._heard_numbers = time.monotonic()
                    if moment >= self._now:
                        self._inbox.append((moment, payload))
                    del payload                             # its memory is free once the message is used
                    self._news.notify_all()
                    self._news.wait_for(lambda: len(self._inbox) < AHEAD or self._gone is not None)
        except Lost as error:
            self._end(error)

    def _start(self, message: Tensor, counts: bool = False) -> None:
        sending = self.channel.send(message)
        with self._news:
            self._under_way.append((sending, counts))
            self._news.notify_all()

    def _drop_sent(self) -> None:
        """Drop each message once it is sent, so that its memory is free."""
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._under_way or self._gone is not None)
                    if not self._under_way:
                        return
                    sending, _ = self._under_way[0]
                sending.wait(time.monotonic() + FOREVER)
                del sending
                with self._news:
                    self._under_way.popleft()
                    self._news.notify_all()
        except Lost as error:
            self._end(error)

    def _end(self, error: Lost) -> None:
        with self._news:
            self._gone = self._gone or error
            self._news.notify_all()

    def _settle(self, most: int, seconds: float) -> None:
        """Wait until at most `most` payloads are in flight."""
        def settled() -> bool:
            return sum(counts for _, counts in self._under_way) <= most

        began = time.monotonic()
        with self._news:
            self._news.wait_for(lambda: settled() or self._gone is not None, seconds)
            if not settled():
                raise self._gone or Lost("it did not answer in time")
        self.account.waited += time.monotonic() - began

    def _head(self, moment: Moment, count: int, size: int) -> Tensor:
        return torch.tensor([MAGIC, *moment, count, size, self.generation], dtype=torch.int64)

    def _header(self) -> tuple[Moment, int, int]:
        """Receive a header; return the moment, the element count and the bytes per element."""
        header = torch.empty(HEADER, dtype=torch.int64)
        self.channel.recv_into(header, time.monotonic() + FOREVER)
        magic, step, exchange, count, size, generation = header.tolist()
        if magic != MAGIC or size not in KINDS or count < 0:
            raise Lost("it does not speak this protocol")
        if generation != self.generation:
            raise Lost(f"its generation is {generation}, not {self.generation}")
        return (step, exchange), count, size

    def _swap(self, mine: bytes, deadline: float) -> bytes:
        """Exchange 32 bytes with the other side."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        taken = torch.empty(32, dtype=torch.uint8)
        sending = self.channel.send(sent)
        self.channel.recv_into(taken, deadline)
        sending.wait(deadline)
        return bytes(taken.tolist())


def open_edge(store: Store, here: int, there: int, host: str, seconds: float) -> Edge:
    """Open the link to a process that opens it at the same time; raise `Lost` if it does not within `seconds`.

    A generation is the number of an attempt to open this link. The lower rank offers a generation and the higher rank
    accepts it; store keys of earlier generations are never read.
    An offer is taken once, by the side that accepts it or the side that withdraws it: a stale offer is never accepted.
    """
    low, high = sorted((here, there))
    place = Meeting(store, f"edge/{low}-{high}")
    deadline = time.monotonic() + seconds

    def takes(offer: int) -> bool:
        return place.add(f"taken/{offer}", 1) == 1

    try:
        if here == low:
            generation = place.add("generation", 1)
            place.set("offer", str(generation))
            try:
                until(lambda: place.check([f"taken/{generation}"]), seconds)
            except TimeoutError:
                if takes(generation):
                    raise
        else:
            def accepted() -> int:
                offer = int(place.get("offer")) if place.check(["offer"]) else 0
                return offer if offer and takes(offer) else 0

            generation = until(accepted, seconds)
    except TimeoutError:
        raise Lost("it did not connect in time") from None
    left = max(deadline - time.monotonic(), 1.0)
    channel = GlooChannel(Meeting(place, str(generation)), int(here == high), host, left)
    return Edge(here, there, channel, generation)
