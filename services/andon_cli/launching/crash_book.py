"""Crash book: looks at a worker while it runs and after its early end, and keeps a report of it.

What is known of a process is gone with it: so its memory is looked at while it runs. The rest (its
last output, the machine's memory, the GPUs, the line's halt) is looked up at once after its end.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from andon.host.memory import available_bytes, resident_bytes
from andon.protocol.halts import HaltReason
from andon.protocol.run_settings import RunPlan
from andon_cli.launching.endings import (
    Ending,
    explained,
    kind_of,
    oom_kills_in,
    traceback_in,
)
from andon_cli.launching.processes import Child
from andon_coordinator.transport.damage import JournalError
from andon_server.board.output import last_lines
from andon_server.book import RunBook
from andon_server.crashes import Crash, write_crash
from andon_server.runs import JOURNAL

__all__ = ["CrashBook", "WorkerEnd"]

_LOOK_EVERY_S = 2.0
_SMI_S = 5.0
"""How long nvidia-smi may take: with a broken driver it hangs."""
_SMI = ("nvidia-smi", "--format=csv", "--query-gpu=index,name,memory.used,memory.total,"
        "temperature.gpu,utilization.gpu,clocks_throttle_reasons.active")  # fmt: skip
_VMSTAT = Path("/proc/vmstat")


@dataclass(slots=True)
class _Seen:
    """What was seen of the process in a slot."""

    pid: int
    began: float = field(default_factory=time.monotonic)
    oom_kills: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """A worker's process that ended early."""

    child: Child
    slot: int
    code: int
    """Its exit code; negative: the signal that killed it."""
    step: int
    """Steps that the line had committed."""
    starts_again: bool
    notice: str
    """Why its machine was about to go, as it told the line; empty: it told nothing."""


class CrashBook:
    """Keeps reports of workers that failed, or had to leave."""

    def __init__(
        self,
        run_dir: Path,
        workers: Sequence[Child],
        say: Callable[[str], None],
        *,
        has_journal: bool,
    ) -> None:
        """Watches the present process of each slot in `workers`.

        Args:
            run_dir: the run's folder on this machine.
            workers: the present process of each slot; the launch changes it.
            say: tells people why one failed.
            has_journal: whether the line is served from this folder.
        """
        self._say = say
        self._reports: list[asyncio.Task[None]] = []
        self._run_dir = run_dir
        self._workers = workers
        self._has_journal = has_journal
        self._seen: dict[int, _Seen] = {}
        self._task = asyncio.create_task(self._watch(), name="memory of workers")

    async def close(self) -> None:
        """Stops watching, once all reports are kept."""
        await asyncio.gather(*self._reports)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def keep(self, end: WorkerEnd) -> None:
        """Begins to keep a report of a worker's end.

        Nobody waits for it: nvidia-smi may take seconds. A report that can't be written is told all
        the same.
        """
        name, seen = end.child.name, self._of(end.slot, end.child)

        async def tell() -> None:
            crash = await asyncio.to_thread(self._report, end, seen)
            self._say(f"{name}: {crash.text}")

        self._reports.append(asyncio.create_task(tell(), name=f"report of {name}"))

    def _report(self, end: WorkerEnd, seen: _Seen) -> Crash:
        output = last_lines(self._run_dir, end.slot) or []
        kills = _oom_kills()
        plan, workers, halt = self._of_journal()
        ending = Ending(
            code=end.code,
            output=output,
            killed_for_memory=(
                kills is not None and seen.oom_kills is not None and kills > seen.oom_kills
            ),
            halt=halt,
            notice=end.notice,
        )
        kind = kind_of(ending)
        crash = Crash(
            name=end.child.name,
            slot=end.slot,
            kind=kind,
            text=explained(kind, ending, plan, workers or len(self._workers)),
            exit_code=end.code,
            at_unix_s=time.time(),
            ran_s=time.monotonic() - seen.began,
            step=end.step,
            starts_again=end.starts_again,
            memory_bytes=seen.memory_bytes,
            available_bytes=available_bytes(),
            gpus=_gpus(),
            output=tuple(output),
            traceback=traceback_in(output),
        )
        with suppress(OSError):
            write_crash(self._run_dir, crash)
        return crash

    def _of_journal(self) -> tuple[RunPlan | None, int, HaltReason | None]:
        """The run's plan, its workers, and the reason of a halt that nobody has answered."""
        if not self._has_journal:
            return None, 0, None
        try:
            book = RunBook.read(self._run_dir / JOURNAL)
        except JournalError:
            return None, 0, None
        halts = book.unanswered
        return book.run.plan, book.most_workers, halts[-1].evidence.reason if halts else None

    async def _watch(self) -> None:
        while True:
            for slot, child in enumerate(self._workers):
                if not child.ended:
                    seen = self._of(slot, child)
                    seen.memory_bytes = resident_bytes(seen.pid) or seen.memory_bytes
            await asyncio.sleep(_LOOK_EVERY_S)

    def _of(self, slot: int, child: Child) -> _Seen:
        seen = self._seen.get(slot)
        if seen is None or seen.pid != child.process.pid:
            seen = self._seen[slot] = _Seen(child.process.pid, oom_kills=_oom_kills())
        return seen


def _oom_kills() -> int | None:
    try:
        return oom_kills_in(_VMSTAT.read_text())
    except OSError:
        return None


def _gpus() -> str:
    """What nvidia-smi says of the GPUs; empty: it is not there, or has nothing to say."""
    if shutil.which(_SMI[0]) is None:
        return ""
    try:
        told = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (told.stdout or told.stderr).strip()
