"""The coordinator's core alone, with simulated workers: no sockets, no journal, no messages.

`SimulatedCrowd` drives the real `LineCore` as a service with so many workers would: every worker
asks for work, reports that it is ready and hears of the commit, and sends a heartbeat meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.schedules import Schedule
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, LineSettings, PacingSettings
from andon_coordinator.core.transfers import TransferRole

__all__ = ["LAYOUT", "SimulatedCrowd", "plan_for"]

LAYOUT = Layout((Block(BlockKind.OTHER, "block", (Component("weight", (64,)),)),))
"""A tiny model: what is measured is the crowd."""

_TERM = 1 << 32


def plan_for(workers: int) -> RunPlan:
    """Two positions a worker and step, in an epoch that no measurement reaches the end of."""
    return RunPlan(global_batch=2 * workers, dataset_size=2 * workers * 1_000_000)


@dataclass(slots=True)
class _Simulated:
    head: Key | None = None
    assignment: do.Assignment | None = None


class SimulatedCrowd:
    """A line of `workers` in sync, whose steps take no time but the core's."""

    def __init__(
        self,
        workers: int,
        *,
        schedule: str = "every-step",
        straggler_timeout_s: float | None = None,
        spare: int = 0,
    ) -> None:
        """Joins all workers, and bootstraps.

        Args:
            workers: how many.
            schedule: `every-step`, `balanced` or `cadence`.
            straggler_timeout_s: of the line.
            spare: slots for newcomers.
        """
        self.workers = [_Simulated() for _ in range(workers)]
        self.now = 0.0
        self.events = 0
        self._saves: list[do.SaveRecord] = []
        cadence = Schedule.CADENCE if schedule == "cadence" else Schedule.EVERY_STEP
        self._plan = plan_for(workers)
        settings = LineSettings(
            run_id="crowd",
            expect_workers=workers,
            min_workers=workers,
            max_workers=workers + spare,
            straggler_timeout_s=straggler_timeout_s,
            policy=Policy(digest_every=0),
            pacing=PacingSettings(schedule=cadence, balanced=schedule == "balanced"),
        )
        self.line = LineCore(settings, term=_TERM, history=History(), random_bits=lambda: 1)
        for worker in range(workers):
            self.send(on.WorkerJoined(worker, self._request(worker)))
        self._save()
        self._bring_state()

    def step(self) -> None:
        """One whole step, with a heartbeat of each worker and a tick in it."""
        for stream, worker in enumerate(self.workers):
            self.send(on.WorkRequested(stream, worker.head))
        for stream in range(len(self.workers)):
            self.send(on.HeartbeatArrived(stream, 0))
        self.send(on.TimePassed())
        for stream, worker in enumerate(self.workers):
            work = worker.assignment
            assert work is not None
            samples = sum(map(len, work.positions))
            self.send(
                on.WorkerReady(
                    stream,
                    on.Ready(
                        key=work.key,
                        loss_sum=float(samples),
                        weight=float(samples),
                        samples=samples,
                        total_weight=float(len(work.batch)),
                        world_size=len(work.roster),
                        timings=on.StepTimings(busy_s=0.01, computed=samples, wait_s=0.001),
                    ),
                )
            )
        self._save()

    def join_newcomer(self) -> None:
        """One more worker joins, in a slot of the line's choice."""
        stream = len(self.workers)
        self.workers.append(_Simulated())
        self.send(on.WorkerJoined(stream, replace(self._request(stream), launch_slot=None)))

    def mean(self, *, last: bool = False) -> None:
        """Every worker gives a number to average; `last`: with the digest of its last weights."""
        for stream, worker in enumerate(self.workers):
            self.send(
                on.ScalarAllReduceArrived(
                    stream,
                    worker.head,
                    0,
                    1.0,
                    1.0,
                    digest=b"same" if last else b"",
                    digest_head=worker.head if last else None,
                )
            )

    def send(self, event: on.Event) -> list[do.Effect]:
        """Gives the core one event, and the workers what follows."""
        self.now += 1e-5
        self.events += 1
        effects = self.line.receive(event, self.now, wall=1.0)
        for effect in effects:
            match effect:
                case do.SaveRecord():
                    self._saves.append(effect)
                case do.Assign(stream, assignment):
                    self.workers[stream].assignment = assignment
                case do.SendCommitted(stream, record):
                    self.workers[stream].head = record.key
                case _:
                    pass
        return effects

    def _save(self) -> None:
        while self._saves:
            self.send(on.RecordSaved(self._saves.pop(0).record.key))

    def _bring_state(self) -> None:
        """Brings every worker the first one's weights, by as many transfers as that takes."""
        waiting: list[do.Effect] = []
        for stream, worker in enumerate(self.workers):
            if worker.head is not None:
                waiting += self.send(on.WorkRequested(stream, worker.head))
        while waiting:
            effect = waiting.pop(0)
            if not isinstance(effect, do.SendTransfer):
                continue
            if effect.role is TransferRole.SEND:
                continue
            joiner = self.workers[effect.stream]
            joiner.head = effect.head
            waiting += self.send(on.StateReported(effect.stream, effect.transfer_id, effect.head))
            waiting += self.send(on.WorkRequested(effect.stream, effect.head))

    def _request(self, worker: int) -> on.JoinRequest:
        return on.JoinRequest(
            run_id="crowd",
            incarnation=worker + 1,
            layout=LAYOUT,
            plan=self._plan,
            launch_slot=worker,
            node_id=f"host-{worker // 8}",
        )
