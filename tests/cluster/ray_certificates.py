"""Certificates for the nodes of a Ray cluster: an authority, and one certificate of it for all."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def tls_variables(folder: Path) -> dict[str, str]:
    """Write the files, and return the variables with which Ray uses them."""
    authority_key, node_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("authority", authority_key, "authority", authority_key, is_authority=True)
    node = _certificate("node", node_key, "authority", authority_key, is_authority=False)
    key = node_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {"CA_CERT": _pem(authority), "SERVER_CERT": _pem(node), "SERVER_KEY": key}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(folder / name) for name in files}}


def own_address() -> str:
    """The address by which Ray names this machine. Nothing is sent to the other one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("8.8.8.8", 80))
        except OSError:
            return "127.0.0.1"
        return sock.getsockname()[0]


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, *,
    is_authority: bool,
) -> x509.Certificate:  # fmt: skip
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), *map(x509.IPAddress, map(ipaddress.ip_address, ("127.0.0.1", own_address())))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())
