"""A private certificate authority, kept in a folder. Needs the library cryptography."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from andon.host.errors import CommandError
from andon.host.tls import CA, CERTIFICATE, KEY

__all__ = ["Authority", "expiry_of"]

_CA_KEY = "ca.key"
_CA_DAYS = 10 * 365
_CLOCKS = timedelta(hours=1)
"""Certificates are valid from this long ago, for hosts whose clocks are slow."""
_COMMON_NAME_MOST = 64
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Signs certificates, each for use as a server and as a client."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """Made by `in_folder`."""
        self._certificate = certificate
        self._key = key

    @classmethod
    def in_folder(cls, folder: Path, now: datetime) -> tuple[Authority, bool]:
        """The authority in a folder, and whether it was made just now.

        Raises:
            CommandError: the folder holds half an authority, or something else.
            OSError: the folder can't be read or written.
        """
        there = [(folder / name).exists() for name in (CA, _CA_KEY)]
        if not any(there):
            folder.mkdir(parents=True, exist_ok=True)
            return cls._make(folder, now), True
        if not all(there):
            raise CommandError(
                f"{folder} holds {CA} or {_CA_KEY} without the other: restore the other, or "
                "choose another --out; hosts trust each other under one CA only"
            )
        try:
            certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            key = serialization.load_pem_private_key((folder / _CA_KEY).read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise CommandError(f"{folder} holds no CA of `andon certs` ({error})") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != certificate.public_key()
        ):
            raise CommandError(
                f"{folder / _CA_KEY} is not the key of {folder / CA}: restore the right one"
            )
        if certificate.not_valid_after_utc <= now:
            raise CommandError(
                f"the CA in {folder} has expired: make another with --out, and copy its "
                "certificates to every host"
            )
        return cls(certificate, key), False

    def certify(self, host: str, folder: Path, *, now: datetime, days: int) -> datetime:
        """Writes a new key, a certificate for `host` and the CA's. Returns when it expires.

        The certificate never outlives the CA's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(now + timedelta(days=days), self._certificate.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(host, self._certificate.subject, key, now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
            .add_extension(self._issuer_identifier(), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        # Key and certificate come last: a process that is using the folder keeps the old pair until
        # the two files fit together.
        _write(folder / CA, _pem(self._certificate))
        _write(folder / KEY, _key_pem(key), private=True)
        _write(folder / CERTIFICATE, _pem(certificate))
        return until

    @classmethod
    def _make(cls, folder: Path, now: datetime) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Andon private CA")])
        certificate = (
            _builder("Andon private CA", name, key, now, now + timedelta(days=_CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(folder / _CA_KEY, _key_pem(key), private=True)
        _write(folder / CA, _pem(certificate))
        return cls(certificate, key)

    def _issuer_identifier(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


def expiry_of(certificate: Path) -> datetime | None:
    """When a certificate expires; None if there is none, or it can't be read."""
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None


def _builder(
    common_name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    name = x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_COMMON_NAME_MOST])
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([name]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _names(host: str) -> list[x509.GeneralName]:
    """The names in the certificate: the host's, and those of loopback."""
    names: list[x509.GeneralName] = []
    for each in dict.fromkeys((host, *_LOOPBACK)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(each)))
        except ValueError:
            names.append(x509.DNSName(each))
    return names


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replaces a file atomically, since it may be in use. Others can never read a private one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o600 if private else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
