"""Works: what a collective returns."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from andon.protocol.peer_calls import Call, CallKind
from andon_torch.tensors import Staging
from andon_torch.testing import FakeCall
from andon_torch.works import CallWork, SeveralWorks
from andon_trainer.core.peer_work import Work


def begun() -> FakeCall:
    return FakeCall(Work(call=Call(kind=CallKind.BARRIER), itemsize=1))


def test_a_future_has_the_tensors_with_the_result() -> None:
    call, tensor = begun(), torch.ones(2)
    work = CallWork(call, Staging(), [tensor], 5)
    seen: list[list[torch.Tensor]] = []

    work.get_future().then(lambda done: seen.append(done.value()))
    assert not work.is_completed()
    call.end()

    assert seen[0][0] is tensor
    assert work.is_success()
    assert work.get_future().wait()[0] is tensor


def test_the_error_of_a_future_is_raised_by_its_callback() -> None:
    call = begun()
    work = CallWork(call, Staging(), [], 5)
    future = work.get_future()

    call.end(RuntimeError("rank 1 is gone"))

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        work.wait()
    assert not work.is_success()
    assert "rank 1 is gone" in str(work.exception())


def test_a_future_that_is_asked_for_late_is_complete() -> None:
    call = begun()
    work = CallWork(call, Staging(), [], 5)

    call.end()

    assert work.get_future().done()


def test_a_result_does_not_land_after_an_error() -> None:
    call, staging = begun(), Staging()
    tensor = torch.zeros(2, 3).t()
    staging.takes(tensor)[:] = bytes([255]) * 24
    work = CallWork(call, staging, [tensor], 5)

    call.end(RuntimeError("over"))

    assert not tensor.any()
    assert work.is_completed()


def test_waiting_longer_than_the_work_s_own_limit_is_the_caller_s_choice() -> None:
    waited: list[float | None] = []
    call = begun()
    call.ended = True
    call.wait = waited.append  # type: ignore[method-assign,assignment]
    work = CallWork(call, Staging(), [], 5)

    work.wait()
    work.wait(timedelta(seconds=9))

    assert waited == [5, 9]


def test_several_works_are_one() -> None:
    calls = [begun(), begun()]
    works = [CallWork(call, Staging(), [torch.ones(1)], 5) for call in calls]
    several = SeveralWorks([*works], [torch.ones(2)])
    future = several.get_future()

    calls[0].end()
    assert not several.is_completed()
    calls[1].end(RuntimeError("over"))

    with pytest.raises(RuntimeError, match="over"):
        several.wait()
    with pytest.raises(RuntimeError, match="over"):
        future.wait()
