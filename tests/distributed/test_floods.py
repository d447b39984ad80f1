"""An admitted neighbour that floods: what it asks for again and again neither adds up nor fills the log."""

import json
import socket
import threading
import time
from contextlib import nullcontext

import psutil
import pytest
from connections import soon
from federations import Sites
from processes import together
from reconnects import WARM, reconnect

from quasiglobal.peers import greeting, reports, tls
from quasiglobal.peers import sites as module
from quasiglobal.peers.audit import Story
from quasiglobal.peers.edge import Refused
from quasiglobal.peers.membership import Terms
from quasiglobal.peers.reports import MOST_REPORTS, Reports
from quasiglobal.peers.sites import Audit, SiteOpener


class Flooded:
    """The opener of site 0, and connections of site 1 that send what the test wants."""

    def __init__(self, folder):
        self.sites, self.audit = Sites(folder, "complete:2", 2), folder / "audit.jsonl"
        self.opener = SiteOpener(self.sites.folders[0], audit=Audit(self.audit))
        self.opener.begin(Terms(0, [1], "e", "t", 2.0, lambda: 0))
        self.open = []

    def connection(self):
        host, port = self.sites.addresses[0].split(":")
        made = self.sites.folders[1].client_context().wrap_socket(socket.create_connection((host, int(port)), 10))
        self.open.append(made)
        return made

    def greet(self, renews=0):
        """Open a connection as an honest neighbour does."""
        mine = greeting.Greeting(1, module._version(), "e", "t", 1, 0, 2, "session", renews)
        greeting.exchange(self.connection(), mine, soon(10))

    def close(self):
        for one in self.open:
            one.close()

    def used(self):
        """Threads and descriptors of this process, without the flooding connections."""
        return threading.active_count(), psutil.Process().num_fds() - len(self.open)

    def recorded(self, event):
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def flooded(tmp_path):
    made = Flooded(tmp_path)
    yield made
    made.opener.stop()
    made.close()
    made.opener.close()


def until(condition, seconds=30):
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, [one.name for one in threading.enumerate()]
        time.sleep(0.02)


@pytest.mark.parametrize("pause", [0.0, 5.0], ids=["at any rate", "too often"])
def test_a_hundred_renewals_leave_one_successor_and_nothing_once_the_peer_has_gone(flooded, monkeypatch, pause):
    monkeypatch.setattr(module, "WATCH", pause)
    monkeypatch.setattr(tls, "LINGER", 0.5)
    flooded.greet()
    edge = flooded.opener.open(1, 5.0)
    edge.listen(1000)
    threads, files = flooded.used()
    often = pytest.raises(Refused, match="it refused this node: a connection is renewed at most every 5 s")
    for _ in range(100):
        with often if pause else nullcontext():
            flooded.greet(renews=1)
    until(lambda: flooded.used()[0] <= threads + 2)
    until(lambda: flooded.used()[1] <= files + 6)           # a successor, and one that is just being closed
    flooded.close()
    edge.close()
    until(lambda: flooded.used()[0] <= threads - 3)         # two of the edge, one of its channel
    until(lambda: flooded.used()[1] < files)


def refusals(flooded, texts):
    for text in texts:
        greeting.refuse(flooded.connection(), text, soon(5))


def test_ever_new_refusals_by_a_neighbour_are_bounded_and_counted(flooded, caplog, monkeypatch):
    texts = [f"text {k}\n2026-01-01 forged line\x1b[2J\u202e{'x' * 400}" for k in range(60)]
    refusals(flooded, texts)
    until(lambda: not flooded.opener._listener._waiting)
    assert len(flooded.recorded("refused")) == MOST_REPORTS
    written = [line for line in caplog.messages if "text" in line]
    assert len(written) == MOST_REPORTS
    assert all(line.isprintable() and len(line) < 400 for line in written)
    assert written[0].startswith("refused node 1 (site1): it refused this node: text 0?")
    monkeypatch.setattr(reports, "PERIOD", 0.0)
    refusals(flooded, texts[:1])
    rest = len(texts) - MOST_REPORTS
    until(lambda: flooded.recorded("left out"))
    assert [(line["who"], line["times"]) for line in flooded.recorded("left out")] == [("node 1 (site1)", rest)]
    assert f"… and {rest} more about node 1 (site1) in the last minute" in caplog.messages


def test_a_neighbour_that_comes_and_goes_is_bounded_and_its_bytes_are_added_up(flooded, caplog):
    for _ in range(30):
        flooded.greet()
        flooded.open.pop().close()
    until(lambda: not flooded.opener._listener._waiting)
    flooded.opener.stop()
    flooded.opener.close()
    connected, closed, (rest,) = (flooded.recorded(event) for event in ("connected", "closed", "left out"))
    assert len(connected) + len(closed) == MOST_REPORTS
    assert len(connected) + len(closed) + rest["times"] == 60
    assert {"sent", "received"} <= rest.keys()


def test_a_neighbour_that_comes_and_goes_does_not_keep_its_open_connection_out_of_the_record(flooded, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    monkeypatch.setattr(module, "TRAFFIC", 0.0)
    for _ in range(2 * MOST_REPORTS):
        flooded.greet()
        flooded.open.pop().close()
    flooded.greet()

    def newest():
        link = flooded.opener._links.to(1)                  # at first, one that is being closed
        return link and link.number

    until(lambda: newest() in [line["connection"] for line in flooded.recorded("connected")])
    number = newest()
    story = Story([json.loads(line) for line in flooded.audit.read_text().splitlines()])
    assert story.connections[-1]["key"] == flooded.sites.folders[1].own().fingerprint
    time.sleep(0.5)
    assert [line["connection"] for line in flooded.recorded("connected")].count(number) == 1


@pytest.mark.parametrize(
    ("count", "numbers"), [(WARM + 10, 2**21), pytest.param(WARM + 200, 12_500_000, marks=pytest.mark.slow)]
)
def test_reconnects_leave_nothing_behind_without_garbage_collection(tmp_path, count, numbers):
    sites = Sites(tmp_path, "complete:2", 2)
    folders = [str(site.path) for site in sites.folders]
    for before, after, lines, recorded, minutes in together(2, reconnect, folders, count, numbers, patience=1500):
        assert max(after[0].values()) <= 2, "edges, channels and links: the open one, and one that is being closed"
        assert after[1] <= before[1] + 3, "threads"
        assert after[2] <= before[2] + 6, "descriptors"
        assert after[3] <= before[3] + 2 * 4 * numbers, "memory"
        about = [line for line in lines if "continues without" in line or "reconnected" in line]
        assert 0 < len(about) <= MOST_REPORTS * minutes
        assert any(line.startswith("… and ") for line in lines)
        assert len(recorded) <= 10 + (MOST_REPORTS + 1) * minutes


def test_a_report_is_written_once_a_minute_and_the_rest_is_counted(monkeypatch):
    written = []
    some = Reports(lambda who, sums: written.append((who, dict(sums))))
    assert [some.pass_on("a", "same") for _ in range(3)] == [True, False, False]
    assert sum(some.pass_on("a", str(k)) for k in range(100)) == MOST_REPORTS - 1
    assert sum(some.pass_on("b", None, {"sent": 5}) for _ in range(100)) == MOST_REPORTS
    assert not written
    some.write_rest(0.0)
    rest = 100 - MOST_REPORTS
    assert written == [("a", {"times": rest + 3}), ("b", {"times": rest, "sent": 5 * rest})]
    assert some.pass_on("a", "same")
