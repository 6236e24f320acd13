"""The service of a plain script's ranks: rank 0 starts it where nothing says the address of one.

As in a launch of `Line` scripts (`process.launch`), it is a child of rank 0's process. What the
ranks share to find it is up to the caller: two functions are enough, so a store of PyTorch's is not
needed here.
"""

from __future__ import annotations

import atexit
import json
import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from andon.host.run_token import bearer_metadata
from andon.host.tls import TlsError, address_of
from andon.v1 import coordinator_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_trainer.config import LineConfig
from andon_trainer.errors import AndonError, JoinRefused, LineLost
from andon_trainer.exchange.channels import open_channel
from andon_trainer.launchers import LaunchStore
from andon_trainer.process.launched_service import Served, serve, served_before

__all__ = ["Located", "end_services", "locate_session"]

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 15.0
"""How long rank 0 waits, at its end, for the other ranks to leave."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the ranks of a script find their coordinator."""

    address: str
    run_id: str
    run_dir: Path | None


class _Service:
    """The service that this process started."""

    def __init__(self, served: Served, process: subprocess.Popen[str], config: LineConfig) -> None:
        self.served = served
        self._process = process
        self._config = config
        # What makes a rank leave its session is registered later, and so called before.
        atexit.register(self.end)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Ends it once no rank needs it any more."""
        atexit.unregister(self.end)
        if self.lives:
            with suppress(grpc.RpcError, TlsError):
                self._await_ranks()
            self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _await_ranks(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        # `serve` listens on loopback too, whatever else it listens on.
        channel = open_channel(f"127.0.0.1:{self.served.port}", self._config.tls)
        with channel:
            stub = CoordinatorStub(channel)
            while time.monotonic() < deadline:
                answer = stub.GetStatus(
                    coordinator_pb2.GetStatusRequest(),
                    timeout=2.0,
                    metadata=bearer_metadata(self._config.token),
                )
                if not answer.status.session.HasField("key"):
                    return
                time.sleep(_POLL_S)


_services: list[_Service] = []
"""Those that this process started: a script may make its groups anew, and finds the same one."""


def end_services() -> None:
    """Ends what this process serves, once no rank needs it; Python's exit does so, too."""
    while _services:
        _services.pop().end()


def locate_session(
    config: LineConfig,
    launch: LaunchStore,
    *,
    publish: Callable[[str], None],
    look_up: Callable[[], str],
) -> Located:
    """Where the coordinator is: `config.address`, or a service that rank 0 starts.

    Args:
        config: this process's.
        launch: its place among the others, and the host at which they reach rank 0.
        publish: makes a text known to all ranks; called once, at rank 0.
        look_up: waits for that text; called at the other ranks.

    Raises:
        JoinRefused: the ranks are on several hosts, and nothing says whether to encrypt.
        LineLost: the service could not be started.
    """
    if config.address:
        return Located(address=config.address, run_id=config.run_id, run_dir=config.run_dir)
    refusal = _in_the_clear(config, launch)
    if launch.rank:
        if refusal is not None:
            raise refusal
        return _located(_answered(json.loads(look_up()), launch), launch)
    try:
        if refusal is not None:
            raise refusal
        served = _serve(config, launch)
    except AndonError as error:
        reason = error.reason if isinstance(error, JoinRefused) else ""
        publish(json.dumps({"refused": str(error), "reason": reason}))
        raise
    publish(json.dumps({"port": served.port, "run_id": served.run_id, "run_dir": served.run_dir}))
    return _located(served, launch)


def _serve(config: LineConfig, launch: LaunchStore) -> Served:
    living = next((each for each in _services if each.lives), None)
    if living is not None:
        return living.served
    served, process = serve(config, launch, served_before(config, launch))
    _services.append(_Service(served, process, config))
    return served


def _located(served: Served, launch: LaunchStore) -> Located:
    host = "127.0.0.1" if launch.one_host else launch.host
    address = address_of(host, served.port)
    return Located(address=address, run_id=served.run_id, run_dir=Path(served.run_dir))


def _in_the_clear(config: LineConfig, launch: LaunchStore) -> JoinRefused | None:
    if launch.one_host or config.tls is not None or config.insecure:
        return None
    return JoinRefused.in_the_clear(
        f"the ranks are on several hosts, and rank 0 serves their run at {launch.host}"
    )


def _answered(answer: dict[str, Any], launch: LaunchStore) -> Served:
    """What rank 0 serves, or its refusal."""
    if "refused" not in answer:
        return Served(**answer)
    text = f"rank 0, at {launch.host or 'this host'}, serves no run: {answer['refused']}"
    if answer["reason"]:
        raise JoinRefused(answer["reason"], text)
    raise LineLost(text, address="", last_step=0)
