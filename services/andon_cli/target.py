"""Target: finds the line that a command is about."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.errors import LineUnreachable, UsageError
from andon_server.runs import RUNS, ServiceAddress, service_of, services

__all__ = ["Target", "find_target", "served_here"]

_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a line, and its run; `run_id` is empty if any run is fine."""

    address: str
    run_id: str = ""


def find_target(address: str, run: str = "") -> Target:
    """The line at `address`, or of `run`, or else the only run that is served from this folder.

    Args:
        address: host:port; empty: it is looked up under `runs/`.
        run: an id under `runs/`, or a run's folder; empty: whichever is served.

    Raises:
        UsageError: there is no such run, or several are served and none was named.
        LineUnreachable: there is no run here, or it is not served any more.
    """
    if address:
        return Target(address, run)
    service = _service_of(run) if run else _only_service()
    if not service.alive:
        which = f"run {run}" if run else f"the newest run, {service.run_id},"
        raise LineUnreachable(f"{which} is not served any more; its journal is {service.journal}")
    return Target(service.address, service.run_id)


def served_here(runs: Path = RUNS) -> list[ServiceAddress]:
    """The services under `runs` that are running now, newest first."""
    # Of those at one address only the newest can be served. An older one may seem to be alive: in a
    # new container the next service often gets the same process id.
    newest: dict[str, ServiceAddress] = {}
    for service in services(runs):
        newest.setdefault(service.address, service)
    living = [service for service in newest.values() if service.alive]
    if len(living) < 2:
        return living
    # A killed service leaves its file behind, and its process id may belong to another process by
    # now. With several candidates, ask each address.
    return [service for service in living if _answers(service.address)]


def _service_of(run: str) -> ServiceAddress:
    found = (service_of(folder) for folder in (RUNS / run, Path(run)))
    service = next((each for each in found if each is not None), None)
    if service is None:
        raise UsageError(
            f"there is no run {run} that was ever served: neither an id under {RUNS}/ here nor a "
            "folder; `andon history` lists them"
        )
    return service


def _only_service() -> ServiceAddress:
    known = services()
    if not known:
        raise LineUnreachable(
            "there is no run under runs/ here: change to the folder in which the run was started, "
            "or pass --address HOST:PORT"
        )
    living = served_here()
    if len(living) > 1:
        names = ", ".join(service.run_id for service in living)
        raise UsageError(
            f"{len(living)} runs are served from here ({names}): say which one by --run ID; "
            "`andon history` shows what each does"
        )
    return living[0] if living else known[0]


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    # ValueError: somebody damaged the file that names the address.
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S),
    ):
        return True
    return False
