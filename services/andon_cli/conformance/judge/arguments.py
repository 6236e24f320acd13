"""The flags of `andon conformance judge`, and the help that teaches them."""

from __future__ import annotations

import argparse

__all__ = ["JUDGE_EPILOG", "add_judge_flags"]

JUDGE_EPILOG = """\
example:
  andon conformance judge -- python my_client.py
  andon conformance judge --only step commit.patience -- ./my_client --steps 20
  andon conformance judge --format json --timeout 60 --jobs 1 -- node client.mjs

Starts the client once or more for each scenario, with ANDON_ADDRESS, ANDON_RUN_ID, RANK and
WORLD_SIZE in its environment (and ANDON_TOKEN_FILE in one), plays the line and the other workers,
and judges what the client sends. It must train any model for ten steps or more, and take its length
from the line. docs/conformance-clients.md lists the checks.

Exit code 0 if none failed and none was left open by an earlier failure, else 1.
"""


def add_judge_flags(verb: argparse.ArgumentParser) -> None:
    """Adds the flags, and the client's command after `--`."""
    verb.add_argument(
        "--only", metavar="NAME", nargs="+", help="checks, or scenarios with all of theirs"
    )
    verb.add_argument(
        "--timeout", metavar="SECONDS", help="wait so long for what must come (default: 20)"
    )
    verb.add_argument("--jobs", metavar="N", help="play N scenarios at once (default: 2)")
    verb.add_argument("--format", metavar="table|json", help="how to show it (default: table)")
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...",
                      help="how the client is started")  # fmt: skip
