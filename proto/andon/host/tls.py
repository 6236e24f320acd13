"""TLS: a folder of certificates, and the channels and ports that use it.

The folder holds `tls.crt` and `tls.key`, this process's own certificate and its key, and `ca.crt`,
the certificates that it trusts. These are the names of a Kubernetes TLS secret. A server with
`ca.crt` demands certificates from its clients. A server checks the files at each handshake, and a
client when it opens a channel, so new files need no restart. Open connections stay as they are.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

__all__ = [
    "CA",
    "CERTIFICATE",
    "KEY",
    "Identity",
    "ServerIdentity",
    "TlsError",
    "add_port",
    "address_of",
    "client_context",
    "host_of",
    "is_loopback",
    "open_aio_channel",
    "open_channel",
    "read_identity",
    "readable_by_others",
]

CERTIFICATE = "tls.crt"
"""This process's own certificate, and the chain below the CA if there is one; PEM."""
KEY = "tls.key"
"""Its private key, PEM, not encrypted."""
CA = "ca.crt"
"""The certificates that this process trusts, PEM."""

_KERNEL_TLS = getattr(ssl, "OP_ENABLE_KTLS", 0)
"""Lets the kernel encrypt, where Python, OpenSSL and the kernel all can."""

_QUIET_S = 0.1
"""New files are taken over by a handshake before which none began for this long."""

_TRIES = 3
"""How often files are read again that changed while they were read."""

Options = Sequence[tuple[str, object]]

log = logging.getLogger(__name__)


class TlsError(Exception):
    """A folder of certificates can't be used: which file, why, and the remedy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of a folder when it was read: each PEM, or None if its file is missing."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None

    @property
    def pair(self) -> tuple[bytes, bytes] | None:
        """Key and certificate, in gRPC's order."""
        if self.certificate is None or self.key is None:
            return None
        return self.key, self.certificate


class _Server(Protocol):
    """A server of gRPC, synchronous or not."""

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int: ...


def read_identity(folder: Path) -> Identity:
    """Reads a folder; its key and certificate are a pair.

    Raises:
        TlsError: a file can't be read, is no PEM, or key and certificate are of different pairs.
    """
    # Whoever replaces the files can't do it in one step. What was read counts only if nothing
    # changed meanwhile, so that a new key is never paired with an old certificate.
    for _ in range(_TRIES):
        before = _looks(folder)
        identity = _read(folder)
        if _looks(folder) == before:
            return identity
    raise TlsError(f"the files in {folder} keep changing: wait until they are written")


def open_channel(address: str, options: Options, folder: Path | None) -> grpc.Channel:
    """A channel to host:port, with TLS by the present files of `folder`; None: unencrypted.

    Raises:
        TlsError: the folder can't be used.
    """
    if folder is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _client_credentials(folder), options=options)


def open_aio_channel(address: str, options: Options, folder: Path | None) -> grpc.aio.Channel:
    """As `open_channel`, for asyncio."""
    if folder is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _client_credentials(folder), options=options)


def client_context(folder: Path) -> ssl.SSLContext:
    """The context with which a client opens a TCP lane: TLS 1.3, by the files of `folder`.

    Raises:
        TlsError: the folder can't be used.
    """
    identity = read_identity(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= _KERNEL_TLS
    context.load_verify_locations(cadata=_trusted(folder, identity).decode("ascii", "ignore"))
    if identity.pair is not None:
        try:
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
        except OSError as error:  # SSLError is one
            raise TlsError(f"the files in {folder} changed while they were read: {error}") from None
    return context


def add_port(server: _Server, where: str, identity: ServerIdentity | None) -> int:
    """Makes a server listen at host:port, with TLS if it has an identity. Returns the port.

    Raises:
        RuntimeError: it can't listen there.
    """
    if identity is None:
        return server.add_insecure_port(where)
    return server.add_secure_port(where, identity.credentials())


class ServerIdentity:
    """A server's certificate, and the certificates that it trusts; follows the files.

    gRPC's threads ask for them at each handshake. If new files can't be used, that is logged once,
    and the identity before them stays in use.
    """

    def __init__(
        self,
        folder: Path,
        count: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the folder. `count` is called at each handshake that a client begins.

        Raises:
            TlsError: the folder can't be used, or lacks the server's own certificate.
        """
        self._folder = folder
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = _looks(folder)
        identity = read_identity(folder)
        self.demands_certificates = identity.ca is not None
        """Whether clients must show a certificate. It does not change with the files.

        Otherwise removing `ca.crt` by mistake would open the server to everybody.
        """
        self._configuration = self._made_of(identity)
        self._contexts: dict[bool, tuple[object, ssl.SSLContext]] = {}
        """For browsers (False) and for TCP lanes (True): how the files looked when they were read,
        and the context of them."""

    def credentials(self) -> grpc.ServerCredentials:
        """gRPC's credentials for one port, which follow the files."""
        first = self.configuration
        return grpc.dynamic_ssl_server_credentials(
            first,
            self.news_since(first),  # type: ignore[arg-type]  # None is documented: no change
            require_client_authentication=self.demands_certificates,
        )

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What the files were when they were last read."""
        with self._lock:
            return self._configuration

    def news_since(
        self, given: grpc.ServerCertificateConfiguration
    ) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """What gRPC asks as each handshake of a port begins: a configuration if it is new, or None.

        Theory of operation. gRPC makes a handshaker from the configuration that it holds without a
        lock, while another handshake may replace it: what the one reads is then freed by the other,
        and the process crashes. So it gets a configuration only if the files changed, which they do
        once in months, and only if no handshake began shortly before. Those that begin later wait
        for gRPC's lock until it is replaced.
        """
        began_at = -_QUIET_S

        def news() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given, began_at
            self._count()
            # Handshakes run on several threads. One of them reads new files, and the others wait.
            with self._lock:
                now = self._clock()
                is_quiet, began_at = now - began_at >= _QUIET_S, now
                self._follow()
                if self._configuration is given or not is_quiet:
                    return None
                given = self._configuration
                return given

        return news

    def _follow(self) -> None:
        looks = _looks(self._folder)
        if looks != self._seen:
            # Also if the files can't be used: they are read again once they change again.
            self._seen = looks
            self._take_over()

    def web_context(self) -> ssl.SSLContext:
        """The context for a browser's handshake that begins now. It asks for no certificate:
        people have none, and show a token instead.
        """
        return self._context(lane=False)

    def lane_context(self) -> ssl.SSLContext:
        """The context for a TCP lane's handshake that begins now: TLS 1.3, and certificates are
        demanded as on gRPC.
        """
        return self._context(lane=True)

    def _context(self, *, lane: bool) -> ssl.SSLContext:
        self._count()
        with self._lock:
            looks = _looks(self._folder)
            known = self._contexts.get(lane)
            if known is None or known[0] != looks:
                self._contexts[lane] = known = looks, self._made_context(lane=lane)
            return known[1]

    def _made_context(self, *, lane: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if lane else ssl.TLSVersion.TLSv1_2
        try:
            pair = self._folder / CERTIFICATE, self._folder / KEY
            context.load_cert_chain(*pair, password="")
            if lane:
                # None is ever used again, and the client of a lane that only sends reads nothing.
                context.num_tickets = 0
                context.options |= _KERNEL_TLS
                if self.demands_certificates:
                    context.load_verify_locations(self._folder / CA)
                    context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # SSLError is one
            known = self._contexts.get(lane)
            if known is None:
                raise
            for_whom = "TCP lanes" if lane else "browsers"
            log.warning("the previous certificate stays in use for %s: %s", for_whom, error)
            return known[1]
        return context

    def _take_over(self) -> None:
        try:
            self._configuration = self._made_of(read_identity(self._folder))
            log.info("new certificates in %s: in use for new connections", self._folder)
        except TlsError as error:
            log.warning("the previous certificates stay in use: %s", error)

    def _made_of(self, identity: Identity) -> grpc.ServerCertificateConfiguration:
        if identity.pair is None:
            raise TlsError(
                f"a server needs {CERTIFICATE} and {KEY}, and {self._folder} lacks "
                f"{CERTIFICATE if identity.certificate is None else KEY}: make them with "
                "`andon certs`"
            )
        if self.demands_certificates and identity.ca is None:
            raise TlsError(
                f"{self._folder / CA} is missing, and clients' certificates are checked with it: "
                "put it back"
            )
        return grpc.ssl_server_certificate_configuration([identity.pair], identity.ca)


def readable_by_others(path: Path) -> bool:
    """Whether users other than a file's owner and group may read it."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, so that nothing sent to it leaves."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address_of(host: str, port: int) -> str:
    """A host without brackets, and a port, as host:port: IPv6 gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of a host:port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def _client_credentials(folder: Path) -> grpc.ChannelCredentials:
    identity = read_identity(folder)
    trusted = _trusted(folder, identity)
    return grpc.ssl_channel_credentials(trusted, *(identity.pair or (None, None)))


def _trusted(folder: Path, identity: Identity) -> bytes:
    """The certificates that a client trusts."""
    if identity.ca is None:
        raise TlsError(
            f"a client needs {CA}, the certificates that it trusts, and {folder} lacks it: copy it "
            "from where the line's certificates were made"
        )
    return identity.ca


def _looks(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file is replaced. Kubernetes replaces a link: the inode changes, too."""
    looks: list[tuple[int, int, int] | None] = []
    for name in (CERTIFICATE, KEY, CA):
        try:
            found = (folder / name).stat()
        except OSError:
            looks.append(None)
        else:
            looks.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(looks)


def _read(folder: Path) -> Identity:
    if not folder.is_dir():
        raise TlsError(
            f"there is no folder {folder}, which --tls or ANDON_TLS_DIR names: make its files "
            "with `andon certs`"
        )
    identity = Identity(*(_bytes_of(folder / name) for name in (CERTIFICATE, KEY, CA)))
    if identity.certificate is None and identity.ca is None:
        raise TlsError(f"{folder} holds neither {CERTIFICATE} nor {CA}: is it the right folder?")
    if (identity.certificate is None) is not (identity.key is None):
        there, missing = (KEY, CERTIFICATE) if identity.key else (CERTIFICATE, KEY)
        raise TlsError(f"{folder} holds {there} and no {missing}: copy both, they are one pair")
    _check(folder, identity)
    return identity


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TlsError(
            f"{path} can't be read ({error.strerror}): let user {os.getuid()} read it"
        ) from None


def _check(folder: Path, identity: Identity) -> None:
    """Lets OpenSSL check the files. gRPC would only fail at every handshake, without a reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if identity.pair is not None:
        try:
            # With an empty password OpenSSL refuses an encrypted key. Without one it would ask for
            # the password at the terminal.
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
        except (ssl.SSLError, OSError) as error:
            if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                text = f"{folder / KEY} is not the key of {folder / CERTIFICATE}"
                raise TlsError(f"{text}: copy both files of one host again") from None
            raise TlsError(
                f"{folder / CERTIFICATE} or {KEY} beside it is no PEM certificate and its key, "
                "not encrypted, or is half written: copy both again"
            ) from None
    if identity.ca is not None:
        try:
            context.load_verify_locations(folder / CA)
        except (ssl.SSLError, OSError):
            raise TlsError(
                f"{folder / CA} holds no PEM certificate, or is half written: copy it again"
            ) from None
