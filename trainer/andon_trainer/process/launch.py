"""A launch by torchrun or the like: rank 0 starts the service, and the others ask it where that is.

Theory of operation. All processes of a launch reach a store at rank 0's host. Rank 0 starts `andon
serve` there as a child, and answers the others' tickets: the port, the run and its folder. They
reach the service under the host name by which they reached the store. A launch that is started
again goes on with the same run, in the same folder and if possible at the same port: then workers
that live find the service again. Which run that was, the store says if it is still the same one,
else the folder of the run that the launch names. A worker that starts anew loads the newest
checkpoint of that folder, if it sees one.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by a star

from andon.host.manifest import newest_whole
from andon_trainer.config import LineConfig
from andon_trainer.errors import AndonError, JoinRefused, LineLost
from andon_trainer.launchers import LaunchStore
from andon_trainer.process.launched_service import (
    Served,
    in_the_clear,
    over,
    serve,
    service_address,
    to_go_on_with,
)
from andon_trainer.process.tickets import Answering, Store, ask, tell_late

__all__ = ["WorkerLaunch", "open_store"]

_PATIENCE_S = 1800
"""How long the processes of a launch wait for each other; PyTorch's own limit."""
_LINGER_S = 15
"""How long a rank 0 that can't serve stays to tell the others why."""
_END_TIMEOUT_S = 15
"""How long rank 0 waits for the service of a run that is over.

That stays for seconds to tell workers that are late, and takes seconds more to close.
"""

_SPANS_HOSTS = "this launch spans several hosts, and rank 0 serves its line"

_lines = itertools.count(1)
"""Lines of this process: a script may open several in turn, and all processes open the same."""

log = logging.getLogger(__name__)


def open_store(launch: LaunchStore) -> Store:
    """Connects to a launch's store; rank 0 serves it if no agent does.

    Raises:
        RuntimeError: it can't be reached.
    """
    store: Store = TCPStore(
        launch.host,
        launch.port,
        is_master=launch.rank == 0 and not launch.hosted_by_agent,
        timeout=timedelta(seconds=_PATIENCE_S),
        wait_for_workers=False,
        # The script's own `init_process_group` may want to serve a store at the same port.
        multi_tenant=True,
    )
    return store


class WorkerLaunch:
    """One worker's part in its launch. Used by one thread."""

    def __init__(
        self,
        config: LineConfig,
        open_store: Callable[[LaunchStore], Store] = open_store,
        lines: Iterator[int] = _lines,
        *,
        linger_s: float = _LINGER_S,
    ) -> None:
        """Asks nobody yet.

        Args:
            config: the worker's.
            open_store: connects to the launch's store.
            lines: numbers the lines of this process.
            linger_s: how long a rank 0 that can't serve stays to tell the others why.
        """
        self._open_store = open_store
        self._lines = lines
        self._linger_s = linger_s
        self._service: subprocess.Popen[str] | None = None
        self._answering: Answering | None = None
        self._publish: Callable[[], Answering] | None = None
        self._tell_late = _nothing
        self._done = False
        if config.launch is not None:
            # Python calls in reverse what is registered. This comes before what makes the worker
            # leave its line, so that the service hears of that.
            atexit.register(self.end)

    def locate(self, config: LineConfig) -> LineConfig:
        """The configuration with the line's address, run, folder and checkpoint, asked of rank 0.

        Rank 0 starts `andon serve` as a child process, which ends with the run. It answers the
        others once it publishes; they wait for that here. A configuration that has an address, or
        belongs to no launch, is returned as it is.

        Raises:
            JoinRefused: the launch spans several hosts, and nothing says whether to encrypt.
            LineLost: the service could not be started, or rank 0 is gone.
        """
        launch = config.launch
        if launch is None or config.address:
            return config
        number = next(self._lines)
        if number > 1 and launch.run_name:
            launch = replace(launch, run_name=f"{launch.run_name}-{number}")
        try:
            served = self._served(config, launch, f"andon/{number}")
        except RuntimeError as error:  # Of the store; a DistNetworkError, for example.
            raise LineLost(
                f"the store of this launch at {launch.host}:{launch.port} can't be used "
                f"({str(error).splitlines()[0]}): rank 0's host is gone, or this one can't reach "
                "it",
                address=f"{launch.host}:{launch.port}",
                last_step=0,
            ) from error
        run_dir = Path(served.run_dir)
        resume = config.resume or newest_whole(run_dir)
        if resume is not None:
            log.info("run %s goes on from %s", served.run_id, resume)
        return replace(
            config,
            address=service_address(launch, served.port),
            run_id=served.run_id,
            run_dir=run_dir,
            resume=resume,
            launch=None,
        )

    def publish(self) -> None:
        """Lets rank 0 answer the others. It begins a thread: whoever forks does so before."""
        if self._publish is not None:
            self._answering, self._publish = self._publish(), None

    def leaving(self, *, done: bool) -> None:
        """Notes whether this worker leaves because the run is over; else `end` does not wait."""
        self._done = done

    def end(self) -> None:
        """Waits for the service, which ends by itself once the line is complete; else ends it."""
        if self._answering is not None:
            self._answering.close()
        service, self._service = self._service, None
        if service is None:
            return
        try:
            service.wait(timeout=_END_TIMEOUT_S if self._done else 0)
        except subprocess.TimeoutExpired:
            service.terminate()
            service.wait()
        if self._done:  # However its service ended, the run is over.
            with suppress(RuntimeError):  # of the store
                self._tell_late()

    def _served(self, config: LineConfig, launch: LaunchStore, prefix: str) -> Served:
        """Where the line is: rank 0 serves it, and the others ask."""
        if launch.rank:
            if refusal := in_the_clear(config, launch, _SPANS_HOSTS):
                raise refusal
            return _answered(ask(self._open_store(launch), prefix, _PATIENCE_S), launch)
        store = self._open_store(launch)
        try:
            if refusal := in_the_clear(config, launch, _SPANS_HOSTS):
                raise refusal
            before = to_go_on_with(_left_in(store, prefix), config, launch)
            served, self._service = serve(config, launch, before)
        except AndonError as error:
            reason = error.reason if isinstance(error, JoinRefused) else ""
            if reason == "complete":
                tell_late(store, prefix, _refusal(reason, str(error)))
                raise
            answering = Answering(store, prefix, _refusal(reason, str(error)))
            answering.await_tickets(launch.world_size - 1, self._linger_s)
            answering.close()
            raise
        store.set(_key_of_served(prefix), json.dumps(asdict(served)))
        self._publish = lambda: Answering(store, prefix, asdict(served))
        self._tell_late = lambda: tell_late(store, prefix, _refusal("complete", over(served)))
        return served


def _nothing() -> None:
    """What a process that serves nothing has to tell."""


def _refusal(reason: str, text: str) -> dict[str, Any]:
    """Rank 0's answer if it serves no line; `reason` is that of JoinRefused, or empty."""
    return {"refused": text, "reason": reason}


def _answered(answer: dict[str, Any], launch: LaunchStore) -> Served:
    """Rank 0's answer, or its refusal."""
    if "refused" not in answer:
        return Served(**answer)
    if answer["reason"] == "complete":
        raise JoinRefused("complete", answer["refused"])
    text = f"rank 0 of this launch, at {launch.host}, serves no line: {answer['refused']}"
    if answer["reason"]:
        raise JoinRefused(answer["reason"], text)
    raise LineLost(text, address="", last_step=0)


def _key_of_served(prefix: str) -> str:
    return f"{prefix}/served"


def _left_in(store: Store, prefix: str) -> Served | None:
    """What the rank 0 of an earlier start left in the store; None if there was none."""
    key = _key_of_served(prefix)
    return Served(**json.loads(store.get(key))) if store.check([key]) else None
