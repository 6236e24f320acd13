"""Handshakes that fail: gRPC tells a program of none, and writes each on standard error.

Theory of operation. While `overheard` is entered, standard error is a pipe to a process of its own,
which passes on every byte as it comes and counts the lines that tell of a failed handshake. It is a
process, not a thread: what a service writes as it crashes is passed on after its death, and nobody
who writes while holding the interpreter's lock waits for somebody who needs it. The counts come
back by a second pipe, as lines of `reason count`; that this is full never holds the first one up.

The process is this file, run with nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

__all__ = ["HandshakeFailure", "failure_of", "overheard"]

_PATIENCE_S = 2.0
"""How long what was written last has to arrive; children that write still may keep it open."""
_CHUNK_BYTES = 65536
_LINE_BYTES = 4096
"""A line is looked at as far as that."""

_WRITTEN = re.compile(rb"ssl_transport_security\.cc:\d+\] Handshake failed with error (.*)")


class HandshakeFailure(StrEnum):
    """Why a TLS handshake came to nothing, as this end saw it."""

    CERTIFICATE_EXPIRED = "certificate_expired"
    CERTIFICATE_NOT_YET_VALID = "certificate_not_yet_valid"
    CERTIFICATE_UNTRUSTED = "certificate_untrusted"
    """The other end's is signed by no CA in ca.crt, or is no certificate for this use."""
    CERTIFICATE_MISSING = "certificate_missing"
    NOT_TLS = "not_tls"
    """The other end speaks in the clear, or something else."""
    REFUSED_BY_PEER = "refused_by_peer"
    """The other end ended it, mostly since it does not trust this end's certificate."""
    OTHER = "other"


_SIGNS = (
    (b"certificate has expired", HandshakeFailure.CERTIFICATE_EXPIRED),
    (b"certificate is not yet valid", HandshakeFailure.CERTIFICATE_NOT_YET_VALID),
    (b":CERTIFICATE_VERIFY_FAILED", HandshakeFailure.CERTIFICATE_UNTRUSTED),
    (b":PEER_DID_NOT_RETURN_A_CERTIFICATE", HandshakeFailure.CERTIFICATE_MISSING),
    (b":HTTP_REQUEST", HandshakeFailure.NOT_TLS),
    (b":HTTPS_PROXY_REQUEST", HandshakeFailure.NOT_TLS),
    (b":WRONG_VERSION_NUMBER", HandshakeFailure.NOT_TLS),
    (b"_ALERT_", HandshakeFailure.REFUSED_BY_PEER),
    # OpenSSL's clients refuse a certificate by an alert that is not encrypted, too short to be.
    (b":BAD_PACKET_LENGTH", HandshakeFailure.REFUSED_BY_PEER),
)
"""What BoringSSL calls a failure; the first that fits counts."""


def failure_of(line: bytes) -> HandshakeFailure | None:
    """The failure that a line of standard error tells of, if it is gRPC's and tells of one."""
    written = _WRITTEN.search(line)
    if written is None:
        return None
    told = written[1]
    return next((failure for sign, failure in _SIGNS if sign in told), HandshakeFailure.OTHER)


@contextmanager
def overheard(count: Callable[[HandshakeFailure, int], object]) -> Iterator[None]:
    """Tells of the handshakes that fail in this process while it is entered.

    `count` is called with a failure and how often it happened since, by a thread of its own.
    """
    sys.stderr.flush()
    before = os.dup(2)
    heard, writing = os.pipe()
    told, telling = os.pipe()
    listener = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(telling)],
        stdin=heard,
        stdout=subprocess.DEVNULL,
        stderr=before,
        pass_fds=(telling,),
        start_new_session=True,  # The terminal's Ctrl-C is for the service.
    )
    os.close(heard)
    os.close(telling)
    os.dup2(writing, 2)
    os.close(writing)
    counting = threading.Thread(
        target=_count, args=(told, count, before), name="handshakes", daemon=True
    )
    counting.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        # A child of this process may write to the pipe still: then the listener ends with that.
        with suppress(subprocess.TimeoutExpired):
            listener.wait(_PATIENCE_S)
            counting.join()
            os.close(before)


def _count(told: int, count: Callable[[HandshakeFailure, int], object], before: int) -> None:
    with open(told, encoding="ascii") as lines:
        for line in lines:
            failure, times = line.split()
            count(HandshakeFailure(failure), int(times))
    os.dup2(before, 2)  # The listener is gone, killed maybe: what is written goes straight on.


def _listen(heard: int, through: int, telling: int) -> None:
    """Passes on what is heard until its end, and tells the failures in it."""
    os.set_blocking(telling, False)
    line = b""
    untold: Counter[HandshakeFailure] = Counter()
    while chunk := os.read(heard, _CHUNK_BYTES):
        _pass_on(through, chunk)
        *lines, rest = (line + chunk).split(b"\n")
        line = rest[:_LINE_BYTES]
        untold.update(filter(None, map(failure_of, lines)))
        _tell(telling, untold)
    os.set_blocking(telling, True)
    _tell(telling, untold)


def _pass_on(through: int, chunk: bytes) -> None:
    while chunk:
        try:
            chunk = chunk[os.write(through, chunk) :]
        except BlockingIOError:  # Whoever reads it made it so.
            select.select((), (through,), ())
        except OSError:  # Nobody reads it any more.
            return


def _tell(telling: int, untold: Counter[HandshakeFailure]) -> None:
    """Tells all in one write, which happens whole or not at all; later if it can't be now."""
    if not untold:
        return
    text = "".join(f"{failure} {times}\n" for failure, times in untold.items())
    try:
        os.write(telling, text.encode("ascii"))
    except BlockingIOError:
        return
    except OSError:  # The service is gone.
        pass
    untold.clear()


if __name__ == "__main__":
    _listen(heard=0, through=2, telling=int(sys.argv[1]))
