"""The script of an audit: a process that recomputes steps, and what it says meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from andon.host.private_files import open_private
from andon.host.tether import tether_command
from andon_cli.auditing.scope import AuditRefused

__all__ = ["AuditedScript"]

_LOOK_EVERY_S = 0.02
_END_S = 3.0
_LAST_LINES = 12


class AuditedScript:
    """A script that runs until it has recomputed all that it was asked to."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None,
        output: Path,
    ) -> None:
        """Starts it; what it prints goes to the file `output`.

        Raises:
            AuditRefused: it can't be started.
        """
        self._output = output
        try:
            with open(output, "wb", opener=open_private) as file:
                self._process = subprocess.Popen(
                    tether_command(list(command), signal.SIGKILL),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    cwd=folder,
                    process_group=0,  # Ctrl-C reaches the auditor alone, which then ends it.
                )
        except OSError as error:
            raise AuditRefused(
                f"{command[0]} can't be started ({error.strerror}): name the script's command, "
                "andon audit RUN -- python train.py"
            ) from error

    def __enter__(self) -> Self:
        """The script."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it, with its loading processes."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def says(self, report: Path) -> Iterator[dict[str, Any] | None]:
        """What it appends to its report, line by line; None whenever nothing is there to read."""
        rest = ""
        while not report.exists():
            if self._process.poll() is not None:
                return
            time.sleep(_LOOK_EVERY_S)
            yield None
        with report.open(encoding="utf-8") as file:
            while True:
                ended = self._process.poll() is not None
                while line := file.readline():
                    rest += line
                    if rest.endswith("\n"):
                        said, rest = json.loads(rest), ""
                        yield said
                if ended:
                    return
                time.sleep(_LOOK_EVERY_S)
                yield None

    @property
    def ended_how(self) -> str:
        """How it ended, with its last words; it has ended."""
        from andon_cli.launching.processes import ended_how

        code = self._process.wait()
        text = self._output.read_bytes().decode("utf-8", errors="replace")
        last = "\n".join(text.strip().splitlines()[-_LAST_LINES:])
        return f"{ended_how(code)}; {self._output} has its output" + (f":\n{last}" if last else "")
