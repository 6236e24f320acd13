"""Standard error, overheard: every byte arrives, a crash's last words, too, and failures count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from signal import SIGABRT, SIGKILL

import pytest

from andon_server.handshakes import HandshakeFailure, overheard

pytestmark = pytest.mark.integration

_EXPIRED = (
    b"I1122 01:11:38.486440    7222 ssl_transport_security.cc:2563] Handshake failed with error "
    b"SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
    b"certificate has expired\n"
)
_REPEATING = """
import os, sys
from collections import Counter
from andon_server.handshakes import overheard
counted = Counter()
with overheard(lambda failure, times: counted.update({failure: times})):
    while text := os.read(0, 65536):
        while text:
            text = text[os.write(2, text):]
    if sys.argv[1:] == ["abort"]:
        os.abort()
print({str(failure): times for failure, times in counted.items()})
print("and after it", file=sys.stderr)
"""
"""A process that writes what it reads on standard error, which is overheard; then what counted."""


def children() -> set[int]:
    """The processes that this one has started, and not seen end."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def repeat(text: bytes, *how: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", _REPEATING, *how],
        input=text,
        check=False,
        capture_output=True,
        timeout=60,
    )


def test_a_failure_is_counted_while_the_process_goes_on() -> None:
    counted: list[tuple[HandshakeFailure, int]] = []
    came = threading.Event()

    def count(failure: HandshakeFailure, times: int) -> None:
        counted.append((failure, times))
        came.set()

    with overheard(count):
        os.write(2, _EXPIRED)
        assert came.wait(60)

    assert counted == [(HandshakeFailure.CERTIFICATE_EXPIRED, 1)]


def test_every_byte_is_passed_on_and_every_failure_is_counted() -> None:
    text = b"\xff\x00" + 300_000 * b"x" + b"\n" + 5000 * _EXPIRED + b"no end of line"

    ended = repeat(text)

    assert ended.stderr == text + b"and after it\n"
    assert (ended.returncode, ended.stdout) == (0, b"{'certificate_expired': 5000}\n")


def test_the_last_words_of_a_process_that_crashes_are_passed_on() -> None:
    ended = repeat(b"a check failed: last words", "abort")

    assert (ended.returncode, ended.stderr) == (-SIGABRT, b"a check failed: last words")


def test_standard_error_goes_straight_on_when_the_listener_is_killed() -> None:
    before, others = os.fstat(2), children()

    with overheard(lambda _failure, _times: None):
        [listener] = children() - others
        os.kill(listener, SIGKILL)
        [counting] = [each for each in threading.enumerate() if each.name == "handshakes"]
        counting.join(60)

        assert os.fstat(2) == before
        os.write(2, b"and is written\n")


def test_nothing_is_left_of_it() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), os.fstat(2)

    with overheard(lambda _failure, _times: None):
        assert os.fstat(2) != before[2]

    assert (len(os.listdir("/proc/self/fd")), threading.active_count(), os.fstat(2)) == before
