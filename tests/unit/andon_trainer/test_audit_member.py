"""An auditing worker takes the steps of a run's records, and says what came of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from andon.host.audit_files import AuditAnswer, AuditOrder, AuditRecord, write_order
from andon.host.manifest import CheckpointFacts
from andon.protocol.halts import shown
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, PositionRange, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_trainer.core.reports import Digest, StepReport, Timings
from andon_trainer.errors import JoinRefused
from andon_trainer.place.audit import AuditMember
from andon_trainer.place.candidate import Candidate
from andon_trainer.state.checkpoint_files import save_checkpoint
from andon_trainer.state.replica import Replica

PLAN = RunPlan(global_batch=4, dataset_size=10, seed=3, grain=2, tree=1)
INITIAL = AuditRecord(
    key=Key(9, 1), kind=RecordKind.INITIAL, step=0, cursor=Cursor(0, 0), weights=True
)


class Over(Exception):
    """The process would have ended."""


def step(number: int, epoch: int, start: int, stop: int, **more: Any) -> AuditRecord:
    return AuditRecord(
        key=Key(9, 10 * number),
        kind=RecordKind.STEP,
        step=number,
        cursor=Cursor(epoch, stop),
        epoch=epoch,
        batch=PositionRange(start, stop),
        **more,
    )


def mark(round_: int, step: int, cursor: Cursor) -> AuditRecord:
    return AuditRecord(key=Key(9, round_), kind=RecordKind.MARK, step=step, cursor=cursor)


class Fixed(Replica):
    """Weights with a short digest."""

    def weights(self, *_: Any) -> Digest:
        return Digest(b"\x01\x02")


Joining = Callable[..., AuditMember]


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Joining:
    def end(_code: int) -> None:
        raise Over

    monkeypatch.setattr(os, "_exit", end)

    def join(*records: AuditRecord, plan: RunPlan = PLAN, origin: AuditRecord = INITIAL) -> Any:
        order = AuditOrder(
            run_id="7f3a",
            plan=PLAN,
            layout="",
            origin=origin,
            last_step=records[-1].step,
            report=tmp_path / "report",
        )
        write_order(tmp_path / "order", order, records)
        model = torch.nn.Linear(1, 1)
        candidate = Candidate(
            layout=Layout(()), plan=plan, replica=Replica([model]), device=("cpu", "", 0, 0)
        )
        return AuditMember(
            tmp_path / "order",
            candidate,
            Fixed([model]),
            lambda member: None,
            footprint=lambda: lambda: "",
            can_attest=False,
        )

    return join


def take(member: AuditMember) -> AuditMember:
    """Takes a step; returns the member."""
    assigned = member.next_round()
    size = len(assigned.batch)
    member.report(
        StepReport(key=assigned.key, loss_sum=2.0, weight=4.0, samples=size, timings=Timings())
    )
    committed = member.await_commit()
    assert committed is not None
    assert (committed.record.step, committed.loss) == (assigned.step, 0.5)
    return member


def said(tmp_path: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, (tmp_path / "report").read_text().splitlines())
    return [(line["what"], line["step"]) for line in lines]


def test_weights_are_digested_when_work_is_asked_for_and_the_process_ends_after_the_last(
    joining: Joining, tmp_path: Path
) -> None:
    member = joining(step(1, 0, 0, 4), step(2, 0, 4, 8, weights=True))

    take(take(member))
    assert member.position.stop_reason
    with pytest.raises(Over):
        member.compare(Digest(b"\x03"))

    kinds = ["began", "weights", "step", "step", "weights", "over"]
    assert said(tmp_path) == list(zip(kinds, [0, 0, 1, 2, 2, 2], strict=True))
    assert '"sha256": "03"' in (tmp_path / "report").read_text()


def test_the_first_weight_is_named_that_the_checkpoint_of_a_step_has_otherwise(
    joining: Joining, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = torch.nn.Linear(1, 1)
    bias = float(model.bias.detach())
    model.bias.data.fill_(0.5)
    facts = CheckpointFacts(step=1, head=Key(9, 10), digest="aa", plan=PLAN, cursor=Cursor(0, 4))
    folder = save_checkpoint(tmp_path / "c" / "step-1", {"model": model.state_dict()}, facts)
    torch.manual_seed(5)
    member = joining(step(1, 0, 0, 4, weights=True, checkpoint=str(folder)))

    with pytest.raises(Over):
        take(member).compare(Digest(b"\x03"))

    lines = map(json.loads, (tmp_path / "report").read_text().splitlines())
    _, last = (line["apart"] for line in lines if line["what"] == "weights")
    assert last == {"parameter": "bias", "element": [0], "there": "0.5", "here": shown(bias)}


def test_skipped_positions_are_left_out_and_an_epoch_ends_where_the_line_ended_it(
    joining: Joining,
) -> None:
    member = joining(
        mark(5, 0, Cursor(0, 4)), step(1, 0, 4, 8), mark(15, 1, Cursor(1, 0)), step(2, 1, 0, 4)
    )

    assert member.next_round().batch == PositionRange(4, 8)
    take(member)
    member.leave_epoch()
    assert member.position.cursor == Cursor(1, 0)
    assert member.next_round() == member.next_round()
    assert (member.next_round().epoch, member.next_round().step) == (1, 2)


def test_a_script_that_leaves_an_epoch_where_the_line_went_on_is_told_of(
    joining: Joining, tmp_path: Path
) -> None:
    member = take(joining(step(1, 0, 0, 4), step(2, 0, 4, 8)))

    with pytest.raises(Over):
        member.leave_epoch()

    assert said(tmp_path)[-1] == ("left", 1)


def test_an_overflow_is_the_lines(joining: Joining) -> None:
    member = joining(step(1, 0, 0, 4, overflow=True))

    assigned = member.next_round()
    member.report(
        StepReport(key=assigned.key, loss_sum=0.0, weight=4.0, samples=4, timings=Timings())
    )

    committed = member.await_commit()
    assert committed is not None
    assert committed.overflow


def test_what_workers_told_each_other_is_answered_as_the_line_did(joining: Joining) -> None:
    told = AuditAnswer(sequence=1, value=0.25, weight=3.0, contributors=2, data=(b"a", b"b"))
    cut = AuditAnswer(sequence=0, left_out=True)
    member = joining(step(1, 0, 0, 4, answers=(told,)), step(2, 0, 4, 8, answers=(told, cut)))

    take(member)
    assert member.all_gather(b"own") == (b"own",)
    assert member.scalar_all_reduce(9.0, 1.0) == (0.25, 3.0, 2)
    assert member.all_gather(b"own") == (b"own",)
    take(member)
    # A part of what belongs together would be worse than nothing.
    assert [member.all_gather(b"own") for _ in range(2)] == [(b"own",)] * 2


def test_the_script_of_another_run_is_refused(joining: Joining) -> None:
    other = RunPlan(global_batch=8, dataset_size=10, seed=3, grain=2, tree=1)

    with pytest.raises(JoinRefused, match="the global_batch of run 7f3a is 4, and the script's"):
        joining(step(1, 0, 0, 4), plan=other)
