"""Any bytes, from strangers and from neighbours: no thread dies, and no memory beyond the model's size is taken."""

import json
import random
import socket
import time

import pytest
import torch
from connections import soon
from federations import Sites
from hypothesis import given, settings
from hypothesis import strategies as st

from quasiglobal.peers import greeting
from quasiglobal.peers.edge import HEARTBEAT, MAGIC, MOST_NOTE, MOVE, NOTE, Channel, Edge, Expected, Lost, Sending
from quasiglobal.peers.greeting import Greeting
from quasiglobal.peers.membership import Terms
from quasiglobal.peers.memory import MessageMemory
from quasiglobal.peers.sites import SiteOpener

LARGEST = 800

BOUNDED = settings(max_examples=60, deadline=None)

MINE = Greeting(greeting.PROTOCOL, "1.0", "e", "t", 0, 0, 1, "s")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)

WORDS = st.dictionaries(st.sampled_from([*MINE.__dict__, "refused", "accepted"]), VALUES)


def framed(text):
    return greeting.START.pack(greeting.MAGIC, min(len(text), 65535)) + text


def greeted(data):
    """Greet a peer that sends these bytes and closes; return its greeting, or the reason why there is none."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            return greeting.exchange(ours, MINE, soon(5))
        except Lost as error:
            why = str(error)
    assert why.isprintable()
    assert len(why) < 500
    return why


@BOUNDED
@given(st.binary(max_size=3000))
def test_any_bytes_for_a_greeting_are_refused(data):
    assert isinstance(greeted(data), str)
    assert isinstance(greeted(framed(data)), str)


@BOUNDED
@given(WORDS, st.binary(max_size=10))
def test_any_words_for_a_greeting_are_refused_or_understood(words, then):
    said = framed(json.dumps(MINE.__dict__ | words).encode())
    found = greeted(said + framed(b'{"accepted": true}') + then)
    if isinstance(found, Greeting):
        assert (found.experiment, found.topology) == ("e", "t")
        assert all(type(value) is type(getattr(MINE, name)) for name, value in found.__dict__.items())
        assert 0 <= found.step <= greeting.MOST_WHOLE
        assert found.library.isprintable()


def test_a_greeting_as_it_should_be_is_understood():
    said = framed(json.dumps(MINE.__dict__ | {"step": 7, "further": 1}).encode())
    assert greeted(said + framed(b'{"accepted": true}')).step == 7
    assert greeted(said) == "it closed the connection"
    assert greeted(framed(b"[" * 2000)) == greeting.FOREIGN
    assert greeted(said + framed(b'{"refused": "because\\n\\u001b[2J"}')) == "it refused this node: because??[2J"


class Fed(Channel):
    """A channel whose other side sent these bytes and closed."""

    def __init__(self, data):
        self.left, self.largest = data, 0

    def send(self, message):
        return Done()

    def recv_into(self, buffer, deadline):
        view = buffer.view(torch.uint8)
        self.largest = max(self.largest, view.numel())
        if view.numel() > len(self.left):
            raise Lost("it closed the connection")
        if view.numel():
            view.copy_(torch.frombuffer(bytearray(self.left[: view.numel()]), dtype=torch.uint8))
        self.left = self.left[view.numel() :]

    def close(self):
        pass


class Done(Sending):
    def wait(self, deadline):
        pass


WHOLE = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.tuples(
    st.just(MAGIC) | WHOLE, WHOLE | st.integers(-2, 5),
    st.sampled_from([0, 1, HEARTBEAT, NOTE, -4]) | WHOLE, WHOLE | st.integers(0, 300),
    st.sampled_from([1, 2, 4, 8]) | WHOLE, st.just(0) | WHOLE,
).map(lambda numbers: torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())


@BOUNDED
@given(st.lists(HEADERS | st.binary(max_size=400), max_size=8).map(b"".join))
def test_any_bytes_for_messages_end_the_edge_and_take_no_memory(data):
    fed, notes = Fed(data), []
    edge = Edge(0, 1, fed, 0)
    edge.on_note = notes.append
    edge._now = (2**62, 0)                                  # nothing waits in the inbox
    edge._largest = LARGEST
    edge._read(MessageMemory())
    assert edge._gone is not None
    assert fed.largest <= max(LARGEST, 48, MOST_NOTE)
    assert sum(map(len, notes)) <= len(data)
    with pytest.raises(Lost):
        edge.receive((2**62 + 1, 0), Expected(1, torch.float32), 0.1)


def test_a_move_to_nowhere_ends_the_edge(monkeypatch):
    monkeypatch.setattr("quasiglobal.peers.edge.ADOPTION", 0.1)
    header = torch.tensor([MAGIC, 0, MOVE, 0, 1, 0]).numpy().tobytes()
    edge = Edge(0, 1, Fed(header * 2), 0)
    edge._largest = LARGEST
    edge._read(MessageMemory())
    assert "moved to a connection" in str(edge._gone)


@pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_raw_bytes_at_every_stage_of_a_connection_disturb_no_neighbour(tmp_path, count):
    sites = Sites(tmp_path, "complete:2", 2)
    first = SiteOpener(sites.folders[0])
    first.begin(Terms(0, [1], "e", "t", 2.0, lambda: 0))
    host, port = sites.addresses[0].split(":")
    draw, hello = random.Random(0), framed(json.dumps(MINE.__dict__ | {"node": 1}).encode())
    for case in range(count):
        with socket.create_connection((host, int(port)), 5) as connection:
            start = draw.choice([b"", hello, b"\x16\x03\x01", b"GET / HTTP/1.0\r\n\r\n"])
            data = start + draw.randbytes(draw.randrange(3000))
            try:
                if case % 2:
                    connection = sites.folders[1].client_context().wrap_socket(connection)
                connection.sendall(data)
                if case % 4 < 2:
                    connection.settimeout(0.05)
                    connection.recv(100)
            except OSError:
                pass
            finally:
                connection.close()
    deadline = soon(20)
    while first._listener._waiting and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not first._listener._waiting
    second = SiteOpener(sites.folders[1])
    second.begin(Terms(1, [0], "e", "t", 2.0, lambda: 0))
    mine = second.open(0, 5)
    theirs = first.open(1, 5)
    for edge in (mine, theirs):
        edge.listen(LARGEST)
    mine.send((1, 0), torch.ones(3), 5)
    assert theirs.receive((1, 0), Expected(3, torch.float32), 5).tolist() == [1, 1, 1]
    for opener in (first, second):
        opener.stop()
    mine.close()
    theirs.close()
