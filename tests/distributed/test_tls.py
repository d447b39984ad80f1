"""The TLS channel: full duplex, bounded, and closed without loss."""

import ssl
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
from connections import at_once, channels, shaken, soon
from federations import Sites

from quasiglobal.peers.edge import Edge, Expected, Lost

MB = 2**18
"""Numbers of float32 in a mebibyte."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return Sites(tmp_path_factory.mktemp("sites"), "complete:2", 2)


@pytest.fixture
def pair(sites):
    ends = channels(sites)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("size", [8 * MB, pytest.param(100 * MB, marks=pytest.mark.slow)])
def test_both_sides_send_at_once_with_heartbeats_in_between(pair, size):
    def talk(end, seed):
        def work():
            for turn in range(3):
                sendings = [end.send(torch.full((size,), float(seed + turn)))]
                sendings += [end.send(torch.full((6,), turn)) for _ in range(20)]
                big, small = torch.empty(size), torch.empty(6, dtype=torch.int64)
                end.recv_into(big, soon(60))
                assert (big == 100.0 - seed + turn).all()
                for _ in range(20):
                    end.recv_into(small, soon(60))
                    assert (small == turn).all()
                for sending in sendings:
                    sending.wait(soon(60))
        return work

    at_once(talk(pair[0], 0), talk(pair[1], 100))


def test_every_type_and_size_arrives_as_it_is(pair):
    for value in (torch.zeros(0), torch.rand(3, 5).bfloat16(), torch.rand(7, dtype=torch.float64), torch.arange(3)):
        found = torch.empty_like(value)
        sending = pair[0].send(value)
        pair[1].recv_into(found, soon())
        sending.wait(soon())
        assert torch.equal(found, value)


def test_closing_while_the_other_side_sends_ends_both(pair):
    sending = pair[0].send(torch.zeros(64 * MB))
    pair[1].recv_into(torch.empty(10), soon())
    pair[1].close()
    with pytest.raises(Lost, match="closed"):
        pair[0].recv_into(torch.empty(1), soon())
    with pytest.raises(Lost, match="closed"):
        pair[1].recv_into(torch.empty(1), soon())
    with pytest.raises(Lost, match="closed"):
        pair[1].send(torch.empty(1))
    began = time.monotonic()
    with suppress(Lost):                                    # it leaves, or the other side is gone
        sending.wait(soon(20))
    assert time.monotonic() - began < 10
    assert not pair[0].alive
    assert not pair[1].alive


def test_messages_that_left_arrive_although_the_sender_closed_with_unread_ones(pair):
    model, found = torch.rand(8 * MB), torch.empty(8 * MB)
    for _ in range(10):
        pair[1].send(torch.zeros(100))

    def leave():
        pair[0].send(model).wait(soon())
        pair[0].close()

    def read_late():
        time.sleep(0.3)
        pair[1].recv_into(found, soon())

    at_once(leave, read_late)
    assert torch.equal(found, model)


def test_a_peer_that_never_reads_costs_time_and_no_memory(pair):
    model = torch.zeros(32 * MB)
    before = psutil.Process().memory_info().rss
    sending = pair[0].send(model)
    with pytest.raises(Lost, match="in time"):
        sending.wait(soon(0.5))
    assert psutil.Process().memory_info().rss - before < 32e6


def test_bytes_that_do_not_come_in_time_end_the_connection(pair):
    with pytest.raises(Lost, match="in time"):
        pair[0].recv_into(torch.empty(1), soon(0.2))
    with pytest.raises(Lost, match="closed"):
        pair[1].recv_into(torch.empty(1), soon())


def test_no_session_can_be_resumed_and_no_older_protocol_spoken(sites):
    server, client = shaken(*sites.folders)
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)                                      # a ticket would come before this
    assert client.version() == "TLSv1.3"
    assert not client.session.has_ticket
    old = sites.folders[0].client_context()
    assert old.minimum_version == ssl.TLSVersion.TLSv1_3
    server.close()
    client.close()


def test_an_edge_moves_to_another_connection_without_losing_a_message(sites):
    earlier = set(threading.enumerate())
    ends = channels(sites)
    edges = [Edge(k, 1 - k, ends[k], 0) for k in range(2)]
    for edge in edges:
        edge.listen(10_000)
    steps, noted = 300, []
    edges[1].on_note = noted.append

    def talk(edge):
        def work():
            for step in range(1, steps):
                edge.send((step, 0), torch.full((1000,), float(step)), 10)
                got = edge.receive((step, 0), Expected(1000, torch.float32), 10)
                assert got is not None
                assert (got == step).all()
        return work

    def move():
        for k in range(3):
            time.sleep(0.02)
            fresh = channels(sites)
            ends.extend(fresh)
            edges[0].adopt(fresh[0])
            time.sleep(0.01 * k)                            # one side is later than the other
            edges[1].adopt(fresh[1])
            edges[0].send_note(b"n" * (k + 1))
            time.sleep(0.05)

    at_once(talk(edges[0]), talk(edges[1]), move)
    for edge in edges:
        edge.send_heartbeat(0)
        edge.finish(5)
    deadline = soon(5)
    while [end.alive for end in ends] != [False] * 6 + [True] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [end.alive for end in ends] == [False] * 6 + [True] * 2
    assert noted == [b"n", b"nn", b"nnn"]
    for edge in edges:
        edge.close()
    deadline = soon(5)
    while any(thread.name == "tls" for thread in {*threading.enumerate()} - earlier) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "tls" for thread in {*threading.enumerate()} - earlier)
