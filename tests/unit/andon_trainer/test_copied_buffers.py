"""Buffers that are no running statistics: rank 0's after each commit, and moved once a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from andon.protocol.records import PositionRange
from andon_trainer import Line, LineHalted
from andon_trainer.averaging import held_buffers
from andon_trainer.averaging.copied_buffers import StepBuffers
from andon_trainer.averaging.running_statistics import RankZeroStatistics
from andon_trainer.core.calls import Bytes
from andon_trainer.core.events import Assigned
from unit.andon_trainer.assigned_work import work
from unit.andon_trainer.host_bench import HostBench, Process
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.ring_bench import layout_of
from unit.andon_trainer.seat import Seat
from unit.andon_trainer.solo import BATCH, data
from unit.andon_trainer.step_bench import StepBench, ranges


class Memory(nn.Module):
    """Buffers as scripts have them: a queue with its place, a codebook, a mask, a cache."""

    queue: torch.Tensor
    at: torch.Tensor
    codes: torch.Tensor
    mask: torch.Tensor
    cache: torch.Tensor

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, width))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("codes", torch.ones(width), persistent=False)
        self.register_buffer("mask", torch.ones(1).expand(4, 4), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - 0.1 * self.queue.mean(0) + 0 * self.mask.sum()
        if self.training:
            key = x.detach().mean(0)
            self.queue[int(self.at) % 3] = key
            self.at += 1
            self.codes.data.mul_(0.9).add_(0.1 * key)  # No count of torch's tells of this.
            self.cache = torch.zeros(len(x))
        return x


class Worker:
    """A model of one worker, in steps."""

    def __init__(self, rank: int, wire: dict[int, Bytes], norm: int = 0, **assigned: Any) -> None:
        self.memory = Memory()
        self.model = nn.Sequential(self.memory, *(nn.BatchNorm1d(5) for _ in range(norm)))
        self.seat = Seat(layout_of([3]), rank, **{"copies_buffers": True, **assigned})
        self.seat.wire = wire
        statistics = RankZeroStatistics(self.seat.averaging, [self.model])
        self.buffers = StepBuffers(self.seat.averaging, statistics, [self.model])

    def forward(self, seed: int) -> None:
        self.model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)))

    def step(self, *seeds: int, meanwhile: float = 0.0) -> None:
        """`meanwhile`: what the script adds to the codes between backward and the commit."""
        self.seat.calls.clear()
        self.seat.held = 0
        self.seat.next_round()
        self.buffers.begin()
        for seed in seeds:
            self.forward(seed)
        self.buffers.keep()
        assert not self.buffers.follow or self.buffers.exchange(1.0)
        self.memory.codes += meanwhile
        self.buffers.apply()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: part.clone() for name, part in self.model.named_buffers()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.mark.parametrize("norm", [0, 1])
def test_after_each_commit_all_workers_hold_rank_0s_buffers_and_the_log_names_one(
    norm: int, caplog: pytest.LogCaptureFixture
) -> None:
    wire: dict[int, Bytes] = {}
    first, second = (Worker(rank, wire, norm) for rank in (0, 1))

    with caplog.at_level(logging.WARNING):
        for step in range(3):
            first.step(step)
            mine = first.values()
            second.step(10 + step, 20 + step)

    assert same(second.values(), mine)
    assert second.memory.at == 3
    assert [call.sequence for call, _ in second.seat.calls] == list(range(2 + norm))
    assert first.seat.held == second.seat.held == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("a step changes the buffer 0.queue and 2 others: after")


def test_buffers_that_nothing_changes_travel_as_a_byte_each() -> None:
    wire: dict[int, Bytes] = {}
    first, second = (Worker(rank, wire) for rank in (0, 1))
    for worker in (first, second):
        worker.model.eval()
        worker.memory.codes[0] = torch.nan

    for step in range(2):  # In the first one all of rank 0's travel.
        first.step(step)
        second.step(step + 9)

    ((call, _),) = second.seat.calls
    assert call.data is not None
    assert call.data.size - call.head_bytes == 5
    assert second.seat.held == 1


def test_what_changed_here_and_not_at_rank_0_is_put_back() -> None:
    wire: dict[int, Bytes] = {}
    first, second = (Worker(rank, wire) for rank in (0, 1))
    first.model.eval()
    before = {name: part for name, part in second.values().items() if name != "0.cache"}

    for step in range(2):
        first.step(step)
        second.step(step + 9)

        assert same(before, second.values())


@pytest.mark.parametrize(
    ("assigned", "installed"),
    [({"attempt": 1}, False), ({"roster": (0, 2)}, False), ({}, True)],
    ids=["tried again", "another roster", "rank 0 has a donor's state"],
)
def test_rank_0_sends_all_where_another_worker_may_hold_other_values(
    assigned: dict[str, Any], *, installed: bool
) -> None:
    wire: dict[int, Bytes] = {}
    first, second = (Worker(rank, wire) for rank in (0, 1))
    for worker in (first, second):
        worker.model.eval()
        worker.step(0)
    came = Worker(1, wire)  # Its state has what the second one's script wrote between two steps.
    came.memory.codes += 5
    came.model.eval()
    first.seat.stand(installed_from=object() if installed else None)

    for worker in (first, came):
        worker.seat.stand(assigned=replace(worker.seat.assigned, **assigned))
        worker.step(1)

    assert same(lasting(came.model), lasting(first.model))


def test_what_came_in_a_round_that_was_lost_is_not_what_a_worker_that_is_alone_commits() -> None:
    wire: dict[int, Bytes] = {}
    first, second = (Worker(rank, wire) for rank in (0, 1))
    first.step(1)
    second.buffers.begin()
    second.forward(2)
    assert second.buffers.exchange(1.0)  # The step is not committed: the first worker is lost.
    mine = lasting(second.model)

    second.seat.stand(assigned=work())
    assert second.buffers.exchange(1.0)
    second.buffers.apply()

    assert same(mine, lasting(second.model))
    assert not same(mine, lasting(first.model))


def test_a_window_that_is_sent_again_by_a_worker_that_is_alone_has_its_own_buffers() -> None:
    bench = LocalBench(middle=Memory(), buffers=True)
    two: dict[str, Any] = {"roster": (0, 1), "rank": 1, "copies_buffers": True}
    bench.assign((0, 8), end="void at its end", **two)
    bench.assign((0, 8), end="commit", attempt=1, roster=(1,))

    bench.run()

    assert bench.model.get_buffer("1.at") == len(bench.computed) > 0


@pytest.mark.parametrize("middle", [Memory, lambda: nn.BatchNorm1d(5)], ids=["own", "norm"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_window_ahead_that_is_dropped_moves_buffers_once(
    world_size: int, middle: Callable[[], nn.Module]
) -> None:
    bench, calm = (LocalBench(middle=middle(), overlap=True, buffers=True) for _ in range(2))
    ahead: dict[str, Any] = {"ahead": ranges((8, 16)), "ahead_batch": PositionRange(8, 16)}
    line: dict[str, Any] = {"roster": tuple(range(world_size)), "copies_buffers": True}
    for each in (bench, calm):
        each.assign((0, 8), end="commit", **ahead, **line)
        second = each.assign((8, 16), end="commit", **line)
    bench.member.drop_before = second.key

    for each in (bench, calm):
        each.run()

    assert len(bench.computed) > len(calm.computed)
    for name, buffer in lasting(calm.model).items():
        assert torch.allclose(bench.model.get_buffer(name), buffer, rtol=1e-5, atol=1e-7), name
        if not buffer.dim():
            assert buffer == len(calm.computed), "a count of the micro-batches"


@pytest.mark.parametrize("training", [False, True])
def test_what_the_script_writes_between_steps_is_rank_0s_after_the_next_one_and_is_not_lost(
    training: bool,
) -> None:
    wire: dict[int, Bytes] = {}
    first, second, plain = (Worker(rank, wire) for rank in (0, 1, 0))
    for worker in (first, second, plain):
        worker.model.train(training)

    for step in range(3):
        for worker, size in ((first, 1.0), (second, 5.0)):
            worker.step(step + 9 * worker.seat.averaging.rank, meanwhile=size)
            if step < 2:
                worker.memory.codes += 10 * size
                worker.memory.queue += size
    for step in range(3):
        plain.forward(step)
        plain.memory.codes += 1
        if step < 2:
            plain.memory.codes += 10
            plain.memory.queue += 1

    assert torch.equal(first.memory.codes, plain.memory.codes), "nothing of rank 0's is lost"
    assert torch.equal(second.memory.queue, first.memory.queue)
    assert torch.equal(second.memory.codes + 1, first.memory.codes), "its last one comes next time"


def test_workers_of_an_earlier_version_have_their_own_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(1, {}, copies_buffers=False)

    with caplog.at_level(logging.WARNING):
        worker.step(1)
        worker.step(2)

    assert worker.memory.at == 2
    assert not worker.seat.calls
    (record,) = caplog.records
    assert "0.queue, and each worker keeps its own" in record.getMessage()


def test_a_buffer_that_is_too_large_is_refused_by_its_name_once_it_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_buffers, "MOST_BYTES", 40)
    worker = Worker(0, {})
    worker.model.eval()
    worker.step(1)

    worker.model.train()
    with pytest.raises(RuntimeError, match=r"changes the buffer 0\.queue, which is too large"):
        worker.step(2)


def memories() -> nn.Module:
    return nn.Sequential(Memory(), nn.BatchNorm1d(5))


def lasting(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: part for name, part in model.named_buffers() if "cache" not in name}


def test_a_step_moves_buffers_once_however_often_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, once = StepBench(middle=memories()), StepBench(middle=memories())
    bench.assign((0, 4), end="void", roster=(0,))
    bench.assign((0, 4), end="void late", attempt=1, roster=(0,))  # On borrowed samples.
    bench.assign((0, 4), (8, 10), end="commit", attempt=2, roster=(0,))  # And a lost worker's.
    once.assign((0, 4), end="commit", roster=(0,))
    at = bench.model.get_buffer("1.0.at")
    waiting: list[int] = []
    ask = bench.member.next_round

    def asked() -> Assigned:
        waiting.append(int(at))
        return ask()

    monkeypatch.setattr(bench.member, "next_round", asked)

    bench.run()
    once.run()

    assert len(bench.computed) == 3
    assert waiting == [0, 0, 0, 1], "an attempt that is void leaves no trace"
    assert bench.model.get_buffer("1.1.num_batches_tracked") == at == 1
    assert same(lasting(bench.model), lasting(once.model))


def test_samples_that_are_added_are_computed_with_the_buffers_that_the_others_had() -> None:
    def spectral() -> StepBench:
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        vectors = list(layer.buffers())
        for vector in vectors:  # Far from where the iteration goes: each one counts.
            vector.copy_(F.one_hot(torch.tensor(0), 5))
        return StepBench(middle=layer)

    bench, whole = spectral(), spectral()
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), (4, 8), end="commit", attempt=1)
    whole.assign((0, 8), end="commit")

    bench.run()
    whole.run()

    for mine, plain in zip(bench.sent[-1].values(), whole.sent[-1].values(), strict=True):
        ours, theirs = (torch.frombuffer(bytearray(e), dtype=torch.float32) for e in (mine, plain))
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert same(dict(bench.model.named_buffers()), dict(whole.model.named_buffers()))


def test_all_processes_of_a_host_hold_its_first_ones_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 5), memories(), nn.Linear(5, 1))
    bench = HostBench(model=model)
    bench.assign((0, 8), end="void", roster=(0,))
    bench.assign((0, 8), attempt=1, roster=(0,))
    bench.assign((8, 20), roster=(0,))

    assert bench.run() == [None, None]

    first, second = (lasting(process.model) for process in bench.processes)
    assert same(first, second)
    assert first["1.0.at"] == first["1.1.num_batches_tracked"] == 2
    assert not same(first, lasting(model))


def test_what_a_hosts_scripts_write_between_steps_is_its_first_processs() -> None:
    bench = HostBench(model=nn.Sequential(nn.Linear(3, 5), Memory().eval(), nn.Linear(5, 1)))
    for start in (0, 8, 16):
        bench.assign((start, start + 8), roster=(0,))
    leader, follower = bench.processes
    for process in bench.processes:
        commit = process.stepper.try_commit

        def written(process: Process = process, commit: Callable[[], bool] = commit) -> bool:
            done = commit()
            if process.member.position.step == 1:
                process.model.get_buffer("1.codes").add_(3 + process.group.rank)
            if process is follower:
                process.model.get_buffer("1.at").add_(1)
            return done

        process.stepper.try_commit = written  # type: ignore[method-assign]

    assert bench.run() == [None, None]

    follower.model.get_buffer("1.at").sub_(1)  # Its last one, which no step has followed.
    assert same(lasting(follower.model), lasting(leader.model))
    assert leader.model.get_buffer("1.codes").tolist() == [4.0] * 5


def test_a_worker_that_is_alone_leaves_no_trace_of_a_step_that_halted() -> None:
    with Line(seed=3) as line:
        net = nn.Sequential(memories(), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader: Any = DataLoader(data(), BATCH)
        net, optimizer, loader = line.prepare(net, optimizer, loader)
        wrong = [torch.nan, 1.0, 1.0]
        for _ in range(2):
            with suppress(LineHalted):
                for x, y, _ in islice(loader, 2):
                    line.backward(F.mse_loss(net(x), y) * wrong.pop(0))
                    optimizer.step()

        assert line.step == 2
    assert net.get_buffer("0.0.at") == net.get_buffer("0.1.num_batches_tracked") == 2
