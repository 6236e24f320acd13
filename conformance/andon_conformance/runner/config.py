"""Configuration of `andon conformance run`: its flags and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from andon_cli.security_flags import add_access_flags
from andon_conformance.runner.channels import Reach
from andon_conformance.subverb import ConformanceConfig, Subverb
from andon_server.errors import UsageError
from andon_server.security import CLEAR, Access, access_of

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["MOST_WORKERS", "RUN", "RunnerConfig"]

MOST_WORKERS = 4
"""More would show nothing that four do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(ConformanceConfig):
    """Which server `andon conformance run` judges, and how."""

    target: str
    """The server, as host:port."""
    workers: int | None = None
    """How many workers are played; None: as many as the line waits for."""
    only: tuple[str, ...] = ()
    """Names of checks, or of groups of them; empty: all."""
    start: str = ""
    """The command that starts the server; empty: it is there already, and is not killed."""
    log: Path | None = None
    """What the server of `start` prints; None: a file of its own, kept if a check fails."""
    access: Access = CLEAR
    """Certificates and tokens."""
    run_id: str = ""
    """The run; empty: whichever is served there."""
    patience_s: float = 10.0
    """How long the server may take for any one answer."""
    quiet_s: float = 0.3
    """How long nothing must come where nothing may."""
    format: Literal["table", "json"] = "table"
    """`table` or `json`."""

    @property
    def reach(self) -> Reach:
        """The server, and what it has to be shown."""
        return Reach(address=self.target, access=self.access)

    def __post_init__(self) -> None:
        """Refuses a run without a target, and a log of no server."""
        if not self.target:
            raise UsageError("no server to judge: andon conformance run --target HOST:PORT")
        if self.log is not None and not self.start:
            raise UsageError("--log is what the server of --start prints: pass both")


_RUN = """\
example, a server that is there already, with a line that nobody joined yet:
  andon serve --workers 3 --port 7070
  andon conformance run --target 127.0.0.1:7070

and one that may be killed and started again, which shows what its journal holds:
  andon conformance run --target 127.0.0.1:7170 \\
    --start 'andon serve --workers 3 --port 7170 --run-id judged --run-dir /tmp/judged'

Exit code 0 if no check failed, else 1. docs/conformance.md lists the checks.
"""


def _run_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--target", metavar="HOST:PORT", help="the server to judge")
    verb.add_argument(
        "--workers",
        metavar="N",
        help=f"play 1 to {MOST_WORKERS} workers (default: as many as the line waits for)",
    )
    verb.add_argument(
        "--only", metavar="NAME", nargs="+", help="these checks, or groups of them (default: all)"
    )
    verb.add_argument(
        "--start",
        metavar="COMMAND",
        help="start the server by this, and kill and restart it for the checks of its journal",
    )
    verb.add_argument(
        "--log",
        metavar="FILE",
        help="append what that server prints (default: a temporary file, kept after failures)",
    )
    verb.add_argument("--run-id", metavar="ID", help="the run (default: whichever is served there)")
    add_access_flags(verb, insecure="send tokens beyond loopback unencrypted")
    verb.add_argument(
        "--patience", metavar="SECONDS", help="wait so long for any one answer (default: 10)"
    )
    verb.add_argument("--format", metavar="table|json", help="how to show it (default: table)")


def _run_config(settings: Settings) -> RunnerConfig:
    given = settings.only_flags()
    return RunnerConfig(
        target=given.address("target"),
        access=access_of(settings),
        workers=given.optional_whole("workers", least=1, most=MOST_WORKERS),
        only=given.words("only"),
        start=given.text("start"),
        log=Path(log) if (log := given.text("log")) else None,
        run_id=given.text("run_id"),
        patience_s=given.seconds("patience", 10.0, least=0.1),
        format=given.choice("format", ("table", "json")),
    )


RUN = Subverb("judge a server by what it sends", _RUN, _run_flags, _run_config)
