"""Metrics of a running node for Prometheus, as plain text over HTTP: `qg node --metrics-port`."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from quasiglobal.engines.distributed import Distributed
from quasiglobal.errors import InputError
from quasiglobal.peers.federation_file import split_address
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import ranking

SLOWEST = 5.0
"""Seconds for a client to send its request."""

EDGES = {
    "sent": ("qg_edge_sent_bytes_total", "counter", "Bytes of models sent to a neighbour."),
    "received": ("qg_edge_received_bytes_total", "counter", "Bytes of models received from a neighbour."),
    "waited": ("qg_edge_waited_seconds_total", "counter", "Seconds waited for a neighbour."),
    "missed": ("qg_edge_missed_total", "counter", "Exchanges completed without a neighbour."),
    "clipped": ("qg_edge_clipped_total", "counter", "Exchanges in which the model of a neighbour was clipped."),
}
"""Name, type and help of each entry of an edge's account."""

Samples = list[tuple[Mapping[str, object], float]]


class Prometheus(Callback):
    """The state of one node, as Prometheus reads it: the last epoch, and the edges as they are now."""

    def __init__(self, engine: Distributed, epochs: int, site: SiteFolder | None = None) -> None:
        self.engine, self.epochs, self.site = engine, epochs, site
        self._epoch: dict[str, float] = {}

    def on_epoch(self, loop: Loop) -> None:
        (record,) = loop.latest.values()
        score = ranking(loop.experiments[0].metric, [record]).name
        named = {"qg_epoch": "epoch", "qg_loss": "loss", "qg_score": score}
        found = {name: record.get(of) for name, of in named.items()}
        now = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        self._epoch = self._epoch | now | {"qg_epoch_timestamp_seconds": time.time()}

    def text(self) -> str:
        """All metrics in Prometheus's text format."""
        epoch = self._epoch
        lines = [
            *_metric("qg_epochs", "gauge", "Epochs of the whole run.", [({}, self.epochs)]),
            *_metric("qg_step", "gauge", "Steps completed.", [({}, self.engine.members.step)]),
        ]
        for name, about in EPOCH.items():
            if name in epoch:
                lines += _metric(name, "gauge", about, [({}, epoch[name])])
        accounts, lost = self.engine.accounts(), {str(there) for there in list(self.engine.lost)}
        up: Samples = [({"neighbour": there}, there not in lost) for there in accounts]
        lines += _metric("qg_edge_up", "gauge", "Whether the edge to a neighbour is open.", up)
        for entry, (name, kind, about) in EDGES.items():
            of_each: Samples = [({"neighbour": there}, one[entry]) for there, one in accounts.items()]
            lines += _metric(name, kind, about, of_each)
        return "\n".join((*lines, *self._of_site(), ""))

    def _of_site(self) -> Iterator[str]:
        """The ends of certificate and federation, so that somebody is told in time."""
        if self.site is None:
            return
        try:
            found, shown = self.site.federation(), self.site.shown()
        except (InputError, OSError):
            return
        yield from _metric("qg_federation_serial", "gauge", "Serial number of the federation file.",
                           [({}, found.serial)])
        yield from _metric("qg_federation_end_timestamp_seconds", "gauge", "End of the federation file.",
                           [({}, found.ends.timestamp())])
        if shown is not None:
            yield from _metric("qg_certificate_end_timestamp_seconds", "gauge", "End of the TLS certificate.",
                               [({}, shown.ends.timestamp())])

    @contextmanager
    def served(self, address: str) -> Iterator[tuple[str, int]]:
        """Serve the text at PORT of this machine alone, or at HOST:PORT."""
        host, port = split_address(address if ":" in address else f"127.0.0.1:{address}")
        if not 0 < port <= 65535:
            raise InputError(f"--metrics-port is PORT or HOST:PORT, got {address!r}")
        try:
            server = _server(host, port, self)
        except OSError as error:
            raise InputError(
                f"cannot serve metrics at {host}:{port}: {error.strerror}; name another --metrics-port"
            ) from None
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield host, port
        finally:
            server.shutdown()
            server.server_close()


EPOCH = {
    "qg_epoch": "Epochs completed.",
    "qg_loss": "Training loss of the last epoch.",
    "qg_score": "Score on the site's own test examples, of the last tested epoch.",
    "qg_epoch_timestamp_seconds": "End of the last epoch.",
}


def _metric(name: str, kind: str, about: str, samples: Samples) -> Iterator[str]:
    """The lines of a metric.

    >>> print(*_metric("qg_edge_up", "gauge", "Open.", [({"neighbour": 3}, True)]), sep="\\n")
    # HELP qg_edge_up Open.
    # TYPE qg_edge_up gauge
    qg_edge_up{neighbour="3"} 1
    """
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{label}="{of}"' for label, of in labels.items())
        yield f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}"


def _server(host: str, port: int, metrics: Prometheus) -> socketserver.TCPServer:
    """A server of one thread: strangers can keep it busy, and nothing else."""
    class Page(BaseHTTPRequestHandler):
        timeout = SLOWEST

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = metrics.text().encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *rest: Any) -> None:
            pass

    class Server(socketserver.TCPServer):
        allow_reuse_address = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, *rest: Any) -> None:
            pass                                    # the client has gone

    return Server((host, port), Page)
