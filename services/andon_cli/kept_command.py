"""The kept command: how `andon run` started a run's script, for an audit that starts it again, and
for the report, which says how to go on.

It lies in the run's folder. Secrets are never kept: a command with an argument that looks like one
is left out, and an audit then has to be given it. Of the environment only what decides bits and the
run's length is kept.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from andon.host.private_files import write_whole
from andon.protocol.arithmetic import ENVIRONMENT

__all__ = ["KeptCommand", "resuming", "secret_in"]

_FILE = "command.json"
_VARIABLES = ("ANDON_STEPS", "OMP_NUM_THREADS", *ENVIRONMENT)
_SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|token(?!s|i|_?len)|credential|api[-_]?key|private[-_]?key|"
    r"access[-_]?key|://[^/@\s]+:[^/@\s]+@",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCommand:
    """A command, and what its bits depend on beside it."""

    command: tuple[str, ...] = ()
    """The interpreter, the script and its arguments; empty: it was left out."""
    folder: str = ""
    """Where it was started."""
    variables: Mapping[str, str] = field(default_factory=dict)
    answer_encoding: str = ""
    """How the line's averages travelled; empty: not known."""
    flags: tuple[str, ...] = ()
    """The settings of `andon run` with which the run goes on as it was."""
    left_out: str = ""
    """Why there is no command."""

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path,
        answer_encoding: str,
        flags: Sequence[str] = (),
    ) -> KeptCommand:
        """What may be kept of a worker's command and environment, and of the run's `flags`."""
        kept = {name: environment[name] for name in _VARIABLES if name in environment}
        secret = secret_in(command)
        if secret:
            return cls(
                variables=kept,
                answer_encoding=answer_encoding,
                flags=tuple(flags),
                left_out=f"its argument {secret} may be a secret",
            )
        return cls(
            command=tuple(command),
            folder=str(folder.absolute()),
            variables=kept,
            answer_encoding=answer_encoding,
            flags=tuple(flags),
        )

    def write(self, run_dir: Path) -> None:
        """Writes it to a run's folder, completely or not at all.

        Raises:
            OSError: it can't be written.
        """
        write_whole(run_dir / _FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> KeptCommand | None:
        """That of a run's folder; None if there is none that can be read."""
        try:
            fields = json.loads((run_dir / _FILE).read_text("utf-8"))
            command, flags = tuple(fields.pop("command")), tuple(fields.pop("flags", ()))
            variables = dict(fields.pop("variables"))
            kept = cls(command=command, variables=variables, flags=flags, **fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        texts = (*kept.command, *kept.flags, *kept.variables.values(), kept.folder)
        texts = (*texts, kept.answer_encoding)
        return kept if all(isinstance(each, str) for each in texts) else None


def resuming(kept: KeptCommand | None, named: str, workers: int) -> str:
    """The command that goes on with a run as it was, as a shell reads it.

    Args:
        kept: the run's; None: there is none, and the script is left open.
        named: how `--resume` finds the run, as a shell reads it.
        workers: how many it has if nothing was kept of that.
    """
    script, flags = (kept.command[1:], kept.flags) if kept else ((), ())
    if not any(flag.startswith("--workers=") for flag in flags):
        flags = (f"--workers={max(1, workers)}", *flags)
    return f"andon run {shlex.join(flags)} --resume {named} {shlex.join(script) or 'SCRIPT'}"


def secret_in(command: Sequence[str]) -> str:
    """The name of the first argument that looks like a secret, without its value; empty: none."""
    for argument in command[1:]:
        name, _, _ = argument.partition("=")
        if "://" in argument and _SECRET.search(argument):
            return "with a password in an address"
        if _SECRET.search(name):
            return name
    return ""
