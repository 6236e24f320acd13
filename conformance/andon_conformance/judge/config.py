"""Configuration of `andon conformance judge`: its flags, and what they mean.

Light: every `andon` command reads the flags of all.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from andon_conformance.subverb import ConformanceConfig, Subverb
from andon_server.errors import UsageError

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["JUDGE", "JudgeConfig"]

_MOST_JOBS = 64
_EPILOG = """\
example:
  andon conformance judge -- python my_client.py
  andon conformance judge --only step commit.patience -- ./my_client --rate 0.1
  andon conformance judge --format json --timeout 60 --jobs 1 -- node client.mjs

Starts the client once or more for each scenario, with ANDON_ADDRESS, ANDON_RUN_ID, RANK and
WORLD_SIZE in its environment (and ANDON_TOKEN_FILE in one), plays the line and the other workers,
and judges what the client sends. It must train any model for ten steps or more.
docs/conformance-clients.md lists the checks.

Exit code 0 if no check failed and none was left open by an earlier failure, else 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig(ConformanceConfig):
    """Which client is judged, and by what."""

    command: tuple[str, ...]
    """How the client is started."""
    only: tuple[str, ...] = ()
    """Names of checks or scenarios; empty: all."""
    timeout_s: float = 20.0
    """How long anything that the client must do is waited for."""
    quiet_s: float = 0.3
    """How long what must not come is waited for, at least."""
    jobs: int = 2
    """Scenarios that are played at once."""
    format: Literal["table", "json"] = "table"
    """`table` or `json`."""

    def __post_init__(self) -> None:
        """Refuses a client that is not named, or not there."""
        if not self.command:
            raise UsageError(
                "no client to judge: andon conformance judge -- COMMAND, such as "
                "andon conformance judge -- python my_client.py"
            )
        if shutil.which(self.command[0]) is None:
            raise UsageError(f"the client can't be started: there is no {self.command[0]}")


def _add_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--only", metavar="NAME", nargs="+", help="these checks, or scenarios (default: all)"
    )
    verb.add_argument(
        "--timeout", metavar="SECONDS", help="wait so long for what must come (default: 20)"
    )
    verb.add_argument(
        "--quiet",
        metavar="SECONDS",
        help="wait so long, or longer, for what must not come (default: 0.3)",
    )
    verb.add_argument("--jobs", metavar="N", help="play N scenarios at once (default: 2)")
    verb.add_argument("--format", metavar="table|json", help="how to show it (default: table)")
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...",
                      help="how the client is started")  # fmt: skip


def _read(settings: Settings) -> JudgeConfig:
    given = settings.only_flags()
    command = settings.command
    return JudgeConfig(
        command=tuple(command[1:] if command[:1] == ("--",) else command),
        only=given.words("only"),
        timeout_s=given.seconds("timeout", 20.0, least=1.0),
        quiet_s=given.seconds("quiet", 0.3, least=0.05),
        jobs=given.whole("jobs", 2, least=1, most=_MOST_JOBS),
        format=given.choice("format", ("table", "json")),
    )


JUDGE = Subverb("judge a client by what it sends", _EPILOG, _add_flags, _read)
"""The subverb's line in the list."""
