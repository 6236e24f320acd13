"""The service of one launch, through every process that serves its line.

A service that dies is started again on its journal, and the workers wait for it. Once the line has
taken steps for a while, another process stands by that has loaded everything, and takes the place
of one that dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from andon.host.errors import CommandError
from andon_cli.launching.follower import Follower
from andon_cli.launching.processes import Child, ServiceStart, Standby
from andon_cli.launching.restarts import Restarts
from andon_server.runs import ServiceAddress
from andon_server.settings import ServeConfig

__all__ = ["STANDBY_AFTER_S", "OwnService"]

STANDBY_AFTER_S = 5.0
"""How long a line takes steps before processes are started that only stand by: most short runs
need none."""
_REVIVALS = 4
"""How often in a row a service that died is started again while the line takes no step."""


class OwnService:
    """Starts a service, and starts it again."""

    def __init__(
        self, config: ServeConfig, *, begun_at: int, say: Callable[[str], None], start: ServiceStart
    ) -> None:
        """Starts nothing yet.

        Args:
            config: what is served.
            begun_at: the step of the checkpoint from which the run begins; 0: from none.
            say: shows what a service writes to stderr, line by line.
            start: starts a service, the first one and those that no standby replaces.
        """
        self.child: Child | None = None
        """The process that serves now, or served last."""
        self._config = config
        self._begun_at = begun_at
        self._say = say
        self._start_service = start
        self._revivals = Restarts(_REVIVALS)
        self._step_of_revival = 0
        """The line's step when the service was last started again."""
        self._standby: Standby | None = None
        self._standing_by: asyncio.Task[None] | None = None
        """Starts a standby."""
        self._line: ServiceAddress | None = None
        self._follower: Follower | None = None

    async def start(self, until: asyncio.Event) -> ServiceAddress | None:
        """Starts it, and waits until it says where it serves; None if `until` was set first.

        Raises:
            CommandError: it ended before it served.
        """
        self.child, announced = await self._start_service(self._config, self._say)
        reading = asyncio.create_task(announced.readline())
        stopping = asyncio.create_task(until.wait())
        # The service may hang, for example on a journal that is locked: Ctrl-C must work here, too.
        done, pending = await asyncio.wait({reading, stopping}, return_when="FIRST_COMPLETED")
        for task in pending:
            task.cancel()
        if reading not in done:
            return None
        try:
            self._line = ServiceAddress.from_json(reading.result().decode())
        except ValueError:
            code = await self.child.wait()
            raise CommandError(
                f"the service ended with exit code {code} before it served: its output is above"
            ) from None
        return self._line

    def stand_by(self, follower: Follower) -> None:
        """From now on another process stands by; `follower` follows the line."""
        self._follower = follower
        self._standing_by = asyncio.create_task(self._start_standby(), name="standby")

    def spend_restart(self, code: int) -> float | None:
        """Seconds to wait before a service that ended with `code` starts again; None: it does not.

        A try that follows a step starts a new row: it is another accident, and not the same again.
        """
        assert self._follower is not None
        if self._follower.step > self._step_of_revival:
            self._revivals = Restarts(_REVIVALS)
        self._step_of_revival = self._follower.step
        return self._revivals.spend(code, time.monotonic(), trained=self._follower.trained)

    @property
    def tries(self) -> str:
        """How often it was started again in a row, for people: `1 of 4`."""
        return f"{self._revivals.used} of {self._revivals.most}"

    async def serve_again(self) -> Child:
        """Has the standby serve, or starts a new process.

        Raises:
            OSError: it could not be started.
        """
        standby, self._standby = self._standby, None
        served = None if standby is None else standby.serve()
        self.child, _ = served or await self._start_service(self._again(), self._say)
        assert self._follower is not None
        self.stand_by(self._follower)
        return self.child

    async def end_standby(self, *, grace_s: float) -> None:
        """Ends what only stands by."""
        if self._standing_by is not None:
            self._standing_by.cancel()
            await asyncio.gather(self._standing_by, return_exceptions=True)
        if self._standby is not None:
            await self._standby.end(grace_s=grace_s)

    def _again(self) -> ServeConfig:
        """What a service that takes the first one's place serves."""
        line, follower = self._line, self._follower
        assert line is not None
        assert follower is not None
        # At the same places: the workers and whoever reads the metrics know no others.
        config = replace(
            self._config,
            port=urlsplit(f"//{line.address}").port,
            metrics_port=urlsplit(line.metrics_url).port,
        )
        if follower.step > self._begun_at:
            # The journal goes on from there by now: rolled back again, it would lose these steps.
            config = replace(config, resume_from=None)
        return config

    async def _start_standby(self) -> None:
        # Not before the line has made a step that it had not when it began: then it is known from
        # where a service goes on, and starting workers are not held up.
        assert self._follower is not None
        await self._follower.is_beyond(max(self._begun_at, self._follower.step))
        await asyncio.sleep(STANDBY_AFTER_S)
        with suppress(OSError):  # Without one, the service starts as slowly as the first.
            self._standby = await Standby.start(self._again(), self._say)
