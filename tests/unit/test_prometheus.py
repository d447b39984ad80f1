"""Metrics of a node for Prometheus."""

import re
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from quasiglobal.errors import InputError
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.runs.prometheus import Prometheus

SAMPLE = re.compile(r'([a-z_]+)(?:\{neighbour="(\d+)"\})? (-?[0-9.e+]+|nan|inf)')


def node(site=None):
    accounts = {"1": {"sent": 100, "received": 90, "waited": 0.5, "missed": 0, "clipped": 0},
                "3": {"sent": 20, "received": 2**40, "waited": 2.0, "missed": 7, "clipped": 5}}
    engine = SimpleNamespace(accounts=lambda: accounts, lost={3: "it closed"}, members=SimpleNamespace(step=12))
    return Prometheus(engine, 50, site)


def epoch(**record):
    return SimpleNamespace(latest={0: record}, experiments=[SimpleNamespace(metric=())])


def samples(text):
    """The numbers by name and neighbour; every line is a comment or a sample."""
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    return {(found[1], found[2]): float(found[3]) for found in (SAMPLE.fullmatch(line) for line in lines)}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def test_epochs_and_edges_are_read_over_http():
    page, port = node(), free_port()
    with page.served(str(port)):
        address = f"http://127.0.0.1:{port}/metrics"
        early = samples(urllib.request.urlopen(address, timeout=10).read().decode())
        assert early["qg_step", None] == 12
        assert ("qg_loss", None) not in early
        page.on_epoch(epoch(epoch=1, loss=2.5, accuracy=0.75))
        page.on_epoch(epoch(epoch=2, loss=float("nan")))                    # not tested: the score stays
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            found = samples(answer.read().decode())
        assert (found["qg_epoch", None], found["qg_epochs", None], found["qg_score", None]) == (2, 50, 0.75)
        assert found["qg_loss", None] != found["qg_loss", None]
        assert (found["qg_edge_up", "1"], found["qg_edge_up", "3"]) == (1, 0)
        assert found["qg_edge_received_bytes_total", "3"] == 2**40
        assert found["qg_edge_clipped_total", "3"] == 5
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
        taken = r"cannot serve metrics at 127.0.0.1:\d+: .*; name another --metrics-port"
        with pytest.raises(InputError, match=taken), node().served(f"127.0.0.1:{port}"):
            pass
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=10)


def test_the_ends_of_certificate_and_federation_are_metrics(tmp_path):
    organiser, site = OrganiserFolder(tmp_path / "organiser"), SiteFolder(tmp_path / "site")
    organiser.new("trial", "complete:2", 30)
    organiser.approve([site.request("trial", "alone", None)[1]], 2, [(1, 0)])
    assert ("qg_federation_serial", None) not in samples(node(site).text())         # not installed yet
    site.pin(organiser.file.read_bytes(), "it")
    site.accept(organiser.file.read_bytes())
    ends = site.renew().ends
    found = samples(node(site).text())
    assert found["qg_federation_serial", None] == 2
    assert found["qg_certificate_end_timestamp_seconds", None] == ends.timestamp()


@pytest.mark.parametrize("address", ["x", "0", "70000", "", "localhost", "::1:9000"])
def test_a_wrong_port_is_refused(address):
    with pytest.raises(InputError, match="--metrics-port is PORT or HOST:PORT, got"), node().served(address):
        pass
