"""How a script ended, seen from a process that ends in each way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

PREPARED = """\
import atexit, json, os, sys
from andon_trainer.errors import JoinRefused, LineHalted, RunOver, WorkerDropped
from andon_trainer.process.exits import watch_exit
from andon.protocol.halts import HaltEvidence, HaltReason

# One interpreter imports; each script is run, and ended, by a copy of it.
for number, script in enumerate(json.load(sys.stdin)):
    copy = os.fork()
    if not copy:
        break
    print(number, os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
else:
    os._exit(0)
for to, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), to)

HALTED = LineHalted(HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=2))
ending = watch_exit()
atexit.register(lambda: print(repr(ending.failure(done="DONE" in globals()))))

def silent(*uncaught):
    pass

def as_hydra(task):
    try:
        task()
    except Exception:
        sys.exit(1)

def fail():
    raise HALTED

exec(compile(script, "<string>", "exec"))
"""


GOOD_ENDS = [
    "pass",
    "sys.exit()",
    "sys.exit(0)",
    "exit()",
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
    "try:\n    fail()\nexcept LineHalted:\n    pass",
]
BAD_ENDS = [
    ("raise ValueError(7)", 1, "ValueError(7)"),
    ("fail()", 3, "LineHalted"),
    ("raise RunOver('the run is over: steps', '', 3, exit_code=1)", 1, "RunOver"),
    ("as_hydra(fail)", 1, "LineHalted"),
    ("sys.exit(2)", 2, "SystemExit('sys.exit(2)')"),
    ("sys.exit('no data')", 1, "SystemExit(\"sys.exit('no data')\")"),
    ("exit(2)", 2, "SystemExit('sys.exit(2)')"),
    ("quit('no data')", 1, "SystemExit(\"sys.exit('no data')\")"),
    ("ending.end(undo=False)\nfail()", 3, "LineHalted"),
    ("raise SystemExit(4)", 4, "SystemExit('raised before the work was done')"),
    ("sys.excepthook = silent\nfail()", 1, "LineHalted"),
    # What PyTorch's C++ made of an error of a session.
    ("ending.explain(HALTED)\nraise RuntimeError(f'from C++: {HALTED}')", 3, "RuntimeError"),
    (
        "ending.explain(HALTED)\ntry:\n    raise RuntimeError(str(HALTED))\n"
        "except RuntimeError as error:\n    raise KeyError(1) from error",
        3,
        "KeyError",
    ),
    ("ending.explain(HALTED)\nraise RuntimeError('another')", 1, "RuntimeError('another')"),
    ("sys.excepthook = silent\nwatch_exit()\nfail()", 3, "LineHalted"),
    ("sys.excepthook = lambda *_: sys.exit(9)\nwatch_exit()\nfail()", 3, "LineHalted"),
]
COLLECTED = """\
import io
ours = sys.excepthook

def as_torch_distributed(*uncaught):
    real, sys.stderr = sys.stderr, io.StringIO()
    try:
        ours(*uncaught)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), real
    sys.stderr.write(text)

sys.excepthook = as_torch_distributed
fail()
"""
DONE = "DONE = True\nraise SystemExit(0)"
OVER = "raise JoinRefused('complete', 'run 7f3a is over after step 9: nothing is left to do')"
CAUGHT_OVER = """\
try:
    raise JoinRefused('complete', 'run 7f3a is over')
except JoinRefused as refused:
    print(refused.reason, file=sys.stderr)
"""
FULL = "raise JoinRefused('full', 'all 2 slots are taken')"
DROPPED = "raise WorkerDropped('dropped after step 2: why', 'alpha:7070', 2)"
OTHERS = (DONE, DROPPED, OVER, CAUGHT_OVER, FULL, COLLECTED)

Ended = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit code of a script, what its end was taken for, and what it wrote on stderr."""
    folder = tmp_path_factory.mktemp("ended")
    scripts = [*GOOD_ENDS, *(script for script, _, _ in BAD_ENDS), *OTHERS]
    done = subprocess.run(
        [sys.executable, "-c", PREPARED],
        cwd=folder,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        input=json.dumps(scripts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    codes = {int(number): int(code) for number, code in map(str.split, done.stdout.splitlines())}

    def outcome(script: str) -> tuple[int, str, str]:
        number = scripts.index(script)
        said = [(folder / f"{number}.{name}").read_text() for name in ("out", "err")]
        return codes[number], said[0].strip(), said[1]

    return outcome


@pytest.mark.parametrize("script", GOOD_ENDS)
def test_a_script_that_comes_to_its_end_did_not_fail(ended: Ended, script: str) -> None:
    assert ended(script) == (0, "None", "")


@pytest.mark.parametrize(("script", "code", "taken_for"), BAD_ENDS)
def test_a_script_that_did_not_is_seen_to_fail_whatever_became_of_the_exception(
    ended: Ended, script: str, code: int, taken_for: str
) -> None:
    seen = ended(script)

    assert seen[0] == code, seen
    assert seen[1].startswith(taken_for), seen


def test_an_exit_without_a_known_code_is_good_once_the_work_is_done(ended: Ended) -> None:
    assert ended(DONE) == (0, "None", "")


def test_a_worker_that_was_dropped_ends_with_one_line(ended: Ended) -> None:
    code, _, errors = ended(DROPPED)

    assert (code, errors) == (5, "dropped after step 2: why\n")


def test_a_worker_that_finds_the_run_complete_says_so_in_one_line_and_ends_well(
    ended: Ended,
) -> None:
    code, _, errors = ended(OVER)

    assert (code, errors) == (0, "run 7f3a is over after step 9: nothing is left to do\n")


def test_a_script_may_catch_that_the_run_is_complete(ended: Ended) -> None:
    assert ended(CAUGHT_OVER) == (0, "None", "complete\n")


def test_any_other_refusal_is_an_error_with_its_traceback(ended: Ended) -> None:
    code, _, errors = ended(FULL)

    assert code == 4
    assert "Traceback" in errors


def test_the_traceback_is_seen_though_another_hook_collects_it_around_ours(ended: Ended) -> None:
    code, _, errors = ended(COLLECTED)

    assert code == 3
    assert "Traceback" in errors
    assert "LineHalted" in errors
