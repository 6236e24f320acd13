"""Processes that are forked from a template: they behave as those of `python script.py args`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from andon_cli.launching.template import Template, TemplateGone
from integration.fixtures.console import (
    PROTOCOL_WORKER,
    finish,
    processes_of,
    start,
    template_of,
    worker_of,
)
from integration.nursery import Nursery, Process, nursery, start_anew

pytestmark = pytest.mark.integration

Starts = dict[str, Callable[..., Process]]

_PROBE = """
import atexit, json, multiprocessing, os, pickle, signal, sys, threading


class Own:
    pass


def double(number):
    return 2 * number


if __name__ == "__main__":
    atexit.register(print, "at exit")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    signals = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    print(json.dumps({
        "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "flags": sys.flags,
        "globals": sorted(globals()), "file": __file__, "main": __name__, "spec": __spec__,
        "own": type(pickle.loads(pickle.dumps(Own()))) is sys.modules["__main__"].Own,
        "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
        "input": sys.stdin.read(), "signals": list(map(str, signals)), "doubled": doubled,
        "threads": [each.name for each in threading.enumerate()], "blocked": list(
            map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "output": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through],
        "command": open("/proc/self/cmdline").read().rstrip("\\0"),
        "files": sorted(os.listdir("/proc/self/fd")),
    }, default=str))
"""
_ENDS = {
    "code": "import sys; sys.exit(3)",
    "thread": "import threading; threading.Timer(0.05, print, [1]).start()",
    "open file": "file = open('/dev/stderr', 'w'); file.write('kept')",
    "full disk": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print(1)",
    "words": "raise SystemExit('no such thing')",
    "exception": "def fail():\n    raise ValueError('é')\n\nfail()",
    "syntax": "x = (",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "own hook": "import sys\nsys.excepthook = lambda *each: print(each[0])\n1 / 0",
}


@pytest.fixture(scope="module")
def starts() -> Starts:
    """A new interpreter, a fork, and a fork that destroys nothing at its end."""
    frees = Nursery(["json"], frees=True)
    return {"anew": start_anew, "forked": frees.start, "in haste": nursery("service").start}


def _each(starts: Starts, folder: Path, text: str, *words: str) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of a script that was started in each way."""
    script = folder / "script.py"
    script.write_text(text, "utf-8")
    found = {}
    for how, begin in starts.items():
        output, errors = folder / f"{how}.out", folder / f"{how}.err"
        # Each library has read the other variables before.
        environment = {**os.environ, "ANDON_OWN": how}
        process = begin(["script.py", *words], environment, output, errors)
        found[how] = process.wait(60.0), output.read_text("utf-8"), errors.read_text("utf-8")
    return found


def test_a_forked_process_sees_what_one_of_a_new_interpreter_sees(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    each = _each(starts, tmp_path, _PROBE, "--flag", "é")

    seen = {}
    for how, (code, output, errors) in each.items():
        assert (code, errors) == (0, "")
        *said, last = output.splitlines()
        assert last == "at exit"
        seen[how] = json.loads(said[-1])
        assert seen[how]["environment"].pop("ANDON_OWN") == how
    anew = seen.pop("anew")
    path = anew.pop("path")
    for forked in seen.values():
        # The nursery's own search path is that of the tests.
        found = forked.pop("path")
        assert found[0] == path[0]
        assert set(path) <= set(found)
        assert forked == anew


@pytest.mark.parametrize("text", _ENDS.values(), ids=_ENDS)
def test_a_forked_process_ends_as_one_of_a_new_interpreter_does(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)

    each = _each(starts, tmp_path, text)

    assert each["forked"] == each["in haste"] == each["anew"]


def test_forked_processes_draw_different_numbers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import random, uuid, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), float(torch.rand(())), uuid.uuid4())\n"
    )
    drawn = []
    for number in range(2):
        output = tmp_path / f"{number}.out"
        process = nursery("trainer").start([str(script)], os.environ, output)
        assert process.wait() == 0, output.read_text()
        drawn.append(output.read_text().split())

    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_a_template_that_was_given_up_forks_nothing_more_and_says_so() -> None:
    template = Template(["json"], environment=os.environ)
    assert template.is_ready(60.0)

    template.close()  # As it does by itself when a fork takes too long.

    for _ in range(2):
        with pytest.raises(TemplateGone):
            template.fork(["script.py"], os.environ, 1, 1)


_LAUNCHER = """
import os, sys, time
from andon_cli.launching.template import Template

template = Template(["json"], environment=os.environ)
while not template.is_ready(60.0):
    pass
pid, _ = template.fork([sys.argv[1]], os.environ, 1, 1)
print(pid, template._process.pid, flush=True)
time.sleep(60)
"""


def test_template_and_forked_processes_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time; time.sleep(60)")
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(sleeper)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    watches = [os.pidfd_open(int(each)) for each in launcher.stdout.readline().split()]

    launcher.kill()
    launcher.wait()

    launcher.stdout.close()
    for watch in watches:
        # Readable once it has ended.
        assert _readable(watch)
        os.close(watch)


def _readable(file: int) -> bool:
    return bool(select.select([file], [], [], 30.0)[0])


def test_a_killed_worker_is_forked_again_and_without_a_template_it_starts_as_before(
    tmp_path: Path,
) -> None:
    printed = tmp_path / "printed.txt"
    with printed.open("w") as out:
        flags = ("run", "--workers", "2", "--restarts", "100")
        process = start(tmp_path, *flags, PROTOCOL_WORKER, "1000000", stdout=out)

    def await_text(part: str, after: int) -> None:
        while part not in printed.read_text()[after:]:
            time.sleep(0.05)  # The test's own time limit bounds this.

    await_text("[worker 1] step ", 0)
    template = template_of(tmp_path)

    def kill() -> int:
        """Kills worker 1, and returns the process that takes its place, once that trains."""
        before = len(printed.read_text())
        os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
        await_text("worker 1 was killed by SIGKILL: it starts again", before)
        await_text("[worker 1] step ", printed.read_text().rindex("it starts again"))
        return worker_of(tmp_path, slot=1)

    assert _is_forked(kill())
    os.kill(template, signal.SIGKILL)
    assert not _is_forked(kill())

    process.send_signal(signal.SIGTERM)
    finish(process)
    assert processes_of(tmp_path) == []


def _is_forked(pid: int) -> bool:
    """Whether a worker was forked: what the kernel shows as its environment is the template's."""
    return "\0RANK=" not in Path(f"/proc/{pid}/environ").read_text()
