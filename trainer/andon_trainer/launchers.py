"""What launched this process: its place among the others, and a store that all of them share.

Launchers say the same under different names. Those of PyTorch (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`)
come first; the others count only where PyTorch's are missing and several processes were started.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from andon.host.tls import is_loopback

__all__ = ["LaunchStore", "place_in_launch", "refuse_to_be_many", "store_of_launch", "whole_number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStore:
    """Where the processes of a launch meet, and this one's place among them.

    It is PyTorch's TCPStore at `MASTER_ADDR` and `MASTER_PORT`, always on rank 0's host.
    """

    host: str
    port: int
    rank: int
    world_size: int
    hosted_by_agent: bool
    """Whether torchrun's agent serves the store; if not, rank 0 does."""
    one_host: bool
    """Whether all processes are on one host."""
    run_name: str = ""
    """The run's id, if whoever launched it named it; empty: they did not."""
    service_port: int = 0
    """The port of the line; 0 is any free one."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables of one launcher."""

    size: str
    rank: str
    local_rank: str


_PYTORCH = _Names("WORLD_SIZE", "RANK", "LOCAL_RANK")
_OTHERS = (
    _Names("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Names("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    _Names("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    # The last: mpirun may use srun, one task on each host, to start what starts the processes. And
    # not SLURM_NTASKS, which a batch script has too, where one process runs.
    _Names("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""Open MPI, MVAPICH, MPICH and Intel MPI, srun."""

_UNNAMED = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{30,}")
"""Job ids that nobody chose: torchrun's default, and those that it draws."""
_RUN_ID_LENGTH = 64


def whole_number(variable: str, text: str) -> int:
    """The number in a variable.

    Raises:
        ValueError: it is none; the message names the variable.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number, not {text!r}: unset it") from None


def place_in_launch(env: Mapping[str, str]) -> dict[str, int]:
    """This process's slot, local rank and number of processes, if a launcher without PyTorch's
    names started several.

    Raises:
        ValueError: a variable is no number.
    """
    names = _launcher(env)
    if names is None or names is _PYTORCH:
        return {}
    found = {
        "launch_slot": whole_number(names.rank, env[names.rank]),
        "launch_size": _size(names, env),
    }
    if local_rank := env.get(names.local_rank):
        found["local_rank"] = whole_number(names.local_rank, local_rank)
    return found


def store_of_launch(env: Mapping[str, str]) -> LaunchStore | None:
    """The store of the launch that this process belongs to; None if it belongs to none.

    Raises:
        ValueError: a variable is no number, or the port is none.
    """
    names = _launcher(env)
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if names is None or not host or not port or (not elastic and _size(names, env) == 1):
        return None
    size = _size(names, env)
    local_size = env.get("LOCAL_WORLD_SIZE", "")
    store_port = whole_number("MASTER_PORT", port)
    if not 0 < store_port < 2**16:
        raise ValueError(
            f"MASTER_PORT is {port}, where no process finds another: set it to a free port of rank "
            "0's host, the same for all (torchrun --master-port), or let torchrun choose one "
            "(--standalone)"
        )
    return LaunchStore(
        host=host,
        port=store_port,
        rank=whole_number(names.rank, env[names.rank]),
        world_size=size,
        hosted_by_agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        one_host=is_loopback(host)
        or (bool(local_size) and whole_number("LOCAL_WORLD_SIZE", local_size) == size),
        run_name=_run_name(elastic),
        service_port=whole_number("ANDON_PORT", env.get("ANDON_PORT") or "0"),
    )


def refuse_to_be_many(env: Mapping[str, str]) -> None:
    """Raises ValueError if a launcher started several processes, each of which would be alone."""
    for names in (_PYTORCH, *_OTHERS):
        size = _size(names, env)
        if size > 1:
            raise ValueError(
                f"{names.size} is {size}, and nothing says where the line is: each of the {size} "
                f"processes would train alone. Start them with `andon run --workers {size}` or "
                "torchrun; or set ANDON_ADDRESS to the line's host:port; or set MASTER_ADDR to "
                "rank 0's host and MASTER_PORT to a free port there, the same for all, and rank 0 "
                f"serves the line. To train alone unset {names.size}"
            )


def _launcher(env: Mapping[str, str]) -> _Names | None:
    """The variables to read; None if no launcher started this process, or one that says too little.

    One launcher's rank is never put beside another's size.
    """
    if any(env.get(name) for name in (_PYTORCH.rank, _PYTORCH.size)):
        return _PYTORCH if env.get(_PYTORCH.rank) and env.get(_PYTORCH.size) else None
    if env.get("TORCHELASTIC_RUN_ID"):
        return None  # `andon run --join`: the line hands out the slots.
    return next((each for each in _OTHERS if env.get(each.rank) and _size(each, env) > 1), None)


def _size(names: _Names, env: Mapping[str, str]) -> int:
    return whole_number(names.size, env.get(names.size) or "1")


def _run_name(job: str) -> str:
    """A run id of a launcher's job id; empty if nobody chose that."""
    if not job or _UNNAMED.fullmatch(job):
        return ""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", job).lstrip("-_")[:_RUN_ID_LENGTH]
    if name == job:
        return name
    # Two ids that differ only in what a run id can't have must not become one run.
    digest = hashlib.sha256(job.encode()).hexdigest()[:8]
    return f"{name[: _RUN_ID_LENGTH - 9]}-{digest}".lstrip("-")
