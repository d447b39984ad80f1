"""Ed25519 keys in files that their owner alone can read, their fingerprints, and signed JSON texts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasiglobal.common.files import replacing
from quasiglobal.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MOST_BYTES = 2**21
"""Size of the largest signed text that is read, about 3,000 sites."""

SIGNED = re.compile(rb'(\{\n.*),\n "signature": "([0-9a-f]{128})"\n\}\n', re.DOTALL)
"""A signed text is a JSON object whose last member is the signature of all bytes before it."""


def new_key(path: Path) -> Ed25519PrivateKey:
    """Make a private key and write it to a new file with mode 600; never overwrite one."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if path.exists():
        raise InputError(f"{path} exists and is never overwritten; name another folder")
    key = Ed25519PrivateKey.generate()
    write_private(path, private_pem(key))
    return key


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as unencrypted PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically with mode 600, in a folder of mode 700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb", opener=_for_the_owner) as file:
        file.write(content)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def check_private(path: Path) -> None:
    """Raise unless a file exists and no other user can read or write it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if mode & 0o077 and sys.platform != "win32":
        raise InputError(f"{path} has mode {mode:o}, so others can use this key; run `chmod 600 {path}`")


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a file that its owner alone can read."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_private(path)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except Exception:                       # cryptography raises many kinds for damaged files
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} is not an Ed25519 key in PEM; restore it from a copy")
    return key


def public_text(key: Ed25519PublicKey) -> str:
    """A public key (SubjectPublicKeyInfo, DER) in hexadecimal digits."""
    return public_der(key).hex()


def public_der(key: Any) -> bytes:
    """A public key as SubjectPublicKeyInfo in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def public_key(text: object, where: str) -> Ed25519PublicKey:
    """Read what `public_text` wrote."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    key = None
    if isinstance(text, str) and re.fullmatch("[0-9a-f]{88}", text):
        try:
            key = load_der_public_key(bytes.fromhex(text))
        except Exception:                   # cryptography raises many kinds for damaged keys
            key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{where} has no Ed25519 public key; ask for the file again")
    return key


def fingerprint(key: Any) -> str:
    """SHA-256 of a public key (SubjectPublicKeyInfo, DER), in hexadecimal digits."""
    return hashlib.sha256(public_der(key)).hexdigest()


def spoken(print_: str, groups: int = 8) -> str:
    """A fingerprint in lines of groups of four digits, to be read aloud.

    >>> print(spoken("0123456789abcdef" * 4))
    0123 4567 89ab cdef 0123 4567 89ab cdef
    0123 4567 89ab cdef 0123 4567 89ab cdef
    """
    fours = [print_[at : at + 4] for at in range(0, len(print_), 4)]
    return "\n".join(" ".join(fours[at : at + groups]) for at in range(0, len(fours), groups))


def sign(kind: str, document: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    """A signed text: the document as JSON, with the signature as its last member.

    `kind` is part of what is signed, so that a request never passes for a federation file.
    """
    body = json.dumps(document, indent=1, ensure_ascii=False).encode().removesuffix(b"\n}")
    return body + b',\n "signature": "' + key.sign(_signed(kind, body)).hex().encode() + b'"\n}\n'


def check_signature(kind: str, text: bytes, key: Ed25519PublicKey, where: str) -> None:
    """Raise unless `key` signed this text, byte for byte."""
    from cryptography.exceptions import InvalidSignature

    body, signature = _parts(text, where)
    try:
        key.verify(signature, _signed(kind, body))
    except InvalidSignature:
        raise InputError(f"{where} was changed, or signed by another key; ask for the file again") from None


def unchecked(text: bytes, where: str) -> dict[str, Any]:
    """The document of a signed text, without its signature, which is not checked."""
    _parts(text, where)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not a signed JSON text of quasiglobal; ask for the file again") from None
    document.pop("signature")
    return dict(document)


def _parts(text: bytes, where: str) -> tuple[bytes, bytes]:
    """The signed bytes and the signature."""
    if len(text) > MOST_BYTES:
        raise InputError(f"{where} has {len(text):,} bytes; a signed file has at most {MOST_BYTES:,}")
    found = SIGNED.fullmatch(text)
    if found is None:
        raise InputError(f"{where} is not a signed JSON text of quasiglobal; ask for the file again")
    return found[1], bytes.fromhex(found[2].decode())


def _signed(kind: str, body: bytes) -> bytes:
    return f"quasiglobal {kind}\n".encode() + body


def read_text(path: Path) -> bytes:
    """Read a signed text, or as much of it as shows that it is too long."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
