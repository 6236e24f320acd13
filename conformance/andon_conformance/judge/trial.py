"""The judgement: plays all scenarios asked for, several at once, each on a bench of its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.host.errors import UsageError
from andon.protocol.records import make_term
from andon.wire.conversion import WireError
from andon_conformance.judge.bench import Bench, Scenario, Waits, record_origin
from andon_conformance.judge.checks import (
    Outcome,
    Overdue,
    Stopped,
    Verdict,
    Verdicts,
    is_wanted,
)
from andon_conformance.judge.client import Launch
from andon_conformance.judge.scenarios.averaging import averaging
from andon_conformance.judge.scenarios.committing import committing, rejoining
from andon_conformance.judge.scenarios.exchanging import checking, faulting, laning
from andon_conformance.judge.scenarios.graining import graining
from andon_conformance.judge.scenarios.halting import halting
from andon_conformance.judge.scenarios.malforming import malforming
from andon_conformance.judge.scenarios.membership import (
    absent,
    dismissed,
    joining,
    leaving,
    refused,
)
from andon_conformance.judge.scenarios.sharing import reducing, sharing
from andon_conformance.judge.scenarios.stepping import encoding, stepping, strips
from andon_conformance.judge.scenarios.transfers import bootstrapping, receiving
from andon_conformance.judge.scenarios.verifying import verifying
from andon_conformance.judge.states import StateSource

__all__ = ["SCENARIOS", "Judgement", "PlayedScenario", "refuse_strange_names"]

SCENARIOS = (
    joining,
    refused,
    absent,
    bootstrapping,
    receiving,
    stepping,
    encoding,
    strips,
    sharing,
    graining,
    verifying,
    committing,
    averaging,
    malforming,
    reducing,
    checking,
    laning,
    faulting,
    halting,
    rejoining,
    leaving,
    dismissed,
)
"""Every scenario, in the order of the report."""

log = logging.getLogger(__name__)

_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedScenario:
    """A scenario, with its verdicts."""

    scenario: Scenario
    verdicts: tuple[Verdict, ...]
    seconds: float
    said: str
    """The last lines of its clients' output."""

    @property
    def holds(self) -> bool:
        """Whether every check passed or was skipped."""
        return all(
            verdict.outcome in (Outcome.PASSED, Outcome.SKIPPED) for verdict in self.verdicts
        )


class Judgement:
    """Judges one client. The output of its processes goes into a folder."""

    def __init__(
        self, launch: Launch, folder: Path, *, waits: Waits, jobs: int, only: Sequence[str]
    ) -> None:
        """Plays `jobs` scenarios at once: those with a check in `only`, or all if it is empty."""
        self._launch = launch
        self._folder = folder
        self._waits = waits
        self._turn = asyncio.Semaphore(jobs)
        self._only = tuple(only)
        self._term = 0
        self._origin: asyncio.Task[StateSource] | None = None

    async def play(self) -> AsyncIterator[PlayedScenario]:
        """Yields each scenario in the order of the list, as soon as it is over."""
        wanted = [
            scenario
            for scenario in SCENARIOS
            if any(is_wanted(check.name, self._only) for check in scenario.checks)
        ]
        tasks = [asyncio.create_task(self._play(scenario)) for scenario in wanted]
        try:
            for task in tasks:
                yield await task
        finally:
            begun = [*tasks, *([] if self._origin is None else [self._origin])]
            await _end(begun)

    def new_term(self) -> int:
        """A term greater than any before."""
        self._term = make_term(self._term, time.time(), secrets.randbits(32))
        return self._term

    async def origin(self) -> StateSource:
        """The client's own state, recorded once for all scenarios."""
        if self._origin is None:
            self._origin = asyncio.create_task(self._record())
        try:
            # Shielded: a scenario that is cancelled must not take the record away from the others.
            return await asyncio.shield(self._origin)
        except (Overdue, Stopped) as error:
            raise Overdue(f"the client's state could not be recorded: {error}") from error

    async def _record(self) -> StateSource:
        bench = self._bench("origin", Verdicts(()))
        try:
            return await record_origin(bench)
        finally:
            await bench.end()

    async def _play(self, scenario: Scenario) -> PlayedScenario:
        async with self._turn:
            began = time.monotonic()
            verdicts = Verdicts(scenario.checks)
            bench = self._bench(scenario.name, verdicts)
            ended = "the scenario ended earlier"
            try:
                await scenario.play(bench)
            except Overdue as overdue:
                ended = str(overdue)
            except Stopped as stopped:
                ended = str(stopped) or "the client did not get so far"
            except WireError as error:
                ended = f"the client sent an invalid message: {error}"
            except Exception as error:  # a task boundary: the other scenarios go on
                log.exception("scenario_failed scenario=%s", scenario.name)
                ended = f"the judge could not go on: {type(error).__name__}: {error}"
            # Before the verdicts are read: nothing may change any more.
            finally:
                await bench.end()
            found = [
                verdict
                for verdict in verdicts.all(ended)
                if is_wanted(verdict.check.name, self._only)
            ]
            return PlayedScenario(
                scenario=scenario,
                verdicts=tuple(found),
                seconds=time.monotonic() - began,
                said=_tail(bench.outputs),
            )

    def _bench(self, name: str, verdicts: Verdicts) -> Bench:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return Bench(verdicts, self._launch, folder, self._waits, self)


def refuse_strange_names(only: Sequence[str]) -> None:
    """Refuses names that neither a check nor a scenario has.

    Raises:
        UsageError: one of `only` is such a name.
    """
    names = [check.name for scenario in SCENARIOS for check in scenario.checks]
    for name in only:
        if not any(is_wanted(known, (name,)) for known in names):
            scenarios = ", ".join(scenario.name for scenario in SCENARIOS)
            raise UsageError(
                f"--only: there is no check or scenario {name!r}; the scenarios are "
                f"{scenarios}, and docs/conformance-clients.md lists their checks"
            )


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _tail(outputs: Sequence[Path]) -> str:
    lines: list[str] = []
    for output in outputs:
        if output.exists():
            lines += output.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(lines[-_TAIL_LINES:])
