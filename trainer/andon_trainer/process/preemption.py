"""Preemption notices: a file or a URL that tells that this machine is about to go.

A cloud tells its spot machines some seconds or minutes before it takes them back, at an address
that only the machine itself reaches, or by an agent that writes a file. A thread looks there every
two seconds, beside training. It sends no credential, follows no redirect and uses no proxy, and
whatever it meets but a notice is no notice.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from andon.protocol.limits import on_one_line

__all__ = ["PreemptionWatch", "notice_at"]

_EVERY_S = 2.0
_PATIENCE_S = 1.0
"""A connection may take so long, and so may each read of the answer."""
_MOST_BYTES = 4096
_MOST_SHOWN = 200
_NONE = frozenset({"", "false", "none"})
"""Answers that say that there is no notice."""


def notice_at(place: str) -> str:
    """What a file or a URL tells of this machine's end; empty: nothing."""
    if "://" not in place:
        try:
            return f"the file {place} is there" if Path(place).exists() else ""
        except OSError:
            return ""
    try:
        body = _answer(place)
    except (OSError, http.client.HTTPException, ValueError):
        return ""  # Not there, or no such address: this machine stays, as far as anybody knows.
    said = on_one_line(body.decode(errors="replace")).strip()
    return "" if said.lower() in _NONE else f"{place} says {said[:_MOST_SHOWN]}"


def _answer(url: str) -> bytes:
    """The body of an answer with the status 200; empty for any other answer."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection: http.client.HTTPConnection
    if place.scheme == "https":
        connection = http.client.HTTPSConnection(
            place.hostname,
            place.port,
            timeout=_PATIENCE_S,
            context=_tls(),
        )
    else:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=_PATIENCE_S)
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    try:
        # Google's metadata server answers only if this is there. It is no secret.
        connection.request("GET", target, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        # One read, which may bring less: an answer in small pieces must not hold the thread.
        return response.read1(_MOST_BYTES) if response.status == http.client.OK else b""
    finally:
        connection.close()


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it loads a file of certificates."""
    return ssl.create_default_context()


class PreemptionWatch:
    """Looks for a notice until there is one; used by the thread that made it."""

    def __init__(self, place: str, tell: Callable[[str], None]) -> None:
        """Begins to look, on a thread of its own.

        Args:
            place: a file, or a URL, as `LineConfig.preemption_notice`.
            tell: gets what the notice says, once, on that thread.
        """
        self._place = place
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-notice", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Looks no more. A look that is under way may still end."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            said = notice_at(self._place)
            if said and not self._over.is_set():
                self._tell(said)
                return
            self._over.wait(_EVERY_S)
