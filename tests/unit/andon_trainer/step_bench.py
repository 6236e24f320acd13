"""A bench for the stepper: assignments, voids and commits by hand, and what was sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from andon.protocol.capabilities import COORDINATOR_CAPABILITIES
from andon.protocol.encoding import Encoding, decode
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import Policy
from andon.protocol.scalars import Scalar
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.grain_averaging import LineGrains
from andon_trainer.averaging.line_averaging import LineAverager
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.step_gather import Given
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete, Committed, TransferAsked
from andon_trainer.core.reports import Digest, StepReport
from andon_trainer.core.values import encode_own
from andon_trainer.data.feed import Feeder, Shard, ShardFeeder
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import plan_model
from andon_trainer.place.membership import Membership
from andon_trainer.place.position import Position
from andon_trainer.place.talk import Silence
from andon_trainer.schedules.averaged_steps import AveragedSteps
from andon_trainer.schedules.grain_steps import GrainStepper
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.stepper import Stepper
from andon_trainer.script.scaling import ScalerGate
from andon_trainer.state.replica import Replica
from andon_trainer.timeline import Timeline

__all__ = ["BATCH", "MAX_OVERFLOWS", "RoundsBench", "StepBench", "ranges"]

BATCH = 12
MAX_OVERFLOWS = 3
"""How many steps in a row may overflow."""
_SAMPLES = 4 * BATCH


def ranges(*bounds: tuple[int, int]) -> tuple[PositionRange, ...]:
    return tuple(PositionRange(*each) for each in bounds)


class Sent:
    """In place of the wire: keeps a copy of each block, and answers with what it decodes to."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.encoding = Encoding.FLOAT32
        self.rounds: list[dict[int, bytes]] = []
        self.weights: list[float] = []
        self.refused = False
        self.halves = False
        """Whether others contribute as much as this worker, and zeros."""
        self.divisor = 1.0
        """What sums of nodes are divided by."""
        self.others: dict[int, bytes] = {}
        """The sums of the node that others send, by block."""
        self.weight_of_others = 0.0
        self.first_sent: float | None = None
        self.averages: list[npt.NDArray[np.float32]] = [
            np.zeros(elements, np.float32) for elements in blocks
        ]

    def begin(self, weight: float) -> None:
        self.rounds.append({})
        self.weights.append(weight)
        self.refused = False

    def lend(self, block: int, area: int = 0) -> None:
        """None: it has no memory."""

    def submit(
        self, block: int, flat: npt.NDArray[np.float32], *, keeps_loss: bool = False
    ) -> None:
        self.refused = self.refused or not np.isfinite(flat).all()
        if not self.refused:
            self.rounds[-1][block] = flat.tobytes()
        came = decoded(flat, self.encoding, keeps_loss=keeps_loss)
        self.averages[block] = came * np.float32(0.5 if self.halves else 1.0)

    def submit_nodes(self, block: int, flats: Sequence[npt.NDArray[np.float32]]) -> None:
        self.rounds[-1][block] = b"".join(flat.tobytes() for flat in flats)
        if block in self.others:
            flats = *flats, np.frombuffer(self.others[block], np.float32)
        self.averages[block] = reduce(np.add, flats) / np.float32(self.divisor)

    def submit_data(self) -> None:
        """It is where it arrives."""

    def abstain(self) -> None:
        """Nothing is sent."""


def decoded(
    flat: npt.NDArray[np.float32], encoding: Encoding, *, keeps_loss: bool = False
) -> npt.NDArray[np.float32]:
    """What others decode of these numbers; topk has one of them."""
    return decode(encode_own(flat, encoding, keeps_loss=keeps_loss, kept=1), encoding, flat.size)


class Logged(Silence):
    """Keeps what a script logs."""

    def __init__(self) -> None:
        self.scalars: list[Scalar] = []

    def log(self, scalars: Sequence[Scalar]) -> None:
        self.scalars += scalars


class ScriptedSeat:
    """A place on a line whose rounds end as the test says."""

    policy = Policy()

    def __init__(self, blocks: Sequence[int]) -> None:
        can = frozenset(COORDINATOR_CAPABILITIES)
        self.position = Position(worker=0, head=Key(1, 0), coordinator_can=can)
        self.talk = Logged()
        self.timeline: Timeline | None = None
        self.transfers: dict[Key, TransferAsked] = {}
        """What is installed while the script waits for the round of a key."""
        self.exchange = Sent(blocks)
        self.reports: list[StepReport] = []
        self.assignments: list[Assigned] = []
        self.ends: list[str] = []
        """Of each round: `void early` (before anything is sent), `void`, `void late` (its averages
        are there), `commit`, or `commit overflow` (another worker's)."""
        self.waited: Callable[[], object] = lambda: None
        """Called in each wait for the line."""
        self.calls: list[Call | None] = []
        """Of each exchange; None: the gradients are all of its round."""

    def encode_as(self, encoding: Encoding) -> None:
        """Makes the line's encoding another one."""
        answer = Encoding.INT4_BLOCK if encoding is Encoding.INT2_BLOCK else None
        self.policy = replace(self.policy, encoding=encoding, answer_encoding=answer)
        self.exchange.encoding = encoding

    def stand(self, **facts: Any) -> None:
        """Makes these facts of its position other ones."""
        self.position = replace(self.position, **facts)

    def next_round(self) -> Assigned:
        self.waited()
        if not self.assignments:
            self.stand(stop_reason="no more")
            return self._work(())
        assigned = self.assignments.pop(0)
        self.stand(assigned=assigned)
        transfer = self.transfers.pop(assigned.key, None)
        if transfer is not None:
            at = {"head": transfer.head, "cursor": transfer.cursor, "step": transfer.step}
            self.stand(installed_from=transfer, **at)
        return assigned

    def begin(self, weight: float, call: Call | None = None) -> bool:
        self.waited()
        self.calls.append(call)
        self.exchange.begin(weight)
        if early := self.ends[0] == "void early":
            self.ends.pop(0)
        return not early

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        self.waited()
        if self.ends[0] == "void" or self.exchange.refused:
            self.ends.pop(0)
            return None
        assert self.position.assigned is not None
        weight = self.exchange.weights[-1] + self.exchange.weight_of_others
        return AveragesComplete(self.position.assigned.key, weight, 1)

    def await_commit(self) -> Committed | None:
        self.waited()
        end = self.ends.pop(0)
        if end not in ("commit", "commit overflow"):
            return None
        assigned = self.position.assigned
        assert assigned is not None
        cursor = Cursor(assigned.epoch, assigned.batch.stop)
        self.stand(step=self.position.step + 1, head=assigned.key, cursor=cursor)
        return Committed(
            record=Record(assigned.key, assigned.parent, RecordKind.STEP, 1, cursor, (0,)),
            overflow=end == "commit overflow" or self.reports[-1].overflow,
        )

    def report(self, report: StepReport) -> None:
        self.reports.append(report)

    def refuse_loss(self, value: str) -> None:
        self.waited()
        self.exchange.begin(0.0)

    def abandon(self, message: str) -> None:
        """Nobody else is here."""

    def stop_line(self, kind: str, message: str) -> bool:
        raise AssertionError(f"{kind}: {message}")

    def hold(self) -> bool:
        return True

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        return value, weight, 1

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        return (data,)

    def catch_up(self) -> None:
        """Nobody goes on without this worker."""

    def left_behind(self) -> bool:
        return False

    def leave_epoch(self) -> None:
        self.stand(cursor=Cursor(self.position.cursor.epoch + 1, 0))

    def compare(self, digest: Digest) -> None:
        """Nobody else is here."""

    def _work(self, positions: tuple[PositionRange, ...]) -> Assigned:
        return Assigned(
            key=Key(1, 1000),
            parent=self.position.head,
            roster=(0, 1, 2),
            rank=0,
            step=self.position.step + 1,
            attempt=0,
            epoch=99,
            positions=positions,
            batch=PositionRange(0, BATCH),
        )


class RoundsBench(ABC):
    """One worker over scripted rounds, which it is assigned beforehand."""

    member: ScriptedSeat
    _rounds = 0

    def assign(
        self, *positions: tuple[int, int], end: str, attempt: int = 0, **other: Any
    ) -> Assigned:
        """Adds a round; `end` says how it ends."""
        self._rounds += 1
        assigned = replace(
            self.member._work(ranges(*positions)),
            key=Key(1, 100 + self._rounds),
            attempt=attempt,
            **{"epoch": 0, **other},
        )
        self.member.assignments.append(assigned)
        self.member.ends.append(end)
        return assigned

    @abstractmethod
    def bodies(self) -> Iterator[int]:
        """Runs the script's loop; yields after each body."""

    def run(self) -> None:
        """Runs the script's loop to its end."""
        for _body in self.bodies():
            pass

    @property
    def sent(self) -> list[dict[int, bytes]]:
        """Of each round, the bytes of each block."""
        return self.member.exchange.rounds


class StepBench(RoundsBench):
    """One worker's stepper over scripted rounds; the loop body of a script."""

    def __init__(
        self,
        *,
        micro: int | None = None,
        feed: Feeder | None = None,
        dtype: Any = torch.float32,
        middle: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        grain: int = 0,
    ) -> None:
        torch.manual_seed(0)
        middle = middle or nn.Tanh()
        self.model = nn.Sequential(nn.Linear(3, 5), middle, nn.Linear(5, 1)).to(dtype)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        self.model.register_parameter("unused", self.unused)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(_SAMPLES, 3, generator=generator).to(dtype)
        plan = plan_model([self.model])
        self.member = ScriptedSeat([block.elements for block in plan.layout.blocks])
        device = torch.device("cpu")
        scale = None if scaler is None else LossScale(scaler, device, MAX_OVERFLOWS)
        self.scaling = None if scale is None else ScalerGate(scale)
        member = cast(Membership, self.member)
        self.plan = plan
        models = TrainedModels(plan=plan, device=device, modules=[self.model], scaling=scale)
        feeder = feed or ShardFeeder(
            _SAMPLES,
            BATCH,
            seed=0,
            micro_batch_size=micro,
            step=lambda: self.member.position.step + 1,
            grain=grain,
        )
        parts = LoopParts(
            member=self.member,
            accumulated=AccumulatedGradients(plan),
            feeder=feeder,
            replica=Replica([self.model]),
            device=device,
            scaling=self.scaling,
            grain=grain,
        )
        self.averager: LineAverager | LineGrains
        self.stepper: AveragedSteps
        if grain:
            self.averager = grains = LineGrains(member, models)
            self.stepper = GrainStepper(parts, grains, seed=0, check=lambda: None)
        else:
            self.averager = averager = LineAverager(member, models)
            self.stepper = Stepper(parts, averager, gather=self.exchange_rows)
        self.computed: list[list[int]] = []
        """Of each loop body, the samples that it got."""
        self.spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda body, loss: loss

    def exchange_rows(self, given: Given) -> list[Given] | None:
        """What all ranks give in a loop body."""
        assert isinstance(self.averager, LineAverager)
        return self.averager.gather(given)

    def bodies(self) -> Iterator[int]:
        loop = self.stepper.batches(lambda: None)
        for body, shard in enumerate(loop):
            assert isinstance(shard, Shard)
            self.computed.append(shard.indices.tolist())
            loss = self.model(self.inputs[shard.indices]).square().mean()
            loss = self.spoil(body, loss)
            self.stepper.backward(loss, None, correct=len(shard.indices))
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
            self.stepper.try_commit()
            yield body

    def mean(self, samples: Sequence[int]) -> list[torch.Tensor]:
        """The gradient of the mean loss over samples, block by block, by plain PyTorch."""
        self.model.zero_grad()
        loss = self.model(self.inputs[list(samples)]).square().mean()
        loss.backward()
        gradients = [
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).float().reshape(-1)
                    for p in block
                ]
            )
            for block in plan_model([self.model]).parameters
        ]
        self.model.zero_grad()
        return gradients
