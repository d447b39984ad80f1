"""A site's request to take part: its name, address and root certificate, signed with the site's key."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quasiglobal.peers import keys
from quasiglobal.peers.certificates import key_of_root
from quasiglobal.peers.federation_file import Site, check_name, decoded, read_address, read_fields

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KIND = "request"


@dataclass(frozen=True)
class Request:
    """A site's request to take part in a federation."""

    federation: str
    name: str
    address: str | None
    fingerprint: str
    root: bytes

    def site(self, node: int) -> Site:
        """The approved site."""
        return Site(node, self.name, self.address, self.fingerprint, self.root)


def written(request: Request, key: Ed25519PrivateKey) -> bytes:
    """The request as a file, signed with the site's key."""
    return keys.sign(KIND, {
        "federation": request.federation, "name": request.name, "address": request.address,
        "root": base64.b64encode(request.root).decode(),
    }, key)


def read(text: bytes, where: str) -> Request:
    """The request in a file. Its signature shows that the sender has the key, not who the sender is."""
    document = keys.unchecked(text, where)
    read_fields(document, {"federation": str, "name": str, "address": str | None, "root": str}, where)
    root = decoded(document["root"], where)
    key = key_of_root(root, where)
    keys.check_signature(KIND, text, key, where)
    return Request(
        check_name(document["federation"], where), check_name(document["name"], where),
        read_address(document["address"], where), keys.fingerprint(key), root,
    )
