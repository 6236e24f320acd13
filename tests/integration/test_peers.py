"""Collectives between ranks that are threads of one process, over lanes of 127.0.0.1."""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon.protocol.peer_calls import Call, CallKind
from andon.protocol.sessions import RankFault, SessionEnd
from andon.tcp.listening import TcpListener
from andon_trainer.core.peer_plan import Places, places_of
from andon_trainer.core.peer_work import Found, Part, Work
from andon_trainer.errors import CallTimedOut, SessionEnded
from andon_trainer.peers.collective import OpenCall, PeerGroup
from andon_trainer.peers.session import Peers
from andon_trainer.peers.testing import FakeSession, Ranks, RankSeat, formed_for, sessions
from unit.andon.certificates import certify
from unit.andon_trainer.call_cases import COLLECTIVES, collective, reduce_floats

pytestmark = pytest.mark.integration

PATIENCE_S = 20.0
AT_ONCE_S = 4.0
"""How late a busy machine may be: less than the 5 s that opening a lane may take."""


def alone(ranks: int) -> Places:
    return Places(tuple((rank,) for rank in range(ranks)))


def groups_of(ranks: Ranks, name: str = "default") -> list[PeerGroup]:
    everybody = range(len(ranks.peers))
    return [peers.group(name, everybody) for peers in ranks.peers]


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.view(np.uint8).data


def sending(values: np.ndarray[Any, Any], peer: int, tag: int = 0) -> Work:
    call = Call(kind=CallKind.SEND, dtype="float32", count=values.size, tag=tag)
    return Work(call=call, itemsize=4, parts=(Part((bytes_of(values),)),), peer=peer)


def receiving(room: np.ndarray[Any, Any], peer: int | None, tag: int = 0) -> Work:
    call = Call(kind=CallKind.SEND, dtype="float32", count=room.size, tag=tag)
    part = Part((), (bytes_of(room),))
    return Work(call=call, itemsize=4, parts=(part,), peer=peer, receives=True)


def over_of(call: OpenCall) -> SessionEnded:
    with pytest.raises(SessionEnded) as caught:
        call.wait(PATIENCE_S)
    return caught.value


class Closed:
    """A gate that is closed; knows one parameter."""

    def __init__(self, *, expected: bool = False) -> None:
        self.asked = 0
        self.overflows = expected

    def first_bad(self, values: memoryview) -> int | None:
        raise AssertionError("float32 is looked at by the engine")

    def expected(self) -> bool:
        self.asked += 1
        return self.overflows

    def explain(self, part: int, element: int) -> Found:
        return Found(parameter=f"weight{part}", element=(element,))


@contextlib.contextmanager
def session_of(hosts: Sequence[int], folder: Path | None) -> Iterator[Ranks]:
    """Ranks on hosts, which share memory in a folder; none must be left there."""
    dirs = None if folder is None else [folder] * len(hosts)
    with sessions(len(hosts), shared_dirs=dirs, hosts=hosts) as ranks:
        yield ranks
    assert folder is None or not list(folder.iterdir())


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="andon-tests-") as name:
        yield Path(name)


@pytest.mark.parametrize("memory", [False, True], ids=["lanes", "memory"])
@pytest.mark.parametrize(
    "hosts", [[0], [0, 0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 1]], ids=lambda hosts: str(hosts)
)
def test_every_kind_gives_what_it_means_small_and_large_in_place_and_not(
    hosts: list[int], memory: bool, folder: Path
) -> None:
    size, places = len(hosts), alone(len(hosts))
    if memory:
        places = places_of([b"%d" % host for host in hosts])
    with session_of(hosts, folder if memory else None) as ranks:
        groups = groups_of(ranks)
        for kind in COLLECTIVES:
            for counts, in_place in (([0], False), ([300, 5], True), ([200_001, 7], False)):
                case = collective(
                    *(kind, places, counts),
                    root=size - 1,
                    in_place=in_place,
                    uneven=kind is not CallKind.ALL_REDUCE,
                )
                calls = [g.begin(w) for g, w in zip(groups, case.works, strict=True)]
                for call in calls:
                    call.wait(PATIENCE_S)
                for rank in range(size):
                    case.check(rank)
        assert not ranks.session.faults
        report = ranks.peers[0].report()
        assert (report.calls, report.pending) == (len(COLLECTIVES) * 3, None)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 1, 1]], ids=["one host", "two hosts"])
def test_if_memory_can_t_be_shared_the_same_calls_use_lanes(
    hosts: list[int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = places_of([b"%d" % host for host in hosts])
    dirs = [folder / "missing"] * len(hosts)
    with sessions(len(hosts), shared_dirs=dirs, hosts=hosts) as ranks:
        groups = groups_of(ranks)
        for count in (5, 300_000, 7):
            case = collective(CallKind.ALL_REDUCE, places, [count])
            calls = [g.begin(w) for g, w in zip(groups, case.works, strict=True)]
            for rank, call in enumerate(calls):
                call.wait(PATIENCE_S)
                case.check(rank)

    assert "exchanges over TCP lanes" in caplog.text
    assert not list(folder.iterdir())


def test_calls_in_memory_are_made_in_order_by_whoever_waits_or_by_nobody(folder: Path) -> None:
    places = Places(((0, 1),))
    with session_of([0, 0], folder) as ranks:
        groups = groups_of(ranks)
        cases = [
            collective(CallKind.ALL_REDUCE, places, [n + 1], seed=n, in_place=True)
            for n in range(30)
        ]

        def make(rank: int) -> None:
            calls = [
                groups[rank].begin(case.works[rank], awaited=n % 3 == 0)
                for n, case in enumerate(cases)
            ]
            threads = [
                threading.Thread(target=call.wait, args=(PATIENCE_S,)) for call in calls[::-2]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for call in calls:
                call.wait(PATIENCE_S)

        makers = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(PATIENCE_S)

        for case in cases:
            case.check(0)
            case.check(1)


def test_groups_may_be_used_in_different_order_and_made_at_different_times() -> None:
    with sessions(2) as ranks:
        first, second = ranks.peers
        cases = {
            name: collective(CallKind.ALL_REDUCE, alone(2), [count], seed=count)
            for name, count in (("a", 500_000), ("b", 3), ("c", 400_000))
        }
        groups = {name: first.group(name, [0, 1]) for name in "abc"}
        calls = [groups[name].begin(cases[name].works[0]) for name in "abc"]
        # What came of it reached a rank that has no such groups.
        for name in "cba":
            calls.append(second.group(name, [0, 1]).begin(cases[name].works[1]))
        for call in calls:
            call.wait(PATIENCE_S)

        for case in cases.values():
            case.check(0)
            case.check(1)


def test_lanes_are_encrypted_where_there_are_certificates(tmp_path: Path) -> None:
    tls = certify(tmp_path / "ca", tmp_path / "rank", "127.0.0.1")
    with sessions(2, tls=tls) as ranks:
        groups = groups_of(ranks)
        for counts in ([5], [400_000, 3]):
            case = collective(CallKind.ALL_REDUCE, alone(2), counts)
            for call in [g.begin(w) for g, w in zip(groups, case.works, strict=True)]:
                call.wait(PATIENCE_S)
            case.check(0)
            case.check(1)


def test_calls_that_are_begun_together_end_in_order_and_callbacks_are_called_once() -> None:
    with sessions(3) as ranks:
        groups = groups_of(ranks)
        ended: list[tuple[int, int]] = []
        cases = [
            collective(CallKind.ALL_REDUCE, alone(3), [count], seed=count)
            for count in (40_000, 1, 300_000, 2, 3)
        ]
        done = threading.Semaphore(0)
        for rank in (2, 0, 1):
            for number, case in enumerate(cases):
                call = groups[rank].begin(case.works[rank])

                def note(
                    error: BaseException | None, rank: int = rank, number: int = number
                ) -> None:
                    assert error is None
                    ended.append((rank, number))
                    done.release()

                call.then(note)
        for _ in range(15):
            assert done.acquire(timeout=PATIENCE_S)

        for rank in range(3):
            assert [n for r, n in ended if r == rank] == [0, 1, 2, 3, 4]
            for case in cases:
                case.check(rank)


@pytest.mark.parametrize("count", [3, 200_000])
def test_sends_are_matched_by_tag_and_from_any_source(count: int) -> None:
    with sessions(3) as ranks:
        groups = groups_of(ranks)
        values = [np.full(count, rank, np.float32) for rank in range(3)]
        rooms = [np.zeros(count, np.float32) for _ in range(4)]
        # The receives of tag 7 are there before anything is sent, those of tag 0 behind it.
        early = [groups[0].begin(receiving(rooms[0], 2, tag=7))]
        sent = [groups[rank].begin(sending(values[rank], 0)) for rank in (1, 2)]
        sent.append(groups[2].begin(sending(values[0], 0, tag=7)))
        sent.append(groups[1].begin(sending(values[0], 0, tag=7)))
        early.append(groups[0].begin(receiving(rooms[1], 1, tag=7)))
        any_of = [groups[0].begin(receiving(rooms[at], None)) for at in (2, 3)]
        for call in (*early, *sent, *any_of):
            call.wait(PATIENCE_S)

        assert {call.sender for call in any_of} == {1, 2}
        for call, room in zip(any_of, rooms[2:], strict=True):
            assert (room == call.sender).all()
        assert not rooms[0].any()
        assert not rooms[1].any()


def test_a_small_send_ends_before_it_is_received_and_many_wait_for_their_turn() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        sent = [groups[0].begin(sending(np.full(2, n, np.float32), 1)) for n in range(100)]
        for call in sent[:64]:
            call.wait(PATIENCE_S)
        assert not sent[70].done()

        for n in range(100):
            room = np.empty(2, np.float32)
            groups[1].begin(receiving(room, None)).wait(PATIENCE_S)
            assert room[0] == n
        for call in sent:
            call.wait(PATIENCE_S)


@pytest.mark.parametrize("memory", [False, True], ids=["lanes", "memory"])
def test_ranks_that_make_different_calls_all_fail_with_both_calls(
    memory: bool, folder: Path
) -> None:
    places = Places(((0, 1),)) if memory else alone(2)
    case, other = (collective(CallKind.ALL_REDUCE, places, [count]) for count in (10, 12))
    with session_of([0, 0], folder if memory else None) as ranks:
        groups = groups_of(ranks)
        calls = [groups[0].begin(case.works[0]), groups[1].begin(other.works[1])]
        first, second = (over_of(call).over for call in calls)

        assert first is second
        assert first.end is SessionEnd.CALLS_DIFFER
        fault = first.fault
        assert fault is not None
        assert fault.call is not None
        assert fault.other_call is not None
        assert {fault.call.call.count, fault.other_call.call.count} == {10, 12}
        with pytest.raises(SessionEnded):
            groups[0].begin(case.works[0])


@pytest.mark.parametrize(
    ("kind", "count", "element"),
    [
        (CallKind.ALL_REDUCE, 40, 37),
        # What a rank gives, and what it keeps for itself.
        (CallKind.ALL_REDUCE, 300_000, 3),
        (CallKind.ALL_REDUCE, 300_000, 299_997),
        (CallKind.REDUCE_SCATTER, 300_000, 299_997),
    ],
)
@pytest.mark.parametrize(
    ("hosts", "memory"),
    [([0, 0], False), ([0, 0], True), ([0, 0, 1, 1], True)],
    ids=["lanes", "memory", "both"],
)
def test_a_nan_ends_the_session_and_names_rank_parameter_and_element(
    kind: CallKind, count: int, element: int, hosts: list[int], memory: bool, folder: Path
) -> None:
    size = len(hosts)
    with session_of(hosts, folder if memory else None) as ranks:
        groups = groups_of(ranks)
        gates = [Closed() for _ in hosts]
        case = collective(kind, alone(size), [count, count], gates=gates)
        case.arrays[1][1][0][0][element] = math.nan
        # The culprit last: the session may end as soon as it begins.
        calls = [groups[rank].begin(case.works[rank]) for rank in (0, *range(2, size), 1)]
        # Nobody has a result of it.
        over, *_ = (over_of(each).over for each in calls)

        assert (over.end, over.culprit) == (SessionEnd.NON_FINITE, 1), over.message
        assert over.fault is not None
        assert (over.fault.parameter, over.fault.element) == ("weight1", (element,))
        assert over.fault.value == "nan"


def test_a_sum_that_overflows_is_a_reduction_that_is_not_finite() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        case = collective(CallKind.ALL_REDUCE, alone(2), [40], gates=[Closed(), Closed()])
        for rank in (0, 1):
            case.arrays[rank][0][0][0][7] = 3e38
        calls = [g.begin(w) for g, w in zip(groups, case.works, strict=True)]
        over = over_of(calls[0]).over

        assert (over.end, over.culprit) == (SessionEnd.NON_FINITE_REDUCTION, None)
        assert over.fault is not None
        assert (over.fault.element, over.fault.value) == ((7,), "inf")


def test_an_overflow_that_is_expected_stops_nobody() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        gates = [Closed(expected=True), Closed(expected=True)]
        case = collective(CallKind.ALL_REDUCE, alone(2), [70_000], gates=gates)
        case.arrays[1][0][0][0][5] = math.inf
        calls = [g.begin(w) for g, w in zip(groups, case.works, strict=True)]
        for call in calls:
            call.wait(PATIENCE_S)

        assert all(math.isinf(case.arrays[rank][0][1][0][5]) for rank in (0, 1))
        assert gates[1].asked == 1


def test_a_mean_is_the_sum_divided_by_the_number_of_ranks() -> None:
    values = [np.array([1.0, 5.0, 1e-3], np.float32) * (rank + 1) for rank in range(3)]
    rooms = [np.empty(3, np.float32) for _ in range(3)]
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=3, reduction="avg")
    with sessions(3) as ranks:
        calls = [
            group.begin(
                Work(
                    call=call,
                    itemsize=4,
                    parts=(Part((bytes_of(values[rank]),), (bytes_of(rooms[rank]),)),),
                    reduce=reduce_floats,
                )
            )
            for rank, group in enumerate(groups_of(ranks))
        ]
        for each in calls:
            each.wait(PATIENCE_S)

    wanted = (values[0] + values[1] + values[2]) / np.float32(3)
    assert all(room.tobytes() == wanted.tobytes() for room in rooms)


def test_a_call_that_is_late_names_who_is_missing_and_stays_open() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        case = collective(CallKind.ALL_REDUCE, alone(2), [10])
        call = groups[0].begin(case.works[0])
        with pytest.raises(CallTimedOut, match=r"all_reduce\(sum\) of 10 float32.*rank 1"):
            call.wait(0.05)
        pending = ranks.peers[0].report().pending
        assert pending is not None
        assert pending.missing == (1,)

        groups[1].begin(case.works[1]).wait(PATIENCE_S)
        call.wait(PATIENCE_S)


def test_a_rank_that_left_while_another_needs_it_is_named() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        for case in (collective(CallKind.ALL_REDUCE, alone(2), [10]) for _ in range(2)):
            for each in [g.begin(w) for g, w in zip(groups, case.works, strict=True)]:
                each.wait(PATIENCE_S)
        ranks.peers[1].close()
        over = over_of(groups[0].begin(collective(CallKind.BARRIER, alone(2), []).works[0])).over

        assert (over.end, over.culprit) == (SessionEnd.RANK_LEFT, 1)


@pytest.mark.parametrize("used", [False, True], ids=["before the first call", "after one"])
def test_a_neighbour_that_left_is_named_though_nothing_goes_over_lanes(
    used: bool, folder: Path
) -> None:
    with session_of([0, 0], folder) as ranks:
        groups = groups_of(ranks)
        case = collective(CallKind.ALL_REDUCE, Places(((0, 1),)), [10])
        if used:
            for each in [g.begin(w) for g, w in zip(groups, case.works, strict=True)]:
                each.wait(PATIENCE_S)
        call = groups[0].begin(case.works[0])
        ranks.peers[1].close()
        over = over_of(call).over

        assert (over.end, over.culprit) == (SessionEnd.RANK_LEFT, 1)


def test_a_rank_that_leaves_without_taking_what_is_sent_to_it_is_named() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        case = collective(CallKind.BARRIER, alone(2), [])
        for each in [g.begin(w) for g, w in zip(groups, case.works, strict=True)]:
            each.wait(PATIENCE_S)
        room = np.empty(2_000_000, np.float32)
        groups[1].begin(receiving(room, 0))
        # Before it has read all of it.
        sent = groups[0].begin(sending(np.zeros_like(room), 1))
        for lane in ranks.peers[1]._lanes._incoming.values():
            lane.close()
        ranks.peers[1].close()
        over = over_of(sent).over

        assert (over.end, over.culprit) == (SessionEnd.RANK_LEFT, 1)


@pytest.mark.parametrize("memory", [False, True], ids=["lanes", "memory"])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_end_of_a_session_ends_a_call_of_any_kind_on_every_rank_that_waits(
    folder: Path, kind: CallKind, memory: bool
) -> None:
    works = collective(kind, alone(3), [400_000]).works
    with sessions(3, shared_dirs=[folder] * 3 if memory else None) as ranks:
        groups = groups_of(ranks)
        calls = [groups[rank].begin(works[rank]) for rank in (0, 2)]

        ranks.peers[0].fault(RankFault(end=SessionEnd.UNREACHABLE, culprit=1, message="it died"))

        for call in calls:
            # A rank that needs nothing of the others has nothing to wait for.
            with contextlib.suppress(SessionEnded):
                call.wait(PATIENCE_S)
        for rank in (0, 2):
            with pytest.raises(SessionEnded, match="it died"):
                groups[rank].begin(works[rank]).wait(PATIENCE_S)


def test_a_rank_whose_lanes_break_is_accused_at_once() -> None:
    with sessions(2) as ranks:
        groups = groups_of(ranks)
        case = collective(CallKind.ALL_REDUCE, alone(2), [10])
        for each in [g.begin(w) for g, w in zip(groups, case.works, strict=True)]:
            each.wait(PATIENCE_S)
        call = groups[0].begin(case.works[0])
        began = time.monotonic()
        # As a process that is killed does it: its sockets are closed, and nothing is said.
        for lane in ranks.peers[1]._lanes._outgoing.values():
            assert lane.connection is not None
            lane.connection.end()
        over = over_of(call).over

        assert (over.end, over.culprit) == (SessionEnd.UNREACHABLE, 1)
        assert time.monotonic() - began < AT_ONCE_S


def test_faults_of_a_rank_are_told_in_the_order_in_which_they_were_found() -> None:
    told: list[str] = []
    second = threading.Event()

    class Slow(RankSeat):
        def fault(self, fault: RankFault) -> None:
            if fault.message == "first":
                second.wait(0.2)
            else:
                second.set()
            told.append(fault.message)

    with contextlib.closing(TcpListener("127.0.0.1")) as listener:
        address = f"127.0.0.1:{listener.port}"
        peers = Peers(Slow(FakeSession(), 0, formed_for(0, [address])), listener)
        for message in ("first", "second"):
            peers.fault(RankFault(end=SessionEnd.CORRUPT, culprit=0, message=message))
        peers.close()

    assert told == ["first", "second"]


def test_a_rank_that_learns_later_that_the_session_was_formed_is_waited_for() -> None:
    listeners = [TcpListener("127.0.0.1") for _ in range(2)]
    addresses = [f"127.0.0.1:{each.port}" for each in listeners]
    session = FakeSession()
    seats = [RankSeat(session, rank, formed_for(rank, addresses)) for rank in range(2)]
    case = collective(CallKind.ALL_REDUCE, alone(2), [10])
    first = Peers(seats[0], listeners[0])
    call = first.group("default", [0, 1]).begin(case.works[0])
    with pytest.raises(CallTimedOut):
        call.wait(0.1)

    second = Peers(seats[1], listeners[1])
    second.group("default", [0, 1]).begin(case.works[1]).wait(PATIENCE_S)
    call.wait(PATIENCE_S)

    assert not session.faults
    for peers in (first, second):
        peers.close()
    for listener in listeners:
        listener.close()
