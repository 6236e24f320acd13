"""Unix sockets in a folder that processes of one user share: how one listens there."""

from __future__ import annotations

import socket
from pathlib import Path

from andon.host.arena import short_path

__all__ = ["listen_on"]


def listen_on(path: Path) -> socket.socket:
    """A socket that listens for one connection of this user, and never blocks.

    Raises:
        OSError: it can't listen there.
    """
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
