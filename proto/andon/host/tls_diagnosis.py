"""Diagnosis: why a TLS connection failed, and the remedy.

gRPC reports every failure as UNAVAILABLE. With TLS 1.3, a client's handshake succeeds before the
server checks the client's certificate; if the server refuses it, it just closes the connection. So
the handshake is tried again here, on a plain socket, which then waits for what the server does.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.tls import CA, CERTIFICATE, TlsError, host_of, read_identity

__all__ = ["SelfCheck", "check_own_certificate", "diagnose_tls", "is_for_another_host"]

_CONNECT_S = 2.0
_WORD_S = 1.0
"""How long a server has to send something or to close the connection, after the handshake."""
_AGAIN_S = 0.25
"""Between the first try and the second; a server that is shutting down has ended by then."""
# Numbers of OpenSSL (X509_V_ERR_...). All others are about who signed the certificate.
_EXPIRED = 10
_NOT_YET_VALID = 9
_OTHER_NAME = (62, 64)
"""Of a host's name, and of an address."""


def diagnose_tls(address: str, folder: Path | None) -> str:
    """Why this process can't connect to host:port with TLS, and the remedy.

    Takes some seconds at most. Empty if nothing listens there, or if TLS is not the problem: then
    the caller may try again. A problem must be found twice, since a server that is shutting down
    closes every connection.

    Args:
        address: the other end.
        folder: this process's certificates; None if it does not encrypt.
    """
    try:
        if folder is not None:
            read_identity(folder)
        if _look(address, folder):
            time.sleep(_AGAIN_S)
            return _look(address, folder)
        return ""
    except TlsError as error:
        return str(error)
    except (OSError, ValueError):
        return ""  # nothing listens there, or it can't be reached


def _look(address: str, folder: Path | None) -> str:
    return _clear(address) if folder is None else _secure(address, folder)


def _clear(address: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent: the question is only whether the other end answers with TLS.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address) as link, context.wrap_socket(link):
            pass
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        if not _is_alert(error):
            return ""  # It does not speak TLS, as this process does not.
    except ConnectionError:
        return ""
    return (
        f"what listens at {address} speaks TLS, and this process does not: give it the folder of "
        "its certificates (--tls DIR, ANDON_TLS_DIR)"
    )


def _secure(address: str, folder: Path) -> str:
    host = host_of(address)
    context = ssl.create_default_context(cafile=str(folder / CA))
    context.set_alpn_protocols(["h2"])
    shows = (folder / CERTIFICATE).exists()
    if shows:
        context.load_cert_chain(folder / CERTIFICATE, folder / "tls.key")
    try:
        with _connect(address) as link, context.wrap_socket(link, server_hostname=host) as secure:
            if secure.selected_alpn_protocol() != "h2":
                return f"what listens at {address} speaks TLS but not HTTP/2: check the port"
            return _after_handshake(secure, address, folder, shows=shows)
    except ssl.SSLCertVerificationError as error:
        return _doubted(error, address, host, folder)
    except ssl.SSLEOFError:
        return ""  # It closed the connection: it is shutting down, or is not a server.
    except ssl.SSLError as error:
        if _is_alert(error):
            return _refused(address, folder, shows=shows)
        return (
            f"what listens at {address} does not speak TLS, and this process does: start it with "
            "--tls DIR, or unset ANDON_TLS_DIR here"
        )


def _after_handshake(secure: ssl.SSLSocket, address: str, folder: Path, *, shows: bool) -> str:
    """Waits for the server: gRPC's sends first, or closes if it refuses the certificate."""
    secure.settimeout(_WORD_S)
    try:
        if secure.recv(1):
            return ""
    except TimeoutError:
        return ""
    except (ssl.SSLError, ConnectionError):
        pass
    return _refused(address, folder, shows=shows)


def _refused(address: str, folder: Path, *, shows: bool) -> str:
    if not shows:
        return (
            f"what listens at {address} asks for a certificate, and {folder} holds no "
            f"{CERTIFICATE}: make one for this host with `andon certs` and copy it there"
        )
    own = check_own_certificate(folder)
    if own.problem:
        return f"what listens at {address} refuses this process's certificate: {own.problem}"
    return (
        f"what listens at {address} refuses this process's certificate, {folder / CERTIFICATE}: "
        f"it is signed by no CA in the {CA} there; make both with the same `andon certs --out`"
    )


def _doubted(error: ssl.SSLCertVerificationError, address: str, host: str, folder: Path) -> str:
    if error.verify_code == _EXPIRED:
        return (
            f"the certificate of what listens at {address} has expired: make a new one there with "
            "`andon certs --renew`, and copy it in place of the old one"
        )
    if error.verify_code == _NOT_YET_VALID:
        return (
            f"the certificate of what listens at {address} is not valid yet: compare the clocks of "
            "both hosts"
        )
    if "match" in error.verify_message or "mismatch" in error.verify_message:
        return (
            f"the certificate of what listens at {address} is not for {host}: make one that names "
            f"it (`andon certs {host}`), or use a name that it has"
        )
    return (
        f"this process does not trust the certificate of what listens at {address} "
        f"({error.verify_message}): {folder / CA} is not of the CA that signed it; copy the "
        "line's ca.crt here"
    )


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Whether a folder's certificate is valid under the folder's own CA."""

    problem: str = ""
    """What is wrong, and the remedy; empty if nothing is."""
    valid_until_s: float | None = None
    """In seconds since the Unix epoch; None if it is unknown."""


def check_own_certificate(folder: Path) -> SelfCheck:
    """Whether `tls.crt` is valid now and signed by `ca.crt` beside it; no connection is made.

    Raises:
        TlsError: the folder can't be used.
        ValueError: it lacks one of them.
    """
    identity = read_identity(folder)
    if identity.pair is None or identity.ca is None:
        raise ValueError(f"{folder} lacks {CERTIFICATE} or {CA}")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / CERTIFICATE, folder / "tls.key")
    serving.load_verify_locations(folder / CA)
    serving.verify_mode = ssl.CERT_REQUIRED
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    asking.load_cert_chain(folder / CERTIFICATE, folder / "tls.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(up, down, server_side=True)
    client = asking.wrap_bio(down, up)
    # Each step of a handshake in memory stops when it needs bytes from the other end. After two
    # steps of each end, both have checked the other's certificate.
    try:
        for end in (client, server, client, server):
            _advance(end)
    except ssl.SSLCertVerificationError as error:
        return SelfCheck(_doubts_of_own(error, folder))
    except ssl.SSLError as error:
        return SelfCheck(f"{folder / CERTIFICATE} can't be used ({error.reason}): make it anew")
    shown = server.getpeercert()
    until = shown.get("notAfter") if shown else None
    return SelfCheck("", ssl.cert_time_to_seconds(until) if isinstance(until, str) else None)


def is_for_another_host(folder: Path, host: str) -> bool:
    """Whether clients that call this process `host` would refuse its certificate for that name.

    No connection is made. Without a CA in the folder, or with one of others, it can't be told: then
    the answer is False.
    """
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        serving.load_cert_chain(folder / CERTIFICATE, folder / "tls.key")
        asking.load_verify_locations(folder / CA)
        server = serving.wrap_bio(up, down, server_side=True)
        client = asking.wrap_bio(down, up, server_hostname=host)
        for end in (client, server, client):
            _advance(end)
    except ssl.SSLCertVerificationError as error:
        return error.verify_code in _OTHER_NAME
    except (OSError, ValueError):
        pass
    return False


def _doubts_of_own(error: ssl.SSLCertVerificationError, folder: Path) -> str:
    if error.verify_code == _EXPIRED:
        return (
            f"{folder / CERTIFICATE} has expired: make it anew with `andon certs --renew`, and "
            "copy it here"
        )
    if error.verify_code == _NOT_YET_VALID:
        return f"{folder / CERTIFICATE} is not valid yet: compare this host's clock with others"
    return (
        f"{folder / CERTIFICATE} is not signed by {CA} beside it ({error.verify_message}): copy "
        "all files of one host together"
    )


def _advance(end: ssl.SSLObject) -> None:
    with suppress(ssl.SSLWantReadError):  # the other end goes on
        end.do_handshake()


def _connect(address: str) -> socket.socket:
    _, _, port = address.rpartition(":")
    return socket.create_connection((host_of(address), int(port)), _CONNECT_S)


def _is_alert(error: ssl.SSLError) -> bool:
    """Whether the error is an alert: the other end speaks TLS, and refused."""
    return "ALERT" in (error.reason or "") and error.reason != "TLSV1_ALERT_PROTOCOL_VERSION"
