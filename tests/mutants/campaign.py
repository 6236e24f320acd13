"""Puts small defects into the code, one at a time, and counts those that the tests find.

    make mutants [ARGS="--only ROOM ... --json FILE --against FILE"]

A defect is *killed* if a test fails or takes too long, or the tests can't start; else it survives.
It is put into a copy of the working tree. `--against` runs the defects of an earlier result on the
present tree and tests; it ends with 1 if one that was killed then survives now or isn't found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("proto", "services", "trainer", "conformance")
sys.path.insert(0, str(_ROOT / "tests"))

from mutants.anchors import Change, changes_of, choose, find  # noqa: E402
from mutants.operators import mutated, sites  # noqa: E402
from mutants.rooms import ROOMS, Room  # noqa: E402

_SEED = "andon"
_PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--hypothesis-seed=0")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a run of the tests."""

    passed: bool
    failed: str
    """The test that failed first, or why there is none."""
    seconds: float


class Tree:
    """A copy of the working tree, with one defect at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        listed = ["git", "-C", str(_ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
        compiled = [str(each.relative_to(_ROOT)) for each in _ROOT.glob("proto/andon/*/*.so")]
        for name in filter(None, [*names, *compiled]):
            if (_ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(_ROOT / name, root / name)

    def files(self, patterns: Sequence[str]) -> list[str]:
        """What there is of files and folders; a test, after `::`, stays with its file."""
        found = []
        for pattern in patterns:
            path, colons, test = pattern.partition("::")
            files = sorted(self._root.glob(path))
            found += [f"{each.relative_to(self._root)}{colons}{test}" for each in files]
        return found

    def changes(self, patterns: Sequence[str]) -> Iterator[Change]:
        """All changes of these files that could be made."""
        for path in self.files(patterns):
            if not path.endswith(("_pb2.py", "_pb2_grpc.py")):
                source = (self._root / path).read_text()
                yield from changes_of(path, source, sites(source))

    def test(self, tests: Sequence[str], limit_s: float, *, caches: bool = False) -> Run:
        """Runs these tests, and ends all that they have started."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(self._root / each) for each in _CODE),
            "PYTHONDONTWRITEBYTECODE": "" if caches else "1",
        }
        python = str(_ROOT / ".venv/bin/python")
        shutil.rmtree(self._root / ".hypothesis", ignore_errors=True)
        began_at = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [python, "-m", "pytest", *_PYTEST, *tests],
                cwd=self._root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code, why = process.wait(limit_s), ""
            except subprocess.TimeoutExpired:
                code, why = -1, "time limit"
            finally:
                _end(process)
            output.seek(0)
            text = output.read()
        first = _FAILED.search(text)
        return Run(
            passed=code == 0,
            failed=first[1] if code and first else why or (f"exit code {code}" if code else ""),
            seconds=round(time.monotonic() - began_at, 1),
        )

    def killed_by(self, change: Change, tests: Sequence[str], limit_s: float) -> tuple[str, Run]:
        """The statement as it is with the change, and what the tests say of it."""
        file = self._root / change.path
        source, times = file.read_text(), file.stat()
        code = mutated(source, change.operator, change.occurrence)
        try:
            file.write_text(code)
            return _changed_line(source, code), self.test(tests, limit_s)
        finally:
            file.write_text(source)  # With its time as before, its compiled code is valid again.
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # All have ended by themselves.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _changed_line(before: str, after: str) -> str:
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(new.strip() for old, new in lines if old != new)


def tests_for(change: Change, room: Room, tree: Tree, killer: str) -> list[str]:
    """The file of the test that found it last time, those named like the module, then the list."""
    stem = Path(change.path).stem.strip("_")
    last = [killer.partition("::")[0]] if killer.startswith("tests/") else []
    names = (stem, *room.more.get(stem, ()))
    named = [f"{folder}/**/test_*{name}*.py" for name in names for folder in room.folders]
    return list(dict.fromkeys(tree.files([*last, *named, *room.tests])))


def run_room(name: str, room: Room, tree: Tree, before: list[dict[str, Any]] | None) -> Any:
    """The room's mutants, new or those of a result, and what became of them."""
    asked: list[tuple[dict[str, Any], Change | None]]
    if before is None:
        chosen = choose(list(tree.changes(room.code)), room.mutants, _SEED)
        asked = [(asdict(each), each) for each in chosen]
    else:
        everywhere = list(tree.changes(["proto/**/*.py", "services/**/*.py", "trainer/**/*.py"]))
        asked = [(each, find(_change_of(each), everywhere)) for each in before]
    lists = [
        [] if change is None else tests_for(change, room, tree, was.get("killer", ""))
        for was, change in asked
    ]
    every = list(dict.fromkeys(test for tests in lists for test in tests))
    clean = tree.test(every, 3000, caches=True)
    assert clean.passed, f"the tests of {name} fail without a defect: {clean.failed}"
    _say(f"{name}: {len(every)} test files, {clean.seconds} s without a defect")
    mutants = []
    for (was, change), tests in zip(asked, lists, strict=True):
        if change is None:
            mutants.append({**was, "found": False, "killed": False, "killer": ""})
            continue
        text, run = tree.killed_by(change, tests, max(120.0, 5 * clean.seconds))
        if run.passed and was.get("killed"):  # Its test may be in another file now.
            text, run = tree.killed_by(change, tree.files(room.folders), 3000)
        end = {"killed": not run.passed, "killer": run.failed, "seconds": run.seconds}
        mutants.append({**asdict(change), "after": text, "found": True, **end})
        word = "SURVIVED" if run.passed else "killed"
        _say(f"  {word:8} {run.seconds:6} s {change.file} {change.function}: {text}")
    return {"clean_s": clean.seconds, "mutants": mutants}


def _change_of(mutant: dict[str, Any]) -> Change:
    return Change(**{name: mutant[name] for name in Change.__dataclass_fields__})


def compare(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Prints each room's figures and what was killed before and isn't now; True if nothing is."""
    sound = True
    for name, room in now.items():
        old, new = before[name]["mutants"], room["mutants"]
        was, is_ = (sum(each["killed"] for each in mutants) for mutants in (old, new))
        _say(f"{name}: {was} of {len(old)} killed before, {is_} now")
        for earlier, mutant in zip(old, new, strict=True):
            if earlier["killed"] and not mutant["killed"]:
                sound = False
                what = "SURVIVES" if mutant["found"] else "NOT FOUND"
                _say(f"  {what}: {mutant['path']} {mutant['function']} {mutant['operator']}")
                _say(f"    was: {earlier['statement']}\n    is: {mutant['statement']}")
                _say(f"    killed before by {earlier['killer']}")
    return sound


def main() -> int:
    """Runs the rooms one after another, and writes the file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROOMS, default=list(ROOMS), metavar="ROOM")
    parser.add_argument("--json", type=Path, help="where to write; what it has of others stays")
    parser.add_argument("--against", type=Path, help="an earlier result")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Ends the tests and removes the copy.
    before = json.loads(arguments.against.read_text())["rooms"] if arguments.against else None
    file = arguments.json
    rooms = json.loads(file.read_text())["rooms"] if file and file.exists() else {}
    facts = {"commit": _said("git", "describe", "--always", "--dirty"), "machine": _machine()}
    with tempfile.TemporaryDirectory(prefix="andon-mutants-") as scratch:
        tree, now = Tree(Path(scratch)), {}
        for name in (each for each in arguments.only if before is None or each in before):
            now[name] = run_room(name, ROOMS[name], tree, before and before[name]["mutants"])
            rooms[name] = facts | now[name]
            killed = [each["killed"] for each in now[name]["mutants"]]
            _say(f"{name}: {sum(killed)} of {len(killed)} killed")
            if file:
                file.write_text(json.dumps({"seed": _SEED, "rooms": rooms}, indent=1) + "\n")
    return 0 if before is None or compare(before, now) else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _machine() -> Any:
    """As the environment with Andon and PyTorch describes it."""
    script = "import json, sys; sys.path.append('benchmarks'); import machine"
    script += "; print(json.dumps(machine.describe_machine()))"
    return json.loads(_said(".venv/bin/python", "-c", script))


def _said(*command: str) -> str:
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
