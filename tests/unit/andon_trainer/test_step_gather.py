"""Gathering in a loop body: what arrives, what becomes of a void step, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from andon_trainer import Line, LineHalted
from andon_trainer.averaging.step_gather import Given, Rows, StepGather
from andon_trainer.core.calls import Call
from andon_trainer.line.gathering import pack
from unit.andon_trainer.host_bench import HostBench
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.ring_bench import layout_of
from unit.andon_trainer.seat import Seat
from unit.andon_trainer.solo import prepared
from unit.andon_trainer.step_bench import BATCH, StepBench

Floats = npt.NDArray[np.float32]
SIZES = [5, 3, 9]


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line(seed=3, device="cpu")
    yield made
    made.close()


class Reducer:
    """Averages what some ranks send, as the protocol says, once all of them have sent it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.met = threading.Barrier(ranks, timeout=20.0)
        self.sent: dict[int, dict[int, Floats]] = {}

    def mean(self, rank: int, blocks: dict[int, Floats]) -> dict[int, Floats]:
        self.sent[rank] = blocks
        self.met.wait()
        share = np.float32(1 / self.ranks)
        zeros = {block: np.zeros(SIZES[block], np.float32) for block in blocks}
        for each in range(self.ranks):
            for block, flat in self.sent[each].items():
                zeros[block] = zeros[block] + share * flat
        self.met.wait()
        return zeros


class RankSeat(Seat):
    """One rank's place."""

    def __init__(self, reducer: Reducer, rank: int) -> None:
        super().__init__(layout_of(SIZES), rank, reducer.ranks)
        self._reducer, self._rank = reducer, rank

    def answer(self) -> None:
        for block, mean in self._reducer.mean(self._rank, self.submitted).items():
            self.averages[block][:] = mean


def test_the_bytes_of_all_ranks_arrive_exactly_however_small_the_model_is() -> None:
    given = [Given(bytes(range(256)), 3), Given(b"", 0), Given(b"\xff" * 61, 70_000)]
    reducer = Reducer(len(given))
    seats = [RankSeat(reducer, rank) for rank in range(len(given))]

    with ThreadPoolExecutor(len(given)) as pool:
        gathers = [StepGather(seat.averaging) for seat in seats]
        found = list(pool.map(lambda gather, each: gather.run(each), gathers, given))

    assert found == [given] * 3
    calls = [call for call, _ in seats[0].calls]
    assert [call.sequence for call in calls] == list(range(len(calls)))
    assert [call.data is not None for call in calls] == [True, *(False for _ in calls[1:])]
    assert all(call.exact for call in calls[1:])


def test_a_worker_that_only_attends_gets_what_the_ranks_give() -> None:
    given = [Given(b"first", 3), Given(b"second rank", 1)]
    reducer = Reducer(len(given))
    seats = [RankSeat(reducer, rank) for rank in range(len(given))]
    heard: list[dict[int, Floats]] = []
    mean = reducer.mean

    def listened(rank: int, blocks: dict[int, Floats]) -> dict[int, Floats]:
        found = mean(rank, blocks)
        if rank == 0:
            heard.append(found)
        return found

    reducer.mean = listened  # type: ignore[method-assign]  # a listening stream
    with ThreadPoolExecutor(len(given)) as pool:
        gathers = [StepGather(seat.averaging) for seat in seats]
        list(pool.map(lambda gather, each: gather.run(each), gathers, given))
    learner = Seat(layout_of(SIZES), rank=2, roster=(0, 1), attends=True, attended=True)
    learner.wire = seats[0].wire

    def answer() -> None:
        for block, flat in heard.pop(0).items():
            learner.averages[block][:] = flat

    learner.answer = answer  # type: ignore[method-assign]  # what it hears
    learner.submit = lambda *_, **__: None  # type: ignore[method-assign]  # it gives nothing

    assert StepGather(learner.averaging).run(Given(b"", 0)) == given


class Bench(StepBench):
    """A script that gathers in each loop body."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: list[list[Given] | None] = []
        """Of each gather that reaches the line."""
        self.found: list[Rows | None] = []
        self.member.abandon = self.abandon  # type: ignore[method-assign]  # the round is void then
        self.spoil = self.gather

    def abandon(self, message: str) -> None:
        assert self.member.ends.pop(0) == "abandoned"

    def exchange_rows(self, given: Given) -> list[Given] | None:
        """See `StepBench`; no wire here."""
        others = [given, Given(b"other", 8), Given(b"", 0)]
        return self.answers.pop(0) if self.answers else others

    def gather(self, body: int, loss: torch.Tensor) -> torch.Tensor:
        self.found.append(self.stepper.gather(b"mine"))
        return loss


def sizes(bench: StepBench) -> list[int]:
    return [len(each) for each in bench.computed]


def test_own_rows_weigh_in_the_mean_by_samples_what_they_do_in_the_sum() -> None:
    bench = Bench()
    bench.assign((0, 4), end="commit")
    bench.assign(end="commit", rank=1)

    bench.run()

    assert bench.found == [
        Rows(given=[b"mine", b"other", b""], rank=0, factor=(4 + 8) / 4),
        Rows(given=[b"", b"other", b""], rank=1, factor=0.0),
    ]


def test_an_attempt_is_one_body_with_the_whole_share_and_nothing_is_kept() -> None:
    bench = Bench()
    bench.assign((0, 4), end="void late")
    bench.assign((0, 6), end="commit", attempt=1)

    bench.run()

    assert sizes(bench) == [4, 6]


def test_a_gather_in_a_void_round_gives_own_rows_and_the_step_is_tried_again() -> None:
    bench = Bench()
    bench.answers = [None]
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="commit", attempt=1)

    bench.run()

    assert [rows is None for rows in bench.found] == [True, False]
    assert bench.member.position.step == 1


def test_a_first_gather_in_a_part_of_a_lost_workers_positions_has_the_step_tried_again() -> None:
    bench = Bench()
    bench.assign((0, BATCH), end="abandoned", attempt=1)
    bench.assign((0, BATCH), end="commit", attempt=2)

    bench.run()

    assert sizes(bench) == [BATCH // 3, BATCH]
    assert [rows is None for rows in bench.found] == [True, False]


def test_gradients_and_buffers_follow_what_was_gathered_in_a_round() -> None:
    bench = StepBench(middle=torch.nn.BatchNorm1d(5))
    averaging = bench.averager._averaging

    def gather(_body: int, loss: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            opened = averaging.open(0.0, Call(name="line.gather"))
            assert opened is not None
            assert opened.finish(last=False) is not None
        return loss

    bench.spoil = gather
    bench.assign((0, 4), end="commit", roster=(0, 1))
    bench.run()

    found = [(call.name, call.sequence) for call in bench.member.calls if call is not None]
    gathered = [("line.gather", number) for number in range(3)]
    assert found == [*gathered, ("line.backward", 3), ("running statistics", 4)]


@pytest.mark.parametrize(
    ("bench", "assigned"),
    [(Bench(micro=2), {}), (Bench(), {"micro_batches": 3, "window": 2 * BATCH})],
    ids=["micro-batches", "cadence"],
)
def test_a_part_of_a_share_is_refused(bench: Bench, assigned: dict[str, Any]) -> None:
    bench.assign((0, BATCH), end="commit", **assigned)

    with pytest.raises(RuntimeError, match="leave micro_batch_size out"):
        bench.run()


def gathers_in(bench: Any) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def gather(_body: int, loss: torch.Tensor) -> torch.Tensor:
        bench.stepper.gather(b"mine")
        return loss

    return gather


def test_local_steps_share_no_model_to_gather_from() -> None:
    bench = LocalBench()
    bench.assign((0, 4), end="commit")
    bench.spoil = gathers_in(bench)

    with pytest.raises(RuntimeError, match="makes local steps"):
        bench.run()


def test_the_processes_of_a_host_are_refused() -> None:
    stepper = HostBench().processes[0].stepper

    with pytest.raises(RuntimeError, match="one worker for each GPU"):
        stepper.gather(b"mine")


def test_a_weight_of_the_scripts_own_is_refused() -> None:
    bench = Bench()
    bench.assign((0, 4), end="commit")

    for _ in bench.stepper.batches(lambda: None):
        bench.stepper.gather(b"mine")
        loss = bench.model(bench.inputs[:4]).mean()
        with pytest.raises(ValueError, match="leave weight out"):
            bench.stepper.backward(loss, 3.0)
        bench.stepper.backward(loss, None)
        bench.stepper.try_commit()


def test_a_worker_that_is_alone_gathers_its_own_rows(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    for x, _y, rows in loader:
        z = net(x)
        found = line.gather({"z": z, "rows": rows, "n": 3.0})
        assert found["z"] is z
        assert torch.equal(found["rows"], rows)
        assert found["n"].tolist() == [3.0]
        line.backward(found["z"].square().mean())
        optimizer.step()
        assert line.committed
        break


@pytest.mark.parametrize("samples", [True, False], ids=["samples", "borrowed"])
def test_a_gradient_reaches_own_rows_alone(line: Line, *, samples: bool) -> None:
    net, _optimizer, loader = prepared(line)
    x, _y, _ = next(iter(loader))
    steps: Any = line._session.stepper
    other = torch.arange(3.0).reshape(3, 1)
    mine = pack(net(x)) if samples else b""
    steps.gather = lambda _data: Rows(
        given=[pack(other), mine], rank=1, factor=2.5 if samples else 0.0
    )

    z = net(x)
    found = line.gather(z)
    found.square().sum().backward()

    own = z.detach() if samples else z.detach()[:0]
    assert torch.equal(found.detach(), torch.cat([other, own]))
    # Of the last layer's bias: the sum over own rows.
    assert torch.allclose(net[2].bias.grad, 2.5 * (2 * own).sum(0))  # type: ignore[index]  # a Sequential


def test_a_row_that_is_not_finite_halts_before_anybody_has_it(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, _y, _ = next(iter(loader))
    member: Any = line._session.member
    assigned = replace(member.position.assigned, roster=(0, 1))
    member.position = replace(member.position, assigned=assigned)

    with pytest.raises(LineHalted, match="nan"):
        line.gather(net(x * float("nan")))
