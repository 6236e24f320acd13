"""Gradients and buffers of two workers, averaged or copied over every data path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from andon.protocol import tokens
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import partition
from andon.protocol.run_settings import Policy
from andon.tcp.proof import CAPABILITY as TCP
from andon_reducer.config import ReducerConfig
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.collectives import LineCollectives
from andon_trainer.averaging.line_averaging import LineAverager
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.exchange.path import Exchange, Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.star import StarExchange
from andon_trainer.model.layout import ModelPlan, plan_model
from andon_trainer.place.membership import Membership
from andon_trainer.place.position import Position
from andon_trainer.place.talk import Silence
from integration.andon_trainer.ring_workers import RingLine
from integration.reducer_bench import RUN, SECRET, Reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

PATHS = ("wire", "shared memory", "two reducers with lanes", "ring")
POLICY = Policy(chunk_elements=64, average_buffers=True, own_gradient_norm=True)
WEIGHTS = (6.0, 2.0)
PATIENCE_S = 20.0
CPU = torch.device("cpu")
Floats = npt.NDArray[np.float32]


class Remembered(nn.Module):
    """Keeps its last batch in a buffer; another one never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8, 5))
        self.register_buffer("table", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("last").data.copy_(x.detach())
        return x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(9), nn.BatchNorm1d(5)
    return nn.Sequential(
        nn.Linear(4, 9), norms[0], nn.Tanh(), nn.Linear(9, 5), norms[1], Remembered()
    )


def samples(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


class Seat:
    """In place of the membership: two workers' rounds, which end as the test says."""

    def __init__(
        self, exchange: Exchange, inbox: Inbox, policy: Policy, opening: tuple[str, OpenRound]
    ) -> None:
        self.exchange = exchange
        self.policy = policy
        self.position = Position()
        self.talk = Silence()
        self.timeline = None
        self.void_after: int | None = None
        """The round is void once this many exchanges of it were begun."""
        self.all_are_there = threading.Barrier(1)
        """Passed once every worker has begun the exchange at which the round is void."""
        self.sent: list[list[Floats]] = []
        """Of each exchange of gradients, what came back."""
        self._inbox = inbox
        self._opening = opening
        self._begun = 0

    def assign(self, assigned: Assigned, void_after: int | None = None) -> None:
        self.position = Position(assigned=assigned)
        self.void_after, self._begun = void_after, 0

    def begin(self, weight: float, call: Call | None = None) -> bool:
        assigned = self.position.assigned
        assert assigned is not None
        self._begun += 1
        if not self.exchange.is_open:  # A void round takes its stream with it.
            self.exchange.open(*self._opening)
        self.exchange.begin(assigned, weight, call)
        return True

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        if self._begun == self.void_after:
            # On a ring the end of one worker's stream ends the exchange that the other waits for.
            self.all_are_there.wait(PATIENCE_S)
            self.exchange.end()
            return None
        assert self.position.assigned is not None
        while (event := self._inbox.take(PATIENCE_S)) is not None:
            assert isinstance(event, AveragesComplete | ExchangeFailed), event
            if event.key == self.position.assigned.key:
                break  # What is said of a void round comes late.
        assert isinstance(event, AveragesComplete), event
        if self._begun == 1:
            self.sent.append([np.array(each) for each in self.exchange.averages])
        return event

    def hold(self) -> bool:
        return True


class Worker:
    """One worker's model and averager."""

    def __init__(self, rank: int, seat: Seat, model: nn.Sequential, plan: ModelPlan) -> None:
        self.rank, self.seat, self.model, self.plan = rank, seat, model, plan
        self.averager = LineAverager(
            cast(Membership, seat), TrainedModels(plan=plan, device=CPU, modules=[model])
        )

    def step(self, seed: int) -> Averaged | None:
        """Forward, backward and exchange of the first attempt of a step."""
        self.averager.begin(kept=False)
        return self.averager.run(self.loss(seed), WEIGHTS[self.rank], None)

    def step_by_hand(self) -> Averaged | None:
        """The same in a script with manual steps."""
        self.loss(self.rank).backward()  # type: ignore[no-untyped-call]  # torch's own
        collectives = LineCollectives(cast(Membership, self.seat), self.plan, CPU)
        blocks = range(len(self.plan.parameters))
        return collectives.run(Call(name="mean", blocks=blocks), WEIGHTS[self.rank])

    def again(self) -> Averaged | None:
        """A second attempt with the kept gradient, on borrowed samples."""
        self.averager.put_away()
        self.averager.begin(kept=True)
        return self.averager.resend(self.loss(99), WEIGHTS[self.rank])

    def loss(self, seed: int) -> torch.Tensor:
        self.model.zero_grad()
        return cast(torch.Tensor, self.model(samples(seed)).square().mean())

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.model.buffers()]


class Pair:
    """Two workers, and the assignments that a coordinator would send."""

    def __init__(self, workers: Sequence[Worker], ring: RingLine | None) -> None:
        self.workers = workers
        self._ring = ring
        self._threads = ThreadPoolExecutor(2)
        there = threading.Barrier(len(workers))
        for worker in workers:
            worker.seat.all_are_there = there

    def assign(self, round_: int, void_after: int | None = None) -> None:
        for worker in self.workers:
            assigned = Assigned(
                key=Key(1, round_),
                parent=None,
                roster=(0, 1),
                rank=worker.rank,
                step=1,
                attempt=0,
                epoch=0,
                positions=(PositionRange(worker.rank, worker.rank + 1),),
                batch=PositionRange(0, 2),
                copies_buffers=True,
            )
            if self._ring is not None:
                assigned = replace(
                    assigned,
                    ring=self._ring.assigned(assigned.key, worker.rank, (0, 1)).ring,
                )
            worker.seat.assign(assigned, void_after)

    def step(self) -> list[Averaged | None]:
        return self.each(lambda worker: worker.step(worker.rank))

    def each(self, act: Callable[[Worker], Averaged | None]) -> list[Averaged | None]:
        return list(self._threads.map(act, self.workers))

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def pair_over(path: str, folder: Path, policy: Policy = POLICY) -> Iterator[Pair]:
    with ExitStack() as stack:
        models = [net(), net()]
        plans = [plan_model([model]) for model in models]
        layout, ring = plans[0].layout, None
        openings = [
            OpenRound(RUN, rank, tokens.session_token(SECRET, RUN, rank), (TCP,))
            for rank in range(2)
        ]
        if path == "ring":
            ring = stack.enter_context(RingLine(layout, policy, 2))
            ends: list[tuple[Exchange, Inbox]] = [
                (each.exchange, each.inbox) for each in ring.workers
            ]
            address = ""
        else:
            shared = folder if path == "shared memory" else None
            config = ReducerConfig(chunk_elements=policy.chunk_elements, shared_dir=shared)
            lanes = path == "two reducers with lanes"
            count = 2 if lanes else 1
            reducers = [stack.enter_context(Reducer(config, lanes=lanes)) for _ in range(count)]
            addresses = [f"127.0.0.1:{each.port}" for each in reducers]
            address = addresses[0]
            shares = partition(layout, policy.chunk_elements, addresses)
            access = ReducerAccess(opening_s=PATIENCE_S, shared_dir=shared)
            ends = []
            for inbox in (Inbox(), Inbox()):
                exchange = StarExchange(layout, policy, inbox, shares, access)
                stack.callback(exchange.close)
                ends.append((exchange, inbox))
        seats = [
            Seat(exchange, inbox, policy, (address, opening))
            for (exchange, inbox), opening in zip(ends, openings, strict=True)
        ]
        pair = Pair(
            [
                Worker(rank, seat, model, plan)
                for rank, (seat, model, plan) in enumerate(zip(seats, models, plans, strict=True))
            ],
            ring,
        )
        stack.callback(pair.close)
        yield pair


def expected_buffers() -> list[torch.Tensor]:
    """The weighted mean of both workers' statistics by plain PyTorch; rank 0's other buffers."""
    alone = [net(), net()]
    for rank, model in enumerate(alone):
        model(samples(rank))
    total = sum(WEIGHTS)
    return [
        first
        if not first.dtype.is_floating_point or name.endswith("last")
        else (first.double() * WEIGHTS[0] + second.double() * WEIGHTS[1]).div(total).float()
        for (name, first), second in zip(alone[0].named_buffers(), alone[1].buffers(), strict=True)
    ]


@pytest.mark.parametrize("path", PATHS)
def test_statistics_become_the_mean_and_other_buffers_rank_0s_over_every_path(
    path: str, tmp_path: Path
) -> None:
    with pair_over(path, tmp_path) as pair:
        pair.assign(1)
        averaged = pair.step()
        for worker in pair.workers:
            worker.averager.committed()

    assert all(averaged)
    first, second = (worker.buffers for worker in pair.workers)
    assert all(map(torch.equal, first, second))
    for ours, plain in zip(first, expected_buffers(), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
def test_f_dp_006_a_gradient_is_sent_again_bit_for_bit_after_the_statistics_were_sent(
    path: str, tmp_path: Path
) -> None:
    with pair_over(path, tmp_path) as pair:
        pair.assign(1, void_after=4)  # After the gradients, and two exchanges of other buffers.
        assert pair.step() == [None, None]
        assert all(worker.averager.intact for worker in pair.workers)
        pair.assign(2)
        assert all(pair.each(Worker.again))
        for worker in pair.workers:
            worker.averager.committed()

    for worker in pair.workers:
        before, after = worker.seat.sent
        assert all(map(np.array_equal, before, after))
        for ours, plain in zip(worker.buffers, expected_buffers(), strict=True):
            assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-7), "nothing of borrowed samples"


@pytest.mark.parametrize("manual", [False, True], ids=["prepared", "manual"])
@pytest.mark.parametrize("path", ["wire", "shared memory"])
def test_each_workers_own_gradient_is_limited_before_the_weighted_mean(
    path: str, tmp_path: Path, *, manual: bool
) -> None:
    limit = 0.05
    own, norms = [], []
    for rank in range(2):
        model = net()
        loss: torch.Tensor = model(samples(rank)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        own.append([part.grad for part in model.parameters()])
    assert min(norms) > 2 * limit, "a limit that changes nothing would test nothing"

    with pair_over(path, tmp_path, replace(POLICY, max_grad_norm=limit)) as pair:
        pair.assign(1)
        averaged = pair.each(Worker.step_by_hand) if manual else pair.step()

    reported = [each.own_gradient_norm for each in averaged if each is not None]
    assert reported == pytest.approx(norms, rel=1e-5)
    for worker in pair.workers:
        for part, first, second in zip(worker.model.parameters(), *own, strict=True):
            assert part.grad is not None
            assert first is not None
            assert second is not None
            mean = (first * WEIGHTS[0] + second * WEIGHTS[1]) / sum(WEIGHTS)
            # PyTorch divides by the norm plus 1e-6.
            assert torch.allclose(part.grad, mean, rtol=1e-4, atol=1e-7)
