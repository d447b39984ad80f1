"""Federations of sites on this machine, with free ports."""

import socket

from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.topology.parsing import pairs_of


def free_ports(count):
    """Ports that nobody listens at now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Sites:
    """An organiser and its sites, one per node, at 127.0.0.1 unless other addresses are given; None only dials.

    `relays` are the nodes that relay.
    """

    def __init__(self, folder, topology, n, name="trial", addresses=None, relays=()):
        self.organiser = OrganiserFolder(folder / f"{name}-organiser")
        self.organiser.new(name, topology, 30)
        self.addresses = addresses or [f"127.0.0.1:{port}" for port in free_ports(n)]
        self.folders = [SiteFolder(folder / f"{name}-{k}") for k in range(n)]
        pairs = zip(self.folders, self.addresses, strict=True)
        asked = [site.request(name, f"site{k}", at, k in relays)[1] for k, (site, at) in enumerate(pairs)]
        self.organiser.approve(asked, n, pairs_of(topology))
        for site in self.folders:
            site.pin(self.text, "the file")
            site.accept(self.text)

    @property
    def text(self):
        """The newest federation file."""
        return self.organiser.file.read_bytes()
