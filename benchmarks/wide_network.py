"""Simulates hosts that are far from each other: a cap for each flow, a delay, and losses.

Each host is a network namespace with a TUN device, and a small program in C carries packets between
the devices (`wide_area.c`): a kernel need not have `fq` and `netem`. It needs root, iproute2 and a
C compiler, and does not change the machine's own network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts_network import CONGESTION, LINK, Network, NoNetwork, bucket

__all__ = ["Distance", "wide_network"]

_GSO_BYTES = "16384"
"""The longest packet that a host hands over at once. A queue drops a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """What lies between hosts."""

    mbit: float
    """Of each host's link, each way."""
    flow_mbit: float = 0.0
    """Of one connection, each way; 0: nothing but the links limits it."""
    round_trip_ms: float = 0.2
    loss: float = 0.0
    """The probability that a packet is lost."""

    @property
    def queue_ms(self) -> float:
        """How long a packet may wait for the link on which it arrives."""
        return max(50.0, self.round_trip_ms)


@contextmanager
def wide_network(count: int, distance: Distance, congestion: str = CONGESTION) -> Iterator[Network]:
    """Provides `count` hosts at this distance from each other, until the context exits.

    Raises:
        NoNetwork: this process lacks the permission, the tools, or a C compiler.
    """
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root: run this with sudo")
    compiler = shutil.which("cc")
    if shutil.which("ip") is None or compiler is None:
        raise NoNetwork("there is no `ip` or no `cc` command: apt-get install iproute2 gcc")
    made = Network(count)
    names = [made.host(number) for number in range(count)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "wide_area"
            source = Path(__file__).with_name("wide_area.c")
            _run(compiler, "-O2", "-o", str(program), str(source))
            for name in names:
                _run("ip", "netns", "add", name)
            with _carrying(program, distance, names):
                for number, name in enumerate(names):
                    _furnish(name, made.address(number), congestion, distance.mbit)
                yield made
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip()
        raise NoNetwork(f"`{' '.join(error.cmd)}` failed: {said}") from error
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def _carrying(program: Path, distance: Distance, names: list[str]) -> Iterator[None]:
    numbers = distance.mbit, distance.flow_mbit, distance.round_trip_ms / 2, distance.loss
    command = [str(program), *map(str, (*numbers, distance.queue_ms)), *names]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise NoNetwork(f"no TUN devices (/dev/net/tun): {process.stderr.read().strip()}")
        try:
            yield
        finally:
            process.stdin.close()


def _furnish(name: str, address: str, congestion: str, mbit: float) -> None:
    """Gives a host its address, and its link the rate at which it sends."""
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
    _run("ip", "-n", name, "link", "set", LINK, "gso_max_size", _GSO_BYTES)
    _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", *bucket(mbit))
    _run("ip", "-n", name, "link", "set", LINK, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    network_of = f"{address.rpartition('.')[0]}.0/24"
    _run("ip", "-n", name, "route", "change", network_of, "dev", LINK, "congctl", congestion)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
