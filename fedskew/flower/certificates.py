"""X.509 certificates and node keys, in the forms that Flower 1.41 and strict TLS clients accept.

All certificates have extensions for key identifiers and key usage, because Python 3.13 refuses certificates without
them. Flower accepts node keys in OpenSSH's format, on a NIST curve.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedskew.errors import UserError
from fedskew.experiment.storage.files import reporting_os_errors

_AUTHORITY_DAYS = 3650
"""Days for which the authority's own certificate is valid."""
RENEWAL_DAYS = 30
"""A server's certificate should be renewed if it expires within this time."""
_CLOCK_SKEW = timedelta(minutes=5)
"""A certificate is backdated by this much, because the clocks of the machines may differ."""

Key = ec.EllipticCurvePrivateKey


@contextmanager
def _naming_unsupported_keys() -> Iterator[None]:
    """Raise ValueError if a key is of a kind that cannot be used here, for instance on a rare elliptic curve."""
    try:
        yield
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def key_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def node_key_pair(comment: str) -> tuple[bytes, bytes]:
    """Make a private and a public key as `ssh-keygen -t ecdsa -b 384` writes them."""
    key = new_key()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + f" {comment}\n".encode()


def read_node_key(path: Path) -> Key:
    """Read a site's private node key. Refuse every key that Flower does not accept."""
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); expected the site's node key") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not readable ({error}); expected a node key without a passphrase") from error
    if not isinstance(key, Key):
        raise UserError(f"{path} is not an ECDSA key; expected one that `ssh-keygen -t ecdsa -b 384` makes")
    return key


def new_authority() -> tuple[x509.Certificate, Key]:
    """Make a certificate authority that can sign server certificates, but no other authorities."""
    key = new_key()
    name = _common_name("fedskew test authority")
    builder = _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA384()), key


@_naming_unsupported_keys()
def load_authority(certificate: bytes, key: Path) -> tuple[x509.Certificate, Key]:
    """Load an authority. Raise ValueError if a file is damaged, or if the key is unsupported or does not match."""
    authority = x509.load_pem_x509_certificate(certificate)
    private = _load_key(key)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not an elliptic curve key")
    if private.public_key() != authority.public_key():
        raise ValueError("the key does not belong to the certificate")
    return authority, private


def issue(authority: x509.Certificate, authority_key: Key, hosts: Iterable[str], days: int) -> tuple[bytes, bytes]:
    """Issue a server's certificate for these names and addresses. Return it and its private key as PEM."""
    key = new_key()
    builder = _builder(_common_name("fedskew test server"), authority.subject, key.public_key(), days)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative_name(host) for host in hosts]), critical=False)
        .add_extension(signer, critical=False)
    )
    return certificate_pem(builder.sign(authority_key, hashes.SHA384())), key_pem(key)


def certificate_hosts(certificate: bytes) -> tuple[str, ...]:
    """Return the names and addresses in a server's certificate. Empty if it has no subject alternative names."""
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def expires_within(certificate: bytes, days: int) -> bool:
    """Whether a certificate expires within this time. With 0 days: whether it has expired."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc - datetime.now(UTC) < timedelta(days=days)


def days_left(certificate: bytes) -> float:
    """Days until a certificate expires. Negative if it expired. Raise ValueError if it is damaged or not valid yet."""
    loaded = x509.load_pem_x509_certificate(certificate)
    now = datetime.now(UTC)
    if now < loaded.not_valid_before_utc:
        raise ValueError(f"it is not valid before {loaded.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
    return (loaded.not_valid_after_utc - now) / timedelta(days=1)


@_naming_unsupported_keys()
def server_days_left(certificate: bytes, key: Path, authority: bytes) -> float:
    """`days_left` of a server's certificate. Also raise ValueError if the key or authority does not match."""
    if _load_key(key).public_key() != x509.load_pem_x509_certificate(certificate).public_key():
        raise ValueError("the key does not belong to the certificate")
    check_issuer(certificate, authority)
    return days_left(certificate)


@_naming_unsupported_keys()
def check_issuer(certificate: bytes, authority: bytes) -> None:
    """Raise ValueError unless the authority signed the server's certificate."""
    issuer = x509.load_pem_x509_certificate(authority)
    try:
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except InvalidSignature:
        raise ValueError("server.pem was not signed by ca.pem") from None


def is_address(host: str) -> bool:
    """Whether the host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _load_key(path: Path) -> PrivateKeyTypes:
    """Load a private key. Raise ValueError if it is damaged."""
    with reporting_os_errors("read", path):
        content = path.read_bytes()
    try:
        return load_pem_private_key(content, password=None)
    except TypeError as error:
        command = f"openssl pkey -in {quote(str(path))} -out {quote(f'{path}.plain')}"
        raise UserError(
            f"{path} needs a passphrase; expected a private key without one: run `{command}`, and rename the new file "
            f"to {path.name}"
        ) from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)


def _common_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
