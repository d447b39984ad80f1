"""One link to a neighbouring process, over a channel that may be lost and reopened, and the checks of what comes.

Every message is a header and a payload. The header contains the step, so that two sides at different steps (one was
absent) resynchronize: messages for an earlier step are discarded, messages for a later step wait in the inbox.

A `Channel` is the transport: gloo (`gloo.py`) or TLS (`tls.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quasiglobal.peers.memory import MessageMemory

Moment: TypeAlias = tuple[int, int]
"""(step, exchange index in that step)."""

MAGIC = 0x71676D31
"""First number of every header: "qgm1" in ASCII."""

HEADER = 6
"""Numbers in a header: magic, step, exchange index in the step, element count, bytes per element, generation."""

KINDS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Allowed payload dtypes, by bytes per element; single bytes are packed bits."""

AHEAD = 3
"""Messages that one side may be ahead of the other before it has to wait."""

FOREVER = 1e7
"""Timeout of the reader thread in seconds, in effect none; a caller with a shorter timeout closes the edge."""

HEARTBEAT = -1
"""Exchange index of a heartbeat: no payload follows; the sender is alive and itself waits for a neighbour."""

NOTE = -2
"""Exchange index of a note: bytes that are not for the algorithm, such as a newer federation file."""

MOVE = -3
"""Exchange index of the last message on a channel: the next comes on the channel that replaces it."""

GREETING = 32
"""Bytes of a greeting, all 0."""

ADOPTION = 30.0
"""Seconds that one side may adopt a new channel before the other."""

OTHER_SIZES = (1, 4)
"""Bytes per element of messages that are not for the algorithm."""

MOST_NOTE = 2**21
"""Maximum size of a note in bytes."""

HEARTBEAT_FACTOR = 10
"""Factor on the timeout for a process that shows life, but does not send the awaited message."""

LOOK = 0.5
"""Seconds between looks at the bytes of an arriving message, and at a request to stop."""


class Lost(Exception):
    """The other side is unreachable or sent invalid data; the message is the reason."""


class Late(Lost):
    """The other side kept this one waiting until its time was over."""

    def __init__(self) -> None:
        super().__init__("it did not answer in time")


class Refused(Lost):
    """The other side failed authentication: another experiment or another secret."""

    def __init__(self, why: str, by: int | None = None) -> None:
        """`by` is the process that refuses if it is not the other side, such as a relay on the way."""
        super().__init__(why)
        self.by = by


class Rejected(Exception):
    """A message does not count; the reason contains no numbers that the sender chose."""


class Sending(ABC):
    """A message on its way."""

    @abstractmethod
    def wait(self, deadline: float) -> None:
        """Wait until the message has left this process; raise `Lost` if it does not by the deadline."""


class Channel(ABC):
    """A connection that carries contiguous CPU tensors as bytes. Deadlines are times of `time.monotonic`.

    One thread may send while another receives.
    """

    @abstractmethod
    def send(self, message: Tensor) -> Sending:
        """Start sending a message, which must not change or be freed before it is sent."""

    @abstractmethod
    def recv_into(self, buffer: Tensor, deadline: float) -> None:
        """Fill the buffer with the next bytes; raise `Lost` if they do not come by the deadline."""

    def moved(self) -> tuple[int, int]:
        """Two numbers: one changes while bytes leave, if the transport sees them, one while a large message arrives."""
        return 0, 0

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the other side detects this, and calls that wait here raise `Lost`."""


@dataclass(frozen=True)
class Expected:
    """The message that a neighbour should send."""

    count: int
    dtype: torch.dtype
    last_step: float = math.inf
    """The last step of the run."""
    packed: bool = False
    """Whether the numbers are packed bits, which are checked once they are restored."""


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
        """Step of the other side as of its admission, or of its last heartbeat."""
        self.gave = False
        """Whether the other side took the rows that were offered."""
        self.on_note: Callable[[bytes], None] = lambda note: None
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Called with the seconds of each wait of the training thread, every `LOOK` seconds; may raise."""
        self._rank = 0 if here < there else 1
        self._under_way: deque[tuple[Sending, bool]] = deque()
        """Messages on their way, and whether they are payloads."""
        self._threads: list[threading.Thread] = []
        self._line = threading.Lock()
        self._incoming = channel
        self._successor: Channel | None = None
        self._moved: Sending | None = None
        self._news = threading.Condition()
        self._inbox: deque[tuple[Moment, Tensor]] = deque()
        self._now: Moment = (0, 0)
        self._coming: Moment | None = None
        """The moment of the message that is arriving."""
        self._heard = 0.0
        """Time of the last sign of life: a heartbeat, or a message of a later moment than any before."""
        self._largest = 0
        self._greets = self._greeted = False
        self._gone: str | None = None
        """Why the edge is lost. Not an exception: its traceback would refer to this edge, and keep all its memory."""
        self._drops = self._posting = False
        self._outbox: deque[tuple[Moment, Tensor]] = deque(maxlen=2 * AHEAD)
        """The newest messages to send, if others are dropped."""
        self.newest: Moment = (0, 0)
        """The moment of the newest message that came; `arrived` counts all."""
        self.arrived = 0

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

    def hand_over(self, rows: Tensor | None, wanted: Expected | None, seconds: float) -> Tensor | None:
        """Send these rows if the other side requests them; receive its rows if they have exactly the size `wanted`.

        The other side has `seconds` to answer, and `HEARTBEAT_FACTOR` times as long for its rows.
        """
        deadline = time.monotonic() + seconds
        count, size = (0, 0) if rows is None else (rows.numel(), rows.element_size())
        theirs = self._swap((wanted is not None).to_bytes(8) + count.to_bytes(16) + size.to_bytes(8), deadline)
        asked, coming, size = (int.from_bytes(theirs[at]) for at in (slice(8), slice(8, 24), slice(24, 32)))
        sending = self.channel.send(rows) if asked and rows is not None else None
        taken, deadline = None, deadline + (HEARTBEAT_FACTOR - 1) * seconds
        if wanted is not None and coming:
            if (coming, size) != (wanted.count, wanted.dtype.itemsize):
                raise Rejected(f"it offers a model of another size than {wanted.count} numbers")
            taken = torch.empty(coming, dtype=wanted.dtype)
            self._incoming.recv_into(taken, deadline)
            check_message(0, taken, wanted)
        if sending is not None:
            sending.wait(deadline)
            self.gave = True
        return taken

    def listen(
        self, largest: int, buffers: MessageMemory | None = None, drops: bool = False, greets: bool = False
    ) -> None:
        """Start to read into buffers, so that the other side can send before this side calls `receive`.

        `largest` is the maximum message size in bytes. `drops`: keep only the newest messages in either direction, so
        that no side ever waits for the other to read. `greets`: no message comes before both sides call `greet`.
        """
        self._largest, self._drops, self._greets = largest, drops, greets
        for work in (lambda: self._read(buffers or MessageMemory()), self._send_outbox):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def greet(self, largest: int, seconds: float) -> None:
        """Announce that this side is ready for the first step, and wait until the other is."""
        self._largest = largest
        with self._line:
            self._start(torch.zeros(GREETING, dtype=torch.uint8))
        with self._news:
            self._news.wait_for(lambda: self._greeted or self._gone is not None, seconds)
            if not self._greeted:
                self.check()
                raise Late()
            self._greets = False

    def check(self) -> None:
        """Raise `Lost` if the other side is gone."""
        if self._gone is not None:
            raise Lost(self._gone)

    def send(self, moment: Moment, payload: Tensor, seconds: float) -> None:
        """Start sending the payload, which must not change afterwards; block only if the other side is far behind."""
        self.check()                                        # it knows the reason better than its channel
        if self._drops:
            with self._news:
                self._outbox.append((moment, payload))
                self._news.notify_all()
            return

        def may_send() -> bool:
            return sum(counts for _, counts in self._under_way) <= AHEAD

        began = time.monotonic()
        with self._news:
            while not may_send():
                self.check()
                if (left := began + seconds - time.monotonic()) <= 0:
                    raise Late()
                self._pause(left)
        self.account.waited += time.monotonic() - began
        self._post(moment, payload)

    def _post(self, moment: Moment, payload: Tensor) -> None:
        with self._line:
            self._start(self._head(moment, payload.numel(), payload.element_size()))
            self._start(payload, counts=True)
        self.account.sent += payload.nbytes

    def send_note(self, note: bytes) -> None:
        """Send bytes that are not for the algorithm; do not wait for completion."""
        payload = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        with self._line:
            for message in (self._head((0, NOTE), len(note), 1), payload):
                self._start(message)

    def adopt(self, channel: Channel) -> None:
        """Continue on another channel to the same process, which adopts the other end of it; no message is lost.

        A channel that the other side has not moved to yet is closed: an edge has at most one successor.
        """
        with self._line:
            try:
                self._moved = self.channel.send(self._head((0, MOVE), 0, 1))
            except Lost as error:
                self._end(str(error))
            with self._news:
                late, self._successor, self.channel = self._successor, channel, channel
                self._news.notify_all()
        if late is not None:
            late.close()
        if self._gone is not None:                          # nobody else would close it
            channel.close()

    def cut(self, why: str) -> None:
        """Close the connection from any thread, without waiting; calls that need it raise `Lost` with this reason."""
        self._end(why)
        for channel in (self.channel, self._incoming):
            channel.close()

    @property
    def listening(self) -> bool:
        """Whether messages are exchanged on this edge."""
        return bool(self._threads) and not self._greets and self._gone is None

    def send_heartbeat(self, step: int) -> None:
        """Send a heartbeat; do not wait for completion."""
        with self._line:
            self._start(self._head((step, HEARTBEAT), 0, 4))

    def receive(
        self, moment: Moment, expected: Expected, seconds: float, until: float = math.inf, since: float = math.inf
    ) -> Tensor | None:
        """Return the payload sent for this moment, or None if the other side is past it or the time is past `until`.

        Raise `Rejected` if it is not what is expected.

        The timeout `seconds` restarts with each sign of life: a heartbeat, a message of a later moment than any before,
        bytes of a message for this moment or a later one. All of them together extend the wait to at most
        `HEARTBEAT_FACTOR` × `seconds`. It counts from `since`, if this process has waited for others meanwhile.
        """
        began = time.monotonic()
        heard = since = min(since, began)
        _, seen = self._incoming.moved()
        with self._news:
            self._now = moment
            try:
                while True:
                    while self._inbox and self._inbox[0][0] < moment:
                        self._inbox.popleft()
                    self._news.notify_all()
                    if self._inbox:
                        break
                    self.check()
                    now, (_, count) = time.monotonic(), self._incoming.moved()
                    if count != seen and self._coming is not None and self._coming >= moment:
                        heard = now
                    seen, heard = count, max(heard, self._heard)
                    if now >= min(heard + seconds, since + HEARTBEAT_FACTOR * seconds):
                        raise Late()
                    if now >= until:
                        return None
                    self._pause(min(heard + seconds, until) - now)
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
        """Wait until all messages are sent, including notes and heartbeats: `seconds`, or longer while bytes leave."""
        began = moved = time.monotonic()
        seen, _ = self.channel.moved()
        with self._news:
            while (self._under_way or self._outbox or self._posting) and self._gone is None:
                now, (count, _) = time.monotonic(), self.channel.moved()
                seen, moved = count, now if count != seen else moved
                if now >= min(moved + seconds, began + HEARTBEAT_FACTOR * seconds):
                    break
                self._pause(moved + seconds - now)
            if self._under_way:
                self.check()
                raise Late()

    def _pause(self, seconds: float) -> None:
        """Wait for news, for a moment at most; called by the training thread, which holds the lock."""
        began = time.monotonic()
        self._news.wait(min(seconds, LOOK))
        self.on_wait(time.monotonic() - began)

    def close(self) -> None:
        """Close the connection; the other side detects this."""
        self.cut("this process closed the connection")
        for thread in self._threads:
            thread.join(timeout=5.0)
        with self._news:                                    # whoever still refers to this edge keeps no messages
            self._inbox.clear()
            self._under_way.clear()

    def _read(self, buffers: MessageMemory) -> None:
        """Put messages into the inbox; discard those for past moments; pause while `AHEAD` messages are queued."""
        try:
            if self._greets:
                self._incoming.recv_into(torch.empty(GREETING, dtype=torch.uint8), time.monotonic() + FOREVER)
                with self._news:
                    self._greeted = True
                    self._news.notify_all()
            while True:
                moment, count, size = self._header()
                if moment[1] == NOTE:
                    self.on_note(self._note(count * size))
                elif moment[1] == MOVE:
                    self._follow()
                elif moment[1] == HEARTBEAT:
                    self.step_there = moment[0]
                    with self._news:
                        self._heard = time.monotonic()
                        self._news.notify_all()
                if moment[1] < 0:
                    continue
                if count * size > self._largest:
                    raise Lost(f"it sent {count} numbers of {size} bytes, above the message size limit")
                payload = buffers.empty(count, KINDS[size])
                self._coming = moment
                self._incoming.recv_into(payload, time.monotonic() + FOREVER)
                self._coming = None
                with self._news:
                    if moment > self.newest:
                        self._heard, self.newest = time.monotonic(), moment
                    self.arrived += 1
                    if moment >= self._now:
                        self._inbox.append((moment, payload))
                    del payload                             # its memory is free once the message is used
                    self._news.notify_all()
                    if not self._drops:
                        self._news.wait_for(lambda: len(self._inbox) < AHEAD or self._gone is not None)
                    elif len(self._inbox) > 2 * AHEAD:
                        self._inbox.popleft()
        except Exception as error:                          # whatever the error, the edge is unusable
            self._end(str(error))

    def _start(self, message: Tensor, counts: bool = False) -> None:
        try:
            sending = self.channel.send(message)
        except Lost as error:                               # the edge knows why better, if it was cut meanwhile
            raise Lost(self._gone or str(error)) from None
        with self._news:
            self._under_way.append((sending, counts))
            self._news.notify_all()

    def _send_outbox(self) -> None:
        """Drop each message once it is sent, so that its memory is free; then post the next one of the outbox."""
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._under_way or self._outbox or self._gone is not None)
                    if not self._under_way and self._gone is not None:
                        return
                    sending = self._under_way[0][0] if self._under_way else None
                    if sending is None:
                        (moment, payload), self._posting = self._outbox.popleft(), True
                if sending is None:
                    self._post(moment, payload)
                    del payload
                else:
                    sending.wait(time.monotonic() + FOREVER)
                    del sending
                with self._news:
                    if self._posting:
                        self._posting = False
                    elif self._under_way:                   # empty once the edge is closed
                        self._under_way.popleft()
                    self._news.notify_all()
        except Lost as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        with self._news:
            self._gone = self._gone or why
            self._outbox.clear()
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
        try:
            moved.wait(time.monotonic() + ADOPTION)
        finally:
            old.close()

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


def check_message(step: int, payload: Tensor, expected: Expected) -> None:
    """Raise `Rejected` unless a message for this step has the expected size and bounded numbers."""
    check_step(step, expected.last_step)
    if (payload.numel(), payload.dtype) != (expected.count, expected.dtype):
        size = f"{expected.count} numbers of {expected.dtype.itemsize} bytes"
        raise Rejected(f"it sent a message of another size than {size}")
    if not expected.packed:
        check_numbers(payload)


def check_step(step: int, last_step: float) -> None:
    """Raise `Rejected` unless the run has this step."""
    if not 0 <= step <= last_step:
        raise Rejected("it claims a step that the run does not have")


def check_numbers(values: Tensor) -> None:
    """Raise `Rejected` unless the sum of the squares of all numbers is finite.

    Numbers near the largest would pass as finite, but overflow in the receiver's next differences and norms, so that
    honest neighbours would reject each other. The sum of squares is a single fast pass.
    """
    flat = values.flatten()
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat
    if not torch.dot(flat, flat).isfinite():
        raise Rejected("it sent numbers that are not finite, or too large to compute with")
