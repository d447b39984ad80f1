"""Edges through a store: process groups of torch.distributed (gloo); typed here, since its stubs omit most of them."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.distributed import ProcessGroup

from quasiglobal.peers.edge import Channel, Edge, Lost, Sending
from quasiglobal.peers.membership import ADMISSION, Opener, Terms
from quasiglobal.peers.memory import LARGE, file_of, new_shared, read_file
from quasiglobal.peers.rendezvous import Meeting, until

Way: TypeAlias = Store | Opener
"""A store where processes meet, or an opener."""

READ = 2
"""Tag of the word that a message in shared memory has been read; `close` uses 1."""

MARKS, MARK = 1024, 0xA5
"""Number and value of the bytes that are marked in a buffer, to see whether a large message arrives."""

MOST_GENERATION = 2**62
"""Generations are random numbers up to this one."""

REPEAT = 0.5
"""Seconds after which an offer in the store is written again: a stranger may have overwritten it."""


class GlooOpener(Opener):
    """Opens gloo groups of two through a store; admits processes with the same secret (QG_SECRET)."""

    shares_memory = True

    def __init__(self, store: Store, host: str) -> None:
        super().__init__()
        self.store, self.host, self._closing = Meeting(store), host, threading.Event()
        self._secret = os.environ.get("QG_SECRET", "").encode()

    def begin(self, terms: Terms) -> None:
        """Nothing is opened before it is needed."""
        self._terms = terms

    def open(self, there: int, seconds: float) -> Edge:
        """Open an edge, and authenticate both sides."""
        terms = self._terms
        try:
            edge = open_edge(self.store, terms.rank, there, self.host, seconds, self._closing)
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

    def stop(self) -> None:
        """Open no further edges."""
        self._closing.set()

    def group(self, rank: int, size: int, seconds: float) -> ProcessGroup:
        """Open a group of all processes through the store."""
        return open_group(Meeting(self.store, "world/0"), rank, size, self.host, seconds)


def open_edge(
    store: Store, here: int, there: int, host: str, seconds: float, closing: threading.Event | None = None
) -> Edge:
    """Open the link to a process that opens it at the same time; raise `Lost` if it does not within `seconds`.

    `closing` is set when this process does not need the link any more.

    A generation is the random number of an attempt to open this link. The lower rank offers a generation and the higher
    rank accepts it; store keys of earlier generations are never read.
    An offer is taken once, by the side that accepts it or the side that withdraws it: a stale offer is never accepted.
    The store is open to strangers: invalid offers are ignored, and an offer that was overwritten is repeated.
    """
    low, high = sorted((here, there))
    place = Meeting(store, f"edge/{low}-{high}")
    deadline = time.monotonic() + seconds

    def needed() -> None:
        if closing is not None and closing.is_set():
            raise TimeoutError

    def takes(offer: int) -> bool:
        return place.add(f"taken/{offer}", 1) == 1

    try:
        if here == low:
            generation, offered = 1 + secrets.randbelow(MOST_GENERATION), -math.inf

            def is_taken() -> bool:
                nonlocal offered
                needed()
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
                needed()
                text = place.get("offer") if place.check(["offer"]) else b""
                offer = int(text) if text.isdigit() and len(text) <= len(str(MOST_GENERATION)) else 0
                return offer if 0 < offer <= MOST_GENERATION and takes(offer) else 0

            generation = until(accepted, seconds)
    except TimeoutError:
        raise Lost("it did not connect in time") from None
    left = max(deadline - time.monotonic(), 1.0)
    channel = GlooChannel(Meeting(place, str(generation)), int(here == high), host, left)
    return Edge(here, there, channel, generation)


def open_group(store: Store, rank: int, size: int, host: str, seconds: float) -> ProcessGroup:
    """Open a group of the `size` processes that call this with the same store; listen at this machine's `host`."""
    gloo: Any = ProcessGroupGloo            # its operations are typed as those of a ProcessGroup
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [gloo.create_device(hostname=host)]
    opened: ProcessGroup = gloo(store, rank, size, options)
    return opened


class GlooChannel(Channel):
    """A gloo group of two, opened through a store; this process has `rank` 0 or 1 in it.

    If the other process can read the memory of this one, large messages in shared memory are not sent: it receives
    their location, and confirms that it has read them.
    """

    def __init__(self, store: Store, rank: int, host: str, seconds: float) -> None:
        self._other = 1 - rank
        self._marked: Tensor | None = None
        try:
            self._group = open_group(store, rank, 2, host, seconds)
        except RuntimeError as error:
            raise Lost(_reason(error)) from None
        self._process, self._is_read = self._meet(time.monotonic() + seconds)

    def send(self, message: Tensor) -> Sending:
        """Start sending a message."""
        if message.nbytes < LARGE:
            return self._post(message)
        where = file_of(message) if self._is_read else None
        told = self._post(torch.tensor(where or (-1, 0)))
        sent = self._post(message) if where is None else self._take(torch.empty(1), READ)
        return _Sending([*told.works, *sent.works], *told.messages, *sent.messages, message)

    def recv_into(self, buffer: Tensor, deadline: float) -> None:
        """Fill the buffer with the next message, which has its size."""
        if buffer.nbytes >= LARGE:
            where = torch.empty(2, dtype=torch.int64)
            self._take(where).wait(deadline)
            file, position = where.tolist()
            if file >= 0:
                try:
                    read_file(self._process, file, position, buffer)
                except (OSError, OverflowError):
                    raise Lost("its shared memory cannot be read") from None
                self._post(torch.empty(1), READ).wait(deadline)
                return
            numbers = buffer.view(torch.uint8)
            self._marked = numbers[:: numbers.numel() // MARKS].fill_(MARK)
        self._take(buffer).wait(deadline)
        self._marked = None

    def moved(self) -> tuple[int, int]:
        """The number of marks that the arriving message has overwritten: gloo does not say how much of it is here."""
        marked = self._marked
        return 0, 0 if marked is None else int((marked != MARK).sum())

    def _meet(self, deadline: float) -> tuple[int, bool]:
        """Return the number of the other process on its machine, and whether it can read memory of this one.

        Each side sends a hash of the bytes that it read, since the location may be another process's memory.
        """
        proof = new_shared(LARGE)
        number = secrets.token_bytes(32)
        proof[:32] = np.frombuffer(number, dtype=np.uint8)
        file, _ = file_of(torch.from_numpy(proof)) or (-1, 0)
        process, theirs = self._swap(torch.tensor([os.getpid(), file]), deadline).tolist()
        found = torch.zeros(32, dtype=torch.uint8)
        with suppress(OSError, OverflowError):
            read_file(process, theirs, 0, found)
        digest = torch.frombuffer(bytearray(hashlib.sha256(bytes(found.tolist())).digest()), dtype=torch.uint8)
        answer = bytes(self._swap(digest, deadline).tolist())
        return process, file >= 0 and answer == hashlib.sha256(number).digest()

    def _swap(self, mine: Tensor, deadline: float) -> Tensor:
        theirs, sending = torch.empty_like(mine), self._post(mine)
        self._take(theirs).wait(deadline)
        sending.wait(deadline)
        return theirs

    def _post(self, message: Tensor, tag: int = 0) -> _Sending:
        return self._begun(self._group.send, message, tag)

    def _take(self, buffer: Tensor, tag: int = 0) -> _Sending:
        return self._begun(self._group.recv, buffer, tag)

    def _begun(self, call: Callable[[list[Tensor], int, int], Work], message: Tensor, tag: int) -> _Sending:
        try:
            return _Sending([call([message], self._other, tag)], message)
        except RuntimeError as error:
            raise Lost(_reason(error)) from None

    def close(self) -> None:
        """Close the connection."""
        with suppress(RuntimeError):        # gloo closes a connection when a wait on it times out; abort() does not
            self._group.recv([torch.empty(1)], self._other, 1).wait(timedelta(milliseconds=1))


class _Sending(Sending):
    """Works of gloo, one after another; keeps the messages alive until they are done."""

    def __init__(self, works: list[Work], *messages: Tensor) -> None:
        self.works, self.messages = works, messages

    def wait(self, deadline: float) -> None:
        for work in self.works:
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise Lost(_reason(error)) from None


def _reason(error: RuntimeError) -> str:
    """Shorten gloo's error message."""
    text = str(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return "it did not answer in time"
    if "closed" in text.lower() or "reset" in text.lower() or "broken pipe" in text.lower():
        return "it closed the connection"
    return text.splitlines()[0][:120]
