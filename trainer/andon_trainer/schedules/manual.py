"""Manual steps: a step's life when the script itself says what is exchanged, and when.

Theory of operation. A manual step is a round like any other. The first call after a commit asks for
work, and so opens it; each call is an exchange of the round with the next `sequence`, awaited
before the call returns; `should_commit` reports the round as complete and waits for its record.

Between two rounds the roster may have changed, so that what the script computed was the share of a
rank that it no longer has. The worker that notices this at its first gradients gives the round up,
for all workers. In a void round the remaining calls do nothing, until `should_commit` returns False
on all workers alike. By then the next round is open, and rank and world size are those of the step
as it will be computed again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.broadcast import HEAD_BYTES, pack, unpack
from andon_trainer.averaging.collectives import Collectives
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.reports import NO_DIGEST, StepReport, Timings
from andon_trainer.errors import LineHalted, RunOver
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import ModelPlan
from andon_trainer.model.wrappers import named_parameters, plain_name, unwrapped
from andon_trainer.place.member import RunMember
from andon_trainer.schedules.loop_checks import HookedParameters, OwnBuffers
from andon_trainer.script.script_checks import JoinedWeights, refuse_scaler_by_hand, scales
from andon_trainer.state.replica import Replica

__all__ = ["ManualStepper"]

_SYNC_BUFFERS = "sync_buffers"
"""The name of the broadcast that makes buffers rank 0's."""

_LATE_REMEDY = (
    "call line.all_reduce_gradients(model) after the last backward that reaches the model, or "
    "freeze it there by requires_grad_(False)"
)


@dataclass(slots=True)
class _ManualStep:
    """A step that was begun and is not over."""

    assigned: Assigned
    moved: bool
    """Whether rank or world size are not what the script saw while it computed."""
    lost: bool = False
    """Whether its round is void: nothing is exchanged any more."""
    calls: int = 0
    """Number of exchanges so far."""
    weight: float = 0.0
    """This worker's, in the first call."""
    first: Averaged | None = None
    """The result of the first call."""
    norms: list[float] = field(default_factory=list)
    """Of each call's averaged gradients, if the line asks for them."""
    own_norms: list[float] = field(default_factory=list)
    """Of what this worker gave to each call, if the line asks for them."""
    exchange_s: float = 0.0


class ManualStepper:
    """The current step of a script with manual steps. Used by one thread."""

    def __init__(
        self,
        member: RunMember,
        collectives: Collectives,
        plan: ModelPlan,
        replica: Replica,
        *,
        view: Callable[[], tuple[int, int]],
        between_steps: Callable[[], None],
    ) -> None:
        """Stands between steps.

        Args:
            member: the worker's membership.
            collectives: makes the calls.
            plan: the blocks of the joined modules.
            replica: holds the modules.
            view: rank and world size as the script sees them.
            between_steps: called whenever a step is over, before the next one is asked for.
        """
        self._member = member
        self._collectives = collectives
        self._plan = plan
        self._replica = replica
        self._accumulated = AccumulatedGradients(plan)
        installed_from = member.position.installed_from
        self._joined: JoinedWeights | None = JoinedWeights(self._accumulated, installed_from)
        """Until the first gradients are averaged, or tensors come from rank 0."""
        self._scales: list[torch.Tensor] | None = scales()
        """Those of before joining, until the first gradients are averaged."""
        self._hooked = HookedParameters(
            self._accumulated.named(), "line.all_reduce_gradients(model)"
        )
        self._own_buffers = OwnBuffers(replica.modules)
        self._blocks = _blocks_by_module(replica.modules, plan)
        self._view = view
        self._between_steps = between_steps
        self._step: _ManualStep | None = None
        # The script's optimizers have no gates here: a hook stops those with late gradients.
        collectives.late.guard_steps(_LATE_REMEDY)
        self.stop_wanted = ""
        """Why the script wants the run to end; empty if it does not."""
        self.last_commit: Committed | None = None
        self.committed = False
        self._told_of_end = False
        """Whether `should_commit` has returned since the run was over."""
        self._script_s = 0.0
        """Time that the script has spent on the current step outside these calls."""
        self._returned_at = time.perf_counter()

    def close(self) -> None:
        """Removes the hook on optimizers; a second call does nothing."""
        self._collectives.close()

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor given up."""
        return self._step is not None

    def average(self, module: nn.Module, weight: float) -> None:
        """Replaces `p.grad` of a joined module by the weighted mean over all workers.

        Args:
            module: one that was joined.
            weight: this worker's.

        Raises:
            ValueError: the weight is negative or not finite, all weights are 0, or the module was
                not joined.
            RuntimeError: a GradScaler scales the script's losses.
            LineHalted: the line stopped, and this worker raises.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        blocks = self._blocks.get(id(unwrapped(module)))
        if blocks is None:
            raise ValueError(
                f"this {type(module).__name__} was not joined, or none of its parameters is "
                "trained: pass it to line.join(...), which takes every module whose gradients "
                "are exchanged"
            )
        if self._scales is not None:
            refuse_scaler_by_hand(self._scales)
            self._scales = None
        if self._joined is not None:
            self._joined.warn(self._member.position.installed_from)
            self._joined = None
        averaged = None
        with self._called():
            step = self._begin()
            # Only gradients depend on rank and world size. A broadcast or a barrier may come first.
            if step.moved and not step.lost:
                self._member.abandon("the roster changed while its gradients were computed")
                step.lost = True
            if step.assigned.world_size > 1:
                self._hooked.look(part for block in blocks for part in self._plan.parameters[block])
            call = Call(name="all_reduce_gradients", blocks=blocks)
            averaged = self._exchange(step, call, weight)
        if averaged is not None:
            self._collectives.late.averaged(blocks)
        if averaged is not None and not averaged.total_weight:
            raise ValueError(
                "all workers gave all_reduce_gradients the weight 0, so there is no mean: leave "
                "the call out on every worker, or give the number of samples behind the gradients"
            )

    def sync_buffers(self, module: nn.Module) -> None:
        """Copies rank 0's buffers of `module` to all workers; raises as `broadcast` does."""
        buffers = unwrapped(module).named_buffers()
        self.broadcast(_SYNC_BUFFERS, {plain_name(name): buffer for name, buffer in buffers})

    def sync_params(self, module: nn.Module) -> None:
        """Copies rank 0's parameters of `module` to all workers; raises as `broadcast` does."""
        self.broadcast("sync_params", dict(named_parameters(unwrapped(module))))

    def broadcast(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites tensors with rank 0's, bit for bit; a void round leaves them as they are.

        Raises:
            ValueError: a tensor is sparse or quantised.
            LineHalted: the line stopped, and this worker raises.
        """
        # A tensor that can't be sent is refused here, before other workers wait for it.
        pack(name, tensors, filled=False)
        if name == _SYNC_BUFFERS:
            self._own_buffers.settled = True
        else:
            self._joined = None  # It may be by this call that all workers get what was changed.
        averaged = None
        with self._called():
            step = self._begin()
            source = step.assigned.rank == 0
            data = pack(name, tensors, filled=source)
            call = Call(name=name, data=data, head_bytes=HEAD_BYTES)
            averaged = self._exchange(step, call, 1.0 if source else 0.0)
        if averaged is not None and not source:
            unpack(data, tensors)

    def barrier(self) -> None:
        """Returns once every worker has called it, or the round is void.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
        with self._called():
            step = self._begin()
            self._exchange(step, Call(name="barrier"), 0.0)

    def should_commit(self) -> bool:
        """Whether the step is committed, the same on every worker.

        If it is not, gradients are dropped and the next round is open.

        Raises:
            RuntimeError: a gradient was added after its mean was taken.
            LineHalted: the line stopped, and this worker raises.
        """
        self.committed = False
        if self._step is not None and not self._step.lost:
            # Before anything is reported: what was added late is in nobody's mean.
            self._collectives.late.refuse(_LATE_REMEDY)
        commit = None
        with self._called():
            step = self._begin()
            commit = self._commit(step)
            if commit is None:
                self._drop()
                # The next round is opened here, so that the script sees its rank and world size
                # before it computes the step again.
                self._step = _ManualStep(self._member.next_round(), moved=False)
        self._told_of_end = bool(self._member.position.stop_reason)
        if commit is None:
            return False
        self._collectives.committed()
        if step.assigned.world_size > 1:
            self._own_buffers.committed()
        self._step, self._script_s = None, 0.0
        self.last_commit = commit
        self.committed = True
        return True

    def _begin(self) -> _ManualStep:
        """The current step; the first call after a commit begins it."""
        if self._step is None:
            self._between_steps()
            self._collectives.late.clear()
            # Before asking: what the script has computed, it computed for this view.
            view = self._view()
            assigned = self._member.next_round()
            moved = (assigned.rank, assigned.world_size) != view
            self._step = _ManualStep(assigned, moved)
        return self._step

    def _exchange(self, step: _ManualStep, call: Call, weight: float) -> Averaged | None:
        """Makes a call, unless the round is void."""
        if step.lost:
            return None
        averaged = self._collectives.run(call, weight)
        if averaged is None:
            step.lost = True
            return None
        # StepReady reports the weights of sequence 0.
        if not step.calls:
            step.weight, step.first = weight, averaged
        step.calls += 1
        if averaged.gradient_norm is not None:
            step.norms.append(averaged.gradient_norm)
        if averaged.own_gradient_norm is not None:
            step.own_norms.append(averaged.own_gradient_norm)
        step.exchange_s += averaged.timings.exchange_s
        return averaged

    def _commit(self, step: _ManualStep) -> Committed | None:
        """Reports the step and waits for its record; None if the round is void."""
        # Held before the report: it says that all averages of the round are here.
        if step.lost or not self._member.hold():
            return None
        assigned, here = step.assigned, self._member.position
        compared = assigned.wants_digest or here.digest_due
        self._member.talk.show("COMMITTING")
        self._member.report(
            StepReport(
                key=assigned.key,
                loss_sum=0.0,
                weight=step.weight,
                samples=sum(map(len, assigned.positions)),
                # The line does not see the script's loop: which part of its time was forward and
                # backward, and of how many samples, is not known. So `busy_s` stays 0.
                timings=Timings(
                    compute_s=self._script_s,
                    exchange_s=step.exchange_s,
                    wait_s=step.exchange_s,
                ),
                digest=self._replica.weights(here.coordinator_can) if compared else NO_DIGEST,
                digest_head=assigned.parent,
                stop_reason=self.stop_wanted,
                total_weight=step.first.total_weight if step.first else 0.0,
                world_size=assigned.world_size,
                gradient_norm=math.hypot(*step.norms) if step.norms else None,
                own_gradient_norm=math.hypot(*step.own_norms) if step.own_norms else None,
            )
        )
        return self._member.await_commit()

    @contextmanager
    def _called(self) -> Iterator[None]:
        """A call of the script; if the line halts in it, the step is dropped and begun again.

        If the run ends in it, this call and those that follow do nothing, as in a void round, until
        `should_commit` returns False: `line.complete` is true then, which ends the script's loop.

        Raises:
            RunOver: the script goes on after that.
        """
        self._script_s += time.perf_counter() - self._returned_at
        try:
            yield
        except LineHalted:
            self._drop()
            raise
        except RunOver as over:
            self._drop()
            if self._told_of_end:
                raise RunOver(
                    f"{over}. Nothing more is exchanged: a loop with manual steps ends by `while "
                    "not line.complete`",
                    over.address,
                    over.last_step,
                    exit_code=1,
                ) from None
        finally:
            self._returned_at = time.perf_counter()

    def _drop(self) -> None:
        """Drops the step and its gradients: the next backward must not add to them."""
        self._accumulated.drop()
        self._collectives.late.clear()
        self._step, self._script_s = None, 0.0


def _blocks_by_module(modules: Sequence[nn.Module], plan: ModelPlan) -> dict[int, range]:
    """The blocks of each module, by its id; in the layout they are neighbours."""
    owners = {id(part): id(module) for module in modules for part in module.parameters()}
    found: dict[int, range] = {}
    for block, parameters in enumerate(plan.parameters):
        owner = owners[id(parameters[0])]
        first = found[owner].start if owner in found else block
        found[owner] = range(first, block + 1)
    return found
