"""A service that stands by: it has loaded everything, and serves once it is told to.

Run as `python -m andon_cli.launching.standby serve FLAG...`. Most of the time that a service takes
to start goes into loading modules. `andon run` has one of these beside its service, and tells it to
serve when the service dies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from andon_cli.app import main as run_command
from andon_cli.app import read_config
from andon_cli.verbs import VERBS, imported

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Loads what the command line needs, waits for a line on stdin, and runs the command."""
    read_config(argv, os.environ)  # To load, and to find mistakes now. It is read again below.
    imported(VERBS[argv[0]].run)
    # The launcher holds the other end: if it is gone, nobody needs a service.
    if not sys.stdin.readline():
        return 0
    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
