"""A bench for local steps: assignments, voids and commits by hand, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn

from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon.protocol.schedules import AVERAGING, OuterOptimizer
from andon_trainer.averaging.changes import ChangeExchange, outer_optimizer
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.core.calls import Call
from andon_trainer.core.computed import Computed
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.data.feed import Feeder, Shard, ShardFeeder
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import plan_model
from andon_trainer.place.membership import Membership
from andon_trainer.schedules.line_weights import OuterStep
from andon_trainer.schedules.local_steps import LocalStepper
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.stepper import StepperGate
from andon_trainer.script.gates import Audit, gate_optimizer
from andon_trainer.script.scaling import ScalerGate
from andon_trainer.state.replica import Replica
from unit.andon_trainer.step_bench import BATCH, MAX_OVERFLOWS, RoundsBench, ScriptedSeat

__all__ = ["LocalBench"]

_SAMPLES = 8 * BATCH


class LocalSeat(ScriptedSeat):
    """A place on a line of local steps, whose rounds end as the test says."""

    def __init__(self, blocks: list[int], policy: Policy) -> None:
        super().__init__(blocks)
        self.policy = policy
        self.refused: list[tuple[int, int, str]] = []
        self.computed = Computed()
        self.local_steps = 0
        """How many were counted."""
        self.missed: dict[int, Assigned] = {}
        """Rounds of the others', by the local step after which each is made up."""
        self.turns = 0
        """How many rounds after one that is lost are taken up in the same loop body."""
        self.looks, self.void_at_look = 0, 0
        """The round is void when the worker looks for this time; 0: never."""
        self.drop_before: Key | None = None
        """What was computed is dropped before the round of this key is assigned."""
        self.on_drop: Callable[[], None] = lambda: None

    def drop_computed(self, why: str) -> None:
        if self.computed.drop():
            self.on_drop()

    def stepped_locally(self) -> None:
        self.local_steps += 1

    def look(self) -> bool:
        self.looks += 1
        return self.looks != self.void_at_look

    @contextmanager
    def making_up(self) -> Iterator[Assigned | None]:
        missed = self.missed.pop(self.local_steps, None)
        own = self.position.assigned
        if missed is not None:
            self.stand(assigned=missed)
        yield missed
        self.stand(assigned=own)

    def take_turn(self) -> Assigned | None:
        self.turns -= 1
        return self.next_round() if self.turns >= 0 else None

    def next_round(self) -> Assigned:
        if self.assignments and self.assignments[0].key == self.drop_before:
            self.drop_computed("state moves to another worker")
        assigned = super().next_round()
        # As the core does: see `WorkerState.take_work`.
        if not self.computed.serves(assigned):
            self.drop_computed("other positions were assigned")
        return assigned

    def await_commit(self) -> Committed | None:
        commit = super().await_commit()
        assigned = self.position.assigned
        # As `WorkerState` does it: of a round that it attends it has computed nothing.
        if commit is not None and assigned is not None and not assigned.attends:
            self.computed.committed()
        return commit

    def hold(self) -> bool:
        if self.ends[0] == "void at its end":  # All its exchanges are made.
            self.ends.pop(0)
            return False
        return True

    def begin(self, weight: float, call: Call | None = None) -> bool:
        if call is not None and call.sequence:
            return True  # What is sent comes back.
        if self.ends[0] == "lost":  # Void before this worker had anything to send.
            self.ends.pop(0)
            return False
        return super().begin(weight, call)

    def refuse_gradient(self, block: int, element: int, value: str) -> None:
        self.refused.append((block, element, value))
        self.drop_computed("its numbers are in doubt")
        assert self.ends.pop(0) == "void", "the round of a bad value is void"


class LocalBench(RoundsBench):
    """One worker's local steps over scripted rounds; the loop body of a script.

    A round may also end `void at its end`, or be `lost`, before this worker had anything to send.
    """

    member: LocalSeat

    def __init__(
        self,
        *,
        outer: OuterOptimizer = AVERAGING,
        momentum: float = 0.9,
        micro: int | None = None,
        max_grad_norm: float | None = None,
        overlap: bool = False,
        ahead_steps: int | None = None,
        middle: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        fused: bool = False,
        feed: Feeder | None = None,
        buffers: bool = False,
        fragments: int = 1,
        mix: float = 0.0,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), middle or nn.Tanh(), nn.Linear(5, 1))
        if fragments > 1:  # Each layer of a stack of alike ones is a block.
            self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(_SAMPLES, 3, generator=generator)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=momentum, fused=fused
        )
        self.replica = Replica([self.model], [self.optimizer])
        plan = plan_model([self.model])
        policy = Policy(
            local_steps=2,
            outer=outer,
            max_grad_norm=max_grad_norm,
            overlap=overlap,
            fragments=fragments,
            mix=mix,
        )
        self.member = LocalSeat([block.elements for block in plan.layout.blocks], policy)
        device = torch.device("cpu")
        self.outer = outer_optimizer(plan, outer)
        self.scaler = scaler
        scaling = None
        if scaler is not None:
            scaling = ScalerGate(LossScale(scaler, device, MAX_OVERFLOWS))
        parts = LoopParts(
            member=self.member,
            accumulated=AccumulatedGradients(plan),
            feeder=feed
            or ShardFeeder(
                _SAMPLES,
                BATCH,
                seed=0,
                micro_batch_size=micro,
                step=lambda: self.member.position.step + 1,
            ),
            replica=self.replica,
            device=device,
            scaling=scaling,
        )
        member = cast(Membership, self.member)
        self.stepper = LocalStepper(
            parts,
            self.member,
            ChangeExchange(member, plan, device, [self.model] if buffers else []),
            OuterStep(
                optimizer=self.outer, moving=nullcontext, max_grad_norm=max_grad_norm, mix=mix
            ),
            ahead_steps,
        )
        audit = Audit([self.model], [self.optimizer])
        audit.open(plan)
        audit.close()  # It would look at the optimizers of other tests, too.
        gate = StepperGate()
        gate.stepper = self.stepper
        gate_optimizer(self.optimizer, gate, audit, scaling)
        if scaling is not None:
            scaling.open(gate)
        self.computed: list[list[int]] = []
        """Of each loop body, the samples that it got, unless they were borrowed."""
        self.borrowed: list[list[int]] = []
        """Of each loop body that had nothing to compute, what it got."""
        self.seen: list[list[torch.Tensor]] = []
        """The weights that the model held in each wait for work."""
        self.cut: Callable[[], None] = lambda: None
        """Called between two steps, where checkpoints are cut."""
        self.member.waited = lambda: None
        self.spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda body, loss: loss

    def miss(self, *positions: tuple[int, int], after: int, end: str = "commit") -> None:
        """Adds a round of the others', which is made up after so many local steps of this worker.

        Its end comes before those of the rounds that are assigned later.
        """
        missed = self.assign(*positions, end=end)
        self.member.assignments.remove(missed)
        self.member.missed[after] = replace(missed, attends=True, attended=True, rank=1)

    def bodies(self) -> Iterator[int]:
        for body, shard in enumerate(self.stepper.batches(self._between_steps)):
            assert isinstance(shard, Shard)
            state = self.stepper._state
            assert state is not None
            (self.borrowed if state.borrowed else self.computed).append(shard.indices.tolist())
            self.optimizer.zero_grad()
            loss = self.model(self.inputs[shard.indices]).square().mean()
            self.stepper.backward(self.spoil(body, loss), None, correct=len(shard.indices))
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            yield body

    def _between_steps(self) -> None:
        self.seen.append(self.weights)
        self.cut()

    @property
    def weights(self) -> list[torch.Tensor]:
        """Copies of the model's parameters."""
        return [part.detach().clone() for part in self.model.parameters()]

    def change_of(self, sent: dict[int, bytes]) -> torch.Tensor:
        """What a round sent, as one vector in the layout's order."""
        return torch.from_numpy(
            np.concatenate([np.frombuffer(sent[block], np.float32) for block in sorted(sent)])
        )
