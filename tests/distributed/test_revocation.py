"""A site that is revoked, or whose certificate ended, is cut off, whatever it did before."""

import itertools
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
from connections import soon
from federations import Sites
from test_networks import Relayed, closes
from test_sites import Meeting, until

from quasiglobal.peers import greeting, relay
from quasiglobal.peers import sites as module
from quasiglobal.peers.certificates import now
from quasiglobal.peers.edge import MAGIC, Lost
from quasiglobal.peers.folders import SiteFolder


@pytest.fixture
def meeting(tmp_path):
    made = Meeting(tmp_path)
    yield made
    made.close()


class Liar:
    """Bare connections of site 1, which it can hold at any stage."""

    def __init__(self, sites, session="session"):
        self.sites, self.session = sites, session

    def connection(self):
        host, port = self.sites.addresses[0].split(":")
        return self.sites.folders[1].client_context().wrap_socket(socket.create_connection((host, int(port)), 10))

    def greeted(self, renews=0):
        made = self.connection()
        greeting.exchange(made, self.greeting(renews), soon(10))
        return made

    def greeting(self, renews=0):
        return greeting.Greeting(1, module._version(), "e", "t", 1, 0, 2, self.session, renews)


def message(step, exchange, count):
    return torch.tensor([MAGIC, step, exchange, count, 4, 0]).numpy().tobytes() + bytes(4 * count)


@pytest.mark.parametrize("half", ["first", "renewed"])
@pytest.mark.parametrize("why", ["revoked", "ended"])
def test_a_site_that_closes_half_of_its_connection_is_cut_too(meeting, tmp_path, monkeypatch, why, half):
    """Either its messages for the last step wait, or it sends on the connection that it has renewed."""
    monkeypatch.setattr(module, "WATCH", 0.1)
    sites = Sites(tmp_path, "complete:2", 2)
    first, liar = meeting.site(sites.folders[0]), Liar(sites)
    with liar.greeted() as sends:
        edge = first.open(1, 5)
        meeting.edges.append(edge)
        edge.listen(1000)
        if half == "renewed":
            time.sleep(0.2)
        with liar.greeted(renews=1) if half == "renewed" else sends as takes:
            for exchange in range(3):
                sends.sendall(message(100, exchange, 3))
            until(lambda: len(edge._inbox) == 3)
            socket.socket.shutdown(takes, socket.SHUT_WR)
            until(lambda: edge.channel._hung_up)
            edge.send((1, 0), torch.ones(3), 5)
            if why == "revoked":
                sites.organiser.revoke("site1")
                sites.folders[0].accept(sites.text)
            else:
                first._links._newest[1].ends = now() - timedelta(seconds=1)
            until(lambda: edge._gone is not None)
            with pytest.raises(Lost, match=why):
                edge.send((2, 0), torch.ones(3), 5)


def replaced(sites):
    """Revoke the key of site 1, and give its number to another one."""
    sites.organiser.revoke("site1")
    other = SiteFolder(sites.folders[1].path.parent / "replaced")
    sites.organiser.approve([other.request("trial", "site1", sites.addresses[1])[1]], 2, [(0, 1)])
    sites.folders[0].accept(sites.text)


def test_a_site_that_is_revoked_while_it_is_admitted_is_not_admitted(meeting, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    sites = Sites(tmp_path, "complete:2", 2)
    first, liar = meeting.site(sites.folders[0]), Liar(sites)
    with liar.connection() as slow:
        greeting._send(slow, asdict(liar.greeting()), soon(5))
        assert greeting._receive(slow, soon(5))["node"] == 0
        assert greeting._receive(slow, soon(5)) == greeting.ACCEPTED
        replaced(sites)
        until(lambda: first.federation.serial == 4)
        greeting.accept(slow, soon(5))
        with pytest.raises(Lost):
            meeting.edges.append(first.open(1, 2))
    assert not meeting.recorded(first, "connected")


def test_a_site_that_is_revoked_while_a_relay_admits_it_is_not_relayed(meeting, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    sites = Relayed(tmp_path)
    third = meeting.site(sites.folders[2], ())
    host, port = sites.addresses[2].split(":")
    context = sites.folders[1].client_context()
    context.set_alpn_protocols([relay.PROTOCOL])
    with context.wrap_socket(socket.create_connection((host, int(port)), 10)) as slow:
        greeting._send(slow, {"meet": 0}, soon(5))
        assert greeting._receive(slow, soon(5)) == greeting.ACCEPTED
        sites.organiser.revoke("site1")
        sites.folders[2].accept(sites.text)
        until(lambda: third.federation.serial == 3)
        with relay.bare(slow) as waits:
            waits.settimeout(10)
            assert closes(waits)
    until(lambda: not third._relay.busy)


def due(link):
    link.begun, link.ends = now() - timedelta(minutes=1), now() + timedelta(seconds=15)


def test_a_neighbour_that_refuses_renewals_keeps_no_other_connection_from_being_renewed(meeting, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    sites = Sites(tmp_path, "complete:3", 3)
    liar, second, third = (meeting.site(sites.folders[k], (0, 1, 2)) for k in range(3))
    for one in (liar, second):
        assert not any(isinstance(edge, str) for edge in meeting.met(one, third))
    for edge in meeting.edges:
        edge.listen(1000)
    texts = map(str, itertools.count())
    liar._objection = lambda *_: next(texts)
    for there in (0, 1):
        due(third._links.to(there))
    until(lambda: meeting.recorded(second, "renewed"))
    assert not [line for line in meeting.recorded(third, "refused") if line["who"] == "federation"]


def test_a_neighbour_that_delays_a_renewal_does_not_end_the_watch(meeting, tmp_path, monkeypatch):
    """It ends its edge meanwhile: this side dials again, and that connection fails first."""
    monkeypatch.setattr(module, "WATCH", 0.1)
    sites = Sites(tmp_path, "complete:2", 2)
    first, second = (meeting.site(folder) for folder in sites.folders)
    for edge in meeting.met(first, second):
        edge.listen(1000)
    delayed, failed = threading.Event(), threading.Event()

    def connected(address, deadline, closing, hold, proxy):
        made = socket.create_server(("127.0.0.1", 0))
        hold(made)
        if delayed.is_set():
            raise OSError("Connection refused")
        delayed.set()
        failed.wait(10)
        return made, deadline

    monkeypatch.setattr(module, "connected", connected)
    due(second._links.to(0))
    assert delayed.wait(10)
    with pytest.raises(Lost, match="Connection refused"):
        second.open(0, 1)
    failed.set()
    sites.organiser.extend(40)
    sites.folders[1].accept(sites.text)
    until(lambda: second.federation.serial == 3)
