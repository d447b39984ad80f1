"""The federation file: the sites with their numbers, addresses and keys, signed by the organiser.

A site joins by a request with its name, address and root certificate, signed with the site's key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import UnionType
from typing import TYPE_CHECKING

from quasiglobal.common import own_code
from quasiglobal.common.files import Json
from quasiglobal.errors import InputError, unknown, whole
from quasiglobal.peers.certificates import (
    SKEW,
    check_signature,
    fingerprint,
    key_of_root,
    now,
    public_der,
    public_key,
    sign,
    unchecked,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
MOST_NODE = 99_999
MOST_SERIAL = 2**53 - 1
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Site:
    """One node of a federation."""

    node: int
    name: str
    address: str | None
    """HOST:PORT at which neighbours reach the site; None if it only dials."""
    fingerprint: str
    """SHA-256 of the site's public key (SubjectPublicKeyInfo, DER), in hexadecimal digits."""
    root: bytes = b""
    """The site's root certificate in DER; its key has this fingerprint."""
    relays: bool = False
    """Whether it connects two sites that can both only dial. The file has this member only if it is true."""

    @property
    def called(self) -> str:
        """The number and the name, as in every message about the site."""
        return f"node {self.node} ({self.name})"


@dataclass(frozen=True)
class Federation:
    """The content of a federation file."""

    name: str
    serial: int
    ends: datetime
    sites: tuple[Site, ...]
    topology: str = ""
    """The topology as the organiser wrote it, for information: neighbours compare theirs by content as they connect."""

    def site(self, which: int | str) -> Site:
        """The site with this node number or name."""
        for site in self.sites:
            if which in (site.node, site.name, str(site.node)):
                return site
        if isinstance(which, int):
            raise InputError(f"federation {self.name} (serial {self.serial}) has no node {which}")
        raise unknown("site", which, [site.name for site in self.sites])

    def has(self, node: int, key: str) -> bool:
        """Whether this node has the key with this fingerprint."""
        return any((site.node, site.fingerprint) == (node, key) for site in self.sites)

    def relays(self, i: int, j: int) -> list[Site]:
        """The sites that can connect nodes i and j, if both only dial."""
        if self.site(i).address is not None or self.site(j).address is not None:
            return []
        return [site for site in self.sites if site.relays and site.address is not None]

    def listener(self, i: int, j: int) -> int:
        """The node that listens for the edge between nodes i and j: the lower one that has an address.

        If neither has one, the lower one listens at a relay.
        """
        for node in sorted((i, j)):
            if self.site(node).address is not None or self.relays(i, j):
                return node
        first, second = self.site(min(i, j)), self.site(max(i, j))
        raise InputError(
            f"{first.name} (node {first.node}) and {second.name} (node {second.node}) are neighbours and neither can "
            "be reached; give one of them an address, or another node number, or let a third site relay between them "
            "(`qg site request --relay`)"
        )

    def check_edges(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Raise if two neighbours both have no address."""
        present = {site.node for site in self.sites}
        for i, j in neighbours:
            if {i, j} <= present:
                self.listener(i, j)

    def check_dates(self, where: str) -> None:
        """Raise if the federation has ended."""
        if now() - SKEW > self.ends:
            raise InputError(
                f"{where} ended on {self.ends:%Y-%m-%d %H:%M} UTC; ask the organiser for a newer one "
                "(`qg federation extend`), and check this machine's clock"
            )


@dataclass(frozen=True)
class Request:
    """A site's request to join a federation."""

    federation: str
    name: str
    address: str | None
    fingerprint: str
    root: bytes
    relays: bool = False


def written(federation: Federation, key: Ed25519PrivateKey) -> bytes:
    """The federation file, signed with the organiser's key."""
    document = {
        "federation": federation.name,
        "serial": federation.serial,
        "ends": federation.ends.strftime(TIME),
        "topology": federation.topology,
        "organiser": public_der(key.public_key()).hex(),
        "sites": [_document(site) for site in federation.sites],
    }
    text = sign("federation", document, key)
    read(text, key.public_key(), f"federation {federation.name}")      # raises if the file is invalid
    return text


def read(text: bytes, organiser: Ed25519PublicKey, where: str) -> Federation:
    """The content of a federation file that this key signed; the signature is checked before anything is parsed."""
    check_signature("federation", text, organiser, where)
    document = unchecked(text, where)
    _check_fields(document, where, federation=str, serial=int, ends=str, topology=str, organiser=str, sites=list)
    own_code.read_from(where, document["topology"])
    sites = tuple(_site(one, f"site {at} in {where}") for at, one in enumerate(document["sites"]))
    for what in ("node", "name", "fingerprint"):
        if len({getattr(site, what) for site in sites}) < len(sites):
            raise InputError(f"{where} has two sites with the same {what}; ask the organiser")
    try:
        ends = datetime.strptime(document["ends"], TIME).replace(tzinfo=UTC)
    except ValueError:
        raise InputError(f"{where} has no end date such as 2027-01-31T12:00:00Z, got {document['ends']!r}") from None
    return Federation(
        check_name(document["federation"], where), _between(document["serial"], 1, MOST_SERIAL, f"serial in {where}"),
        ends, sites, document["topology"],
    )


def organiser_of(text: bytes, where: str) -> Ed25519PublicKey:
    """The public key that a federation file names as its organiser's, to be compared by telephone."""
    return public_key(unchecked(text, where).get("organiser"), where)


def written_request(request: Request, key: Ed25519PrivateKey) -> bytes:
    """The request as a file, signed with the site's key."""
    return sign("request", {
        "federation": request.federation, "name": request.name, "address": request.address,
        "root": base64.b64encode(request.root).decode(), **({"relays": True} if request.relays else {}),
    }, key)


def read_request(text: bytes, where: str) -> Request:
    """The request in a file. Its signature proves that the sender has the key, not the sender's identity."""
    document: Json = {"relays": False} | unchecked(text, where)
    _check_fields(document, where, federation=str, name=str, address=str | None, root=str, relays=bool)
    root = _decoded(document["root"], where)
    key = key_of_root(root, where)
    check_signature("request", text, key, where)
    return Request(
        check_name(document["federation"], where), check_name(document["name"], where),
        read_address(document["address"], where), fingerprint(key), root, document["relays"],
    )


def read_signed(kind: str, text: bytes, federation: Federation, where: str) -> tuple[Site, Json]:
    """A document that a site of the federation signed: the site, and the other members."""
    document = unchecked(text, where)
    name, site = document.pop("federation", None), document.pop("site", None)
    if name != federation.name or not isinstance(site, str):
        raise InputError(f"{where} is not of a site of federation {federation.name}; ask the site for another")
    found = federation.site(site)
    check_signature(kind, text, key_of_root(found.root, where), where)
    return found, document


def check_name(text: str, where: str) -> str:
    """Check the name of a federation or a site, which becomes part of file names and URIs."""
    if not NAME.fullmatch(text):
        raise InputError(
            f"{where} has the name {text[:50]!r}; use at most 40 lower-case letters, digits and hyphens, as in st-james"
        )
    return text


def read_address(text: str | None, where: str) -> str | None:
    """Check an address HOST:PORT, or None.

    >>> read_address("[2001:db8::7]:7443", "")
    '[2001:db8::7]:7443'
    """
    if text is None:
        return None
    host, port = split_address(text)
    if not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", host) or not 1 <= port <= 65535:
        raise InputError(f"{where} has the address {text[:80]!r}; write HOST:PORT, as in qg.st-james.example:7443")
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an address; port 0 if it has none.

    >>> split_address("[::1]:7443"), split_address("st-james.example:7443")
    (('::1', 7443), ('st-james.example', 7443))
    """
    host, _, port = text.rpartition(":")
    inside = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\]", host)
    if (":" in host and not inside) or not re.fullmatch("[0-9]{1,5}", port):
        return host, 0
    return inside[1] if inside else host, int(port)


def _site(said: object, where: str) -> Site:
    if not isinstance(said, dict):
        raise InputError(f"{where} is not an object; ask the organiser for the file again")
    document: Json = {"relays": False} | said
    _check_fields(document, where, node=int, name=str, address=str | None, fingerprint=str, root=str, relays=bool)
    root = _decoded(document["root"], where)
    if fingerprint(key_of_root(root, where)) != document["fingerprint"]:
        raise InputError(f"{where} has a fingerprint that is not its root certificate's; ask the organiser")
    return Site(
        _between(document["node"], 0, MOST_NODE, f"node of {where}"), check_name(document["name"], where),
        read_address(document["address"], where), document["fingerprint"], root, document["relays"],
    )


def _document(site: Site) -> Json:
    """A site as JSON; earlier versions read it unless it relays."""
    document = asdict(site) | {"root": base64.b64encode(site.root).decode()}
    return document if site.relays else {name: document[name] for name in document if name != "relays"}


def _check_fields(document: Json, where: str, **types: type | UnionType) -> None:
    """Raise unless a document has these members, of these types, and no others."""
    if document.keys() != types.keys() or not all(isinstance(document[name], types[name]) for name in types):
        raise InputError(f"{where} needs exactly {', '.join(types)}; it was made by another version of quasiglobal")


def _decoded(text: str, where: str) -> bytes:
    """Bytes from base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InputError(f"{where} has a damaged certificate; ask for the file again") from None


def _between(value: object, least: int, most: int, what: str) -> int:
    number = whole(value)
    if number is None or not least <= number <= most:
        raise InputError(f"the {what} must be a whole number from {least} to {most}, got {str(value)[:50]}")
    return number
