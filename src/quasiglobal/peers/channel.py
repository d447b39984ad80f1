"""The transport of one edge: bytes in both directions, in order, between two processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Lost(Exception):
    """The other side is unreachable or sent invalid data; the message is the reason."""


class Refused(Lost):
    """The other side failed authentication: another experiment or another secret."""


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

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the other side detects this, and calls that wait here raise `Lost`."""
