"""Target: the line that a command means, if it names none."""

from __future__ import annotations

from dataclasses import dataclass

from andon_cli.errors import LineUnreachable
from andon_cli.runs import newest_service

__all__ = ["Target", "find_target"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a line is served, and which run it is; `run_id` is empty if any run will do."""

    address: str
    run_id: str = ""


def find_target(address: str) -> Target:
    """The line at `address`; without one, the newest run under `runs/`.

    Raises:
        LineUnreachable: there is no run here, or the newest one is not served any more.
    """
    if address:
        return Target(address)
    service = newest_service()
    if service is None:
        raise LineUnreachable(
            "there is no run under runs/ here: go to the directory that the run was started in, "
            "or pass --address HOST:PORT"
        )
    if not service.alive:
        raise LineUnreachable(
            f"the newest run, {service.run_id}, is not served any more; its journal is "
            f"{service.journal}"
        )
    return Target(service.address, service.run_id)
