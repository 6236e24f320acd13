"""The process of a template: it has loaded what scripts load, and forks processes that run them.

A forked process behaves as `python script.py args` does, but has nothing to load.

Theory of operation. The process has one thread. For each request it forks twice, and the process in
the middle ends at once. So the forked process is an orphan, and the kernel gives it to the process
that asked, which has declared that it takes orphans (`andon.host.tether`). From then on it is that
one's child like any other: the kernel reports its end, and ends it with its parent. Nothing of it
depends on the template any more.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module, invalidate_caches
from importlib.machinery import SourceFileLoader
from io import IOBase
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from andon.host.tether import tie_to_parent

__all__ = ["main"]

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def main() -> None:
    """Loads modules, then forks on request until nobody is left who could ask.

    The arguments are a folder, the number of a socket, the process id of the parent, room for the
    commands of forked processes, "frees" or nothing, and names of modules. Returns only in a forked
    process, whose script has ended.
    """
    _, number, parent, _, frees, *modules = sys.argv[1:]
    if not tie_to_parent(int(parent), signal.SIGKILL):
        os._exit(1)
    short = _ShortEnd()
    if not frees:
        atexit.register(short.end)  # Before all others, so it runs after them.
    # As every worker does: SIGUSR1 asks for a checkpoint.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for module in modules:
        import_module(module)
    # What was loaded stays out of every later garbage collection: a collection writes to all that
    # it visits, and each forked process would copy those pages.
    gc.collect()
    gc.freeze()
    if not _may_fork():
        os._exit(1)
    with socket.socket(fileno=int(number)) as requests:
        requests.send(b"\n")
        request = _serve(requests, int(parent))
    try:
        _run(request["argv"])
        short.code = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            short.code = ended.code or 0
        raise


class _ShortEnd:
    """Ends a process where the interpreter would begin to destroy what it has loaded."""

    def __init__(self) -> None:
        """Does nothing yet."""
        self.code: int | None = None
        """The script's own exit code; None: the interpreter says how it ended."""

    def end(self) -> None:
        """Ends the process, unless its output can't be written: the interpreter says so."""
        if self.code is None:
            return
        for each in gc.get_objects():
            # A file that nobody closed would be written when it is destroyed.
            if issubclass(type(each), IOBase):
                with suppress(OSError, ValueError):
                    each.flush()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return
        os._exit(self.code & 0xFF)


def _may_fork() -> bool:
    """Whether a forked process is whole: there is no thread that it would lack, and no device."""
    # OpenBLAS has threads, which end before a fork, and start again when they are needed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About the threads.
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return len(os.listdir("/proc/self/task")) == 1 and not any(
        name.startswith(_DEVICES) for name in opened
    )


def _serve(requests: socket.socket, parent: int) -> dict[str, Any]:
    """Forks for each request. Returns only in a forked process: the request."""
    while True:
        head, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            os._exit(0)
        data, size = b"", int.from_bytes(head, "little")
        while len(data) < size:
            # No more: the next request may be here already.
            if not (piece := requests.recv(size - len(data))):
                os._exit(0)
            data += piece
        orphaned, held = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            requests.close()
            os.close(held)
            os.read(orphaned, 1)  # It ends once the process between us has.
            os.close(orphaned)
            request: dict[str, Any] = json.loads(data)
            _begin(request, parent, files)
            return request
        os.waitpid(between, 0)
        for each in (orphaned, held, *files):
            os.close(each)


def _begin(request: Mapping[str, Any], parent: int, files: Sequence[int]) -> None:
    """Becomes a process of its own, with what the request says."""
    talk, out, errors = files
    os.setpgid(0, 0)
    # False, too, if the kernel gives orphans to somebody else.
    if not tie_to_parent(parent, signal.SIGKILL):
        os._exit(1)
    for number, file in ((1, out), (2, errors)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    _show_command(sys.orig_argv)
    _draw_anew()
    invalidate_caches()
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = request["folder"]  # type: ignore[attr-defined]  # not in the stubs
    # Whoever asked has given up, or begins to watch us: then we may run.
    with socket.socket(fileno=talk) as asked:
        try:
            asked.sendall(b"%d\n" % os.getpid())
            begins = asked.recv(1)
        except OSError:
            begins = b""
    if not begins:
        os._exit(1)


def _draw_anew() -> None:
    """Seeds what a new process draws from the system; `random` does that itself at a fork."""
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _show_command(command: Sequence[str]) -> None:
    """Lets `ps` show a command instead of the template's, as far as there is room."""
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    said = b"".join(os.fsencode(each) + b"\0" for each in command)
    if start and len(said) <= end - start:
        ctypes.memmove(start, said.ljust(end - start, b"\0"), end - start)


def _run(argv: Sequence[str]) -> None:
    """Runs `script.py` or `-m module`, as the interpreter would."""
    if argv[0] == "-m":
        name = sys.argv.pop(1)
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(argv[0]))
    script = os.path.abspath(argv[0])
    module = ModuleType("__main__")
    vars(module).update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=script,
        __loader__=SourceFileLoader("__main__", script),
    )
    sys.modules["__main__"] = module
    try:
        code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
        exec(code, vars(module))
    except BaseException as error:
        # The interpreter does what it does at the end of any script.
        _leave_out_own_frames(error)
        raise


def _leave_out_own_frames(error: BaseException) -> None:
    show, trace = sys.excepthook, error.__traceback__ and error.__traceback__.tb_next

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
