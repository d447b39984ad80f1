"""Process groups and stores of torch.distributed (gloo); typed here, since its stubs omit most of them."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from quasiglobal.peers.channel import Channel, Lost, Sending
from quasiglobal.peers.shared import LARGE, file_of, new_shared, read_file

__all__ = ["GlooChannel", "Group", "Meeting", "Store", "TCPStore", "open_group", "until"]

Group = Any
"""A ProcessGroupGloo."""

READ = 2
"""Tag of the word that a message in shared memory has been read; `close` uses 1."""


Value = TypeVar("Value")


def until(condition: Callable[[], Value], seconds: float) -> Value:
    """Poll with back-off; return the first truthy value."""
    began, pause = time.monotonic(), 0.002
    while not (value := condition()):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"no answer within {seconds:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return value


class Meeting(Store):
    """A store, or a prefix of it, with one connection that many threads share; it waits by polling.

    A c10d store blocks its connection while it waits. One connection per edge would be slow where name resolution is
    slow: c10d looks up the name of the other side for each connection.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        super().__init__()
        outer = store if isinstance(store, Meeting) else None
        self._connection: list[Any] = outer._connection if outer else [store]
        self._prefix: str = (outer._prefix if outer else "") + (f"{prefix}/" if prefix else "")

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._connection[0].set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait until the key exists, then read its value."""
        self.wait([key])
        value: bytes = self._connection[0].get(self._prefix + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum."""
        total: int = self._connection[0].add(self._prefix + key, amount)
        return total

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        found: bool = self._connection[0].check([self._prefix + key for key in keys])
        return found

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until all keys exist; raise RuntimeError on timeout, as any store does."""
        try:
            until(lambda: self.check(keys), timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError(f"timed out: {error}") from None

    def reconnect(self) -> None:
        """Reconnect to the store; raise OSError if it is unreachable."""
        client = self._connection[0]
        socket.create_connection((client.host, client.port), timeout=1.0).close()   # c10d itself would block
        self._connection[0] = client.clone()


def open_group(store: Store, rank: int, size: int, host: str, seconds: float) -> Group:
    """Open a group of the `size` processes that call this with the same store; listen at this machine's `host`."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


class GlooChannel(Channel):
    """A gloo group of two, opened through a store; this process has `rank` 0 or 1 in it.

    If the other process can read the memory of this one, large messages in shared memory are not sent: it is told where
    they are, and says when it has read them.
    """

    def __init__(self, store: Store, rank: int, host: str, seconds: float) -> None:
        self._other = 1 - rank
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
        return _Sequence(told, self._post(message) if where is None else self._await(torch.empty(1), message))

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
        self._take(buffer).wait(deadline)

    def _meet(self, deadline: float) -> tuple[int, bool]:
        """Return the number of the other process on its machine, and whether it can read memory of this one.

        Each side says what it read in the other's memory, as a hash: it may have been led to other memory.
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

    def _post(self, message: Tensor, tag: int = 0) -> Sending:
        return _Sending(_work(self._group.send, message, self._other, tag), message)

    def _take(self, buffer: Tensor) -> Sending:
        return _Sending(_work(self._group.recv, buffer, self._other, 0), buffer)

    def _await(self, word: Tensor, message: Tensor) -> Sending:
        """The other side's word that it has read a message."""
        return _Sending(_work(self._group.recv, word, self._other, READ), word, message)

    def close(self) -> None:
        """Close the connection."""
        with suppress(RuntimeError):        # gloo closes a connection when a wait on it times out; abort() does not
            self._group.recv([torch.empty(1)], self._other, 1).wait(timedelta(milliseconds=1))


class _Sending(Sending):
    """A work of gloo; until it is done, the memory of the messages is read or written."""

    def __init__(self, work: Any, *messages: Tensor) -> None:
        self._work, self._messages = work, messages

    def wait(self, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise Lost(_reason(error)) from None


class _Sequence(Sending):
    """One sending after another."""

    def __init__(self, *parts: Sending) -> None:
        self._parts = parts

    def wait(self, deadline: float) -> None:
        for part in self._parts:
            part.wait(deadline)


def _work(call: Callable[..., Any], message: Tensor, other: int, tag: int) -> Any:
    try:
        return call([message], other, tag)
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
