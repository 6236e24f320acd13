"""Processes that outlive the worker that started them, and hold its output open."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from andon_cli.launching.output import OutputLog
from andon_cli.launching.processes import Child, start_worker

pytestmark = pytest.mark.integration

_LEAVES_A_PROCESS = """
import subprocess, sys
left = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={session}
)
print(left.pid, flush=True)
"""


async def worker(folder: Path, shown: list[str], *, session: bool) -> Child:
    """A worker that ends at once, and leaves a process behind that has its output."""
    return await start_worker(
        "worker 0",
        [sys.executable, "-c", _LEAVES_A_PROCESS.format(session=session)],
        environment=os.environ,
        log=OutputLog(folder / "worker-0.log", shown.append),
        show=shown.append,
    )


async def test_a_process_in_a_session_of_its_own_does_not_keep_a_worker_from_ending(
    tmp_path: Path,
) -> None:
    shown: list[str] = []
    child = await worker(tmp_path, shown, session=True)

    async with asyncio.timeout(60):
        code = await child.wait()
        await child.end(grace_s=1.0)

    left = int(shown[0])
    os.kill(left, signal.SIGKILL)  # It lives: who makes a session wants it to outlive the script.
    assert code == 0
    assert (tmp_path / "worker-0.log").read_text() == f"{left}\n"


async def test_a_process_of_a_workers_group_ends_with_it(tmp_path: Path) -> None:
    shown: list[str] = []
    child = await worker(tmp_path, shown, session=False)

    async with asyncio.timeout(60):
        code = await child.wait()

    assert code == 0
    assert not _lives(int(shown[0]))


def _lives(pid: int) -> bool:
    """Whether a process runs; one that nobody asked yet how it ended does not."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and command.read_bytes() != b""
