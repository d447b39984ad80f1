"""Keys in files that only their owner can read, signed JSON documents, and the X.509 certificates of a site.

A site has a long-lived root certificate for its key, and short-lived ones for its TLS connections. The federation file
has the root of every site, and TLS trusts only these roots: a site renews its certificate by itself, and a newer file
without the site revokes it. A root may sign anything, even the number of another node, so `peer` in `folders.py` checks
that the root of the claimed node signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import stat
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quasiglobal.common.files import Json, replacing
from quasiglobal.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
    from cryptography.x509 import KeyUsage, Name

MOST_BYTES = 2**21
"""Maximum size of a signed document in bytes, enough for about 3,000 sites."""

SIGNED = re.compile(rb'(\{\n.*),\n "signature": "([0-9a-f]{128})"\n\}\n', re.DOTALL)
"""A signed document is a JSON object; its last member is the signature of all bytes before it."""

LIFETIME = timedelta(days=7)
"""Validity of a TLS certificate."""

LONGEST_LIFETIME = timedelta(days=31)
"""Maximum validity of a TLS certificate."""

SKEW = timedelta(minutes=10)
"""Tolerated difference of two clocks."""

HOLDER = re.compile(r"qg://([a-z0-9-]{1,40})/(0|[1-9][0-9]{0,4})")
"""The name of a node in certificates: federation and number."""

MOST_ROOT = 1024
"""Maximum size of a root certificate in bytes; `root` makes about 420."""

FOREVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280's date for certificates without an end: the federation file ends a root's validity."""


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


def derived(key: Ed25519PrivateKey, purpose: str) -> bytes:
    """A secret for one purpose, by HMAC from a private key, of which it reveals nothing."""
    return hmac.digest(key.private_bytes_raw(), f"quasiglobal {purpose}\n".encode(), "sha256")


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically with mode 600, in a folder of mode 700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb", opener=partial(os.open, mode=0o600)) as file:
        file.write(content)


def check_private(path: Path) -> None:
    """Raise unless a file exists and no other user can read or write it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if mode & 0o077 and sys.platform != "win32":
        raise InputError(f"{path} has mode {mode:o}, so others can use this key; run `chmod 600 {path}`")


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a file that only its owner can read."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_private(path)
    content = read_text(path)
    try:
        key = load_pem_private_key(content, None)
    except Exception:                       # cryptography raises many kinds for damaged files
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} is not an Ed25519 key in PEM; restore it from a copy")
    return key


def public_der(key: PublicKeyTypes) -> bytes:
    """A public key as SubjectPublicKeyInfo in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def public_key(text: object, where: str) -> Ed25519PublicKey:
    """Read a key from the hexadecimal digits of `public_der`."""
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


def fingerprint(key: PublicKeyTypes) -> str:
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


def sign(kind: str, document: Json, key: Ed25519PrivateKey) -> bytes:
    """The document as JSON, with the signature as its last member.

    The signature covers `kind`, so that a request cannot pass for a federation file.
    """
    body = json.dumps(document, indent=1, ensure_ascii=False).encode().removesuffix(b"\n}")
    return body + b',\n "signature": "' + key.sign(_signed(kind, body)).hex().encode() + b'"\n}\n'


def check_signature(kind: str, text: bytes, key: Ed25519PublicKey, where: str) -> None:
    """Raise unless `key` signed exactly these bytes."""
    from cryptography.exceptions import InvalidSignature

    body, signature = _parts(text, where)
    try:
        key.verify(signature, _signed(kind, body))
    except InvalidSignature:
        raise InputError(f"{where} was changed, or signed by another key; ask for the file again") from None


def unchecked(text: bytes, where: str) -> Json:
    """The content of a signed document; its signature is not checked."""
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
    """Read a signed document, at most one byte more than is allowed."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def now() -> datetime:
    """The time, in whole seconds, as in certificates."""
    return datetime.now(UTC).replace(microsecond=0)


def minute(when: datetime) -> str:
    """A time for messages."""
    return f"{when:%Y-%m-%d %H:%M} UTC"


class CertificateClaim(NamedTuple):
    """The holder and the validity that a TLS certificate claims."""

    federation: str
    node: int
    begins: datetime
    ends: datetime

    @property
    def is_due(self) -> bool:
        """Whether less than a third of the certificate's life is left."""
        return now() > self.ends - (self.ends - self.begins) / 3


def root(key: Ed25519PrivateKey) -> bytes:
    """A site's root certificate in DER, signed by its own key. Its name is the key's fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    own = _name(fingerprint(key.public_key()))
    builder = x509.CertificateBuilder(
        issuer_name=own, subject_name=own, public_key=key.public_key(), serial_number=x509.random_serial_number(),
        not_valid_before=now() - SKEW, not_valid_after=FOREVER,
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, None).public_bytes(Encoding.DER)


def key_of_root(certificate: bytes, where: str) -> Ed25519PublicKey:
    """The public key of a root certificate in DER; raise InputError unless `root` made it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        found = x509.load_der_x509_certificate(certificate)
        found.verify_directly_issued_by(found)
        limits = found.extensions.get_extension_for_class(x509.BasicConstraints).value
        key = found.public_key()
        fits = limits.ca and limits.path_length == 0 and found.subject == _name(fingerprint(key))
        fits = fits and len(found.extensions) == 3 and len(certificate) <= MOST_ROOT     # nothing else for TLS to read
    except Exception:                       # cryptography raises many kinds for damaged certificates
        fits, key = False, None
    if not fits or not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{where} is not the root certificate of a site; ask for the file again")
    return key


def issue(
    key: Ed25519PrivateKey, federation: str, node: int, lifetime: timedelta = LIFETIME, at: datetime | None = None
) -> bytes:
    """A fresh key and a TLS certificate of it for this node, signed with the site's key; both as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    at = at or now()
    fresh = Ed25519PrivateKey.generate()
    builder = x509.CertificateBuilder(
        issuer_name=_name(fingerprint(key.public_key())), subject_name=_name(f"node {node}"),
        public_key=fresh.public_key(), serial_number=x509.random_serial_number(),
        not_valid_before=at - SKEW, not_valid_after=at + lifetime,
    )
    holder = x509.UniformResourceIdentifier(f"qg://{federation}/{node}")
    for_both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    of_the_root = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(for_both_sides, critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([holder]), critical=True)
    builder = builder.add_extension(of_the_root, critical=False)
    return private_pem(fresh) + builder.sign(key, None).public_bytes(Encoding.PEM)


def read_claim(certificate: bytes) -> CertificateClaim:
    """The claim of a TLS certificate in DER or PEM, not yet checked against anything."""
    from cryptography import x509

    try:
        load = x509.load_pem_x509_certificate if b"-----BEGIN" in certificate else x509.load_der_x509_certificate
        found = load(certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (holder,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        matched = HOLDER.fullmatch(holder)
        begins, ends = found.not_valid_before_utc + SKEW, found.not_valid_after_utc
    except Exception:                       # cryptography raises many kinds for damaged certificates
        matched = None
    if matched is None:
        raise InputError("the certificate names no node of a federation; it was not made by `qg site`")
    return CertificateClaim(matched[1], int(matched[2]), begins, ends)


class OutOfDate(InputError):
    """By the clock of this machine, a certificate is not valid yet, or no longer."""


def check_issued(certificate: bytes, by: bytes, holder: str = "its holder", here: str = "this site") -> None:
    """Raise unless the root `by` signed this TLS certificate, and it is valid now, for at most `LONGEST_LIFETIME`.

    The sentence about a wrong clock names both sites, since both read it.
    """
    from cryptography.x509 import load_der_x509_certificate

    try:
        found = load_der_x509_certificate(certificate)
        found.verify_directly_issued_by(load_der_x509_certificate(by))
    except Exception:                       # cryptography raises many kinds for damaged certificates
        raise InputError("the certificate is signed by another site's key") from None
    start, end = found.not_valid_before_utc, found.not_valid_after_utc
    clock = f"{minute(now())} by the clock of {here}; compare `date -u` at both"
    if now() < start:
        raise OutOfDate(f"the certificate of {holder} begins at {minute(start)}, and it is {clock}")
    if now() > end:
        raise OutOfDate(f"the certificate of {holder} ended at {minute(end)}, and it is {clock}, or renew it")
    if end - start > LONGEST_LIFETIME + SKEW:
        raise InputError(f"the certificate is valid for more than {LONGEST_LIFETIME.days} days; renew it for fewer")


def _name(text: str) -> Name:
    from cryptography.x509 import Name

    return Name.from_rfc4514_string(f"CN={text}")


def _usage(signs_certificates: bool) -> KeyUsage:
    from cryptography.x509 import KeyUsage

    return KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, crl_sign=False, encipher_only=False,
        decipher_only=False,
    )
