"""Which processes make a host: what their DistributedDataParallel says, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from andon.protocol.layout import Layout
from andon.protocol.run_settings import RunPlan
from andon_trainer import Line
from andon_trainer.config import LineConfig
from andon_trainer.data.evaluation import EvaluationShare, Splitting
from andon_trainer.errors import HostLost
from andon_trainer.hosts.calls import answer_in_host
from andon_trainer.hosts.opening import agree_on_plan, config_of_host, group_of, switch_off
from andon_trainer.launchers import LaunchStore
from andon_trainer.model.layout import plan_model
from unit.andon_trainer.host_bench import ThreadGroup, thread_groups
from unit.andon_trainer.solo import SAMPLES, data, model

ON_A_LINE = LineConfig(address="alpha:7070")


class Wrapped(nn.parallel.DistributedDataParallel):
    """As a script makes one, without the collectives that making it takes."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.process_group = group
        self.mixed_precision = None
        self._comm_hooks = []
        self.require_backward_grad_sync = self.require_forward_param_sync = True


@pytest.fixture
def wrapped() -> Iterator[Wrapped]:
    """A model that two processes have."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield Wrapped(model(), dist.group.WORLD)
    dist.destroy_process_group()


def of_all(groups: list[ThreadGroup], call: Any) -> list[Any]:
    """What a call returns, or raises, in each process."""

    def one(group: ThreadGroup) -> Any:
        try:
            return call(group)
        except (ValueError, HostLost) as error:
            return str(error)

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(one, groups))


def test_a_model_that_nobody_wrapped_makes_no_host() -> None:
    assert group_of([], ON_A_LINE) is None


def test_processes_that_andon_run_started_are_told_to_leave_the_wrapper_out(
    wrapped: Wrapped,
) -> None:
    with pytest.raises(TypeError, match=r"leave DistributedDataParallel\(\.\.\.\) out"):
        group_of([wrapped], replace(ON_A_LINE, andon_run=True))


def test_an_audit_of_several_processes_is_told_to_start_one(wrapped: Wrapped) -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 1"):
        group_of([wrapped], replace(ON_A_LINE, audit=Path("audit.json")))


def test_processes_without_a_line_are_told_how_to_start_one(line: Line, wrapped: Wrapped) -> None:
    with pytest.raises(ValueError, match="with torchrun, or set ANDON_ADDRESS"):
        line.prepare(wrapped, DataLoader(data(), 4))


def test_a_communication_hook_is_refused(wrapped: Wrapped) -> None:
    wrapped._comm_hooks.append((print, None))

    with pytest.raises(ValueError, match="leave register_comm_hook out"):
        group_of([wrapped], ON_A_LINE)


def test_mixed_precision_of_the_wrapper_is_refused(wrapped: Wrapped) -> None:
    wrapped.mixed_precision = object()  # type: ignore[assignment]  # not looked into

    with pytest.raises(ValueError, match=r"use torch\.autocast"):
        group_of([wrapped], ON_A_LINE)


def test_models_of_different_groups_are_refused(wrapped: Wrapped) -> None:
    alone = dist.new_group([0])
    assert isinstance(alone, dist.ProcessGroup)

    with pytest.raises(ValueError, match="2 process groups"):
        group_of([wrapped, Wrapped(model(), alone)], ON_A_LINE)
    assert group_of([Wrapped(model(), alone)], ON_A_LINE) is None


def test_the_wrapper_averages_nothing_until_the_line_is_closed(wrapped: Wrapped) -> None:
    undo = switch_off([wrapped])

    assert not wrapped.require_backward_grad_sync
    assert not wrapped.require_forward_param_sync
    undo()
    assert wrapped.require_backward_grad_sync
    assert wrapped.require_forward_param_sync


def test_andon_run_is_known_by_the_run_that_it_gives_to_launchers() -> None:
    ours = {"ANDON_ADDRESS": "a:1", "ANDON_RUN_ID": "7f3a", "TORCHELASTIC_RUN_ID": "7f3a"}

    assert LineConfig.read(ours).andon_run
    assert not LineConfig.read({**ours, "TORCHELASTIC_RUN_ID": "none"}).andon_run
    assert not LineConfig.read({"ANDON_ADDRESS": "a:1"}).andon_run


def test_the_line_counts_hosts_where_torchrun_counts_processes() -> None:
    launch = LaunchStore(
        host="a", port=1, rank=2, world_size=6, hosted_by_agent=True, one_host=True
    )
    config = LineConfig(launch_slot=2, launch=launch)

    found = config_of_host(config, thread_groups(2)[0])

    assert found.launch_slot is None
    assert found.launch == replace(launch, world_size=3)


def test_processes_that_prepare_something_else_than_their_leader_are_named_on_all() -> None:
    layout: Layout = plan_model([model()]).layout
    plan = RunPlan(global_batch=8, seed=1)

    same = of_all(thread_groups(3), lambda group: agree_on_plan(group, layout, plan))
    other = of_all(
        thread_groups(3),
        lambda group: agree_on_plan(group, layout, replace(plan, seed=5 if group.rank == 2 else 1)),
    )

    slower = of_all(
        thread_groups(2),
        lambda group: agree_on_plan(group, layout, plan, (("threads", str(1 + group.rank)),)),
    )

    assert same == [None] * 3
    assert len(set(other)) == 1
    assert "seed is 5 at process 2 of this host and 1 at process 0" in other[0]
    assert len(set(slower)) == 1
    assert (
        "process 1 of this host computes with threads 2, and process 0 with threads 1" in slower[0]
    )


def test_an_answer_is_for_all_processes_and_so_is_a_failure() -> None:
    def double(given: list[bytes]) -> bytes:
        return b"".join(given) * 2

    def fail(_given: list[bytes]) -> bytes:
        raise ValueError("too much")

    def each(group: ThreadGroup, ask: Any) -> Any:
        return answer_in_host(group, "line.gather", b"%d" % group.rank, ask)

    assert of_all(thread_groups(2), lambda group: each(group, double)) == [b"0101"] * 2
    mine, theirs = of_all(thread_groups(2), lambda group: each(group, fail))
    assert mine == "too much"
    assert "another process of this host failed" in theirs


def test_an_evaluation_is_divided_among_hosts_and_then_inside_each() -> None:

    loader = DataLoader(data(), 4)
    places = [EvaluationShare(0, 2, part, 3) for part in range(3)] + [EvaluationShare(1, 2)]

    seen = [
        int(row)
        for place in places
        for _x, _y, rows in Splitting(torch.device("cpu")).split(loader, place, seed=1)[1]
        for row in rows
    ]

    whole = [
        number
        for place in places
        for number, _ in Splitting(torch.device("cpu")).whole_batches(loader, seed=1).deal(place)
    ]

    assert seen == list(range(SAMPLES))
    assert whole == list(range(len(loader)))
