"""The folders of both sides of a federation: a site's keys, certificates and file, and the organiser's key and file.

The TLS contexts of a site are made from its folder.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from quasiglobal.common.files import Json, alone, read_json, replacing, write_json
from quasiglobal.errors import InputError
from quasiglobal.peers import certificates, federation_file
from quasiglobal.peers.certificates import (
    LIFETIME,
    LONGEST_LIFETIME,
    CertificateClaim,
    fingerprint,
    minute,
    now,
    read_key,
)
from quasiglobal.peers.federation_file import Federation, Request, Site

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

DAMAGED = "{} is damaged; run `qg site renew`"

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""
DATA = "fingerprints of data"
"""Purpose of the key in data.key."""

LONGEST_DAYS = 3660
"""Maximum duration of a federation in days."""

log = logging.getLogger("quasiglobal")


@dataclass(frozen=True)
class Identity:
    """The other side of a TLS connection, checked against the federation file."""

    federation: str
    node: int
    fingerprint: str
    """Fingerprint of the site's key, which stays the same when certificates are renewed."""
    ends: datetime
    """End of the presented certificate."""


class SiteFolder:
    """The folder of one site.

    site.key: the site's key, whose fingerprint the organiser approved; it signs certificates, and files of the site.
    tls.pem: the key and the short-lived certificate of its TLS connections, renewed from site.key.
    data.key: the key of the fingerprints of the site's data, derived from site.key, which may be kept elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "site.key"
        self.certificate = path / "tls.pem"
        self.data = path / "data.key"
        self.root = path / "site.der"
        self.authority = path / "organiser.pub"
        self.file = path / "federation.json"
        self.newest = path / "newest.json"
        self._parsed: tuple[bytes, Federation] | None = None
        self._trouble = ""

    def request(
        self, federation: str, name: str, address: str | None, relays: bool = False
    ) -> tuple[Path, Request]:
        """Write a request to join, and make the site's key if there is none."""
        federation_file.check_name(federation, "the federation")
        federation_file.check_name(name, "the site")
        if federation_file.read_address(address, "the site") is None and relays:
            raise InputError("other sites dial a relay; give its --address HOST:PORT")
        if self.is_pinned and self.federation().name != federation:
            raise InputError(f"{self.path} belongs to federation {self.federation().name}; name another --folder")
        with _alone(self.path):
            key = read_key(self.key) if self.key.exists() else certificates.new_key(self.key)
            if not self.root.exists():
                _write(self.root, certificates.root(key))
            own = Request(federation, name, address, fingerprint(key.public_key()), self.root.read_bytes(), relays)
            path = self.path / f"request-{name}.json"
            _write(path, federation_file.written_request(own, key))
        return path, own

    def pin(self, text: bytes, where: str) -> None:
        """Trust the organiser that this federation file names; compare the fingerprint before."""
        if self.authority.exists():
            raise InputError(f"{self.path} already has an organiser; use another folder for another federation")
        organiser = federation_file.organiser_of(text, where)
        found = federation_file.read(text, organiser, where)
        found.check_dates(where)
        self.own(found)
        _write(self.authority, certificates.public_der(organiser).hex().encode() + b"\n")

    @property
    def is_pinned(self) -> bool:
        """Whether an organiser is trusted already."""
        return self.authority.exists()

    def accept(self, newer: bytes, where: str = "the new federation file") -> bool:
        """Install a newer federation file and return True; return False if it is installed already.

        Raise InputError if the file is older, has ended, was changed or is signed by another key.
        """
        found = self._read(newer, where)
        with _alone(self.path):
            _check_serial(found, newer, self._seen(), where)
            if self.file.exists() and self.file.read_bytes() == newer:
                return False
            _write(self.file, newer)
            self._remember(found, newer)
        return True

    def federation(self) -> Federation:
        """The content of the federation file; raise InputError if it is unsigned, has ended, or a newer one was seen.
        """
        if not self.file.exists():
            raise InputError(f"{self.file} does not exist; run `qg site install` with the organiser's file")
        seen = self._seen()                         # before the file, since `accept` writes it after the file
        text = certificates.read_text(self.file)
        found = self._read(text, str(self.file))
        _check_serial(found, text, seen, str(self.file))
        if found.serial > seen[0]:
            with _alone(self.path):
                self._remember(found, text)
        return found

    def text(self) -> bytes:
        """The bytes of the federation file, to pass on; checked as by `federation`."""
        self.federation()
        return certificates.read_text(self.file)

    def own(self, federation: Federation | None = None) -> Site:
        """This site's entry in the federation."""
        federation = federation or self.federation()
        try:
            root = self.root.read_bytes()
        except OSError:
            raise InputError(f"{self.path} is not a site's folder; make one with `qg site request`") from None
        mine = fingerprint(certificates.key_of_root(root, str(self.root)))
        for site in federation.sites:
            if site.fingerprint == mine:
                return site
        raise InputError(
            f"federation {federation.name} (serial {federation.serial}) does not have the key of {self.path}: it is "
            "not approved yet, or revoked; ask the organiser"
        )

    def renew(self, lifetime: timedelta = LIFETIME, key: Path | None = None) -> CertificateClaim:
        """Make a fresh TLS certificate; `key` is the path of site.key if it is kept elsewhere."""
        if not timedelta(0) < lifetime <= LONGEST_LIFETIME:
            raise InputError(f"a certificate is valid for at most {LONGEST_LIFETIME.days} days, got {lifetime}")
        found = self.federation()
        own = self.own(found)
        signer = self._signer(own, key)
        if not self.data.exists():
            certificates.write_private(self.data, certificates.derived(signer, DATA).hex().encode() + b"\n")
        made = certificates.issue(signer, found.name, own.node, lifetime)
        with _alone(self.path):
            certificates.write_private(self.certificate, made)
        return certificates.read_claim(made)

    def sign(self, kind: str, document: Json, key: Path | None = None) -> Path:
        """Write a document in this site's name, such as constants-aachen.json, which `read_signed` checks."""
        found = self.federation()
        own = self.own(found)
        path = self.path / f"{kind}-{own.name}.json"
        named = {"federation": found.name, "site": own.name} | document
        _write(path, certificates.sign(kind, named, self._signer(own, key)))
        return path

    def _signer(self, own: Site, key: Path | None) -> Ed25519PrivateKey:
        """The site's key, at this path if it is kept elsewhere."""
        signer = read_key(key or self.key)
        if fingerprint(signer.public_key()) != own.fingerprint:
            raise InputError(f"{key or self.key} is not the key that {self.root} belongs to; restore the right one")
        return signer

    def data_key(self) -> bytes | None:
        """The key of the fingerprints of the site's data; None if site.key is elsewhere, until the next renewal."""
        if not self.data.exists():
            return certificates.derived(read_key(self.key), DATA) if self.key.exists() else None
        certificates.check_private(self.data)
        try:
            return bytes.fromhex(self.data.read_text())
        except (OSError, ValueError):
            raise InputError(f"{self.data} is damaged; delete it, and run `qg site renew`") from None

    def shown(self) -> CertificateClaim | None:
        """The claim of this site's TLS certificate; None if there is no certificate yet."""
        if not self.certificate.exists():
            return None
        certificates.check_private(self.certificate)
        try:
            return certificates.read_claim(self.certificate.read_bytes())
        except InputError:
            raise InputError(DAMAGED.format(self.certificate)) from None

    def server_context(self) -> ssl.SSLContext:
        """A context for one accepted connection: mutual TLS 1.3, only with sites of the newest federation file.

        A new context per connection, made in a few milliseconds, follows renewals and newer files.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """A context for one dialled connection, as `server_context`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def peer(self, certificate_der: bytes, federation: Federation | None = None) -> Identity:
        """The node that a certificate proves; raise InputError with the reason if it proves none."""
        federation = federation or self.federation()
        claim = certificates.read_claim(certificate_der)
        if claim.federation != federation.name:
            raise InputError(f"the certificate is for federation {claim.federation}, this is {federation.name}")
        site = federation.site(claim.node)
        certificates.check_issued(certificate_der, site.root, site.called, self.own(federation).called)
        return Identity(federation.name, site.node, site.fingerprint, claim.ends)

    def _context(self, side: int) -> ssl.SSLContext:
        federation = self.federation()
        self._renew_if_due(federation)
        context = ssl.SSLContext(side)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False              # `peer` checks the identity
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= NO_CHECK_TIME       # `peer` checks it: an alert of TLS would not name the clocks
        context.load_verify_locations(cadata=b"".join(site.root for site in federation.sites))
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0                 # no resumption: every connection is checked anew
        try:
            with alone(self.path, shared=True, wait=True):      # OpenSSL opens the file twice: no renewal in between
                context.load_cert_chain(self.certificate)
        except (OSError, ssl.SSLError) as error:
            _check_files_left(error)
            raise InputError(DAMAGED.format(self.certificate)) from None
        return context

    def _renew_if_due(self, federation: Federation) -> None:
        """Renew in the last third of the certificate's life, or if the site's number has changed."""
        if self.key.exists():
            certificates.check_private(self.key)
        shown = self.shown()
        if shown is None:
            self.renew()
        elif shown.node != self.own(federation).node:
            self.renew(shown.ends - shown.begins)
        elif shown.is_due and self.key.exists():
            try:
                self.renew(shown.ends - shown.begins)
            except InputError as error:             # such as a full disk: the old one may still be valid
                if now() > shown.ends:
                    raise
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("the certificate ends %s and cannot be renewed: %s", minute(shown.ends), error)
        elif now() > shown.ends:
            raise InputError(f"{self.certificate} ended on {minute(shown.ends)}; run `qg site renew --key FILE`")

    def _read(self, text: bytes, where: str) -> Federation:
        if not self.authority.exists():
            raise InputError(f"{self.path} trusts no organiser yet; run `qg site install` with the organiser's file")
        if self._parsed is None or self._parsed[0] != text:
            organiser = certificates.public_key(self.authority.read_text().strip(), str(self.authority))
            self._parsed = text, federation_file.read(text, organiser, where)
        found = self._parsed[1]
        found.check_dates(where)
        return found

    def _seen(self) -> tuple[int, str]:
        """Serial number and digest of the newest file seen so far."""
        if not self.newest.exists():
            return 0, ""
        try:
            seen = read_json(self.newest)
            return int(seen["serial"]), str(seen["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            _check_files_left(error)
            raise InputError(f"{self.newest} is damaged; delete it if {self.file} is the newest you know") from None

    def _remember(self, found: Federation, text: bytes) -> None:
        if found.serial > self._seen()[0]:
            write_json(self.newest, {"serial": found.serial, "sha256": hashlib.sha256(text).hexdigest()})


class OrganiserFolder:
    """The folder of the organiser: organiser.key, which is secret, and federation.json, which is public."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "organiser.key"
        self.file = path / "federation.json"

    def new(self, name: str, topology: str, days: float) -> Federation:
        """Make a key and a federation without sites; the topology is a string that this package does not parse."""
        federation_file.check_name(name, "the federation")
        made = Federation(name, 1, _end(days), (), topology)
        with _alone(self.path):
            if self.file.exists():
                raise InputError(f"{self.file} exists; name another folder with --folder")
            certificates.new_key(self.key)
            self._write(made)
        return made

    def read(self) -> Federation:
        """The newest federation."""
        if not self.file.exists():
            raise InputError(f"{self.path} has no federation; make one with `qg federation new`, or name its --folder")
        return federation_file.read(certificates.read_text(self.file), read_key(self.key).public_key(), str(self.file))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the organiser's key, for the sites to compare."""
        return fingerprint(read_key(self.key).public_key())

    def approve(
        self, requests: Sequence[Request], nodes: int, links: Sequence[tuple[int, int]], node: int | None = None,
        confirm: Callable[[Site], None] = lambda site: None,
    ) -> Federation:
        """Add sites, under the lowest free numbers or, for one site, under `node`.

        `nodes` and `links` describe the federation's topology. A request with a known key keeps the site's number and
        changes its address. `confirm` is called with each site before anything is written, and may raise.
        """
        if node is not None and len(requests) != 1:
            raise InputError(f"--node is for one request, got {len(requests)}; approve them one by one")
        with _alone(self.path):
            found = self.read()
            for request in requests:
                found = _with(found, request, nodes, node)
            found.check_edges(links)
            for request in requests:
                confirm(found.site(request.name))
            return self._write_next(found)

    def revoke(self, site: str) -> Federation:
        """Write the next file without this site, which frees its number."""
        with _alone(self.path):
            found = self.read()
            gone = found.site(site)
            return self._write_next(replace(found, sites=tuple(one for one in found.sites if one != gone)))

    def extend(self, days: float) -> Federation:
        """Write the next file, which ends this many days from now; refuse an end before the present one."""
        with _alone(self.path):
            found, ends = self.read(), _end(days)
            if ends < found.ends:
                least = math.ceil((found.ends - now()) / timedelta(days=1))
                raise InputError(
                    f"{ends:%Y-%m-%d} is {days:g} days from now, but federation {found.name} ends "
                    f"{found.ends:%Y-%m-%d}, which is later; name {least} days or more"
                )
            return self._write_next(replace(found, ends=ends))

    def _write_next(self, federation: Federation) -> Federation:
        self._write(replace(federation, serial=federation.serial + 1))
        return self.read()

    def _write(self, federation: Federation) -> None:
        _write(self.file, federation_file.written(federation, read_key(self.key)))


def _with(federation: Federation, request: Request, n: int, node: int | None) -> Federation:
    """The federation with this site added; it replaces a site with the same key."""
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
    others[chosen] = Site(chosen, request.name, request.address, request.fingerprint, request.root, request.relays)
    return replace(federation, sites=tuple(site for _, site in sorted(others.items())))


def _end(days: float) -> datetime:
    """The end of a federation that lasts this many days."""
    if not 0 < days <= LONGEST_DAYS:
        raise InputError(f"a federation lasts at most {LONGEST_DAYS} days, got {days:g}")
    return now() + timedelta(days=days)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone(folder, wait=True):
        yield


def _check_serial(found: Federation, text: bytes, seen: tuple[int, str], where: str) -> None:
    """Raise if a newer file was seen, or another one with this serial number."""
    serial, digest = seen
    if found.serial < serial:
        raise InputError(f"{where} has serial {found.serial}, but {serial} was seen here; ask for the newest file")
    if found.serial == serial and hashlib.sha256(text).hexdigest() != digest:
        raise InputError(f"{where} differs from another file with serial {serial}; ask the organiser for another")


def _check_files_left(error: Exception) -> None:
    """Raise with the true reason if a file cannot be read because too many are open."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        raise InputError("too many files are open; allow more with `ulimit -n`") from None


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
