"""Metrics of a running node for Prometheus, as plain text over HTTP: `qg node --metrics-port`."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from quasiglobal.engines.distributed import Distributed
from quasiglobal.errors import InputError
from quasiglobal.peers.federation_file import split_address
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import ranking

SLOWEST = 5.0
"""Seconds for a client to send its request."""

GAUGES = {
    "qg_epochs": "Epochs of the whole run.",
    "qg_step": "Steps completed.",
    "qg_epoch": "Epochs completed.",
    "qg_loss": "Training loss of the last epoch.",
    "qg_score": "Score on the site's own test examples, of the last tested epoch.",
    "qg_epoch_timestamp_seconds": "End of the last epoch.",
    "qg_federation_serial": "Serial number of the federation file.",
    "qg_federation_end_timestamp_seconds": "End of the federation file.",
    "qg_certificate_end_timestamp_seconds": "End of the TLS certificate.",
}
"""Help of each metric of the node."""

EDGES = {
    "sent": ("qg_edge_sent_bytes_total", "Bytes of models sent to a neighbour."),
    "received": ("qg_edge_received_bytes_total", "Bytes of models received from a neighbour."),
    "waited": ("qg_edge_waited_seconds_total", "Seconds waited for a neighbour."),
    "missed": ("qg_edge_missed_total", "Exchanges completed without a neighbour."),
    "clipped": ("qg_edge_clipped_total", "Exchanges in which the model of a neighbour was clipped."),
}
"""Name and help of each entry of an edge's account."""


class Prometheus(Callback):
    """The state of one node for Prometheus: the last epoch, and the present state of the edges."""

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
        now = {"qg_epochs": self.epochs, "qg_step": self.engine.members.step} | self._epoch | self._of_site()
        lines = [line for name in GAUGES if name in now for line in _metric(name, "gauge", GAUGES[name], now[name])]
        accounts, lost = self.engine.accounts(), {str(there) for there in list(self.engine.lost)}
        up = {there: float(there not in lost) for there in accounts}
        lines += _metric("qg_edge_up", "gauge", "Whether the edge to a neighbour is open.", up)
        for entry, (name, about) in EDGES.items():
            lines += _metric(name, "counter", about, {there: one[entry] for there, one in accounts.items()})
        return "\n".join((*lines, ""))

    def _of_site(self) -> dict[str, float]:
        """The ends of the certificate and the federation, for alerts in time."""
        if self.site is None:
            return {}
        try:
            found, shown = self.site.federation(), self.site.shown()
        except (InputError, OSError):
            return {}
        ends = {"federation": found.ends} | ({} if shown is None else {"certificate": shown.ends})
        times = {f"qg_{what}_end_timestamp_seconds": end.timestamp() for what, end in ends.items()}
        return {"qg_federation_serial": found.serial} | times

    @contextmanager
    def served(self, address: str) -> Iterator[tuple[str, int]]:
        """Serve the text on this machine only (PORT), or at HOST:PORT."""
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


def _metric(name: str, kind: str, about: str, value: float | Mapping[str, float]) -> Iterator[str]:
    """The lines of a metric, which has one value, or one per neighbour.

    >>> print(*_metric("qg_edge_up", "gauge", "Open.", {"3": True}), sep="\\n")
    # HELP qg_edge_up Open.
    # TYPE qg_edge_up gauge
    qg_edge_up{neighbour="3"} 1
    """
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    if isinstance(value, Mapping):
        yield from (f'{name}{{neighbour="{there}"}} {of:.15g}' for there, of in value.items())
    else:
        yield f"{name} {value:.15g}"


def _server(host: str, port: int, metrics: Prometheus) -> socketserver.TCPServer:
    """A server with one thread: strangers can only keep it busy."""
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

        def log_message(self, *rest: object) -> None:
            pass

    class Server(socketserver.TCPServer):
        allow_reuse_address = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, *rest: object) -> None:
            pass                                    # the client has gone

    return Server((host, port), Page)
