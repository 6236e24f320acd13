"""Judges clients that are forked from a nursery, several scenarios in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from andon_conformance.judge.bench import Waits
from andon_conformance.judge.checks import Verdict
from andon_conformance.judge.client import Launch, Running
from andon_conformance.judge.trial import Judgement
from integration.nursery import Child, nursery

__all__ = ["AT_ONCE", "CLIENTS", "forked", "judged"]

CLIENTS = Path(__file__).parent

AT_ONCE = 12
"""Parallel broken clients, with one scenario each. They mostly wait, so two cores run many."""

_JOBS = 6
"""Parallel scenarios of one correct client, which may import PyTorch."""

_WAITING = ThreadPoolExecutor(4 * AT_ONCE)
"""One thread waits for each client: asyncio's default pool has too few threads."""

_STARTING_S = 30.0
"""For a client's first Join, however little patience a defect needs: many start at once."""

_LONGEST_S = 300.0
"""The clients' processes; none outlives its test."""


class _Forked:
    """A nursery's process, with the interface that the judge expects."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_WAITING, self._child.wait, _LONGEST_S)

    async def end(self) -> None:
        self._child.kill()


def forked(
    imports: Literal["trainer", "service"], script: str, *arguments: str, **more: str
) -> Launch:
    """Starts a script of this folder, with `more` added to its environment."""
    given = {"ANDON_SHARED_DIR": "off", "OMP_NUM_THREADS": "1", **more}

    async def start(environment: Mapping[str, str], output: Path) -> Running:
        command = [str(CLIENTS / script), *arguments]
        child = nursery(imports).start(command, {**environment, **given}, output)
        return _Forked(child)

    return start


async def judged(
    launch: Launch,
    folder: Path,
    only: Sequence[str] = (),
    *,
    patience_s: float = 30.0,
    quiet_s: float = 0.3,
) -> list[Verdict]:
    """The judge's findings about a client."""
    waits = Waits(patience_s=patience_s, quiet_s=quiet_s, start_s=_STARTING_S)
    trial = Judgement(launch, folder, waits=waits, jobs=_JOBS, only=only)
    return [verdict async for played in trial.play() for verdict in played.verdicts]
