"""Sites in closed networks: a cap on what they send, an HTTP proxy, and a third site that relays."""

import itertools
import math
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta

import hosts
import numpy as np
import psutil
import pytest
import torch
from commands import QG, wait_for
from connections import at_once, channels, soon
from federations import Sites, free_ports
from owners import Owners
from proxies import proxy, tinyproxy
from test_federated import audit, same_as_the_simulator
from test_sites import Meeting, certified, until

from quasiglobal.engines.distributed import LateModels
from quasiglobal.errors import InputError
from quasiglobal.peers import relay, sites
from quasiglobal.peers.bandwidth import Cap, read_bandwidth
from quasiglobal.peers.certificates import now
from quasiglobal.peers.dialling import CREDENTIALS, Proxy, read_proxy
from quasiglobal.peers.edge import Edge, Expected, Lost, Refused
from quasiglobal.peers.greeting import refuse
from quasiglobal.peers.membership import Membership, Terms
from quasiglobal.peers.reports import MOST_REPORTS
from quasiglobal.peers.sites import SiteOpener


@pytest.fixture
def meeting(tmp_path):
    made = Meeting(tmp_path)
    yield made
    made.close()


def talk(edges, count=1000, steps=3):
    """Assert that messages pass in both directions; the first step of a new edge is 1."""
    for edge in edges:
        if not edge.listening:
            edge.listen(8 * count)
    for step in range(1, steps + 1):
        for k in (0, 1):
            edges[k].send((step, 0), torch.full((count,), float(k)), 10)
        for k in (0, 1):
            assert (edges[k].receive((step, 0), Expected(count, torch.float32), 10) == 1 - k).all()


class Three(Owners):
    """Three owners with a graph of three nodes."""

    def __init__(self, folder, topology):
        super().__init__(folder, epochs=3)
        toml = folder / "experiment.toml"
        toml.write_text(toml.read_text().replace("ring:4", topology))
        with np.load(folder / "all.npz") as data:
            mine = data["owner"] < 3
            kept = {name: values if name.endswith("_test") else values[mine] for name, values in data.items()}
        np.savez(folder / "all.npz", **kept)


@pytest.mark.slow
def test_nodes_behind_a_proxy_and_a_relay_get_what_the_simulator_gets(tmp_path):
    """Two sites only dial, one of them through a proxy and slowly; the third is their neighbour, and relays."""
    of, three = Relayed(tmp_path), Three(tmp_path, "complete:3")
    with ExitStack() as stack:
        url, heads = stack.enter_context(proxy())
        stack.callback(three.close)
        words = [["--bandwidth", "20mbit"], ["--proxy", url], []]
        nodes = [three.join(k, of.folders[k], "--device", "cpu", *words[k]) for k in range(3)]
        for k, process in enumerate(nodes):
            assert "continues without" not in three.said(process, k)
    same_as_the_simulator(tmp_path, range(3))
    assert "node 1 (site1), through site2, node 2 (site2), 127.0.0.1" in three.printed(0).read_text()
    assert len({head.split()[1] for head in heads}) == 1    # the relay, which is a neighbour too
    (opened,), (closed,) = audit(tmp_path, 2, "relay opened"), audit(tmp_path, 2, "relay closed")
    assert opened["nodes"] == [0, 1]
    assert min(closed["bytes"]) > 15 * 8 * 20_000           # 15 models of 26,122 numbers
    assert [line.get("relay") for line in sorted(audit(tmp_path, 0, "connected"), key=str)].count(2) == 1


@pytest.mark.slow
def test_a_relay_has_written_its_result_while_it_stays_for_others_and_sigterm_ends_it(tmp_path):
    of, three = Relayed(tmp_path), Three(tmp_path, "complete:3")
    busy = "from quasiglobal import cli; from quasiglobal.peers.relay import Relay; Relay.busy = True; cli.main()"
    programs = {2: ("-c", busy)}                            # as if a site waited there for ever
    with ExitStack() as stack:
        stack.callback(three.close)
        nodes = [three.join(k, of.folders[k], program=programs.get(k, QG)) for k in range(3)]
        for k in (0, 1):
            three.said(nodes[k], k)
        wait_for(lambda: list(tmp_path.glob("runs2/*/summary.json")))
        time.sleep(1)
        assert nodes[2].poll() is None
        nodes[2].send_signal(signal.SIGTERM)
        three.said(nodes[2], 2)
    assert audit(tmp_path, 2, "finished")[0]["status"] == "finished"


@pytest.mark.slow
@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
def test_hosts_without_a_way_to_each_other_train_through_tinyproxy_and_a_relay(tmp_path, monkeypatch):
    """Host 0 reaches the relay alone, host 1 the proxy alone, and nobody reaches them."""
    of_debian = tinyproxy(tmp_path / "debian")
    with ExitStack() as stack:
        net = stack.enter_context(hosts.on_a_bridge(4))
        for here, there in ((0, 1), (0, 3), (1, 0), (1, 2)):
            hosts.ip("-n", net.name(here), "route", "add", "unreachable", f"{net.address(there)}/32")
        (tmp_path / "proxy.conf").write_text(
            f"Port 3128\nListen {net.address(3)}\nTimeout 600\nBasicAuth basel secret\nConnectPort 7443\n"
        )
        serving = subprocess.Popen([*net.inside(3), of_debian, "-d", "-c", tmp_path / "proxy.conf"])
        stack.callback(serving.wait)
        stack.callback(serving.kill)
        three = Three(tmp_path, "complete:3")
        stack.callback(three.close)
        of = Sites(tmp_path, "complete:3", 3, addresses=[None, None, f"{net.address(2)}:7443"], relays=[2])
        url, short = f"http://{net.address(3)}:3128", ["--patience", "5"]
        alone = three.join(1, of.folders[1], "--proxy", url, *short, before=net.inside(1))
        said = three.said(alone, 1, status=2)
        assert f"the proxy {net.address(3)}:3128 does not connect to {net.address(2)}:7443: 407 " in said
        assert f"set {CREDENTIALS}=user:password" in said
        monkeypatch.setenv(CREDENTIALS, "basel:secret")
        nodes = [
            three.join(k, of.folders[k], *(["--proxy", url] if k == 1 else []), before=net.inside(k)) for k in range(3)
        ]
        for k, process in enumerate(nodes):
            three.said(process, k)
    same_as_the_simulator(tmp_path, range(3))
    assert audit(tmp_path, 2, "relay opened")
    came = {line["address"].partition(":")[0] for line in audit(tmp_path, 2, "connected")}
    assert came == {net.address(0), net.address(3)}


# ---------------------------------------------------------------------------------------- bandwidth


@pytest.mark.parametrize(("text", "rate"), [("50mbit", 6.25e6), ("1.5Gbit", 1.875e8), (" 64kbit", 8000)])
def test_a_bandwidth_is_a_number_with_a_unit(text, rate):
    assert read_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["50", "50MB", "50mbit/s", "0mbit", "-1mbit", "mbit", "1e3mbit", "nanmbit", ""])
def test_another_bandwidth_is_refused_with_the_remedy(text):
    with pytest.raises(InputError, match="bandwidth must be a number with kbit, mbit or gbit"):
        read_bandwidth(text)


def test_all_edges_together_send_no_faster_than_the_cap(tmp_path, monkeypatch):
    pair, cap = Sites(tmp_path, "complete:2", 2), Cap(read_bandwidth("16mbit"))
    first, second = channels(pair), channels(pair)
    for sender, _ in (first, second):
        monkeypatch.setattr(sender, "_cap", cap)
    size, began = 2**20, time.monotonic()
    sendings = [sender.send(torch.zeros(size, dtype=torch.uint8)) for sender, _ in (first, second)]
    for _, taker in (first, second):
        taker.recv_into(torch.empty(size, dtype=torch.uint8), soon(60))
    took = time.monotonic() - began
    assert 8 * 2 * size < 16e6 * (took + 0.4)               # the first tenth of a second is free, and the last pieces
    free = torch.zeros(2 * size, dtype=torch.uint8)
    first[1].send(free)
    first[0].recv_into(free, soon(60))                      # the other direction is another site's
    for sending in sendings:
        sending.wait(soon())
    for end in (*first, *second):
        end.close()


@pytest.mark.slow
def test_a_message_may_take_longer_than_the_timeout_under_a_cap(tmp_path, monkeypatch):
    """Six seconds for each message, in both directions at once, and a timeout of two."""
    ends = channels(Sites(tmp_path, "complete:2", 2))
    for end in ends:
        monkeypatch.setattr(end, "_cap", Cap(read_bandwidth("4mbit")))
    edges, count = [Edge(k, 1 - k, end, generation=0) for k, end in enumerate(ends)], 700_000
    for edge in edges:
        edge.listen(4 * count)

    def exchanged(edge):
        edge.send((1, 0), torch.ones(count), 2.0)
        return edge.receive((1, 0), Expected(count, torch.float32), 2.0) is not None

    assert at_once(*(lambda edge=edge: exchanged(edge) for edge in edges)) == [True, True]
    for edge in edges:
        edge.close()


def test_a_cap_wastes_no_more_than_a_pause():
    cap = Cap(1e6)
    assert cap.pause() == 0
    cap.count(500_000)
    assert 0.3 < cap.pause() < 0.6
    idle = Cap(1e6)
    idle.count(0)
    assert idle.pause() == 0


# ---------------------------------------------------------------------------------------- proxy


@pytest.mark.parametrize("text", ["https://proxy:3128", "proxy:3128", "http://proxy", "http://a b:1", "http://p:1/x"])
def test_another_proxy_is_refused_with_the_remedy(text):
    with pytest.raises(InputError, match="proxy must be http://HOST:PORT"):
        read_proxy(text)


def test_a_password_is_not_an_argument(monkeypatch):
    with pytest.raises(InputError, match=f"set {CREDENTIALS}") as refused:
        read_proxy("http://user:secret@proxy.example:3128")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv(CREDENTIALS, "user:secret")
    assert read_proxy("http://proxy.example:3128/") == Proxy("proxy.example:3128", "user:secret")
    assert "secret" not in repr(read_proxy("http://proxy.example:3128"))


def test_a_site_dials_through_a_proxy_which_looks_up_the_name(meeting, tmp_path):
    (port,) = free_ports(1)
    pair = Sites(tmp_path, "complete:2", 2, addresses=[f"qg.aachen.example:{port}", None])
    with proxy(names={"qg.aachen.example": port}) as (url, heads):
        first = meeting.site(pair.folders[0], listen=f"127.0.0.1:{port}")
        second = meeting.site(pair.folders[1], proxy=replace(read_proxy(url), credentials="user:secret"))
        talk(meeting.met(first, second))
        assert heads == [
            f"CONNECT qg.aachen.example:{port} HTTP/1.1\r\nHost: qg.aachen.example:{port}\r\n"
            "Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=\r\n\r\n"
        ]
        assert meeting.recorded(second, "connected")[0]["dialled"] == f"qg.aachen.example:{port}"
        meeting.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
         f"127.0.0.1:1: 407 Proxy Authentication Required; set {CREDENTIALS}=user:password"),
        (b"HTTP/1.0 403 Forbidden\r\n\r\n", "127.0.0.1:1: 403 Forbidden; allow this address and port in the proxy"),
        (b"HTTP/1.1 502\r\n\r\n", "does not connect to 127.0.0.1:1: 502"),
        (b"\x15\x03\x01\x00\x02\x02\n", "does not answer as an HTTP proxy"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not answer as an HTTP proxy"),
        (b"", "does not answer as an HTTP proxy"),
    ],
    ids=["407", "403", "502", "tls", "ssh", "closed"],
)
def test_the_answer_of_a_proxy_that_does_not_connect_is_in_the_reason(meeting, tmp_path, answer, why):
    pair = Sites(tmp_path, "complete:2", 2, addresses=["127.0.0.1:1", None])
    with proxy(answer) as (url, _):
        second = meeting.site(pair.folders[1], proxy=read_proxy(url))
        with pytest.raises(Lost) as lost:
            second.open(0, 5)
        assert why in str(lost.value)
        assert url.removeprefix("http://") in str(lost.value)
        temporary = b"502" in answer
        assert isinstance(lost.value, Refused) is not temporary         # a refusal is logged at once


def test_a_proxy_that_is_not_there_or_silent_is_named(meeting, tmp_path, monkeypatch):
    pair = Sites(tmp_path, "complete:2", 2, addresses=["127.0.0.1:1", None])
    (port,) = free_ports(1)
    second = meeting.site(pair.folders[1], proxy=Proxy(f"127.0.0.1:{port}"))
    with pytest.raises(Lost, match=rf"the proxy 127.0.0.1:{port}: Connection refused"):
        second.open(0, 5)
    monkeypatch.setattr(sites, "ADMISSION", 0.3)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(Lost, match=rf"the proxy 127.0.0.1:{port}: it did not answer in time"),
    ):
        second.open(0, 0.1)


# ---------------------------------------------------------------------------------------- relay


class Relayed(Sites):
    """Sites of which the first `dialling` only dial, and the others relay."""

    def __init__(self, folder, topology="complete:3", n=3, dialling=2):
        ports = free_ports(n - dialling)
        super().__init__(
            folder, topology, n, addresses=[None] * dialling + [f"127.0.0.1:{port}" for port in ports],
            relays=range(dialling, n),
        )


@pytest.fixture
def three(meeting, tmp_path, monkeypatch):
    """The openers of two sites that only dial, and of a third that relays and is not their neighbour."""
    monkeypatch.setattr(sites, "WATCH", 0.1)
    of = Relayed(tmp_path)
    return of, [meeting.site(of.folders[k], (0, 1) if k < 2 else ()) for k in range(3)]


def taps(monkeypatch, change=lambda data: data):
    """Keep, and change, what relays receive from now on."""
    heard, original = [], relay.Relay._receive

    def receive(self, end):
        before = end.held
        original(self, end)
        if end.held is not before and end.held:
            heard.append(bytes(end.held))
            end.held = change(end.held)

    monkeypatch.setattr(relay.Relay, "_receive", receive)
    return heard


def test_two_sites_that_only_dial_meet_at_a_third_which_sees_ciphertext_alone(meeting, three, monkeypatch):
    _, (first, second, third) = three
    heard = taps(monkeypatch)
    edges = meeting.met(first, second, 10)
    model = torch.arange(50_000, dtype=torch.float32)
    for edge in edges:
        edge.listen(model.nbytes)
    edges[0].send((1, 0), model, 10)
    assert edges[1].receive((1, 0), Expected(50_000, torch.float32), 10).equal(model)
    passed = b"".join(heard)
    assert len(passed) > model.nbytes
    for plain in (model.numpy().tobytes()[1000:1032], b"qgm1"[::-1], b"qgg1", b"experiment", b"qg://trial", b"step"):
        assert plain not in passed
    assert first._whereabouts(1) == "node 1 (site1), through site2"
    assert [meeting.recorded(one, "connected")[0]["relay"] for one in (first, second)] == [2, 2]
    (opened,) = meeting.recorded(third, "relay opened")
    assert opened["nodes"] == [0, 1]
    assert opened["keys"] == [site.fingerprint for site in third.federation.sites[:2]]
    meeting.close()
    until(lambda: meeting.recorded(third, "relay closed"))
    (closed,) = meeting.recorded(third, "relay closed")
    assert closed["bytes"][0] > model.nbytes
    assert not any(thread.name == "relay" for thread in threading.enumerate())


def test_a_relay_that_changes_a_byte_is_noticed(meeting, three, monkeypatch):
    _, (first, second, _) = three
    edges = meeting.met(first, second, 10)
    talk(edges, steps=1)

    def flip(data):
        changed = bytearray(data)
        changed[-1] ^= 1
        return bytes(changed)

    taps(monkeypatch, flip)
    edges[0].send((2, 0), torch.zeros(1000), 10)
    with pytest.raises(Lost, match=r"TLS 1.3 as expected: .*bad record mac"):
        edges[1].receive((2, 0), Expected(1000, torch.float32), 10)


def test_a_relayed_edge_is_renewed_and_opened_again(meeting, three):
    of, (first, second, third) = three
    edges = meeting.met(first, second, 10)
    talk(edges)
    certified(of.folders[1])
    link = second._links.to(0)
    link.begun, link.ends = now() - timedelta(minutes=1), now() + timedelta(seconds=20)
    until(lambda: meeting.recorded(first, "renewed"))
    for step in range(4, 30):
        edges[0].send((step, 0), torch.ones(3), 5)
        assert edges[1].receive((step, 0), Expected(3, torch.float32), 5) is not None
    until(lambda: meeting.recorded(third, "relay closed"))
    edges[0].close()
    talk(meeting.met(first, second, 10))
    until(lambda: len(meeting.recorded(third, "relay closed")) == 2)
    until(lambda: len(third._relay._ends) == 3)             # the edge, and the listening side waits for the next


def test_sites_meet_again_at_a_relay_that_was_restarted_and_it_keeps_nothing(meeting, three):
    of, (first, second, third) = three
    talk(meeting.met(first, second, 10))
    third.stop()
    until(lambda: not any(edge.channel.alive for edge in meeting.edges))
    again = meeting.site(of.folders[2], ())
    before = psutil.Process().num_fds()
    for _ in range(5):
        edges = meeting.met(first, second, 20)
        talk(edges)
        for edge in edges:
            edge.close()
    until(lambda: len(again._relay._ends) <= 1)             # the listening side waits for the next
    until(lambda: psutil.Process().num_fds() <= before + 4)


def test_a_revoked_site_is_not_relayed_any_more(meeting, three):
    of, (first, second, third) = three
    edges = meeting.met(first, second, 10)
    talk(edges)
    of.organiser.revoke("site1")
    of.folders[2].accept(of.text)                           # the file arrives at the relay alone
    with pytest.raises(Lost, match="closed the connection"):
        edges[0].receive((4, 0), Expected(1000, torch.float32), 10)
    with pytest.raises(Refused, match="the relay site2: its federation file does not have this site's key"):
        second.open(0, 5)
    until(lambda: meeting.recorded(third, "relay closed"))


def test_a_relay_that_is_revoked_relays_no_more(meeting, three):
    of, (first, second, third) = three
    edges = meeting.met(first, second, 10)
    talk(edges)
    of.organiser.revoke("site2")
    of.folders[2].accept(of.text)
    with pytest.raises(Lost, match="closed the connection"):
        edges[0].receive((4, 0), Expected(1000, torch.float32), 10)
    until(lambda: not third._relay.busy)


def test_strangers_and_sites_with_an_address_are_not_relayed(meeting, tmp_path):
    four = Relayed(tmp_path, "complete:4", 4, dialling=2)
    third = meeting.site(four.folders[2], ())
    (tmp_path / "other").mkdir()
    other = Relayed(tmp_path / "other", "complete:4", 4, dialling=2)

    def asks(folder, there):
        """The answer to a site that asks for another one."""
        opener = SiteOpener(folder)
        opener.begin(Terms(opener.site.node, [], "e", "t", 2.0, lambda: 0))
        opener._relays_to = lambda _: [third.site]
        try:
            with pytest.raises(Lost) as lost:
                opener._dial(there, soon(0.5))
            return str(lost.value)
        finally:
            opener.stop()

    assert "its key is not in this site's federation file" in asks(other.folders[0], 1)
    assert asks(four.folders[0], 3) == (
        "the relay site2: it refused this node: no relay here between node 0 and node 3: one has an address"
    )
    assert asks(four.folders[0], 77) == (
        "the relay site2: it refused this node: federation trial (serial 2) has no node 77"
    )
    assert asks(four.folders[0], 0) == "the relay site2: it refused this node: node 0 asks for itself"
    until(lambda: len(meeting.recorded(third, "refused")) == 4)
    assert third._relay._ends == []


@pytest.mark.usefixtures("three")
def test_a_relay_that_says_that_somebody_came_is_not_believed_all_the_time(monkeypatch):
    met = []

    def take(self, end):
        met.append(end)
        end.connection.sendall(relay.MET + b"not TLS" * 10)
        end.connection.close()

    monkeypatch.setattr(relay.Relay, "take", take)
    until(lambda: len(met) > 1)
    began, before = time.monotonic(), len(met)
    time.sleep(1.5)
    assert len(met) - before <= 2 * (time.monotonic() - began) / sites.NEXT + 2


def test_a_site_that_does_not_relay_says_so(meeting, tmp_path):
    of = Relayed(tmp_path)
    monkey = meeting.site(of.folders[2], ())
    monkey._relay.close()
    monkey._relay = None                                    # as a version before this one
    second = meeting.site(of.folders[1], (0, 1))
    with pytest.raises(Refused, match="the relay site2: it does not relay"):
        second.open(0, 5)


def test_another_relay_serves_where_one_is_gone(meeting, tmp_path):
    of = Relayed(tmp_path, "complete:4", 4, dialling=2)
    first, second, _ = (meeting.site(of.folders[k], (0, 1) if k < 2 else ()) for k in (0, 1, 3))
    talk(meeting.met(first, second, 20))
    assert meeting.recorded(first, "connected")[0]["relay"] == 3


def test_without_a_relay_two_sites_that_only_dial_are_no_neighbours(meeting, tmp_path):
    with pytest.raises(InputError, match=r"neither can be reached; .* let a third site relay"):
        Sites(tmp_path / "alone", "complete:2", 2, addresses=[None, None])
    of = Relayed(tmp_path / "relayed")
    of.organiser.revoke("site2")
    for site in of.folders[:2]:
        site.accept(of.text)
    second = meeting.site(of.folders[1], (0, 1))
    with pytest.raises(Lost, match="neither it nor this site can be reached, and no site of the federation relays"):
        second.open(0, 0.5)


class Asked:
    """A relay of at most four connections, and the sites that ask it."""

    def __init__(self, cap):
        self.relay, self.sites = relay.Relay(lambda *event, **facts: None, cap, most=4), []

    def asks(self, node, to):
        """The connection of a site that asks for another one."""
        ours, theirs = socket.socketpair()
        theirs.settimeout(10)
        self.sites.append(theirs)
        self.relay.take(relay.End(ours, node, to, "key", "address"))
        return theirs

    def pair(self):
        """The connections of two sites that have met."""
        pair = self.asks(0, 1), self.asks(1, 0)
        assert [site.recv(1) for site in pair] == [relay.MET] * 2
        return pair

    def close(self):
        self.relay.close()
        for site in self.sites:
            site.close()


@pytest.fixture
def asked(request):
    made = Asked(Cap(getattr(request, "param", math.inf)))
    yield made
    made.close()


def closes(connection):
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_a_relay_keeps_few_connections_and_frees_them(asked):
    earlier = asked.asks(0, 1)
    first = asked.asks(0, 1)
    assert closes(earlier)                                  # a successor replaces its predecessor
    others = [asked.asks(0, 2), asked.asks(0, 3), asked.asks(4, 5)]
    last = asked.asks(6, 7)                                 # no room: the oldest of the site with the most
    assert closes(first)
    partner = asked.asks(7, 6)
    assert closes(others[0])
    assert last.recv(1) == partner.recv(1) == relay.MET
    last.sendall(b"x" * 1000)
    assert partner.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
    last.close()
    partner.close()
    until(lambda: len(asked.relay._ends) == 2)
    others[1].close()
    others[2].close()
    until(lambda: not asked.relay.busy)


def test_a_relay_closes_what_is_idle_and_who_speaks_before_the_other_is_there(asked, monkeypatch):
    monkeypatch.setattr(relay, "TICK", 0.05)
    early = asked.asks(0, 1)
    early.sendall(b"!")
    assert closes(early)
    monkeypatch.setattr(relay, "IDLE", 0.2)
    for site in asked.pair():
        assert closes(site)
    until(lambda: not asked.relay.busy)


def test_a_relay_stops_reading_from_one_whose_partner_does_not_read(asked):
    sender, taker = asked.pair()
    sender.settimeout(0.5)
    sent, data = 0, os.urandom(2**20)
    with suppress(TimeoutError):
        while sent < 2**23:
            sent += sender.send(data)
    assert sent < 2**23
    sender.shutdown(socket.SHUT_WR)
    got = 0
    while part := taker.recv(2**20):
        got += len(part)
    assert got == sent


@pytest.mark.parametrize("asked", [1e6], indirect=True)
def test_a_relay_sends_no_faster_than_its_cap(asked):
    sender, taker = asked.pair()
    began, size = time.monotonic(), 2**16
    at_once(
        lambda: sender.sendall(bytes(15 * size)), lambda: [taker.recv(size, socket.MSG_WAITALL) for _ in range(15)]
    )
    assert 15 * size < 1e6 * (time.monotonic() - began + 0.3)


def test_a_relay_that_refuses_in_ever_new_words_hides_nothing_about_a_neighbour(meeting, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sites, "LONGEST_PAUSE", 0.0)
    of, texts = Relayed(tmp_path, "complete:4", 4, dialling=2), map(str, itertools.count())

    def refuses(self, guest, connection, by, deadline):
        refuse(connection, next(texts), deadline)
        raise Lost("it was refused")

    monkeypatch.setattr(SiteOpener, "_relay_for", refuses)
    meeting.site(of.folders[2], ())
    pair = [
        Membership(
            SiteOpener(of.folders[k]), k, [1 - k], experiment="e", topology="t", timeout=2.0,
            handover=LateModels(lambda: None),
        ) for k in range(2)
    ]

    def find(one):
        with pytest.raises(InputError, match="the relay site"):
            one.find(3.0)

    at_once(*(lambda one=one: find(one) for one in pair))
    assert int(next(texts)) > 2 * MOST_REPORTS
    assert not any("more about node 0" in line or "more about node 1" in line for line in caplog.messages)
    assert any("more about node 2 (site2)" in line for line in caplog.messages)
