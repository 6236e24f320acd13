"""A line whose services and workers are on simulated hosts, and a Gloo group beside it.

Each host of `hosts_network` has one worker, or several ranks of a process group. Workers alternate
between an Andon exchange and `all_reduce` of the same numbers over Gloo, in the same namespaces:
ours, theirs, ours, theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts_network import LINK, Network
from service import SECRET, announced

from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon_cli.commands.authority import Authority

__all__ = ["GROUPS", "HOSTS", "PATHS", "WARM_UP", "Case", "Runs", "WorkerSpec", "exchange_between"]

HOSTS = 4
WARM_UP = 2
"""Pairs before the first one that counts."""
PATHS = ("reducers", "star", "ring", "shared-memory", "c10d", "gloo")
"""A reducer on each host; one on the first host; a ring; all workers on the first host; a process
group of Andon, whose ranks exchange with each other; one of Gloo, for how far equals differ."""
GROUPS = ("c10d", "gloo")
"""Those of process groups."""
_PATIENCE_S = 600
_LINE_PORT, _REDUCER_PORT, _STORE_PORT = 7070, 7071, 7072


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is exchanged, and how."""

    path: str
    """One of PATHS."""
    encoding: str
    ranks_per_host: int = 1
    """Ranks of a process group on each host, which share memory; a line has one worker a host."""
    mib: int
    """Of float32, whatever the encoding."""
    transport: str = "tcp"
    """`tcp` for the TCP lane, or `grpc`."""
    tls: bool = False
    connections: str = "1"
    """Of a TCP lane each way, or `auto`."""
    gloo: bool = True
    """Whether Gloo exchanges the same numbers in turns."""
    warm_up: int = WARM_UP
    """Exchanges of each side before the first one that counts."""

    @property
    def is_group(self) -> bool:
        """Whether ours is a call in a process group, and no step."""
        return self.path in GROUPS

    def workers(self, hosts: int) -> int:
        """How many there are on so many hosts."""
        return hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Where a worker is."""
        return 0 if self.path == "shared-memory" else rank // self.ranks_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Case):
    """The parameters of one worker process."""

    pairs: int
    address: str
    run_id: str
    rank: int
    hosts: int
    store: str
    """The rendezvous address of the Gloo group, as host:port."""
    shared_dir: str
    """The folder for shared memory; no other host has it."""
    service: int
    """The process of this host's service, whose processor time this worker reports; 0: none."""
    certs: str
    """The folder of this host's certificates; empty: nothing is encrypted."""


Runs = list[dict[str, float]]
"""One worker's exchanges: what `hosts_worker._measured` says of each."""


@dataclass(slots=True)
class _Host:
    """What one host has of its own."""

    shared_dir: Path
    certs: Path | None
    service: int = 0


def exchange_between(hosts: Network, case: Case, pairs: int) -> dict[str, list[Runs]]:
    """Runs the services and workers of one case; returns each worker's exchanges, by side.

    Raises:
        RuntimeError: a service or a worker failed.
    """
    with (
        TemporaryDirectory() as folder,
        TemporaryDirectory(dir=DEFAULT_SHARED_DIR) as shared,
        ExitStack() as stack,
    ):
        all_hosts = _furnished(hosts, case, Path(folder), Path(shared))
        run_id = stack.enter_context(_serving(hosts, case, Path(folder), all_hosts))
        specs = []
        for rank in range(case.workers(hosts.count)):
            host = all_hosts[case.host_of(rank)]
            spec = WorkerSpec(
                **asdict(case),
                pairs=pairs,
                address=f"{hosts.address(0)}:{_LINE_PORT}",
                run_id=run_id,
                rank=rank,
                hosts=hosts.count,
                store=f"{hosts.address(0)}:{_STORE_PORT}",
                shared_dir=str(host.shared_dir),
                # A host's service is reported once, by the first worker of that host.
                service=host.service if case.host_of(rank) == rank else 0,
                certs=str(host.certs or ""),
            )
            specs.append(spec)
        processes = [stack.enter_context(_worker(hosts, case, spec)) for spec in specs]
        seen = [_output(process) for process in processes]
    return {side: [each[side] for each in seen] for side in ("ours", "gloo")}


def _furnished(hosts: Network, case: Case, folder: Path, shared: Path) -> list[_Host]:
    """Folders and certificates of each host."""
    now = datetime.now(UTC)
    authority = Authority.in_folder(folder / "ca", now)[0] if case.tls else None
    furnished = []
    for number in range(hosts.count):
        shared_dir = shared / f"host-{number}"
        shared_dir.mkdir()
        certs = None
        if authority is not None:
            certs = folder / f"certs-{number}"
            authority.certify(hosts.address(number), certs, now=now, days=1)
        furnished.append(_Host(shared_dir, certs))
    return furnished


@contextmanager
def _serving(hosts: Network, case: Case, folder: Path, all_hosts: Sequence[_Host]) -> Iterator[str]:
    """Serves a line on the first host, and reducers on the others; returns the run's id."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    with ExitStack() as stack:

        def start(number: int, *flags: str) -> dict[str, Any]:
            host = all_hosts[number]
            common = ["--bind", "0.0.0.0", "--metrics-port", "0", "--announce"]
            common += ["--advertise", hosts.address(number), "--secret-file", str(secret)]
            common += ["--tls", str(host.certs)] if host.certs else ["--insecure"]
            errors = folder / f"service-{number}.err"
            environment = {**os.environ, "ANDON_SHARED_DIR": str(host.shared_dir)}
            command = [*hosts.inside(number), sys.executable, "-m", "andon_cli", "serve"]
            running = announced([*command, *common, *flags], errors, environment)
            host.service, told = stack.enter_context(running)
            return told

        # A ring's line has one, which averages nothing of a step.
        reducers = hosts.count if case.path == "reducers" else 1
        line = ["--workers", str(case.workers(hosts.count)), "--reducers", str(reducers)]
        line += ["--encoding", case.encoding, "--run-dir", str(folder / "run")]
        line += ["--connections", case.connections]
        line += ["--topology", "ring"] if case.path == "ring" else []
        told = start(0, "--port", str(_LINE_PORT), *line)
        for number in range(1, reducers):
            own = ["--role", "reducer", "--port", str(_REDUCER_PORT)]
            own += ["--connections", case.connections]
            start(number, *own, "--coordinator", f"{hosts.address(0)}:{_LINE_PORT}")
        yield str(told["run_id"])


@contextmanager
def _worker(hosts: Network, case: Case, spec: WorkerSpec) -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("hosts_worker.py"))
    inside = hosts.inside(case.host_of(spec.rank))
    process = subprocess.Popen(
        [*inside, sys.executable, script, json.dumps(asdict(spec))],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            **(_of_process_group(spec) if case.is_group else {}),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warnings that addresses have no names
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _of_process_group(spec: WorkerSpec) -> dict[str, str]:
    """Variables by which a process group finds its session, and that it checks every sum."""
    trust = {"ANDON_TLS_DIR": spec.certs} if spec.certs else {"ANDON_INSECURE": "1"}
    return {
        "ANDON_ADDRESS": spec.address,
        "ANDON_SHARED_DIR": spec.shared_dir,
        "ANDON_GATE": "all",
        **trust,
    }


def _output(process: subprocess.Popen[str]) -> dict[str, Runs]:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"a worker exited with code {process.returncode}: see its output")
    seen: dict[str, Runs] = json.loads(output)
    return seen
