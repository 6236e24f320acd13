"""Simulates hosts on one machine: network namespaces, each with a rate-limited link to a switch.

It needs root and iproute2. It does not change the machine's own network: the switch is a bridge in
its own namespace. A link is a veth pair with a token bucket (`tc tbf`) at each end, so each
direction has its own rate. Traffic within a host goes over its loopback interface, at full speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CONGESTION", "LINK", "Network", "NoNetwork", "bucket", "link_bytes", "network"]

CONGESTION = "cubic"
"""Linux's default. A machine whose kernel has another one would measure that one instead."""
LINK = "eth0"
"""The interface name of a host's link, inside the host."""
_CONGESTIONS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_BURST = "256kb"
_LATENCY = "50ms"


class NoNetwork(RuntimeError):
    """This process can't make network namespaces. The message says why, and what to do."""


class Network:
    """Hosts 0, 1, ... with one link each; `network` makes them."""

    def __init__(self, count: int) -> None:
        """Chooses names; creates nothing yet."""
        self._number = os.getpid() % 250
        self.count = count

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"andon-net{self._number}-switch"

    def host(self, number: int) -> str:
        """The namespace of a host."""
        return f"andon-net{self._number}-{number}"

    def address(self, number: int) -> str:
        """The address at which other hosts reach a host."""
        return f"10.214.{self._number}.{number + 1}"

    def limit(self, number: int, mbit: float) -> None:
        """Gives the link of a host another rate; it must have one already."""
        for namespace, device in self._ends(number):
            _run("tc", "-n", namespace, "qdisc", "change", "dev", device, "root", "tbf",
                 *bucket(mbit))  # fmt: skip

    def _ends(self, number: int) -> tuple[tuple[str, str], ...]:
        """Namespace and device of both ends of a host's link."""
        return (self.host(number), LINK), (self.switch, f"port{number}")

    def inside(self, number: int) -> list[str]:
        """The command prefix that runs a command on a host."""
        return ["ip", "netns", "exec", self.host(number)]


@contextmanager
def network(
    count: int, mbit: float | None, congestion: str = CONGESTION, *, keep_windows: bool = False
) -> Iterator[Network]:
    """Provides `count` hosts with links of `mbit` Mbit/s each way, until the context exits.

    If `mbit` is None, nothing but the machine limits the links.

    `congestion` is the congestion control of every connection that the hosts open. With
    `keep_windows` a connection that was idle starts at the rate at which it stopped.

    Raises:
        NoNetwork: this process lacks the permission or the tools.
    """
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root: run this with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetwork(f"there is no `{tool}` command: apt-get install iproute2")
    known = _CONGESTIONS.read_text().split()
    if congestion not in known:
        raise NoNetwork(
            f"this kernel has no congestion control {congestion!r}, only {', '.join(known)}: "
            f"choose one of them, or load its module (modprobe tcp_{congestion})"
        )
    made = Network(count)
    try:
        _make(made, mbit)
        for number in range(count):
            # By the route: a namespace may not choose any other for itself as a whole.
            network_of = f"{made.address(number).rpartition('.')[0]}.0/24"
            _run("ip", "-n", made.host(number), "route", "change", network_of, "dev", LINK,
                 "congctl", congestion)  # fmt: skip
            if keep_windows:
                _run(*made.inside(number), "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        yield made
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip()
        raise NoNetwork(f"`{' '.join(error.cmd)}` failed: {said}") from error
    finally:
        for name in (made.switch, *map(made.host, range(count))):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def link_bytes() -> tuple[int, int]:
    """Bytes that this process's host has sent and received over its link, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"this process's host has no link {LINK}: start it inside a host")


def _make(made: Network, mbit: float | None) -> None:
    _run("ip", "netns", "add", made.switch)
    _run("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", made.switch, "link", "set", "bridge", "up")
    for number in range(made.count):
        host, port = made.host(number), f"port{number}"
        _run("ip", "netns", "add", host)
        _run("ip", "-n", made.switch, "link", "add", port, "type", "veth",
             "peer", "name", LINK, "netns", host)  # fmt: skip
        _run("ip", "-n", made.switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host, "address", "add", f"{made.address(number)}/24", "dev", LINK)
        _run("ip", "-n", host, "link", "set", LINK, "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")
        if mbit is None:
            continue
        for namespace, device in made._ends(number):
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                 *bucket(mbit))  # fmt: skip


def bucket(mbit: float) -> tuple[str, ...]:
    """What `tc tbf` is told for a rate."""
    return ("rate", f"{round(mbit * 1000)}kbit", "burst", _BURST, "latency", _LATENCY)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
