"""The organiser's folder: the key that signs the federation file, and the newest file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from quasiglobal.common.files import alone, replacing
from quasiglobal.errors import InputError
from quasiglobal.peers import federation_file, keys
from quasiglobal.peers.certificates import now
from quasiglobal.peers.federation_file import Federation
from quasiglobal.peers.requests import Request

LONGEST_DAYS = 3660


class OrganiserFolder:
    """What the organiser keeps: organiser.key, and federation.json, which is for everybody."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "organiser.key"
        self.file = path / "federation.json"

    def new(self, name: str, topology: str, days: float) -> Federation:
        """Make a key and a federation without sites; the topology is a text that this package does not read."""
        federation_file.check_name(name, "the federation")
        made = Federation(name, 1, now() + lasting(days), (), topology)
        with self._alone():
            if self.file.exists():
                raise InputError(f"{self.file} exists; name another folder with --folder")
            keys.new_key(self.key)
            self._write(made)
        return made

    def read(self) -> Federation:
        """The newest federation."""
        if not self.file.exists():
            raise InputError(f"{self.path} has no federation; make one with `qg federation new`, or name its --folder")
        return federation_file.read(keys.read_text(self.file), keys.read_key(self.key).public_key(), str(self.file))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the organiser's key, for the sites to compare."""
        return keys.fingerprint(keys.read_key(self.key).public_key())

    def approve(
        self, requests: Sequence[Request], nodes: int, links: Sequence[tuple[int, int]], node: int | None = None
    ) -> Federation:
        """Add sites, under the lowest free numbers or, for one site, under `node`.

        `nodes` and `links` are those of the federation's topology. A request of a known key keeps its number, and
        changes its address.
        """
        if node is not None and len(requests) != 1:
            raise InputError(f"--node is for one request, got {len(requests)}; approve them one by one")
        with self._alone():
            before = self.read()
            after = before
            for request in requests:
                after = self._with(after, request, nodes, node)
            after.check_edges(links)
            self._write(replace(after, serial=before.serial + 1))
        return self.read()

    def revoke(self, site: str) -> Federation:
        """Write the next file without this site."""
        with self._alone():
            self._write(self.read().without(site))
        return self.read()

    def extend(self, days: float) -> Federation:
        """Write the next file, which ends this many days from now."""
        with self._alone():
            self._write(self.read().until(now() + lasting(days)))
        return self.read()

    def _with(self, federation: Federation, request: Request, n: int, node: int | None) -> Federation:
        if request.federation != federation.name:
            raise InputError(
                f"{request.name} asks for federation {request.federation}, this is {federation.name}; "
                "ask the site for another request"
            )
        others = {site.node: site for site in federation.sites if site.fingerprint != request.fingerprint}
        known = next((site.node for site in federation.sites if site.fingerprint == request.fingerprint), None)
        free = [number for number in range(n) if number not in others]
        if any(site.name == request.name for site in others.values()):
            raise InputError(f"another site has the name {request.name}; revoke it, or ask for another name")
        if not free:
            raise InputError(f"{federation.topology} has {n} nodes, and all are taken; revoke a site first")
        if node is not None and node not in free:
            taken = f"is taken by {others[node].name}" if node in others else f"is not one of {federation.topology}"
            raise InputError(f"node {node} {taken}; free: {', '.join(map(str, free))}")
        chosen = next(number for number in (node, known, free[0]) if number is not None)
        return federation.with_site(request.site(chosen))

    def _write(self, federation: Federation) -> None:
        text = federation_file.written(federation, keys.read_key(self.key))
        with replacing(self.file) as temporary:
            temporary.write_bytes(text)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(self.path, wait=True):
            yield


def lasting(days: float) -> timedelta:
    """A validity in days."""
    if not 0 < days <= LONGEST_DAYS:
        raise InputError(f"a federation lasts at most {LONGEST_DAYS} days, got {days:g}")
    return timedelta(days=days)
