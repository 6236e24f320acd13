"""A nursery: a process that has imported PyTorch already, and forks workers for tests.

A worker that it forks is what `python script args` would be, four seconds of importing sooner: a
process of its own with its own arguments, environment and output, whose uncaught exception ends it
as in any script. It differs in one thing: all of them share one seed for hashing strings. What
`andon run` and torchrun start in tests is started by nobody's help.

Theory of operation. The nursery has one thread. For each request it forks a nurse, and the nurse
forks the worker, says its process id, waits for its end and says how it ended: so nobody has to
listen to many children at once.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

__all__ = ["Child", "nursery"]

_BREATH_S = 60.0
"""Importing PyTorch on a busy machine takes a while."""


class Child:
    """A worker; it is used as `subprocess.Popen` is."""

    def __init__(self, pid: int, status: int, output: Path) -> None:
        """Takes the end of the pipe on which the worker's end is told."""
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """How it ended; None while it lives."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """How it ended, as soon as it has: an exit code, or minus the signal."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it lives."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = json.loads(_read_line(self._status))
            os.close(self._status)
        return self.returncode


class _Nursery:
    """The process, from the tests' side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        atexit.register(self._close)

    def start(
        self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> Child:
        """Starts a worker whose output goes to a file."""
        output.touch()
        ours, theirs = os.pipe()
        request = {
            "argv": [str(script), *arguments],
            "environment": dict(environment),
            "output": str(output),
            "folder": os.getcwd(),
        }
        data = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(4, "little")], [theirs])
        os.close(theirs)
        self._socket.sendall(data)
        assert select.select([ours], [], [], _BREATH_S)[0], "the nursery does not answer"
        return Child(int(_read_line(ours)), ours, output)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(_BREATH_S)


@cache
def nursery() -> _Nursery:
    """The tests' one nursery, started at its first use."""
    return _Nursery()


def _read_line(pipe: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(pipe, 1)
        assert byte, "the nurse is gone"
        line += byte
    return line


def _serve(requests: socket.socket) -> None:
    """Forks until nobody asks any more; returns in a worker, that is to become its script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nurses need nobody to wait for them
    while True:
        head, pipes, _, _ = socket.recv_fds(requests, 4, 1)
        if not head:
            os._exit(0)
        data = b""
        while len(data) < int.from_bytes(head, "little"):
            data += requests.recv(1 << 16)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _nurse(pipes[0], json.loads(data))
            return
        os.close(pipes[0])


def _nurse(status: int, request: dict[str, object]) -> None:
    """Forks the worker and tells of it; returns in the worker."""
    worker = os.fork()
    if worker:
        os.write(status, b"%d\n" % worker)
        _, how = os.waitpid(worker, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
        os._exit(0)
    os.close(status)
    with Path(os.devnull).open() as nothing, Path(str(request["output"])).open("w") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]  # JSON's
    sys.argv[:] = request["argv"]  # type: ignore[call-overload]  # JSON's


def _become_worker() -> None:
    # What a training script imports, and what making an optimizer imports.
    import torch

    import andon_trainer  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _become_worker()
