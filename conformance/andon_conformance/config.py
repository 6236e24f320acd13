"""The command line of `andon conformance`: the arguments of its two verbs, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from andon.host.access import Access
from andon.host.errors import UsageError
from andon_conformance.reach import Reach

__all__ = ["MAX_WORKERS", "JudgeConfig", "RunnerConfig", "build_parser", "read_config"]

MAX_WORKERS = 5
"""The most workers that the suite plays: so many has the least trimmed mean."""

_MAX_JOBS = 64

ReportFormat = Literal["table", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Which server `andon conformance run` judges, and how."""

    reach: Reach
    """The server's address, with the certificates and tokens that it asks for."""
    workers: int | None = None
    """How many workers to play; None: as many as the line waits for."""
    only: tuple[str, ...] = ()
    """Names of checks, or of groups of checks; empty: all."""
    start: str = ""
    """The command that starts the server; empty: it runs already, and is never killed."""
    log: Path | None = None
    """Where the output of `start` goes; None: a temporary file, kept if a check fails."""
    run_id: str = ""
    """The run; empty: whichever the server serves."""
    patience_s: float = 10.0
    """How long the server may take for any one answer."""
    quiet_s: float = 0.3
    """How long to watch for messages that must not come."""
    same_bits: bool = False
    """Whether the workers' plan has a grain: then only the checks of such a line are made."""
    format: ReportFormat = "table"

    def __post_init__(self) -> None:
        """Refuses a log without a server to start."""
        if self.log is not None and not self.start:
            raise UsageError("--log takes the output of the server that --start starts: pass both")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Which client `andon conformance judge` judges, and how."""

    command: tuple[str, ...]
    """How to start the client."""
    only: tuple[str, ...] = ()
    """Names of checks or scenarios; empty: all."""
    timeout_s: float = 20.0
    """How long to wait for anything that the client must do."""
    quiet_s: float = 0.3
    """How long to watch for messages that must not come, at least."""
    jobs: int = 2
    """How many scenarios to play at once."""
    format: ReportFormat = "table"

    def __post_init__(self) -> None:
        """Refuses a client that is not named, or not there."""
        if not self.command:
            raise UsageError(
                "no client to judge: andon conformance judge -- COMMAND, such as "
                "andon conformance judge -- python my_client.py"
            )
        if shutil.which(self.command[0]) is None:
            raise UsageError(f"the client can't be started: there is no {self.command[0]}")


_OVERVIEW = """\
examples:
  andon conformance run --target 127.0.0.1:7070      judge the server at this address
  andon conformance judge -- python client.py        judge a client by what it sends
  andon conformance run --help
"""

_RUN = """\
examples:
  A server that is running, with a line that nobody has joined yet:
    andon serve --workers 3 --port 7070
    andon conformance run --target 127.0.0.1:7070

  A server that the suite may kill and restart, which also tests its journal:
    andon conformance run --target 127.0.0.1:7170 \\
      --start 'andon serve --workers 3 --port 7170 --run-id judged --run-dir /tmp/judged'

The exit code is 0 if no check failed, else 1. docs/conformance.md lists the checks.
"""

_JUDGE = """\
examples:
  andon conformance judge -- python my_client.py
  andon conformance judge --only step commit.patience -- ./my_client --rate 0.1
  andon conformance judge --format json --timeout 60 --jobs 1 -- node client.mjs

Starts the client at least once for each scenario, with ANDON_ADDRESS, ANDON_RUN_ID, RANK and
WORLD_SIZE in its environment (and ANDON_TOKEN_FILE in one scenario). The suite plays the line and
the other workers, and judges what the client sends. The client must train any model for at least
ten steps. docs/conformance-clients.md lists the checks.

The exit code is 0 if no check failed and none was left open by an earlier failure, else 1.
"""


_PLAIN: dict[str, Any] = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}


def read_config(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> RunnerConfig | JudgeConfig:
    """The configuration that the arguments ask for.

    Raises:
        UsageError: the arguments make no sense together.
        SystemExit: argparse showed help, or refused an argument.
    """
    given = build_parser().parse_args(argv)
    if given.verb == "run":
        return _runner_config(given, os.environ if environment is None else environment)
    return JudgeConfig(
        command=tuple(given.command[1:] if given.command[:1] == ["--"] else given.command),
        only=tuple(given.only),
        timeout_s=given.timeout,
        quiet_s=given.quiet,
        jobs=given.jobs,
        format=given.format,
    )


def _runner_config(given: argparse.Namespace, environment: Mapping[str, str]) -> RunnerConfig:
    def path(flag: Path | None, variable: str) -> Path | None:
        text = environment.get(variable, "").strip()
        return flag or (Path(text) if text else None)

    insecure = environment.get("ANDON_INSECURE", "").strip().lower() in ("1", "true", "yes", "on")
    return RunnerConfig(
        reach=Reach(
            address=given.target,
            access=Access(
                tls_dir=path(given.tls, "ANDON_TLS_DIR"),
                token_file=path(given.token_file, "ANDON_TOKEN_FILE"),
                operator_token_file=path(given.operator_token_file, "ANDON_OPERATOR_TOKEN_FILE"),
                token=environment.get("ANDON_TOKEN", "").strip(),
                insecure=given.insecure or insecure,
            ),
        ),
        workers=given.workers,
        only=tuple(given.only),
        start=given.start,
        log=given.log,
        run_id=given.run_id,
        patience_s=given.patience,
        same_bits=given.same_bits,
        format=given.format,
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of `andon conformance`."""
    parser = argparse.ArgumentParser(
        prog="andon conformance",
        description="Judge another implementation of andon.v1 by what it sends.",
        epilog=_OVERVIEW,
        **_PLAIN,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_run(_verb(verbs, "run", "judge a server by what it sends", _RUN))
    _add_judge(_verb(verbs, "judge", "judge a client by what it sends", _JUDGE))
    return parser


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    described = f"{summary[0].upper()}{summary[1:]}."
    verb = verbs.add_parser(name, help=summary, description=described, epilog=epilog, **_PLAIN)
    text = "these checks, or groups of them (default: all)"
    verb.add_argument("--only", metavar="NAME", nargs="+", default=(), help=text)
    text = "how to show the result (default: table)"
    verb.add_argument("--format", choices=("table", "json"), default="table", help=text)
    return verb


def _flag(verb: argparse.ArgumentParser, name: str, metavar: str, text: str, **more: Any) -> None:
    verb.add_argument(name, metavar=metavar, help=text, **more)


def _add_run(verb: argparse.ArgumentParser) -> None:
    flag = partial(_flag, verb)
    flag("--target", "HOST:PORT", "the server to judge", type=_address, required=True)
    text = f"play 1 to {MAX_WORKERS} workers (default: as many as the line waits for)"
    flag("--workers", "N", text, type=_whole(1, MAX_WORKERS))
    text = "start the server by this command; checks of its journal kill and restart it"
    flag("--start", "COMMAND", text, default="")
    text = "append that server's output to this file "
    text += "(default: a temporary file, kept if a check fails)"
    flag("--log", "FILE", text, type=Path)
    flag("--run-id", "ID", "the run (default: whichever the server serves)", default="")
    text = "how long to wait for any one answer (default: 10)"
    flag("--patience", "SECONDS", text, type=_seconds(0.1), default=10.0)
    text = "play a line in grains, and make its checks only"
    verb.add_argument("--same-bits", action="store_true", help=text)
    text = "encrypt with DIR/tls.crt, tls.key and ca.crt (or ANDON_TLS_DIR)"
    flag("--tls", "DIR", text, type=Path)
    flag("--token-file", "FILE", "the run's token (or ANDON_TOKEN_FILE)", type=Path)
    text = "the operator's token (or ANDON_OPERATOR_TOKEN_FILE; default: the run's)"
    flag("--operator-token-file", "FILE", text, type=Path)
    text = "send tokens beyond loopback without encryption"
    verb.add_argument("--insecure", action="store_true", help=text)


def _add_judge(verb: argparse.ArgumentParser) -> None:
    flag = partial(_flag, verb)
    text = "how long to wait for what must come (default: 20)"
    flag("--timeout", "SECONDS", text, type=_seconds(1.0), default=20.0)
    text = "the least time to watch for what must not come (default: 0.3)"
    flag("--quiet", "SECONDS", text, type=_seconds(0.05), default=0.3)
    text = "play N scenarios at once (default: 2)"
    flag("--jobs", "N", text, type=_whole(1, _MAX_JOBS), default=2)
    flag("command", "-- COMMAND ...", "how to start the client", nargs=argparse.REMAINDER)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:7070, not {text!r}")
    return text


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, not {text!r}"
            )
        return int(text)

    return read


def _seconds(least: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= least):
            raise argparse.ArgumentTypeError(
                f"must be at least {least:g} seconds, not {text!r}"
            ) from None
        return number

    return read
