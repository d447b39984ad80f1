"""One link to a neighbouring process: a gloo group of two, that may be lost and opened again.

Everything that travels is a header and a payload. The header names the step, so that two sides that are not at the
same step (one was away) find together again: what is for an earlier step is thrown away, what is for a later one waits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from quasiglobal.engines.distributed.gloo import Group, Meeting, Store, open_group, until

MAGIC = 0x71676D31
"""The first number of every header: qgm1."""

HEADER = 6
"""Numbers in a header: magic, step, which exchange of the step, how many numbers follow, their bytes, generation."""

KINDS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""What a message may hold, by the bytes of a number."""

LARGEST = 2**34
"""Bytes that a model may have."""

AHEAD = 3
"""Messages that one side may be ahead of the other before it has to wait."""

FOREVER = 1e7
"""Seconds that a reader waits for the next message; whoever needs it sooner closes the edge."""

Moment = tuple[int, int]
"""(step, which exchange of that step)."""

SIGN = -1
"""In place of an exchange: nothing follows, but the sender is there, and waits for somebody itself."""

SIGNS = 10
"""Times the usual patience that a process is waited for which gives signs of life alone."""


@dataclass
class Account:
    """What an edge has carried."""

    sent: int = 0
    """Bytes of payload."""
    received: int = 0
    waited: float = 0.0
    """Seconds spent waiting for the other side."""
    missed: int = 0
    """Exchanges that went without the other side."""


class Lost(Exception):
    """The other side is not there, or is not to be trusted; says why."""


class Refused(Lost):
    """The other side does not belong here."""


class Edge:
    """The link between processes `here` and `there`, open as long as `group` is."""

    def __init__(self, here: int, there: int, group: Group, generation: int) -> None:
        self.here, self.there, self.group, self.generation = here, there, group, generation
        self.account = Account()
        self.step_there = 0
        self._rank = 0 if here < there else 1
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._signs: list[tuple[Any, Tensor]] = []
        self._reader: threading.Thread | None = None
        self._line = threading.Lock()
        self._news = threading.Condition()
        self._inbox: deque[tuple[Moment, Tensor]] = deque()
        self._now: Moment = (0, 0)
        self._heard = self._heard_numbers = 0.0
        self._gone: Lost | None = None

    def admit(self, experiment: bytes, secret: bytes, step: int, deadline: float) -> None:
        """Let the other side in: both show that they know the secret and run the same experiment, and say their step.

        Each proves it on a number that the other has just drawn, so that an answer cannot be used again.
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
        """Wait until both sides are about to step."""
        self._swap(bytes(32), deadline)

    def share_model(self, model: Tensor | None, wanted: bool, deadline: float) -> Tensor | None:
        """Give the other side a model if it asks for one, and take its if `wanted`."""
        count = 0 if model is None else model.numel()
        offer = wanted.to_bytes(8) + count.to_bytes(16) + (0 if model is None else model.element_size()).to_bytes(8)
        theirs = self._swap(offer, deadline)
        asked, coming, size = (int.from_bytes(theirs[at]) for at in (slice(8), slice(8, 24), slice(24, 32)))
        work = self._guarded(self.group.send, model) if asked and model is not None else None
        taken = None
        if wanted and coming and size in KINDS and coming * size <= LARGEST:
            taken = torch.empty(coming, dtype=KINDS[size])
            self._take(taken, deadline)
        if work is not None:
            self._wait(work, deadline)
        return taken

    def listen(self, largest: int) -> None:
        """From now on take in whatever comes, in a thread of its own: the other side never waits for this one to read.

        A message has at most `largest` bytes.
        """
        reader = threading.Thread(target=self._read, args=(largest,), daemon=True)
        reader.start()
        self._reader = reader

    def send(self, moment: Moment, payload: Tensor, seconds: float) -> None:
        """Begin to send what nobody changes any more; wait only where the other side has fallen far behind."""
        self._settle(2 * AHEAD, seconds)
        with self._line:
            for message in (self._head(moment, payload.numel(), payload.element_size()), payload):
                self._under_way.append((self._guarded(self.group.send, message), message))
        self.account.sent += payload.nbytes

    def send_heartbeat(self, step: int) -> None:
        """Say that this process is there; nobody waits until that has left."""
        message = self._head((step, SIGN), 0, 4)
        with self._line:
            self._signs.append((self._guarded(self.group.send, message), message))

    def receive(self, moment: Moment, expected: int, dtype: torch.dtype, seconds: float) -> Tensor | None:
        """The numbers that the other side sent for this moment, or None if it has gone beyond it.

        It may take `seconds` for each message: one that is behind but catching up is waited for, and for some time
        one that is held up itself.
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
                    left = min(heard + seconds, numbers + SIGNS * seconds) - time.monotonic()
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
        """Wait until everything sent has left."""
        self._settle(0, seconds)

    def close(self) -> None:
        """Forget the connection; the other side notices."""
        with self._news:
            self._gone = self._gone or Lost("it was closed here")
            self._news.notify_all()
        with suppress(RuntimeError):        # gloo closes a connection when a wait for it runs out; its abort() does not
            self.group.recv([torch.empty(1)], 1 - self._rank, 1).wait(timedelta(milliseconds=1))
        if self._reader is not None:
            self._reader.join(timeout=5.0)

    def _read(self, largest: int) -> None:
        """Put what comes into the inbox; what is for the past is thrown away, of the future only so much is taken."""
        try:
            while True:
                moment, count, size = self._header()
                if moment[1] == SIGN:
                    with self._news:
                        self._heard = time.monotonic()
                        self._news.notify_all()
                    continue
                if count * size > largest:
                    raise Lost(f"it sent {count} numbers of {size} bytes, more than any message here has")
                payload = torch.empty(count, dtype=KINDS[size])
                self._take(payload, time.monotonic() + FOREVER)
                with self._news:
                    self._heard = self._heard_numbers = time.monotonic()
                    if moment >= self._now:
                        self._inbox.append((moment, payload))
                    self._news.notify_all()
                    self._news.wait_for(lambda: len(self._inbox) < AHEAD or self._gone is not None)
        except Lost as error:
            with self._news:
                self._gone = self._gone or error
                self._news.notify_all()

    def _settle(self, most: int, seconds: float) -> None:
        """Wait until no more than so many messages are under way."""
        began = time.monotonic()
        while len(self._under_way) > most:
            self._wait(self._under_way.popleft()[0], began + seconds)
        self.account.waited += time.monotonic() - began

    def _head(self, moment: Moment, count: int, size: int) -> Tensor:
        return torch.tensor([MAGIC, *moment, count, size, self.generation], dtype=torch.int64)

    def _header(self) -> tuple[Moment, int, int]:
        """The next message's moment, and how many numbers of how many bytes follow."""
        header = torch.empty(HEADER, dtype=torch.int64)
        self._take(header, time.monotonic() + FOREVER)
        magic, step, exchange, count, size, generation = header.tolist()
        if magic != MAGIC or size not in KINDS or count < 0:
            raise Lost("it does not speak this protocol")
        if generation != self.generation:
            raise Lost(f"it is of generation {generation}, not {self.generation}")
        return (step, exchange), count, size

    def _swap(self, mine: bytes, deadline: float) -> bytes:
        """Send 32 bytes and take the other side's."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        taken = torch.empty(32, dtype=torch.uint8)
        work = self._guarded(self.group.send, sent)
        self._take(taken, deadline)
        self._wait(work, deadline)
        return bytes(taken.tolist())

    def _take(self, buffer: Tensor, deadline: float) -> None:
        self._wait(self._guarded(self.group.recv, buffer), deadline)

    def _guarded(self, call: Callable[..., Any], message: Tensor) -> Any:
        try:
            return call([message], 1 - self._rank, 0)
        except RuntimeError as error:
            raise Lost(_reason(error)) from None

    def _wait(self, work: Any, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise Lost(_reason(error)) from None


def open_edge(store: Store, here: int, there: int, host: str, seconds: float) -> Edge:
    """The link to a process that opens it at the same time; raises `Lost` where it does not within `seconds`.

    The lower of the two offers a generation, the higher accepts it; what is left of earlier ones is never met. An offer
    is taken once: by the side that accepts it, or by the one that withdraws it, so that nobody accepts a stale one.
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
        raise Lost("it did not come") from None
    try:
        left = max(deadline - time.monotonic(), 1.0)
        group = open_group(Meeting(place, str(generation)), int(here == high), 2, host, left)
    except RuntimeError as error:
        raise Lost(_reason(error)) from None
    return Edge(here, there, group, generation)


def _reason(error: RuntimeError) -> str:
    """Gloo's words in few."""
    text = str(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return "it did not answer in time"
    if "closed" in text.lower() or "reset" in text.lower() or "broken pipe" in text.lower():
        return "it closed the connection"
    return text.splitlines()[0][:120]
