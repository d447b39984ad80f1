"""X.509 certificates of a site: a long-lived root of its own, and the short-lived ones of its TLS connections.

The federation file has the root of every site, and TLS trusts these roots alone, so a site renews its certificate
without anybody else, and a newer file without a site revokes it. A root may sign anything, also the number of another
node: `peer` in `site.py` therefore checks that the root of that very node signed.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from quasiglobal.errors import InputError
from quasiglobal.peers.keys import fingerprint, private_pem

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.x509 import Certificate, KeyUsage, Name

LIFETIME = timedelta(days=7)
"""Validity of a TLS certificate."""

LONGEST_LIFETIME = timedelta(days=31)
"""Validity up to which the certificate of another site is accepted."""

SKEW = timedelta(minutes=10)
"""Tolerated difference of two clocks."""

HOLDER = re.compile(r"qg://([a-z0-9-]{1,40})/(0|[1-9][0-9]{0,4})")
"""The name of a node in certificates, as of `uri`."""

MOST_ROOT = 1024
"""Size of the largest root certificate in bytes; `root` makes about 420."""

FOREVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280's date for certificates without an end: the federation file ends a root's validity."""


def now() -> datetime:
    """The time, in whole seconds, as in certificates."""
    return datetime.now(UTC).replace(microsecond=0)


class CertificateClaim(NamedTuple):
    """What a TLS certificate says about its holder."""

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
    """The public key of a root certificate in DER, if it is one that `root` makes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.x509 import BasicConstraints

    try:
        found = _read(certificate)
        found.verify_directly_issued_by(found)
        limits = found.extensions.get_extension_for_class(BasicConstraints).value
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
    """A TLS certificate for this node with a fresh key of its own, signed by the site's key: both as PEM."""
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
    holder = x509.UniformResourceIdentifier(uri(federation, node))
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
    from cryptography.x509 import SubjectAlternativeName, UniformResourceIdentifier, load_pem_x509_certificate

    try:
        found = load_pem_x509_certificate(certificate) if b"-----BEGIN" in certificate else _read(certificate)
        names = found.extensions.get_extension_for_class(SubjectAlternativeName).value
        (holder,) = names.get_values_for_type(UniformResourceIdentifier)
        matched = HOLDER.fullmatch(holder)
        begins, ends = found.not_valid_before_utc + SKEW, found.not_valid_after_utc
    except Exception:                       # cryptography raises many kinds for damaged certificates
        matched = None
    if matched is None:
        raise InputError("the certificate names no node of a federation; it was not made by `qg site`")
    return CertificateClaim(matched[1], int(matched[2]), begins, ends)


def check_issued(certificate: bytes, by: bytes) -> None:
    """Raise unless the root `by` signed this TLS certificate, which is valid now, and not for too long."""
    try:
        found = _read(certificate)
        found.verify_directly_issued_by(_read(by))
    except Exception:                       # cryptography raises many kinds for damaged certificates
        raise InputError("the certificate is signed by another site's key") from None
    start, end = found.not_valid_before_utc, found.not_valid_after_utc
    if now() + SKEW < start or now() > end:
        raise InputError(
            f"the certificate is valid from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now():%Y-%m-%d %H:%M}; check both clocks"
        )
    if end - start > LONGEST_LIFETIME + SKEW:
        raise InputError(f"the certificate is valid for more than {LONGEST_LIFETIME.days} days; renew it for fewer")


def uri(federation: str, node: int) -> str:
    """The name of a node in certificates.

    >>> uri("tumours", 3)
    'qg://tumours/3'
    """
    return f"qg://{federation}/{node}"


def _read(certificate: bytes) -> Certificate:
    from cryptography.x509 import load_der_x509_certificate

    return load_der_x509_certificate(certificate)


def _name(text: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(signs_certificates: bool) -> KeyUsage:
    from cryptography.x509 import KeyUsage

    return KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, crl_sign=False, encipher_only=False,
        decipher_only=False,
    )
