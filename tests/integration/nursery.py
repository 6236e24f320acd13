"""Nurseries: templates that have imported the slow modules, and fork processes for tests.

A forked process behaves like `python script args` or `python -m module args`, but starts some
seconds sooner, and ends a quarter of a second sooner (`andon_cli.launching.template`). Processes
that torchrun starts, the service and the first workers of `andon run`, and what stands by for a
service start without a nursery, if a test does not have them forked (fixtures/warm_run.py).
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Literal

from andon_cli.launching.template import Template
from andon_cli.verbs import VERBS

__all__ = ["Child", "Nursery", "Process", "first_line", "nursery", "start_anew"]

_BREATH_S = 60.0
"""Importing PyTorch on a busy machine takes a while."""
_IMPORTS_S = 110.0
"""How long a nursery may take to its first answer: it imports transformers beside other tests."""
_ROOM = 2000
"""Characters of the longest command that `ps` shows right."""


class Child:
    """A process from a nursery, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, watch: int, output: Path) -> None:
        """Takes a child of this process, and a pidfd that tells of its end."""
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self._watch = watch
        self._reaping = Lock()

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float = _BREATH_S) -> int:
        """Waits for its end; returns the exit code, or minus the signal."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._watch], [], [], timeout)[0]:
            with self._reaping:  # One thread may wait while another one kills.
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    os.close(self._watch)
        return self.returncode


Process = Child | subprocess.Popen[bytes]


def start_anew(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path
) -> Process:
    """Starts a process like `Nursery.start`, but with a new interpreter, which is slower."""
    with output.open("ab") as out, errors.open("ab") as err:
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=out, stderr=err
        )


def first_line(process: Process, output: Path) -> str:
    """The first line of its output; if it ended before a complete line, all of its output."""
    deadline = time.monotonic() + _BREATH_S
    while "\n" not in (text := output.read_text()) and process.poll() is None:
        assert time.monotonic() < deadline, f"process {process.pid} wrote nothing"
        time.sleep(0.002)
    return text.partition("\n")[0]


class Nursery:
    """The tests' interface to a template."""

    def __init__(self, modules: Sequence[str], *, frees: bool = False) -> None:
        """Starts a template; `frees` is one of its arguments."""
        path = ":".join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._template = Template(
            modules, environment=environment, room=_ROOM, patience_s=_BREATH_S, frees=frees
        )
        self._forking = Lock()
        atexit.register(self._template.close)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
    ) -> Child:
        """Starts a process whose output goes to a file, and its errors there or to another file.

        `arguments` are those of `python`: a script, or `-m` and a module, with their arguments.
        """
        with output.open("ab") as out, (errors or output).open("ab") as err, self._forking:
            assert self._template.is_ready(_IMPORTS_S), "the nursery is not ready"
            files = out.fileno(), err.fileno()
            return Child(*self._template.fork(arguments, environment, *files), output)


_TRAINER = ("andon_trainer.preloaded",)
_COMMANDS = (
    # Where a command begins, and what its first name of a host needs.
    *("andon_cli.app", "encodings.idna"),
    "integration.fixtures.schemas",
)
_MODULES = {
    # `andon run`, too, whose workers and service are forked then (fixtures/warm_run.py).
    "trainer": (*_TRAINER, "andon_cli.commands.run", "andon_server.serve", *_COMMANDS),
    "service": (
        "andon_server.serve",
        "andon_trainer.place.membership",
        # A command imports its module when it is asked for.
        *sorted(
            {name.partition(":")[0] for verb in VERBS.values() for name in (verb.schema, verb.run)}
        ),
        *_COMMANDS,
    ),
    # The package imports a name's module when the name is asked for.
    "models": (
        "peft",
        *_TRAINER,
        *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "t5", "vit")),
    ),
    "plain": (
        *_TRAINER,
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        # Which few have: `pip install --group plain`.
        *(
            name
            for name in ("accelerate", "lightning.pytorch", "transformers.trainer")
            if find_spec(name.partition(".")[0])
        ),
    ),
}


@cache
def nursery(imports: Literal["trainer", "service", "models", "plain"]) -> Nursery:
    """The nursery with PyTorch, the one without, and those with transformers or FSDP, too.

    Each starts at its first use.
    """
    return Nursery(_MODULES[imports])
