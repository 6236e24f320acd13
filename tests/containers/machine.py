"""What these tests need of a machine, and a network of their own on it.

Theory of operation. A Docker daemon takes itself for the only one on its network: when it starts,
it flushes the packet filter's chains of any other one, whose published ports are gone then. So the
tests' daemon lives in a network namespace. Its bridges, rules and published ports are there alone,
and go with the namespace; nothing of the host can collide with them. The only way out is
slirp4netns, a process that makes the namespace's connections on the host: no rule, route or address
of the host is changed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["NAMESERVER", "Missing", "Namespace", "end", "namespace", "require", "run", "wait_until"]

Result = TypeVar("Result")

NEEDED = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "containerd": "containerd",
    "mmdebstrap": "mmdebstrap",
    "slirp4netns": "slirp4netns",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Programs, and Debian's packages that have them."""

NAMESERVER = "10.0.2.3"
"""Where slirp4netns answers for the host's own name server, whichever that is."""

_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 30.0


class Missing(Exception):
    """This machine lacks something: what, and what supplies it. The tests are skipped."""


def require() -> None:
    """Raises `Missing` unless this machine has everything that must be there before the start."""
    if os.geteuid() != 0:
        raise Missing("needs root, to run a Docker daemon: sudo make containers")
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        packages = " ".join(sorted({NEEDED[name] for name in absent}))
        raise Missing(f"needs {', '.join(absent)}: apt-get install {packages}")
    if not Path("/dev/net/tun").exists():
        raise Missing("needs /dev/net/tun, for the daemon's network: modprobe tun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A network namespace, and a thread of this process that is in it."""

    path: Path
    thread: ThreadPoolExecutor

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that runs there, and gets SIGTERM if this process dies.

        Not `ip netns exec`: that also mounts another /sys, which has no cgroups.
        """
        return ("nsenter", f"--net={self.path}", "setpriv", "--pdeathsig", "TERM")

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns there: sockets that it makes belong to the namespace."""
        return self.thread.submit(function).result()

    def get(self, url: str) -> bytes:
        """The answer at a published port.

        Raises:
            OSError: if there is none, or its status is an error.
        """

        def ask() -> bytes:
            with urllib.request.urlopen(url, timeout=5) as answer:
                body: bytes = answer.read()
                return body

        return self.call(ask)


@contextmanager
def namespace(name: str, log: Path) -> Iterator[Namespace]:
    """A network namespace with a way out; it is removed in the end.

    Raises:
        Missing: if this machine can't make one.
    """
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise Missing(f"can't make a network namespace ({made.stderr.strip()}): run as full root")
    path = Path("/run/netns") / name
    try:
        with (
            _way_out(path, log),
            ThreadPoolExecutor(1, initializer=_enter, initargs=(path,)) as one,
        ):
            yield Namespace(path=path, thread=one)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _enter(path: Path) -> None:
    """Moves the calling thread, and no other one, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


@contextmanager
def _way_out(path: Path, log: Path) -> Iterator[None]:
    """slirp4netns for the namespace at `path`, from when it is ready."""
    reads, writes = os.pipe()
    options = ["--configure", "--mtu=65520", "--disable-host-loopback", f"--ready-fd={writes}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM",
             "slirp4netns", *options, "--netns-type=path", str(path), "tap0"],
            stdout=output, stderr=output, pass_fds=[writes], start_new_session=True,
        )  # fmt: skip
    os.close(writes)
    try:
        with os.fdopen(reads, "rb") as ready:
            # An end without a word means that it died.
            if ready.read(1) != b"1":
                raise Missing(f"slirp4netns does not start: {log.read_text()[-300:].strip()}")
        yield
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], patience_s: float = _PATIENCE_S) -> None:
    """Ends a process that we started: politely, then by force."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(true: Callable[[], object], what: Callable[[], str], patience_s: float) -> None:
    """Returns once `true` is; it is asked again and again.

    Raises:
        AssertionError: if there is none in time; it says `what` was awaited.
    """
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_s:.0f} s: {what()}")
        time.sleep(0.25)


def run(
    command: Sequence[str], *, env: dict[str, str] | None = None, timeout_s: float = 600.0
) -> str:
    """What a command prints.

    Raises:
        AssertionError: if it fails; with the end of what it said.
    """
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{said}"
    return done.stdout
