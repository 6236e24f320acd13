"""A bench for a host of several processes: a thread for each, and memory for their connections."""

from __future__ import annotations

import copy
import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import torch
from torch import nn

from andon.protocol.records import Key
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.core.events import Assigned
from andon_trainer.data.feed import Shard, ShardFeeder
from andon_trainer.errors import HostLost
from andon_trainer.hosts.averaging import FollowerAverager, LeaderAverager
from andon_trainer.hosts.grain_averaging import FollowerGrains, LeaderGrains
from andon_trainer.hosts.member import FollowerMember, LeaderMember
from andon_trainer.hosts.steps import HostGrains, HostProcesses
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import plan_model
from andon_trainer.place.membership import Membership
from andon_trainer.schedules.averaged_steps import AveragedSteps
from andon_trainer.schedules.grain_steps import GrainStepper
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.stepper import Stepper
from andon_trainer.script.scaling import ScalerGate
from andon_trainer.state.replica import Replica
from unit.andon_trainer.step_bench import BATCH, ScriptedSeat, ranges

__all__ = ["HostBench", "LeaderSeat", "Process", "ThreadGroup", "thread_groups"]

_SAMPLES = 4 * BATCH
_PATIENCE_S = 20.0


class _Shared:
    """What the processes of a host have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: dict[tuple[int, int], queue.Queue[Any]] = {
            (source, target): queue.Queue() for source in range(size) for target in range(size)
        }
        self.told: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size)]
        self.sent: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size)]
        self.sums: dict[int, list[torch.Tensor]] = {}
        self.summed = threading.Condition()
        self.closed = False


class _ThreadSum:
    def __init__(self, group: ThreadGroup, number: int, flat: torch.Tensor) -> None:
        self._group = group
        self._number = number
        self._flat = flat

    def is_completed(self) -> bool:
        shared = self._group.shared
        return shared.closed or len(shared.sums[self._number]) == self._group.size

    def wait(self) -> None:
        shared = self._group.shared
        with shared.summed:
            done = shared.summed.wait_for(self.is_completed, _PATIENCE_S)
        if shared.closed or not done:
            raise HostLost("another one is gone")
        first, *others = shared.sums[self._number]
        # Term by term, as Gloo does: torch's own sum begins with +0.0.
        self._flat.copy_(reduce(torch.add, others, first))


class _ThreadTransfer:
    def __init__(self, take: Callable[[], object] = lambda: None) -> None:
        self._take = take

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._take()


class ThreadGroup:
    """A `HostGroup` of threads."""

    of_devices = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.size
        self.shared = shared
        self._sums = 0

    def meet(self, item: Any) -> list[Any]:
        for target in range(self.size):
            self.shared.brought[self.rank, target].put(pickle.dumps(item))
        return [self._take(self.shared.brought[each, self.rank]) for each in range(self.size)]

    def tell(self, item: Any) -> None:
        assert self.rank == 0
        self._refuse_closed()
        for told in self.shared.told[1:]:
            told.put(pickle.dumps(item))

    def hear(self) -> Any:
        return self._take(self.shared.told[self.rank])

    def start_sum(self, flat: torch.Tensor) -> _ThreadSum:
        self._refuse_closed()
        number, self._sums = self._sums, self._sums + 1
        with self.shared.summed:
            self.shared.sums.setdefault(number, []).append(flat.clone())
            self.shared.summed.notify_all()
        return _ThreadSum(self, number, flat)

    def broadcast(self, flat: torch.Tensor) -> None:
        if self.rank == 0:
            self.tell(flat.clone())
        else:
            flat.copy_(self.hear())

    def start_send(self, flat: torch.Tensor) -> _ThreadTransfer:
        self._refuse_closed()
        self.shared.sent[self.rank].put(pickle.dumps(flat))
        return _ThreadTransfer()

    def start_receive(self, rank: int, flat: torch.Tensor) -> _ThreadTransfer:
        # Transfers are waited for in the order in which they were begun.
        return _ThreadTransfer(lambda: flat.copy_(self._take(self.shared.sent[rank])))

    def close(self) -> None:
        self.shared.closed = True
        with self.shared.summed:
            self.shared.summed.notify_all()

    def _take(self, messages: queue.Queue[Any]) -> Any:
        while True:
            try:
                return pickle.loads(messages.get(timeout=0.01))
            except queue.Empty:
                self._refuse_closed()

    def _refuse_closed(self) -> None:
        if self.shared.closed:
            raise HostLost("another one is gone")


def thread_groups(size: int) -> list[ThreadGroup]:
    """The groups of a host's processes."""
    shared = _Shared(size)
    return [ThreadGroup(rank, shared) for rank in range(size)]


class LeaderSeat(ScriptedSeat):
    """The leader's place on a line whose rounds end as the test says."""

    behind = False
    leaves = False

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__(blocks)
        self.reported_losses: list[str] = []

    def refuse_loss(self, value: str) -> None:
        self.reported_losses.append(value)
        super().refuse_loss(value)

    def left_behind(self) -> bool:
        return self.behind


class Process:
    """One process of the host: its model, and its steps."""

    def __init__(
        self,
        group: ThreadGroup,
        model: nn.Module,
        seat: LeaderSeat | None,
        micro: int | None,
        scale: LossScale | None,
        grain: int,
    ) -> None:
        self.group = group
        self.model = model
        plan = plan_model([model])
        device, replica = torch.device("cpu"), Replica([model])
        self.member: LeaderMember | FollowerMember
        if seat is None:
            self.member = FollowerMember(group, replica)
        else:
            self.member = LeaderMember(group, seat, replica)
        member = self.member
        parts = LoopParts(
            member=member,
            accumulated=AccumulatedGradients(plan),
            feeder=ShardFeeder(
                _SAMPLES,
                BATCH,
                seed=0,
                micro_batch_size=micro,
                step=lambda: member.position.step + 1,
                grain=grain,
            ),
            replica=replica,
            device=device,
            micro_batch_size=micro,
            scaling=None if scale is None else ScalerGate(scale),
            grain=grain,
        )
        line = None if seat is None else cast(Membership, seat)
        models = TrainedModels(plan=plan, device=device, modules=[model], scaling=scale)
        self.processes: HostProcesses | None = None
        self.stepper: AveragedSteps
        if grain:
            grains = (
                FollowerGrains(group, models) if line is None else LeaderGrains(group, line, models)
            )
            dealt = HostGrains(group, parts, grains)
            self.stepper = GrainStepper(parts, grains, 0, lambda: None, dealt)
        else:
            averager = (
                FollowerAverager(group, member, models)
                if line is None
                else LeaderAverager(group, line, models)
            )
            self.processes = processes = HostProcesses(group, parts, averager)
            self.stepper = Stepper(parts, averager, processes)
        self.computed: list[list[int]] = []
        """Of each loop body, the samples that it got."""
        self.gradients: list[list[torch.Tensor | None]] = []
        """`p.grad` after each loop body."""
        self.spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda _body, loss: loss
        self.weight: float | None = None


def _scaled_by(scale: float) -> LossScale:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return LossScale(scaler, torch.device("cpu"), max_overflows=16)


class HostBench:
    """A host, over scripted rounds; the loop body of a script."""

    def __init__(
        self,
        size: int = 2,
        *,
        micro: int | None = None,
        model: nn.Module | None = None,
        loss_scale: float | None = None,
        warm: bool = True,
        grain: int = 0,
    ) -> None:
        if warm:
            # The host's processes are threads here. If the first tanh of all is computed by two of
            # them at once, MKL 2024.2 may give one a kernel of less accuracy: see
            # benchmarks/first_backward.py.
            torch.zeros(1).tanh()
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        self.inputs = torch.randn(_SAMPLES, 3, generator=torch.Generator().manual_seed(1))
        blocks = [block.elements for block in plan_model([self.model]).layout.blocks]
        self.seat = LeaderSeat(blocks)
        self.processes = [
            Process(
                group,
                copy.deepcopy(self.model),
                None if group.rank else self.seat,
                micro,
                None if loss_scale is None else _scaled_by(loss_scale),
                grain,
            )
            for group in thread_groups(size)
        ]
        self._rounds = 0

    def assign(self, *positions: tuple[int, int], end: str = "commit", **other: Any) -> Assigned:
        """Adds a round of the host; `end` says how it ends."""
        self._rounds += 1
        assigned = replace(
            self.seat._work(ranges(*positions)),
            key=Key(1, 100 + self._rounds),
            **{"epoch": 0, "roster": (0, 1), **other},
        )
        self.seat.assignments.append(assigned)
        self.seat.ends.append(end)
        return assigned

    def run(self) -> list[BaseException | None]:
        """Runs every process's loop to its end; returns what ended each early."""

        def work(process: Process) -> BaseException | None:
            try:
                self._loop(process)
            except Exception as error:
                process.group.close()  # As a process does that ends.
                return error
            return None

        with ThreadPoolExecutor(len(self.processes)) as threads:
            return list(threads.map(work, self.processes))

    def mean(self, samples: Sequence[int]) -> dict[int, torch.Tensor]:
        """The gradient of the mean loss over samples, block by block, by plain PyTorch."""
        model = copy.deepcopy(self.model)
        model(self.inputs[list(samples)]).square().mean().backward()
        return {
            number: torch.cat(
                [torch.full((p.numel(),), -0.0) if p.grad is None else p.grad.flatten() for p in b]
            )
            for number, b in enumerate(plan_model([model]).parameters)
        }

    @property
    def sent(self) -> list[dict[int, torch.Tensor]]:
        """Of each round, the blocks that the leader sent."""
        return [
            {
                number: torch.frombuffer(bytearray(data), dtype=torch.float32)
                for number, data in blocks.items()
            }
            for blocks in self.seat.exchange.rounds
        ]

    def _loop(self, process: Process) -> None:
        for body, shard in enumerate(process.stepper.batches(lambda: None)):
            assert isinstance(shard, Shard)
            process.computed.append(shard.indices.tolist())
            loss = process.model(self.inputs[shard.indices]).square().mean()
            loss = process.spoil(body, loss)
            process.stepper.backward(loss, process.weight, correct=len(shard.indices))
            process.gradients.append(
                [None if p.grad is None else p.grad.clone() for p in process.model.parameters()]
            )
            process.stepper.try_commit()
