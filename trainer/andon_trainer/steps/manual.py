"""Stepping by hand: a step's life when the script itself says what is exchanged, and when.

Theory of operation. A step by hand is a round like any other. The first call after a commit asks
for work, and so opens it; each call is an exchange of the round with the next `sequence`, awaited
before the call returns; `should_commit` reports the round as complete and waits for its record.

Between two rounds the roster may have changed, so that what the script computed was the share of a
rank that it no longer has. The worker that finds this out at its first gradients gives the round
up, for everybody. A void round makes the calls that are left do nothing, until `should_commit` says
False on all workers alike. By then the next round is open, and rank and world size are those of
the step as it will be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.reports import NO_DIGEST, StepReport, Timings
from andon_trainer.errors import LineHalted
from andon_trainer.gradients.averaging import Averaged
from andon_trainer.gradients.broadcast import HEAD_BYTES, pack, unpack
from andon_trainer.gradients.collectives import Pool
from andon_trainer.gradients.guards import Accumulation
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.member import Member
from andon_trainer.state.replica import Replica

__all__ = ["HandStepper", "refuse_shared"]

_LATE_REMEDY = (
    "call line.all_reduce_gradients(model) after the last backward that reaches the model, or "
    "freeze it there by requires_grad_(False)"
)


@dataclass(slots=True)
class _Step:
    """A step that was begun and is not over."""

    assigned: Assigned
    moved: bool
    """Whether rank or world size are not what the script saw while it computed."""
    lost: bool = False
    """Whether its round is void: nothing is exchanged any more."""
    calls: int = 0
    weight: float = 0.0
    """Of this worker, in the first call."""
    first: Averaged | None = None
    norms: list[float] = field(default_factory=list)
    """Of each call's averaged gradients, if the line asks for them."""
    exchange_s: float = 0.0


class HandStepper:
    """The present step of a script that exchanges by hand. Used by one thread."""

    def __init__(
        self,
        member: Member,
        pool: Pool,
        plan: ModelPlan,
        replica: Replica,
        *,
        view: Callable[[], tuple[int, int]],
        between_steps: Callable[[], None],
    ) -> None:
        """Stands between steps.

        Args:
            member: the worker's place.
            pool: where calls are made.
            plan: the blocks of the joined modules.
            replica: holds the modules.
            view: rank and world size as the script sees them.
            between_steps: called whenever a step is over and before the next one is asked for.
        """
        self._member = member
        self._pool = pool
        self._plan = plan
        self._replica = replica
        self._accumulation = Accumulation(plan)
        self._blocks = _blocks_by_module(replica.modules, plan)
        self._view = view
        self._between_steps = between_steps
        self._step: _Step | None = None
        pool.late.guard_steps(_LATE_REMEDY)
        self.stop_wanted = ""
        self.last_commit: Committed | None = None
        self.committed = False

    def close(self) -> None:
        """Looks at optimizers no more; a second call does nothing."""
        self._pool.late.close()

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor given up."""
        return self._step is not None

    def average(self, module: nn.Module, weight: float) -> None:
        """Makes `p.grad` of a joined module the weighted mean over all workers.

        Args:
            module: one that was joined.
            weight: finite and at least 0.

        Raises:
            ValueError: the module was not joined, or all weights are 0.
            LineHalted: the line stopped, and this worker raises.
        """
        blocks = self._blocks.get(id(module))
        if blocks is None:
            raise ValueError(
                f"this {type(module).__name__} was not joined, or none of its parameters is "
                "trained: pass it to line.join(...), which takes every module whose gradients "
                "are exchanged"
            )
        with self._forgotten_if_halted():
            step = self._begun()
            if step.moved and not step.lost:
                self._member.abandon("the roster changed while its gradients were computed")
                step.lost = True
            call = Call(name="all_reduce_gradients", sequence=step.calls, blocks=blocks)
            averaged = self._exchange(step, call, weight)
        if averaged is not None:
            self._pool.late.averaged(blocks)
        if averaged is not None and not averaged.total_weight:
            raise ValueError(
                "all workers gave all_reduce_gradients the weight 0, so there is no mean: leave "
                "the call out on every worker, or give what was averaged over"
            )

    def broadcast(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes tensors rank 0's, bit for bit; as they were if the round is void.

        Raises:
            ValueError: a tensor is sparse or quantised.
            LineHalted: the line stopped, and this worker raises.
        """
        pack(name, tensors, filled=False)  # refuses before anybody waits
        with self._forgotten_if_halted():
            step = self._begun()
            source = step.assigned.rank == 0
            data = pack(name, tensors, filled=source)
            call = Call(name=name, sequence=step.calls, data=data, head_bytes=HEAD_BYTES)
            averaged = self._exchange(step, call, 1.0 if source else 0.0)
        if averaged is not None and not source:
            unpack(data, tensors)

    def barrier(self) -> None:
        """Returns once every worker has called it, or the round is void.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
        with self._forgotten_if_halted():
            step = self._begun()
            self._exchange(step, Call(name="barrier", sequence=step.calls), 0.0)

    def should_commit(self) -> bool:
        """Whether the step is committed, the same on every worker.

        If not, gradients are gone and the next round is open.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
        self.committed = False
        if self._step is not None and not self._step.lost:
            self._pool.late.refuse(_LATE_REMEDY)
        with self._forgotten_if_halted():
            commit = self._commit(self._begun())
            if commit is None:
                self._forget()
                self._step = _Step(self._member.next_round(), moved=False)
                return False
        self._step = None
        self.last_commit = commit
        self.committed = True
        return True

    def _begun(self) -> _Step:
        """The present step; the first call after a commit begins it."""
        if self._step is None:
            self._between_steps()
            self._pool.late.forget()
            view = self._view()
            assigned = self._member.next_round()
            self._step = _Step(assigned, moved=(assigned.rank, assigned.world_size) != view)
        return self._step

    def _exchange(self, step: _Step, call: Call, weight: float) -> Averaged | None:
        if step.lost:
            return None
        averaged = self._pool.exchange(call, weight)
        if averaged is None:
            step.lost = True
            return None
        if not step.calls:
            step.weight, step.first = weight, averaged
        step.calls += 1
        if averaged.gradient_norm is not None:
            step.norms.append(averaged.gradient_norm)
        step.exchange_s += averaged.timings.exchange_s
        return averaged

    def _commit(self, step: _Step) -> Committed | None:
        if step.lost or not self._member.hold():
            return None
        assigned, every = step.assigned, self._member.digest_every
        compared = every and self._member.step % every == 0
        self._member.show("COMMITTING")
        self._member.report(
            StepReport(
                key=assigned.key,
                loss_sum=0.0,
                weight=step.weight,
                samples=sum(map(len, assigned.positions)),
                timings=Timings(exchange_s=step.exchange_s, wait_s=step.exchange_s),
                digest=self._replica.weights() if compared else NO_DIGEST,
                digest_head=assigned.parent,
                stop_reason=self.stop_wanted,
                total_weight=step.first.total_weight if step.first else 0.0,
                world_size=assigned.world_size,
                gradient_norm=math.hypot(*step.norms) if step.norms else None,
            )
        )
        return self._member.await_commit()

    @contextmanager
    def _forgotten_if_halted(self) -> Iterator[None]:
        """A script that catches the halt begins the step anew."""
        try:
            yield
        except LineHalted:
            self._forget()
            raise

    def _forget(self) -> None:
        """Gradients of a void step must not be added to by the next backward."""
        self._accumulation.drop()
        self._pool.late.forget()
        self._step = None


def refuse_shared(modules: Sequence[nn.Module]) -> None:
    """Raises ValueError if two modules share a parameter: whose mean would it get?"""
    owners: dict[int, nn.Module] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), module) is not module:
                raise ValueError(
                    f"{name} belongs to two of the joined modules, and has one gradient: join "
                    "them as one, line.join(nn.ModuleList([...])), and reduce that"
                )


def _blocks_by_module(modules: Sequence[nn.Module], plan: ModelPlan) -> dict[int, range]:
    """The blocks of each module, by its id: they are neighbours in the layout."""
    owners = {id(part): id(module) for module in modules for part in module.parameters()}
    found: dict[int, range] = {}
    for block, parameters in enumerate(plan.parameters):
        owner = owners[id(parameters[0])]
        first = found[owner].start if owner in found else block
        found[owner] = range(first, block + 1)
    return found
