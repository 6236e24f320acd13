"""Nurseries: processes that have imported the slow modules, and fork processes for tests.

A forked process behaves like `python script args` or `python -m module args`, but starts some
seconds sooner, because it need not import. It has its own arguments, environment and output, and an
uncaught exception ends it as usual. The only difference: all forked processes share one seed for
hashing strings. Processes that `andon run` and torchrun start, and the replacement of a killed
coordinator, start without a nursery.

Theory of operation. A nursery has one thread. For each request it forks a nurse. The nurse forks
the process, reports its id, waits for its end and reports its exit status. So no process has to
wait for several children at once.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

__all__ = ["Child", "Process", "first_line", "nursery", "start_anew"]

_BREATH_S = 60.0
"""Importing PyTorch on a busy machine takes a while."""
_IMPORTS_S = 110.0
"""How long a nursery may take to its first answer: it imports transformers beside other tests."""


class Child:
    """A process from a nursery, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, output: Path) -> None:
        """Takes the reading end of the pipe on which the nurse reports the exit status."""
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self._status = status

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
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = json.loads(_read_line(self._status))
            os.close(self._status)
        return self.returncode


Process = Child | subprocess.Popen[bytes]


def start_anew(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path
) -> Process:
    """Starts a process like `_Nursery.start`, but with a new interpreter, which is slower."""
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


class _Nursery:
    """The tests' interface to a nursery process."""

    def __init__(self, imports: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), imports]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": ":".join(path for path in sys.path if path),
            }
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        atexit.register(self._close)

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
        output.touch()
        ours, theirs = os.pipe()
        request = {
            "argv": list(arguments),
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors or output),
            "folder": os.getcwd(),
        }
        data = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(4, "little")], [theirs])
        os.close(theirs)
        self._socket.sendall(data)
        assert select.select([ours], [], [], _IMPORTS_S)[0], "the nursery does not answer"
        return Child(int(_read_line(ours)), ours, output)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(_BREATH_S)


@cache
def nursery(imports: Literal["trainer", "service", "models"]) -> _Nursery:
    """The nursery with PyTorch, the one without, or the one with transformers, too.

    Each starts at its first use.
    """
    return _Nursery(imports)


def _read_line(pipe: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(pipe, 1)
        assert byte, "the nurse is gone"
        line += byte
    return line


def _serve(requests: socket.socket) -> None:
    """Forks for each request. Returns only in a forked process, which then runs its script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps nurses
    while True:
        head, pipes, _, _ = socket.recv_fds(requests, 4, 1)
        if not head:
            os._exit(0)
        data, size = b"", int.from_bytes(head, "little")
        while len(data) < size:
            # No more: the next request may be here, if the one before waited in vain for this one.
            data += requests.recv(size - len(data))
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _nurse(pipes[0], json.loads(data))
            return
        os.close(pipes[0])


def _nurse(status: int, request: dict[str, object]) -> None:
    """Forks the process and reports on it. Returns only in the process."""
    child = os.fork()
    if child:
        os.write(status, b"%d\n" % child)
        _, how = os.waitpid(child, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
        os._exit(0)
    os.close(status)
    for number, file, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], os.O_WRONLY | os.O_APPEND),
        (2, request["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(str(file), mode)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]  # JSON's
    sys.argv[:] = request["argv"]  # type: ignore[call-overload]  # JSON's


def _import_trainer() -> None:
    """Imports all that a training script and the creation of an optimizer import."""
    import torch

    import andon_trainer

    # The package imports a name's module when the name is asked for: 300 modules, for more than a
    # second, which each forked process would else import by itself.
    for name in andon_trainer.__all__:
        getattr(andon_trainer, name)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def _import_service() -> None:
    """Imports all that a service, a worker without PyTorch and the command line import."""
    import andon_server.serve  # noqa: F401
    import andon_trainer.place.membership  # noqa: F401
    from andon_cli.verbs import VERBS, imported

    for verb in VERBS.values():
        imported(verb.schema)
        imported(verb.run)


def _import_models() -> None:
    """Imports what a script with models of transformers, or adapters of peft, does."""
    import peft  # noqa: F401

    _import_trainer()
    # The package imports a name's module when the name is asked for.
    from transformers import (  # noqa: F401
        BertModel,
        GPT2LMHeadModel,
        T5ForConditionalGeneration,
        ViTForImageClassification,
    )


_IMPORTS = {"trainer": _import_trainer, "service": _import_service, "models": _import_models}


def _become_child() -> None:
    _IMPORTS[sys.argv[2]]()
    # What was imported stays out of every later garbage collection. A child would else copy each
    # page of it, because a collection writes to all that it visits: a second at its end.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
    if sys.argv[0] == "-m":
        module = sys.argv.pop(1)
        sys.path[0] = ""
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _become_child()
