"""A network namespace with one link to this host's, which a test may take down or filter."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chaos.rig import ChaosLine

__all__ = ["Link", "network_link"]


class Link:
    """A network namespace with one link to this host's namespace."""

    def __init__(self) -> None:
        """Makes it.

        Raises:
            subprocess.CalledProcessError: this process lacks the permission.
        """
        number = os.getpid() % 250
        self.name, self._here, self._there = f"andon-{number}", f"andon{number}h", f"andon{number}w"
        self._host, worker = f"10.213.{number}.1", f"10.213.{number}.2"
        # The namespace has this host's memory and sockets, and another host has not.
        self.prefix = ("ip", "netns", "exec", self.name, "env", "ANDON_SHARED_DIR=off")
        _ip("netns", "add", self.name)
        peer = ("type", "veth", "peer", "name", self._there, "netns", self.name)
        _ip("link", "add", self._here, *peer)
        _ip("address", "add", f"{self._host}/30", "dev", self._here)
        _ip("link", "set", self._here, "up")
        _ip("-n", self.name, "address", "add", f"{worker}/30", "dev", self._there)
        _ip("-n", self.name, "link", "set", self._there, "up")

    def address_of(self, line: ChaosLine) -> str:
        """The address of a service, as seen from the other end of the link."""
        return f"{self._host}:{line.service.address.rpartition(':')[2]}"

    def set(self, state: str) -> None:
        """Takes the link `up` or `down`."""
        _ip("link", "set", self._here, state)

    def filter(self, port: int) -> None:
        """Drops whatever goes to or from a port of this host, without a word to either end."""
        for end in ("--dport", "--sport"):
            rule = ("-p", "tcp", end, str(port), "-j", "DROP")
            for chain in ("INPUT", "OUTPUT"):
                _run(*self.prefix, "iptables", "-A", chain, *rule)


@contextmanager
def network_link() -> Iterator[Link]:
    """A link; skips the test if this process can't make one."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        link = Link()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system allows no network namespaces: {error.stderr.strip()}")
    try:
        yield link
    finally:
        _ip("netns", "delete", link.name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
