"""Where the ranks of a group find their coordinator: an address, or a service of rank 0's.

Theory of operation. All ranks of a group share a store of PyTorch's. By it they learn where rank 0
serves, if nothing says the address of a coordinator. torchrun's agents keep their store while they
start their processes again, so what is found there may be of an earlier start: addresses go by
tickets (`andon_trainer.process.tickets`). Whether all ranks are on one host torchrun itself says;
no other launcher has a store that outlives its processes, so there the ranks ask each other.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from andon_trainer.config import LineConfig
from andon_trainer.errors import AndonError, LineLost
from andon_trainer.launchers import LaunchStore, store_of_launch, whole_number
from andon_trainer.peers.serving import Located, locate_session
from andon_trainer.process.tickets import Answering, ask

__all__ = ["Meeting", "configuration", "located"]

_LINGER_S = 15.0
"""How long a rank 0 that can't serve stays to tell the others why."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The ranks that form a session, and what they share before it."""

    store: Any
    """A `torch.distributed.Store` of these ranks alone."""
    rank: int
    ranks: tuple[int, ...]
    """The session's ranks, as the script numbers them."""
    whole: bool
    """Whether they are all ranks of the script."""
    timeout: timedelta
    prefix: str
    """The beginning of its keys in the store."""

    def put(self, key: str, text: str) -> None:
        """Tells all ranks."""
        self.store.set(f"{self.prefix}/{key}", text)

    def get(self, key: str) -> str:
        """Waits for what a rank tells."""
        name = f"{self.prefix}/{key}"
        self.store.wait([name], self.timeout)
        text: bytes = self.store.get(name)
        return text.decode()


def configuration(env: Mapping[str, str]) -> LineConfig:
    """This process's settings, without what a launcher says of its place: the script knows that."""
    return LineConfig.read({name: env[name] for name in env if name.startswith("ANDON_")})


@contextmanager
def located(config: LineConfig, meeting: Meeting) -> Iterator[Located]:
    """Where the coordinator is; rank 0 starts one if nothing says its address.

    Rank 0 tells the others until the block is left: it attends there, and so do they.

    Raises:
        JoinRefused: several hosts, and nothing says whether to encrypt.
        LineLost: the service could not be started, or rank 0 says nothing.
    """
    answering: list[Answering] = []

    def publish(text: str) -> None:
        answering.append(Answering(meeting.store, meeting.prefix, {"served": text}))

    try:
        try:
            place = locate_session(
                config,
                _launch(config, meeting),
                publish=publish,
                look_up=lambda: _ask(meeting),
            )
        except AndonError:
            for each in answering:  # They must hear why.
                each.await_tickets(len(meeting.ranks) - 1, _LINGER_S)
            raise
        yield place
    finally:
        for each in answering:
            each.close()


def _ask(meeting: Meeting) -> str:
    patience_s = meeting.timeout.total_seconds()
    try:
        return str(ask(meeting.store, meeting.prefix, patience_s)["served"])
    except LineLost:
        raise LineLost(
            f"rank 0 did not make this group for {patience_s:.0f} s, and it serves the run: see "
            "what it does, or start the service by itself (`andon serve`) and set ANDON_ADDRESS",
            address="",
            last_step=0,
        ) from None


def _launch(config: LineConfig, meeting: Meeting) -> LaunchStore:
    """The group as a launch: its rank 0 serves."""
    launcher = store_of_launch(os.environ)
    if config.address:
        one_host, host = True, ""
    elif launcher is not None and os.environ.get("TORCHELASTIC_RUN_ID"):
        one_host = launcher.one_host
        host = launcher.host if meeting.whole else _reached_at(meeting)
    else:
        one_host, host = _hosts(meeting)
    return LaunchStore(
        host=host,
        port=0,
        rank=meeting.rank,
        world_size=len(meeting.ranks),
        hosted_by_agent=True,
        one_host=one_host,
        run_name=launcher.run_name if launcher is not None and meeting.whole else "",
        service_port=whole_number("ANDON_PORT", os.environ.get("ANDON_PORT") or "0"),
    )


def _hosts(meeting: Meeting) -> tuple[bool, str]:
    """Whether all ranks are on one host, and by which name others reach rank 0's."""
    meeting.put(f"host/{meeting.rank}", _own_host())
    if meeting.rank == 0:
        hosts = {meeting.get(f"host/{rank}") for rank in range(len(meeting.ranks))}
        meeting.put("hosts", json.dumps([len(hosts) == 1, _reached_at(meeting)]))
    one_host, host = json.loads(meeting.get("hosts"))
    return bool(one_host), str(host)


def _own_host() -> str:
    """What two processes have in common that reach each other at 127.0.0.1."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _reached_at(meeting: Meeting) -> str:
    """The name of this host for the others: that of the store if it is here, or this host's."""
    store = meeting.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if not host:
        return socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Of UDP: nothing is sent. It tells by which address this host goes there.
            probe.connect((host, port))
            here = str(probe.getsockname()[0])
            return str(host) if here == socket.gethostbyname(host) else here
    except OSError:
        return str(host)
