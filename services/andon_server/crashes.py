"""Crashes: what is kept of each process of a run that ended early, for people who come later.

`andon run` writes a report for each into the run's folder, `crashes/0001-worker-1.json`; the board
and `andon report` read them. A report may hold what a script printed, so it is its owner's alone.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from andon.host.private_files import make_folder, write_whole

__all__ = ["Crash", "CrashKind", "read_crashes", "write_crash"]

_FOLDER = "crashes"
_MOST = 1000
"""So many are kept: a run that fails more often has told its story."""
_LARGEST = 1 << 20


class CrashKind(enum.Enum):
    """Why a process ended."""

    SCRIPT_ERROR = "script_error"
    OUT_OF_MEMORY = "out_of_memory"
    """The script asked for memory, and did not get it."""
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    KILLED_FOR_MEMORY = "killed_for_memory"
    """The kernel killed it because memory ran out."""
    KILLED = "killed"
    NOTICE = "notice"
    """Its machine was about to go: by SIGTERM, or by a file or a URL that told it."""
    FAULT = "fault"
    """Its own code made it end: an illegal access to memory, a failed assertion in C."""
    NON_FINITE = "non_finite"
    """The line halted because of a value that is no number."""
    WRONG_ARITHMETIC = "wrong_arithmetic"
    HALTED = "halted"
    REFUSED = "refused"
    LINE_LOST = "line_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The report of one process that failed, or had to leave."""

    name: str
    """Which process, such as `worker 1`."""
    slot: int
    kind: CrashKind
    text: str
    """What happened, and the remedy."""
    exit_code: int
    """Negative: the signal that killed it."""
    at_unix_s: float
    ran_s: float
    step: int
    """Steps that the line had committed."""
    starts_again: bool
    memory_bytes: int | None = None
    """What it was last seen to hold; None: not known."""
    available_bytes: int | None = None
    """What the machine had left after it."""
    gpus: str = ""
    """What nvidia-smi says; empty: there is none."""
    output: tuple[str, ...] = ()
    """Its last lines."""
    traceback: tuple[str, ...] = ()
    """The last one among them."""

    def to_json(self) -> dict[str, Any]:
        """Its fields as values of JSON."""
        return asdict(self) | {"kind": self.kind.value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Crash:
        """The inverse of `to_json`.

        Raises:
            TypeError, ValueError, KeyError: these are no fields of a report.
        """
        values = values | {
            "kind": CrashKind(values["kind"]),
            "output": tuple(map(str, values["output"])),
            "traceback": tuple(map(str, values["traceback"])),
        }
        crash = cls(**values)
        for each in fields(cls):
            if each.type == "str" and not isinstance(getattr(crash, each.name), str):
                raise TypeError(f"{each.name} is no text")
        for number in (crash.at_unix_s, crash.ran_s, crash.step, crash.slot, crash.exit_code):
            if not isinstance(number, int | float):
                raise TypeError(f"{number!r} is no number")
        return crash


def write_crash(run_dir: Path, crash: Crash) -> Path | None:
    """Writes a report into a run's folder; returns its path, None if too many are there.

    Raises:
        OSError: it can't be written.
    """
    folder = run_dir / _FOLDER
    make_folder(folder)
    number = len(list(folder.glob("*.json"))) + 1
    if number > _MOST:
        return None
    target = folder / f"{number:04d}-{crash.name.replace(' ', '-')}.json"
    write_whole(target, json.dumps(crash.to_json(), indent=1) + "\n", errors="replace")
    return target


def read_crashes(run_dir: Path) -> list[Crash]:
    """The reports in a run's folder, first to last; one that can't be read is left out."""
    found = []
    for path in sorted((run_dir / _FOLDER).glob("*.json"))[:_MOST]:
        try:
            if path.is_symlink() or path.stat().st_size > _LARGEST:
                continue
            found.append(Crash.from_json(json.loads(path.read_text("utf-8"))))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return found
