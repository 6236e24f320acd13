"""Template: a process that has loaded what scripts load, and forks processes that run them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from andon.host.tether import adopting_orphans

__all__ = ["Template", "TemplateGone"]

# The folder that `python script.py` begins to search for modules is the script's.
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, sys.argv[1]); "
    "from andon_cli.launching.template_process import main; main()"
)
_PATIENCE_S = 3.0
"""How long a fork may take."""


class TemplateGone(Exception):
    """The template has ended, does not answer, or can't fork here."""


class Template:
    """This process's interface to a template, which ends with this process.

    It needs Linux: `TemplateGone` says so elsewhere.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        environment: Mapping[str, str],
        script_folder: str = "",
        room: int = 0,
        patience_s: float = _PATIENCE_S,
        frees: bool = True,
    ) -> None:
        """Starts it, from the main thread. It imports `modules`.

        Args:
            modules: names.
            environment: what modules read while they are imported.
            script_folder: where they are looked for first; the current one, if it is empty.
            room: characters of the longest command that `ps` can show for a forked process.
            patience_s: how long a fork may take. Later the template is ended.
            frees: whether a forked process destroys at its end what it has loaded, as a new
                interpreter does. With PyTorch that takes a quarter of a second.

        Raises:
            TemplateGone: there are none on this platform.
            OSError: it could not be started.
        """
        if not (sys.platform == "linux" and hasattr(os, "pidfd_open")):
            raise TemplateGone("it needs Linux")
        self._socket, theirs = socket.socketpair()
        self._ready = False
        self._patience_s = patience_s
        numbers = [str(theirs.fileno()), str(os.getpid())]
        arguments = [script_folder, *numbers, "." * room, "frees" if frees else "", *modules]
        # Pipes, as workers have: Python asks once what its output is. Nobody reads this one.
        unread, output = os.pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *arguments],
                    pass_fds=[theirs.fileno()],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
        except OSError:
            self._socket.close()
            raise
        finally:
            os.close(unread)
            os.close(output)

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Whether it has imported everything; waits for that.

        Raises:
            TemplateGone: it has ended.
        """
        if not self._ready and select.select([self._socket], [], [], wait_s)[0]:
            with suppress(OSError):
                self._ready = bool(self._socket.recv(1))
            if not self._ready:
                raise TemplateGone("it has ended")
        return self._ready

    def fork(
        self, argv: Sequence[str], environment: Mapping[str, str], out: int, errors: int
    ) -> tuple[int, int]:
        """Forks a process, which is a child of this one, and returns its id and a pidfd.

        It leads a process group of its own, and the kernel ends it with this process. One thread at
        a time may call this.

        Args:
            argv: as arguments of `python`: a script, or `-m` and a module, with their arguments.
            environment: all of its environment.
            out: a file descriptor, for its output.
            errors: a file descriptor.

        Raises:
            TemplateGone: no process was forked.
        """
        request = {"argv": [*argv], "environment": {**environment}, "folder": os.getcwd()}
        data = json.dumps(request).encode()
        ours, theirs = socket.socketpair()
        with ours, adopting_orphans():
            ours.settimeout(self._patience_s)
            try:
                with theirs:
                    self._socket.settimeout(self._patience_s)  # Fails once it was closed.
                    files = [theirs.fileno(), out, errors]
                    socket.send_fds(self._socket, [len(data).to_bytes(4, "little")], files)
                self._socket.sendall(data)
                # An orphan says this, which is our child by now. It waits to hear that we know it.
                pid = int(ours.recv(32))
                watch = os.pidfd_open(pid)
                with suppress(BrokenPipeError):  # It is dead already: its status will say why.
                    ours.sendall(b"\n")
            except (OSError, ValueError) as error:
                self.close()  # A late answer must not be taken for that to another request.
                raise TemplateGone(f"it does not answer: {error}") from error
        return pid, watch

    def close(self) -> None:
        """Ends it. What it has forked goes on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
