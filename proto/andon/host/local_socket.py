"""Unix sockets in a folder that processes of one user share: how a service listens there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from andon.host.arena import short_path

__all__ = ["LocalListener"]


class LocalListener:
    """Listens for one connection of this user, for the running event loop."""

    def __init__(self, path: Path, came: Callable[[socket.socket], None]) -> None:
        """Listens at `path`, which whoever owns the folder's file removes.

        `came` takes the connection, which never blocks. Nothing else is accepted after it.

        Raises:
            OSError: it can't listen there.
        """
        self._loop = asyncio.get_running_loop()
        self._came = came
        self._socket: socket.socket | None = _listening(path)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Ends it. A second call does nothing."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _accept(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # It is gone again.
            connection, _ = self._socket.accept()
            connection.settimeout(0)
            self.close()
            self._came(connection)


def _listening(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.settimeout(0)
        with short_path(path) as short:
            listening.bind(short)
        # Nobody can connect before `listen`.
        path.chmod(0o600)
        listening.listen(1)
    except OSError:
        listening.close()
        raise
    return listening
