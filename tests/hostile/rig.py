"""A healthy line of two workers under attack: measures its steps and its memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from andon.v1 import coordinator_pb2 as pb
from chaos.judge import judge
from chaos.rig import ChaosLine, await_until, chaos_line, events_of
from integration.strangers import Stranger, resident_bytes

__all__ = [
    "MIB",
    "PACE_S",
    "SECRET",
    "Attacked",
    "Target",
    "attacked",
    "many_descriptors",
    "secret_flags",
]

MIB = 2**20
SECRET = b"a secret of the tests, longer than sixteen bytes"
TOO_MANY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
"""The status codes with which a service, or gRPC itself, ends excess calls."""
PATIENCE_S = 15.0
PACE_S = 0.001
"""Compute time of a sample: a step takes about ten milliseconds, mostly asleep."""


@dataclass
class Attacked:
    """The result of one attack."""

    attack: str
    seconds: float
    steps: int
    """Steps committed during the attack and applied by both workers."""
    longest_gap_s: float
    """The longest pause between two of them."""
    before_bytes: int
    peak_bytes: int
    told: dict[str, Any] = field(default_factory=dict)
    """The attacker's observations."""

    @property
    def grown_bytes(self) -> int:
        """The growth of the service's memory at its peak."""
        return max(0, self.peak_bytes - self.before_bytes)

    def row(self) -> dict[str, Any]:
        """A row of a table."""
        return asdict(self)


@dataclass
class Target:
    """The line, for an attacker and for a judge."""

    line: ChaosLine
    done: list[Attacked] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The service's address."""
        return self.line.service.address

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self.line.service.process.pid

    @property
    def stranger(self) -> Stranger:
        """A client that knows the run, its layout and its plan."""
        task = self.line.task
        return Stranger(self.address, self.line.service.run_id, task.layout, task.plan)

    def attack(self, name: str, by: Callable[[Target], dict[str, Any]]) -> Attacked:
        """Measures the line while `by` attacks it; afterwards both workers must still train.

        The attack is repeated until the line has committed a step during it, for at most
        `PATIENCE_S`, because the duration of a step depends on the machine.

        Raises:
            AssertionError: a worker was lost, or the line committed no step.
        """
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the peak counts from here
        before, began_at = resident_bytes(self.pid), time.monotonic()
        while True:
            told = by(self)
            ended_at = time.monotonic()
            stepped = any(began_at <= at <= ended_at for at in self._times())
            if stepped or ended_at > began_at + PATIENCE_S:
                break
        self.line.await_progress()
        result = self._judged(name, told, before, (began_at, ended_at))
        self.done.append(result)
        return result

    def rest(self, seconds: float) -> dict[str, Any]:
        """No attack."""
        time.sleep(seconds)
        return {}

    def _judged(
        self, name: str, told: dict[str, Any], before: int, span: tuple[float, float]
    ) -> Attacked:
        began_at, ended_at = span
        times = [at for at in self._times() if at >= began_at]
        gaps = [later - at for at, later in zip([began_at, *times], times, strict=False)]
        return Attacked(
            attack=name,
            seconds=ended_at - began_at,
            steps=sum(at <= ended_at for at in times),
            longest_gap_s=max(gaps, default=0.0),
            before_bytes=before,
            peak_bytes=resident_bytes(self.pid, most=True),
            told=told,
        )

    def _times(self) -> list[float]:
        """The time at which the slower worker applied each step."""
        held: dict[int, float] = {}
        counts: dict[int, int] = {}
        for worker in self.line.workers.values():
            for event in events_of(worker.log):
                if event["event"] == "applied":
                    step = event["step"]
                    held[step] = max(held.get(step, 0.0), event["at"])
                    counts[step] = counts.get(step, 0) + 1
        return [held[step] for step in sorted(held) if counts[step] == len(self.line.workers)]

    def finish(self) -> int:
        """Ends the run and judges all of it; returns the committed steps."""
        self.line.finish()
        verdict = judge(self.line)
        assert set(verdict.attempts.values()) == {0}, (
            "an attack voided a round of the healthy workers"
        )
        return verdict.steps

    def goes_on(self) -> bool:
        """Whether the line runs with both its workers.

        While an attack is still being handled, the service may refuse this call as an excess call;
        then the call is repeated.
        """

        def asked() -> pb.LineStatus | None:
            try:
                return self.line.service.status()
            except grpc.RpcError as refused:
                if refused.code() not in TOO_MANY:
                    raise
                return None

        line = await_until("an answer of the service", asked, patience_s=PATIENCE_S)
        return (line.state, line.live, line.participating) == (pb.LINE_STATE_RUNNING, 2, 2)


def secret_flags(folder: Path) -> tuple[str, str]:
    """A service's flags for the tests' secret, in a file of this folder."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    return "--secret-file", str(secret)


@contextmanager
def attacked(folder: Path, *flags: str) -> Iterator[Target]:
    """A line of two workers that already commits steps; `flags` are its service's."""
    given = ("--liveness", "10", *secret_flags(folder), *flags)
    with chaos_line(folder, 2, *given, pace_s=PACE_S) as line:
        line.await_step(5)
        yield Target(line)


@contextmanager
def many_descriptors(wanted: int) -> Iterator[int]:
    """Raises this process's limit of open files, if the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield max(soft, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
