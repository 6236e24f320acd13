"""An interrupted state transfer continues where it stopped; no partial state is installed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from andon.protocol.records import Cursor, Key
from andon_reducer.config import ReducerConfig
from andon_trainer.core.effects import ReportState
from andon_trainer.core.events import Assigned, Dismissed, Event, TransferAsked
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.giving import StateGiver
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import (
    PartialState,
    StateMover,
    persistently,
    receive_state,
    send_state,
)
from andon_trainer.exchange.path import Inbox
from integration.cut import Cable
from integration.harness import wait_until
from integration.reducer_bench import RUN, Reducer
from integration.state_moves import GIVEN, MIB, PATIENCE_S, STATE, NoState, nobody, nothing, ticket
from unit.andon_trainer.assigned_work import work

pytestmark = pytest.mark.integration


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    with Reducer(ReducerConfig()) as served:
        yield served


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def transfer(
    threads: ThreadPoolExecutor, reducer: Reducer, cable: Cable, arrived: PartialState, number: int
) -> tuple[Future[None], Future[bytearray]]:
    """Sends STATE to a receiver at the other end of the cable."""
    sender = ticket(f"127.0.0.1:{reducer.port}", 0, number)
    receiver = ticket(cable.address, 1, number)
    return (
        threads.submit(send_state, sender, GIVEN, nothing, nobody),
        threads.submit(receive_state, receiver, arrived, nothing, nobody),
    )


def test_state_that_was_cut_off_goes_on_where_it_was(
    reducer: Reducer, threads: ThreadPoolExecutor
) -> None:
    arrived = PartialState()
    with Cable(reducer.port, carries_bytes=15 * MIB) as cable:
        sent, got = transfer(threads, reducer, cable, arrived, 1)
        assert isinstance(got.exception(PATIENCE_S), grpc.RpcError)
        error = sent.exception(PATIENCE_S)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.ABORTED
    held = len(arrived.data)
    # How much of it had been read depends on the machine.
    assert 0 < held <= 15 * MIB

    with Cable(reducer.port) as cable:
        sent, got = transfer(threads, reducer, cable, arrived, 2)
        assert got.result(PATIENCE_S) == STATE
        sent.result(PATIENCE_S)

    assert cable.carried_bytes < len(STATE) - held + MIB
    assert arrived == PartialState()


def test_a_state_that_nobody_waits_for_goes_on_over_a_connection_that_breaks(
    reducer: Reducer, threads: ThreadPoolExecutor
) -> None:
    arrived, sent_bytes = PartialState(), [0]

    def note(so_far: int, _whole: int) -> None:
        sent_bytes[0] = so_far

    sender = ticket(f"127.0.0.1:{reducer.port}", 0, 1)
    send = partial(send_state, sender, GIVEN, note, nobody)
    with Cable(reducer.port, carries_bytes=15 * MIB) as first, Cable(reducer.port) as second:
        addresses = iter((first.address, second.address))
        sent = threads.submit(persistently, send, lambda: sent_bytes[0])
        got = persistently(
            lambda: receive_state(ticket(next(addresses), 1, 1), arrived, nothing, nobody),
            lambda: len(arrived.data),
        )
        sent.result(PATIENCE_S)

    assert got == STATE
    # How much of the first 15 MiB had been read depends on the machine.
    assert second.carried_bytes < len(STATE)


@pytest.mark.parametrize(
    ("code", "tries"),
    [
        (grpc.StatusCode.UNAVAILABLE, 8),
        (grpc.StatusCode.CANCELLED, 1),
        (grpc.StatusCode.UNAUTHENTICATED, 1),
    ],
)
def test_a_transfer_that_moves_nothing_is_not_tried_for_ever(
    code: grpc.StatusCode, tries: int
) -> None:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return code

    def move() -> None:
        called.append(1)
        raise Failed

    called: list[int] = []
    waits: list[float] = []
    with pytest.raises(Failed):
        persistently(move, lambda: 0, waits.append)

    assert len(called) == tries
    assert len(waits) == tries - 1
    assert waits == sorted(waits)


def test_c_commit_001_what_came_of_another_state_is_thrown_away(
    reducer: Reducer, threads: ThreadPoolExecutor
) -> None:
    arrived = PartialState(bytearray(b"of an older head"), b"\1" * 32)

    with Cable(reducer.port) as cable:
        sent, got = transfer(threads, reducer, cable, arrived, 1)
        assert got.result(PATIENCE_S) == STATE
        sent.result(PATIENCE_S)


def test_progress_is_told_up_to_the_whole_at_both_ends(
    reducer: Reducer, threads: ThreadPoolExecutor
) -> None:
    told: dict[str, list[tuple[int, int]]] = {"sent": [], "received": []}
    address = f"127.0.0.1:{reducer.port}"

    sent = threads.submit(
        send_state, ticket(address, 0, 1), GIVEN, lambda *it: told["sent"].append(it), nobody
    )
    receiver = ticket(address, 1, 1)
    receive_state(receiver, PartialState(), lambda *it: told["received"].append(it), nobody)
    sent.result(PATIENCE_S)

    for steps in told.values():
        assert steps == sorted(steps)
        assert steps[-1] == (len(STATE), len(STATE))


def test_why_a_transfer_failed_is_said_in_one_line(reducer: Reducer) -> None:
    joined = SimpleNamespace(run_id=RUN, worker=0, session_token=b"wrong")
    control = SimpleNamespace(show=lambda *_: None, at_end=lambda *_: None)
    address = f"127.0.0.1:{reducer.port}"
    link = SimpleNamespace(joined=joined, control=control, address=address, tls=None)
    asked = TransferAsked(transfer_id=1, head=Key(7, 3), sends=True, step=3, cursor=Cursor(0, 4))

    why = StateMover(cast(Connection, link), NoState()).move(asked)

    assert why.startswith("UNAUTHENTICATED: ")
    assert "\n" not in why


def test_a_sender_whose_receiver_was_faster_says_nothing_of_a_failure(
    reducer: Reducer, caplog: pytest.LogCaptureFixture
) -> None:
    joined = SimpleNamespace(run_id=RUN, worker=0, session_token=ticket("", 0, 0).session_token)
    # The transfer is over for the line before the sender's call has ended.
    control = SimpleNamespace(show=lambda *_: None, at_end=lambda _, act: act and act())
    address = f"127.0.0.1:{reducer.port}"
    link = SimpleNamespace(joined=joined, control=control, address=address, tls=None)
    asked = TransferAsked(transfer_id=1, head=Key(7, 3), sends=True, step=3, cursor=Cursor(0, 4))

    why = StateMover(cast(Connection, link), NoState()).move(asked)

    assert why == "the transfer is over"
    assert not caplog.records


class Changing(NoState):
    """A state that training changes."""

    def __init__(self) -> None:
        self.data = STATE

    def packed(self) -> PackedState:
        return PackedState([self.data])


class Donor:
    """A worker that gives its state while it trains on."""

    def __init__(self, reducer: Reducer, state: NoState, token: bytes | None = None) -> None:
        self.reports: queue.SimpleQueue[ReportState] = queue.SimpleQueue()
        self.acts: list[Callable[[], object] | None] = []
        address = f"127.0.0.1:{reducer.port}"
        token = ticket(address, 0, 0).session_token if token is None else token
        control = SimpleNamespace(
            send=self.reports.put, at_end=lambda _id, act: self.acts.append(act)
        )
        link: Any = SimpleNamespace(
            joined=SimpleNamespace(run_id=RUN, worker=0, session_token=token),
            **{"control": control, "address": address, "tls": None},
        )
        self.giver = StateGiver(link, state)

    def give(self, number: int) -> None:
        self.giver.give(replace(BESIDE, transfer_id=number))


BESIDE = TransferAsked(
    transfer_id=1, head=Key(7, 3), sends=True, step=3, cursor=Cursor(0, 4), beside_training=True
)


def test_a_state_that_is_given_beside_training_is_that_of_its_head(reducer: Reducer) -> None:
    state = Changing()
    donor = Donor(reducer, state)
    donor.give(1)
    state.data = b"of a later head"

    got = receive_state(ticket(f"127.0.0.1:{reducer.port}", 1, 1), PartialState(), nothing, nobody)

    assert got == STATE
    assert donor.reports.get(timeout=PATIENCE_S) == ReportState(1, Key(7, 3), "")
    donor.giver.close(PATIENCE_S)


def test_memory_for_a_copy_is_got_once_and_beside_training(reducer: Reducer) -> None:
    asked: list[int] = []
    got: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Large(NoState):
        def room_ahead(self) -> Callable[[], None]:
            asked.append(threading.get_ident())
            return lambda: got.put(threading.get_ident())

    giver = Donor(reducer, Large()).giver
    for _ in range(50):
        giver.get_ready()

    assert got.get(timeout=PATIENCE_S) != threading.get_ident()
    assert asked == [threading.get_ident()], "only this thread may look at the state"


def test_a_state_that_can_not_be_looked_at_disturbs_nobody_until_it_is_needed(
    reducer: Reducer,
) -> None:
    class Unfit(NoState):
        def room_ahead(self) -> Callable[[], None]:
            raise RuntimeError("consolidate the state first")

    giver = Donor(reducer, Unfit()).giver
    for _ in range(50):
        giver.get_ready()


@pytest.mark.parametrize("how", ["refused", "cut short", "can't be packed"])
def test_a_state_that_can_not_be_given_is_reported_and_nothing_else_happens(
    reducer: Reducer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    class Unfit(NoState):
        def packed(self) -> PackedState:
            raise TypeError("a lambda")

    state = Unfit() if how == "can't be packed" else Changing()
    donor = Donor(reducer, state, b"wrong" if how == "refused" else None)
    donor.give(1)
    if how == "cut short":  # Nobody receives; the control stream ends.
        wait_until(lambda: donor.acts)
        assert donor.acts[0] is not None
        donor.acts[0]()

    report = donor.reports.get(timeout=PATIENCE_S)

    assert (report.transfer_id, report.head) == (1, Key(7, 3))
    assert report.failure
    # A transfer that is over for the line is no failure, for people.
    assert ("a state transfer failed" in caplog.text) is (how != "cut short")
    donor.giver.close(PATIENCE_S)


def test_a_worker_gives_its_state_to_no_more_than_two_at_once(reducer: Reducer) -> None:
    donor = Donor(reducer, Changing())
    for number in (1, 2, 3):
        donor.give(number)

    report = donor.reports.get(timeout=PATIENCE_S)

    assert report.transfer_id == 3
    assert "others already" in report.failure
    wait_until(lambda: len(donor.acts) == 2)
    for act in donor.acts[:2]:  # What ends adds another one.
        assert act is not None
        act()
    donor.giver.close(PATIENCE_S)


def attends(*, attends: bool) -> Assigned:
    return replace(work(), attends=attends)


@pytest.mark.parametrize(
    ("asked", "then", "ended"),
    [
        (replace(BESIDE, sends=False), attends(attends=True), False),
        (replace(BESIDE, sends=False), attends(attends=False), True),
        (replace(BESIDE, sends=False), replace(BESIDE, sends=False, transfer_id=2), True),
        (replace(BESIDE, beside_training=False), attends(attends=False), True),
        (BESIDE, attends(attends=False), False),
        (BESIDE, replace(BESIDE, transfer_id=2), True),
        # Nobody else sends a state to a worker that is dismissed.
        (replace(BESIDE, sends=False), Dismissed("the run is over"), True),
        (replace(BESIDE, sends=False, beside_training=False), Dismissed("it is over"), True),
        # The worker that has the state of this one may go on.
        (replace(BESIDE, beside_training=False), Dismissed("notice"), False),
        (BESIDE, Dismissed("notice"), False),
        # Unless the run is over for that one, too: it may never ask for the state.
        (replace(BESIDE, beside_training=False), Dismissed("it is over", "drained"), True),
    ],
)
def test_what_ends_a_transfer_for_one_of_its_ends(
    asked: TransferAsked, then: Event, *, ended: bool
) -> None:
    stream = ControlStream("127.0.0.1:1", Inbox(), 1, outbox=ScalarOutbox())
    called: list[int] = []
    stream._note_transfer(asked)
    stream.at_end(1, lambda: called.append(1))

    stream._note_transfer(then)

    assert bool(called) is ended
    stream.close()
