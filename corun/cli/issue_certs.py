"""A small certificate authority: it makes the files that TLS between the processes of one cluster needs.

This module owns the files that `make` writes, which include tokens and a seed key. It is for users without an authority
of their own organisation, which would be better. It must not know who uses the files.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corun.errors import InvalidArgumentError

VALID_DAYS = 825
TOKEN_BYTES = 32
SEED_KEY_BYTES = 32
SERVER = ExtendedKeyUsageOID.SERVER_AUTH
CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH
AUTHORITY_USES = ("digital_signature", "key_cert_sign", "crl_sign")
KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_DNS_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)


def make(directory: Path, hosts: Sequence[str]) -> list[Path]:
    """Write an authority, a certificate for the members, which are reached at `hosts`, a certificate for clients, a
    token for each, and the routers' seed key. Return the paths of the files.

    The client's token has operator rights, since whoever makes a cluster wants to see its state. Keys and tokens can be
    read by their owner only. Raises InvalidArgumentError before it writes anything if there is no host, if one is
    neither a name nor an address, or if a file exists already.
    """
    if not hosts:
        raise InvalidArgumentError("hosts", list(hosts), "must be at least one host name or address")
    of_members, of_client = [_name(host) for host in hosts], [_name("client")]
    ca_key, issuer = ec.generate_private_key(ec.SECP256R1()), _subject("corun authority")
    signs = x509.KeyUsage(**{use: use in AUTHORITY_USES for use in KEY_USES})
    authority = _unsigned("corun authority", ca_key, issuer).add_extension(signs, critical=True)
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    files = _pair("ca", authority.sign(ca_key, hashes.SHA256()), ca_key)
    for name, names, uses in (("member", of_members, [SERVER, CLIENT]), ("client", of_client, [CLIENT])):
        key = ec.generate_private_key(ec.SECP256R1())
        unsigned = _unsigned(f"corun {name}", key, issuer)
        unsigned = unsigned.add_extension(x509.SubjectAlternativeName(names), critical=False)
        unsigned = unsigned.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        files |= _pair(name, unsigned.sign(ca_key, hashes.SHA256()), key)
    client = secrets.token_hex(TOKEN_BYTES)
    texts = {
        "cluster.token": secrets.token_hex(TOKEN_BYTES),
        "clients.tokens": f"client: {client} operator",
        "client.token": client,
        "seed.key": secrets.token_hex(SEED_KEY_BYTES),
    }
    files |= {name: f"{text}\n".encode() for name, text in texts.items()}
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        if os.path.lexists(directory / name):
            raise InvalidArgumentError("directory", str(directory), f"must not hold {name} already")
    return [_new(directory / name, content) for name, content in files.items()]


def _unsigned(name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(issuer_name=issuer, subject_name=_subject(name), public_key=key.public_key())
    # The clocks of machines differ, so the certificate is valid from one hour ago.
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            limit = "must be an address, or a name of letters, digits, '-', '_' and '.', and without a port"
            raise InvalidArgumentError("hosts", host, limit) from None
        return x509.DNSName(host)


def _pair(name: str, signed: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> dict[str, bytes]:
    """Return the contents of the files of a certificate and of its key, by their names."""
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {f"{name}.pem": signed.public_bytes(pem), f"{name}.key": secret}


def _new(path: Path, content: bytes) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if path.suffix == ".pem" else 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path
