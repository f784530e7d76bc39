"""Server certificates that expired in the past, signed by a federation's real authority."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fedskew.flower import certificates
from fedskew.flower.credentials import LOCAL, Credentials


def write_certificate(keys: Credentials, expires: timedelta, names_hosts: bool = True) -> None:
    """Replace the server's certificate by one for this machine that expires so long from now, or did if negative."""
    authority, authority_key = certificates.load_authority(keys.authority.read_bytes(), keys.authority_key)
    pem, key = certificates.issue(authority, authority_key, LOCAL, days=1)
    issued = x509.load_pem_x509_certificate(pem)
    end = datetime.now(UTC) + expires
    builder = (
        x509.CertificateBuilder()
        .subject_name(issued.subject)
        .issuer_name(issued.issuer)
        .public_key(issued.public_key())  # type: ignore[arg-type]
        .serial_number(issued.serial_number)
        .not_valid_before(end - timedelta(days=365))
        .not_valid_after(end)
    )
    for extension in issued.extensions:
        if not names_hosts and extension.oid == x509.SubjectAlternativeName.oid:
            continue
        builder = builder.add_extension(extension.value, extension.critical)
    keys.certificate.write_bytes(certificates.certificate_pem(builder.sign(authority_key, hashes.SHA384())))
    keys.key.write_bytes(key)


def expire_certificate(keys: Credentials) -> None:
    write_certificate(keys, timedelta(days=-2))
