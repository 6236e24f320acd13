"""Web names: under which names programs may ask for what a process tells over HTTP.

A page in somebody's browser may make a name of its own lead to this process (DNS rebinding), and
then reads the answers as if they were its own. It can't choose the name that the browser sends in
the Host header, though: that is the page's. So a name counts only if it is this host's, or was
allowed by a person. An address always counts: nobody can make one lead elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

__all__ = ["LOCALHOST", "is_allowed", "listed_names", "name_of", "own_names"]

LOCALHOST = "localhost"

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9])?")


def name_of(host: str) -> str:
    """The name in a Host header, without the port, in lower case; empty if it is none.

    Every address of loopback is called `localhost`.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
    try:
        return LOCALHOST if ipaddress.ip_address(name).is_loopback else name
    except ValueError:
        return name.removesuffix(".")


def own_names(*more: str) -> frozenset[str]:
    """The names of this host, and `more` of them."""
    names = (LOCALHOST, socket.gethostname(), *more)
    return frozenset(each.strip("[]").lower() for each in names if each)


def is_allowed(host: str, names: Iterable[str]) -> bool:
    """Whether a Host header has one of the names, or an address. Programs may send none."""
    if not host:
        return True
    name = name_of(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def listed_names(text: str) -> tuple[str, ...]:
    """The names in a list with commas.

    Raises:
        ValueError: one of them is none.
    """
    names = tuple(each.strip().lower() for each in text.split(",") if each.strip())
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"must be names of hosts, separated by commas, not {name!r}")
    return names
