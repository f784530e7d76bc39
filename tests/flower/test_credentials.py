"""The keys of a test federation: what they prove, to whom, and that they stay what they are."""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from encrypted_keys import encrypt
from expired_certificates import write_certificate

from fedskew.errors import UserError
from fedskew.flower.certificates import certificate_hosts
from fedskew.flower.credentials import Credentials, make_credentials

SITES = ["north", "south"]
NEW_HOST = ["fl.example.net"]
RARE_CURVE = """-----BEGIN EC PRIVATE KEY-----
MHECAQEEHmRRyotsj1tv8JG17gI8fNkJqOWOvZB2fRPE4cqt36AKBggqhkjOPQMB
BKFAAz4ABDB3Kllp6uWI7rpojMmH7ebvhyKB2AzipPGgWHj/IVxadXZshrWSEsyk
6TS9/cEgWF8h/akJD8oBD03I0w==
-----END EC PRIVATE KEY-----
"""
"""A key on prime239v1, made by openssl."""


@pytest.fixture
def made(tmp_path: Path) -> Credentials:
    return make_credentials(tmp_path / "keys", SITES, ["fl.example.org", "10.1.2.3"])


def handshake(server: Credentials, authority: Path, name: str) -> None:
    """One over a socket pair, with the checks that Python 3.13 makes by default."""
    hosting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    hosting.load_cert_chain(server.certificate, server.key)
    visiting = ssl.create_default_context(cafile=str(authority))
    visiting.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            hosting.wrap_socket(there, server_side=True).close()
        except OSError:  # the visitor has refused
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        visiting.wrap_socket(here, server_hostname=name).close()
    finally:
        here.close()
        thread.join()


@pytest.mark.parametrize("name", ["fl.example.org", "10.1.2.3", "localhost", "127.0.0.1", "::1"])
def test_a_strict_client_trusts_the_server_under_its_names(made: Credentials, name: str) -> None:
    handshake(made, made.node("north").authority, name)


def test_not_under_another_name(made: Credentials) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="fl\\.example\\.com"):
        handshake(made, made.authority, "fl.example.com")


def test_not_by_another_authority(made: Credentials, tmp_path: Path) -> None:
    other = make_credentials(tmp_path / "other", SITES)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.authority, "localhost")


@pytest.mark.parametrize("site", SITES)
def test_a_node_key_is_openssh_on_a_nist_curve_and_its_halves_belong_together(made: Credentials, site: str) -> None:
    node = made.node(site)
    private = load_ssh_private_key(node.private.read_bytes(), None)
    public = load_ssh_public_key(node.public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.curve.name == "secp384r1"
    assert private.public_key() == public


def test_sites_differ(made: Credentials) -> None:
    assert made.node("north").public.read_bytes() != made.node("south").public.read_bytes()


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = make_credentials(tmp_path / "keys", SITES)
    finally:
        os.umask(before)
    secrets = [made.authority_key, made.key, *(made.node(site).private for site in SITES)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700


def test_a_site_s_folder_has_nobody_else_s_secret(made: Credentials) -> None:
    assert {path.name for path in made.node("north").folder.iterdir()} == {"ca.pem", "node.key", "node.pub"}
    assert made.node("north").authority.read_bytes() == made.authority.read_bytes()


def test_a_site_is_added_without_the_authority_s_key_and_everything_else_stays(made: Credentials) -> None:
    made.authority_key.unlink()
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    make_credentials(made.folder, [*SITES, "east"])
    assert {path: path.read_bytes() for path in before} == before
    assert made.node("east").private.is_file()
    assert made.node("east").authority.read_bytes() == made.authority.read_bytes()
    assert not made.authority_key.exists()


@pytest.mark.parametrize("host", ["FL.Example.org", "10.1.2.3", "0:0:0:0:0:0:0:1"])
def test_another_spelling_of_a_host_is_no_new_host(made: Credentials, host: str) -> None:
    before = made.certificate.read_bytes()
    make_credentials(made.folder, SITES, [host])
    assert made.certificate.read_bytes() == before


@pytest.mark.parametrize("host", ["999.1.1.1", "10.0.0", "10.0.0.5:9092", "https://fl.example.org", "fl..org"])
def test_what_is_neither_a_name_nor_an_address_is_refused(made: Credentials, host: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"host {host!r} is neither a host's name nor an address")):
        make_credentials(made.folder, SITES, [host])


def test_a_new_host_is_added_to_the_old_ones_under_the_same_authority(made: Credentials) -> None:
    authority = made.authority.read_bytes()
    make_credentials(made.folder, SITES, ["fl.example.net"])
    assert made.authority.read_bytes() == authority
    for name in ("fl.example.org", "fl.example.net"):
        handshake(made, made.authority, name)


def test_a_certificate_in_its_last_month_is_renewed(tmp_path: Path) -> None:
    short = make_credentials(tmp_path, SITES, days=20).certificate.read_bytes()
    made = make_credentials(tmp_path, SITES, days=365)
    assert made.certificate.read_bytes() != short
    assert make_credentials(tmp_path, SITES).certificate.read_bytes() == made.certificate.read_bytes()


def test_in_its_last_month_a_certificate_stays_if_the_authority_s_key_is_not_there(made: Credentials) -> None:
    write_certificate(made, timedelta(days=10))
    before = made.certificate.read_bytes()
    made.authority_key.unlink()
    make_credentials(made.folder, [*SITES, "east"])
    assert made.certificate.read_bytes() == before
    assert made.node("east").private.is_file()


def test_an_expired_certificate_needs_the_authority_s_key(made: Credentials) -> None:
    write_certificate(made, timedelta(days=-1))
    made.authority_key.unlink()
    with pytest.raises(UserError, match=r"ca\.key is missing, and the server needs a new certificate; put the"):
        make_credentials(made.folder, SITES)


def test_a_renewed_certificate_keeps_its_host_names(tmp_path: Path) -> None:
    make_credentials(tmp_path, SITES, hosts=["fl.example.org"], days=20)
    renewed = make_credentials(tmp_path, SITES, days=365)
    assert "fl.example.org" in certificate_hosts(renewed.certificate.read_bytes())


def test_half_an_authority_is_not_replaced(made: Credentials) -> None:
    key = made.authority_key.read_bytes()
    made.authority_key.unlink()
    with pytest.raises(UserError, match=r"ca\.key is missing, and the server needs a new certificate; put the"):
        make_credentials(made.folder, SITES, NEW_HOST)
    made.authority_key.write_bytes(key)
    made.authority.unlink()
    for hosts in ([], NEW_HOST):
        with pytest.raises(UserError, match=r"cannot read .*ca\.pem"):
            make_credentials(made.folder, SITES, hosts)


@pytest.mark.parametrize("content", [b"", b"no key at all"])
def test_a_damaged_authority_is_named(made: Credentials, content: bytes) -> None:
    key = made.authority_key.read_bytes()
    made.authority_key.write_bytes(content)
    with pytest.raises(UserError, match=r"ca\.pem or .*ca\.key cannot be used"):
        make_credentials(made.folder, SITES, NEW_HOST)
    made.authority_key.write_bytes(key)
    made.authority.write_bytes(content)
    with pytest.raises(UserError, match=r"ca\.pem or .*ca\.key cannot be used"):
        make_credentials(made.folder, SITES, NEW_HOST)
    with pytest.raises(UserError, match=r"ca\.pem cannot be used"):
        make_credentials(made.folder, SITES)


def test_an_authority_s_key_of_another_kind_is_named(made: Credentials) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    made.authority_key.write_bytes(key)
    with pytest.raises(UserError, match="the key is not an elliptic curve key"):
        make_credentials(made.folder, SITES, NEW_HOST)


def test_another_authority_s_key_is_refused(made: Credentials, tmp_path: Path) -> None:
    other = make_credentials(tmp_path / "other", SITES)
    made.authority_key.write_bytes(other.authority_key.read_bytes())
    with pytest.raises(UserError, match="the key does not belong to the certificate"):
        make_credentials(made.folder, SITES, NEW_HOST)


def test_a_new_site_does_not_get_another_authority_s_certificate(made: Credentials, tmp_path: Path) -> None:
    """It would refuse the server."""
    made.authority.write_bytes(make_credentials(tmp_path / "other", SITES).authority.read_bytes())
    with pytest.raises(UserError, match=r"server\.pem was not signed by ca\.pem"):
        make_credentials(made.folder, [*SITES, "east"])
    assert not made.node("east").folder.exists()


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_an_authority_s_key_with_a_passphrase_is_named_if_it_must_sign(made: Credentials, form: PrivateFormat) -> None:
    encrypt(made.authority_key, form)
    make_credentials(made.folder, [*SITES, "east"])
    with pytest.raises(UserError) as raised:
        make_credentials(made.folder, SITES, NEW_HOST)
    key = made.authority_key
    assert str(raised.value) == (
        f"{key} needs a passphrase; expected a private key without one: run "
        f"`openssl pkey -in {key} -out {key}.plain`, and rename the new file to ca.key"
    )


def test_a_key_on_an_unsupported_curve_is_named(made: Credentials) -> None:
    made.authority_key.write_text(RARE_CURVE)
    with pytest.raises(UserError, match=r"ca\.key cannot be used \(Curve .* is not supported\)"):
        make_credentials(made.folder, SITES, NEW_HOST)


def test_a_server_certificate_without_host_names_is_named_and_may_be_deleted(made: Credentials) -> None:
    write_certificate(made, timedelta(days=100), names_hosts=False)
    with pytest.raises(UserError, match=r"server\.pem names no host; expected a certificate with .*: delete it"):
        make_credentials(made.folder, SITES)
    made.certificate.unlink()
    make_credentials(made.folder, SITES)
    handshake(made, made.authority, "localhost")


@pytest.mark.parametrize(
    ("sites", "hosts", "days", "said"),
    [
        ([], [], 365, "no sites"),
        (["a", "b", "a"], [], 365, "site 'a' is named twice"),
        (["../up"], [], 365, "'../up'"),
        ([".hidden"], [], 365, "'.hidden'"),
        (["a"], ["https://fl.example.org"], 365, "without scheme and port"),
        (["a"], ["fl.example.org:9092"], 365, "without scheme and port"),
        (["a"], ["-x"], 365, "'-x'"),
        (["a"], [""], 365, "''"),
        (["a"], [], 0, "days is 0"),
        (["a"], [], 3_000_000, "days is 3000000; expected 1 to 36500"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    tmp_path: Path, sites: list[str], hosts: list[str], days: int, said: str
) -> None:
    with pytest.raises(UserError) as raised:
        make_credentials(tmp_path / "keys", sites, hosts, days)
    assert said in str(raised.value)
    assert not (tmp_path / "keys").exists()
