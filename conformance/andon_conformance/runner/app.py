"""The runner: bootstraps a line on the server under test, and makes one check after another on it.

Theory of operation. A server keeps one line, so all checks share it. Before each check every player
joins on new streams, in sync and idle, with no halt (`LineUnderTest.rest`). That makes checks
independent: by the protocol's own rules whatever the last one left behind is void. If the line
can't be brought to rest, the remaining checks are skipped, and one has failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from andon.host.errors import CommandError, LineUnreachable, UsageError
from andon.v1 import coordinator_pb2 as pb
from andon_conformance.config import MAX_WORKERS, RunnerConfig
from andon_conformance.runner import (
    averages,
    faults,
    grains,
    halts,
    joins,
    lanes,
    lifetime,
    nodes,
    rejoins,
    rounds,
    voids,
)
from andon_conformance.runner.checks import (
    NotApplicable,
    Result,
    Scene,
    ServerCheck,
    Violation,
    chosen,
)
from andon_conformance.runner.gradients import GRAIN_PLAN, LAYOUT, PLAN
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, ServerUnderTest
from andon_conformance.runner.server import ServerProcess, ask_status, listens

__all__ = ["CHECKS", "results_of"]

CHECKS: tuple[ServerCheck, ...] = (
    *lifetime.BOOTSTRAP,
    *joins.CHECKS,
    *lanes.CHECKS,
    *averages.CHECKS,
    *faults.CHECKS,
    *nodes.CHECKS,
    *rounds.CHECKS,
    *voids.CHECKS,
    *halts.CHECKS,
    *rejoins.CHECKS,
    *grains.CHECKS,
    *lifetime.ENDING,
)
"""Every check, in the order in which they are made."""

log = logging.getLogger(__name__)

_IN_GRAINS: tuple[Scene, ...] = ("bootstrap", "grains")
"""What is made on a line in grains: the other checks belong to a line without."""
_WAITS = 12
"""A check may take this many times the patience in all: it may wait more than once."""
_STATUS_S = 5.0
"""How long the first GetStatus may take at least, which also waits for the connection."""


async def results_of(config: RunnerConfig) -> AsyncIterator[Result]:
    """Yields the result of each check as soon as it is known.

    Raises:
        CommandError: there is no server at the target, or its line is not a new one.
    """
    wanted = chosen(CHECKS, config.only)
    if config.same_bits:
        wanted = [each for each in wanted if each.scene in _IN_GRAINS]
        if not wanted:
            raise UsageError("--only: none of these checks is of a line in grains (--same-bits)")
    async with _server(config) as server, _line(config, server) as line:
        bootstrapping = [each for each in wanted if each.scene == "bootstrap"]
        # The line is bootstrapped in any case: every other check needs a head.
        await lifetime.bootstrap(line, watch=bool(bootstrapping))
        if not bootstrapping and line.bootstrapping.broken is not None:
            bootstrapping = [each for each in CHECKS if each.scene == "bootstrap"]
        for each in bootstrapping:
            yield await _made(line, each)
        async for result in _after_bootstrap(line, wanted):
            yield result


async def _after_bootstrap(
    line: LineUnderTest, wanted: Sequence[ServerCheck]
) -> AsyncIterator[Result]:
    """The checks of a line that has a head."""
    stuck = ""
    if line.bootstrapping.broken is not None:
        stuck = f"the line could not be bootstrapped: {line.bootstrapping.broken}"
    for scene in ("running", "restarting", "grains", "ending"):
        for each in (check for check in wanted if check.scene == scene):
            if not stuck and not _why_not(line, each):
                try:
                    # After the end nobody may join any more, so nobody can be gathered.
                    if not line.ending.played:
                        await line.rest()
                except Violation as broken:
                    stuck = f"the line can't be brought back to rest: {broken}"
                    came = await _with_end(line, f"before it: {broken.came}")
                    yield _result(each, "fail", broken.expected, came)
                    continue
            yield _skipped(each, stuck) if stuck else await _made(line, each)


async def _made(line: LineUnderTest, each: ServerCheck) -> Result:
    """Makes one check."""
    why_not = _why_not(line, each)
    if why_not:
        return _skipped(each, why_not)
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        # Above each single wait, for a server that always answers just in time.
        async with asyncio.timeout(_WAITS * line.target.patience_s):
            await each.play(line)
    except Violation as broken:
        came = await _with_end(line, broken.came)
        return _result(each, "fail", broken.expected, came, loop.time() - began)
    except NotApplicable as why:
        return _skipped(each, str(why))
    # Not of one wait, which would be a Violation, but of the whole check.
    except TimeoutError:
        came = await _with_end(line, "none in time")
        return _result(each, "fail", "an end of it", came, loop.time() - began)
    except CommandError as error:
        return _result(each, "fail", "the server to start again", str(error), loop.time() - began)
    except Exception as error:  # the boundary of a check: the others are made nevertheless
        log.exception("check_failed name=%s", each.name)
        came = f"what the suite does not understand: {type(error).__name__}: {error}"
        return _result(each, "fail", each.claim, came, loop.time() - began)
    return _result(each, "pass", seconds=loop.time() - began)


async def _with_end(line: LineUnderTest, came: str) -> str:
    """What came, and whether it may have been so little because the server is dead."""
    ended = "" if line.server is None else await line.server.ended()
    return f"{came}; {ended}" if ended else came


def _why_not(line: LineUnderTest, each: ServerCheck) -> str:
    """Why a check can't be made here; empty if it can."""
    if len(line.players) < each.workers:
        return f"it takes {each.workers} workers"
    if each.scene == "grains" and not line.target.plan.grain:
        return "it takes a line in grains: --same-bits"
    if each.scene == "restarting" and line.server is None:
        return "it takes --start, so that the server can be killed"
    return ""


def _skipped(each: ServerCheck, why: str) -> Result:
    return Result(name=each.name, rule=each.rule, claim=each.claim, outcome="skipped", came=why)


def _result(
    each: ServerCheck, outcome: str, expected: str = "", came: str = "", seconds: float = 0.0
) -> Result:
    assert outcome in ("pass", "fail")
    return Result(
        name=each.name,
        rule=each.rule,
        claim=each.claim,
        outcome="pass" if outcome == "pass" else "fail",
        expected=expected,
        came=came,
        seconds=round(seconds, 3),
    )


@asynccontextmanager
async def _server(config: RunnerConfig) -> AsyncIterator[ServerProcess | None]:
    """The server's process, if the suite is to start it."""
    if not config.start:
        yield None
        return
    if await ask_status(config.reach, timeout_s=1.0) is not None:
        raise UsageError(
            f"--start: something serves at {config.reach.address} already: end it first"
        )
    server = ServerProcess(config.start, config.reach, config.log or Path(os.devnull))
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _line(config: RunnerConfig, server: ServerProcess | None) -> AsyncIterator[LineUnderTest]:
    """A new line, with players that have not joined yet."""
    status = await ask_status(config.reach, timeout_s=max(config.patience_s, _STATUS_S))
    if status is None:
        there = await listens(config.reach.address)
        fact = "a process takes connections there" if there else "no process listens there"
        raise LineUnreachable(
            f"no coordinator of andon.v1 answers GetStatus at {config.reach.address} ({fact}): "
            "start one, or pass --start COMMAND"
        )
    workers = config.workers or status.expect_workers
    _check_new(config, status, workers)
    target = ServerUnderTest(
        reach=config.reach,
        run_id=config.run_id or status.run_id,
        layout=LAYOUT,
        plan=GRAIN_PLAN if config.same_bits else PLAN,
        patience_s=config.patience_s,
        quiet_s=config.quiet_s,
    )
    players = [Player(target, slot) for slot in range(workers)]
    line = LineUnderTest(target, players, server=server)
    try:
        yield line
    finally:
        for player in players:
            await player.close()


def _check_new(config: RunnerConfig, status: pb.LineStatus, workers: int) -> None:
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(
            f"the line at {config.reach.address} waits for {workers} workers, and the suite plays "
            f"1 to {MAX_WORKERS}: start it with fewer"
        )
    if status.expect_workers and workers != status.expect_workers:
        raise UsageError(
            f"--workers {workers}, but the line at {config.reach.address} waits for "
            f"{status.expect_workers}: say the same to both"
        )
    if status.workers or status.step or status.state != pb.LINE_STATE_FORMING:
        raise UsageError(
            f"the line at {config.reach.address} is not a new one: start a server with an empty "
            "journal"
        )
