"""The bench: starts the lines of one scenario, each with its own client, and ends them all."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.checks import Check, Overdue, Verdicts, checks_of
from andon_conformance.judge.client import Launch, Running, line_environment
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.server import GET, PUT, ScriptedServer
from andon_conformance.judge.states import StateSource, give_state, whole_state
from andon_conformance.judge.transcript import EXITED, Transcript

__all__ = ["Bench", "Host", "Scenario", "Waits", "record_origin", "scenario"]

_ORIGIN_STEPS = 2
_LAST_WORDS_S = 0.25
"""How long to keep reading after the process ended: messages may still be on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One story, and the checks that it decides."""

    name: str
    summary: str
    checks: tuple[Check, ...]
    play: Callable[[Bench], Awaitable[None]]


def scenario(name: str, checks: str) -> Callable[[Callable[[Bench], Awaitable[None]]], Scenario]:
    """Decorator: makes a scenario of the function that plays it. Its docstring is the summary.

    `checks` is a table, as for `checks_of`.
    """

    def made(play: Callable[[Bench], Awaitable[None]]) -> Scenario:
        # Python -OO drops docstrings; only the report is poorer then.
        summary = " ".join((play.__doc__ or name).split()).removesuffix(".")
        summary = summary[0].lower() + summary[1:]
        return Scenario(name=name, summary=summary, checks=checks_of(checks), play=play)

    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long a judge waits."""

    patience_s: float = 20.0
    """How long to wait for what must come."""
    quiet_s: float = 0.3
    """The least time to watch for what must not come; always at least two heartbeats."""
    start_s: float = 0.0
    """How long to wait at least for a client's first Join: its process starts first."""


class Host(Protocol):
    """What the benches of one judge share."""

    def new_term(self) -> int:
        """A term greater than any before."""

    async def origin(self) -> StateSource:
        """See `Bench.origin`."""


class Bench:
    """What one scenario uses: its verdicts, its lines and their clients."""

    def __init__(
        self, verdicts: Verdicts, launch: Launch, folder: Path, waits: Waits, host: Host
    ) -> None:
        """Starts clients with `launch`; their output goes into files in `folder`.

        `host` is shared with the benches of the other scenarios.
        """
        self.verdicts = verdicts
        self._waits = waits
        self._host = host
        self._launch = launch
        self._folder = folder
        self._lines: list[tuple[ScriptedLine, asyncio.Task[None]]] = []
        self.outputs: list[Path] = []

    async def start(
        self, setting: LineSetting | None = None, *, away: bool = False
    ) -> ScriptedLine:
        """Starts a line and a client for it; with `away` the coordinator is still unavailable."""
        setting = setting or LineSetting()
        transcript = Transcript(self._waits.patience_s, self._waits.quiet_s)
        servers = [
            ScriptedServer(
                transcript, alone=number > 0, lanes=setting.lanes, checksums=setting.checksums
            )
            for number in range(setting.reducers)
        ]
        # Before it serves: the client's very first try must find it away.
        servers[0].away = away
        for server in servers:
            await server.start()
        number = len(self.outputs)
        output = self._folder / f"client-{number}.log"
        self.outputs.append(output)
        token_file = None
        if setting.token:
            token_file = self._folder / f"token-{number}"
            token_file.write_bytes(setting.token + b"\n")
        run_id = secrets.token_hex(2)
        environment = line_environment(
            servers[0].address, run_id, setting.slot, setting.workers, token_file
        )
        if setting.same_bits:
            environment["ANDON_SAME_BITS"] = "1"
        client = await self._launch(environment, output)
        line = ScriptedLine(
            setting=setting,
            verdicts=self.verdicts,
            transcript=transcript,
            servers=tuple(servers),
            client=client,
            run_id=run_id,
            term=self._host.new_term(),
            start_s=self._waits.start_s,
        )
        self._lines.append((line, asyncio.create_task(_watch(client, transcript))))
        return line

    async def origin(self) -> StateSource:
        """The client's own state, recorded once for all scenarios."""
        return await self._host.origin()

    async def from_origin(self, setting: LineSetting | None = None) -> ScriptedLine:
        """Starts a line whose client receives the recorded state and is then in sync."""
        origin = await self.origin()
        line = await self.start_behind(origin, setting)
        since = line.transfer(1, pb.TRANSFER_ROLE_RECEIVE)
        asked = await line.state_call(GET, since)
        give_state(asked.stream, origin)
        report = await line.reports(1, since)
        if report.failure:
            raise Overdue(f"the client does not accept its own state: {report.failure}")
        return line

    async def start_behind(
        self, origin: StateSource, setting: LineSetting | None = None
    ) -> ScriptedLine:
        """Starts a line at the recorded head, whose client has no state and knows it."""
        line = await self.start(setting)
        await line.joins()
        line.head, line.step, line.cursor = origin.head, origin.step, origin.cursor
        line.accept(pb.JOIN_STATUS_BEHIND)
        return line

    async def started(self, setting: LineSetting | None = None) -> ScriptedLine:
        """Starts a line that the client bootstraps."""
        line = await self.start(setting)
        await line.bootstrap()
        return line

    async def several_from_origin(self, count: int) -> list[ScriptedLine]:
        """As `from_origin`, for several clients at once; if one fails, the others are cancelled."""
        tasks = [asyncio.create_task(self.from_origin()) for _ in range(count)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def end(self) -> None:
        """Ends every client, then its servers."""
        for line, watch in self._lines:
            # The client first: one whose line ends before it would try to join again.
            await line.client.end()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            for server in line.servers:
                await server.stop()


async def record_origin(bench: Bench) -> StateSource:
    """Bootstraps a line, takes steps, and has the client send its state."""
    line = await bench.started()
    await line.steps(_ORIGIN_STEPS)
    # A client in the middle of a round has no state to send.
    await line.asks()
    since = line.transfer(1, pb.TRANSFER_ROLE_SEND)
    first = await line.state_call(PUT, since)
    first.stream.send(reducer_pb2.PutStateResponse())
    state = await whole_state(line, first.stream, first.message.size_bytes)
    first.stream.end()
    await line.reports(1, since)
    assert line.head is not None
    head, step, cursor = line.head, line.step, line.cursor
    current = await line.begin()
    line.average(current)
    ready = await line.ready(current)
    if conversion.optional_key_from_proto(ready.digest.head) != head:
        raise Overdue("StepReady has no digest of the weights that the step started from")
    return StateSource(state, first.message.sha256, head, step, cursor, ready.digest.sha256)


async def _watch(client: Running, transcript: Transcript) -> None:
    code = await client.wait()
    # The exit must stand behind all that the client sent before it.
    await asyncio.sleep(_LAST_WORDS_S)
    transcript.add(EXITED, None, code)
