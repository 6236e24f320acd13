"""Plans of calls, run in memory and compared with what the call means."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.peer_calls import EAGER_BYTES, Call, CallKind
from andon_trainer.core.collectives import plan_of
from andon_trainer.core.peer_flow import START_BYTES, Flow
from andon_trainer.core.peer_plan import Buffer, Places, Plan, Sizes, Source, Span, places_of
from andon_trainer.core.peer_work import Work
from unit.andon_trainer.call_cases import CASES, Case, collective


class Memory:
    """One rank's spans."""

    def __init__(self, work: Work, plan: Plan) -> None:
        self.work, self.plan = work, plan
        self.scratch = memoryview(bytearray(b"\xff" * plan.scratch_bytes))
        self.got: dict[tuple[int, int | None], int] = {}
        self.made: dict[tuple[int, int | None], int] = {}
        self.given: dict[tuple[int, int], int] = {}

    def view(self, span: Span) -> memoryview:
        if span.buffer is Buffer.SCRATCH:
            return self.scratch[span.start : span.stop]
        part = self.work.parts[span.part]
        views = part.gives if span.buffer is Buffer.GIVES else part.takes
        return views[span.index][span.start : span.stop]

    def row(self, spans: tuple[Span, ...], start: int, stop: int) -> list[memoryview]:
        """The views of some bytes of a transfer."""
        found, at = [], 0
        for span in spans:
            low, high = max(start, at), min(stop, at + span.size)
            if low < high:
                found.append(self.view(span.within(low - at, high - at)))
            at += span.size
        return found

    def ready(self, sources: tuple[Source, ...], size: int) -> int:
        """How many bytes are there of what has these sources."""
        for each in sources:
            done = (
                self.got.get((each.stage, each.transfer), 0)
                if each.make is None
                else self.made.get((each.stage, each.make), 0)
            )
            missing = each.needed - done
            if missing > 0:
                return max(each.start, each.stop - missing)
        return size

    def make(self, step: random.Random) -> bool:
        """Goes on with what can be made; whether anything was."""
        moved = False
        for s, stage in enumerate(self.plan.stages):
            for m, make in enumerate(stage.makes):
                sources = self.plan.make_sources[s][m]
                done = self.made.get((s, m), 0)
                ready = min(self.ready(each, make.out.size) for each in sources)
                ready = ready if ready == make.out.size else ready // 4 * 4
                left = all(
                    self.given.get((s, t)) == each.size for t, each in enumerate(stage.gives)
                )
                if ready > done and (left or not make.after_gives):
                    stop = done + max(4, step.randrange(0, ready - done + 1) // 4 * 4)
                    inputs = [self.view(each.within(done, stop)) for each in make.inputs]
                    out = self.view(make.out.within(done, stop))
                    if make.reduces:
                        assert self.work.reduce is not None
                        self.work.reduce(out, inputs, last=make.last)
                    else:
                        out[:] = bytes(inputs[0])
                    self.made[s, m] = stop
                    moved = True
        return moved


def plans_of(case: Case) -> list[Plan]:
    return [
        plan_of(
            work.call,
            tuple(
                Sizes(tuple(v.nbytes for v in part.gives), tuple(v.nbytes for v in part.takes))
                for part in work.parts
            ),
            work.itemsize,
            case.places,
            rank,
            work.peer,
        )
        for rank, work in enumerate(case.works)
    ]


def run(case: Case, seed: int) -> None:
    """Runs the plans of all ranks in pieces of random lengths and in random order, to the end."""
    step = random.Random(seed)
    ranks = [Memory(w, p) for w, p in zip(case.works, plans_of(case), strict=True)]
    moving = True
    while moving:
        moving = False
        for a in step.sample(range(len(ranks)), len(ranks)):
            moving |= ranks[a].make(step)
            for s, stage in enumerate(ranks[a].plan.stages):
                for t, gives in enumerate(stage.gives):
                    done = ranks[a].given.get((s, t), 0)
                    ready = ranks[a].ready(ranks[a].plan.give_sources[s][t], gives.size)
                    if ready == done:
                        continue
                    stop = done + step.randrange(1, ready - done + 1)
                    there = ranks[gives.peer]
                    index, gets = next(
                        (i, each)
                        for i, each in enumerate(there.plan.stages[s].gets)
                        if each.peer == a
                    )
                    data = b"".join(ranks[a].row(gives.spans, done, stop))
                    for view in there.row(gets.spans, done, stop):
                        view[:], data = data[: view.nbytes], data[view.nbytes :]
                    assert not data
                    there.got[s, index] = ranks[a].given[s, t] = stop
                    moving = True
    for rank in ranks:
        for s, stage in enumerate(rank.plan.stages):
            assert all(rank.got.get((s, i)) == each.size for i, each in enumerate(stage.gets))
            assert all(rank.made.get((s, i)) == each.out.size for i, each in enumerate(stage.makes))


@settings(max_examples=200, deadline=None)
@given(case=CASES, seed=st.integers(0, 2**16))
def test_every_plan_gives_what_its_call_means_in_any_order_of_pieces(case: Case, seed: int) -> None:
    run(case, seed)

    for rank in range(case.places.size):
        case.check(rank)


@settings(max_examples=60, deadline=None)
@given(case=CASES)
def test_what_one_rank_gives_is_what_the_other_one_gets(case: Case) -> None:
    plans = plans_of(case)

    assert len({len(plan.stages) for plan in plans}) == 1
    for stage in range(len(plans[0].stages)):
        gives = {
            (a, each.peer): each.size for a, p in enumerate(plans) for each in p.stages[stage].gives
        }
        gets = {
            (each.peer, b): each.size for b, p in enumerate(plans) for each in p.stages[stage].gets
        }
        assert gives == gets


@pytest.mark.parametrize("count", [3, 100_000])
def test_two_ranks_get_the_sum_of_the_first_and_the_second(count: int) -> None:
    case = collective(CallKind.ALL_REDUCE, Places(((0, 1),)), [count], seed=3)
    first, second = (case.arrays[rank][0][0][0].copy() for rank in (0, 1))

    run(case, 0)

    for rank in (0, 1):
        assert case.arrays[rank][0][1][0].tobytes() == (first + second).tobytes()


def test_ranks_of_one_folder_are_neighbours_and_a_rank_without_one_is_alone() -> None:
    places = places_of([b"b", b"", b"a", b"b", b"", b"a"])

    assert places.hosts == ((0, 3), (1,), (2, 5), (4,))
    assert not places.even
    assert places.alike(2) == (0, 1, 2, 4)


def test_neighbours_give_each_other_their_segments_once_whatever_the_number_of_hosts() -> None:
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=2**20, reduction="sum")
    size = 4 * 2**20
    plan = plan_of(call, (Sizes((size,), (size,)),), 4, Places(((0, 1), (2, 3))), 0)

    # Half of it to the neighbour, and a quarter to the other host, in either direction.
    assert [[(t.peer, t.size) for t in s.gives] for s in plan.stages] == [
        [(1, size // 2)],
        [(2, size // 4)],
        [(2, size // 4)],
        [(1, size // 2)],
    ]
    assert plan.peers == (1, 2)


def test_neighbours_move_first_what_links_wait_for() -> None:
    places, elements = Places(((0, 1), (2, 3), (4, 5))), 6 * 16_000
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=elements, reduction="sum")
    plan = plan_of(call, (Sizes((4 * elements,), (4 * elements,)),), 4, places, 2)

    def order(stage: int) -> list[int]:
        [transfer] = [each for each in plan.stages[stage].gives if each.peer == 3]
        low = min(span.start for span in transfer.spans)
        return [(span.start - low) // 64_000 for span in transfer.spans]

    # Host 1 gives on what hosts 2 and 0 sum, and brings back what it has summed itself first.
    assert order(0) == [2, 0, 1]
    assert order(3) == [1, 2, 0]


def test_a_small_reduction_has_one_stage() -> None:
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=EAGER_BYTES // 4, reduction="sum")
    sizes = (Sizes((EAGER_BYTES,), (EAGER_BYTES,)),)

    assert len(plan_of(call, sizes, 4, Places(((0, 1),)), 0).stages) == 1
    # All of 64 inputs would be more than their halves in two stages.
    many = Places((tuple(range(64)),))
    assert len(plan_of(call, sizes, 4, many, 0).stages) == 2


@pytest.mark.parametrize(("ranks", "each_gets"), [(2, EAGER_BYTES), (9, 2**15), (99, 0)])
def test_the_start_that_follows_begins_at_once_is_bounded(ranks: int, each_gets: int) -> None:
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=2**24, reduction="sum")
    plan = plan_of(
        call, (Sizes((2**26,), (2**26,)),), 4, Places(tuple((r,) for r in range(ranks))), 0
    )

    gives, makes = Flow(plan, 4, frozenset(plan.peers)).advance()

    assert not makes
    assert [each.stop for each in gives] == [each_gets] * (ranks - 1 if each_gets else 0)
    assert each_gets * (ranks - 1) <= START_BYTES


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (Sizes((8,), ()), "takes 0, and not 1 and 1"),
        (Sizes((8,), (6,)), "not whole elements"),
        (Sizes((8,), (12,)), "gives itself 8 bytes, and takes 12"),
    ],
)
def test_parts_that_are_not_those_of_the_call_are_refused(sizes: Sizes, why: str) -> None:
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=2, reduction="sum")

    with pytest.raises(ValueError, match=why):
        plan_of(call, (sizes,), 4, Places(((0, 1),)), 0)


def test_a_receiver_gets_what_the_sender_gives() -> None:
    call = Call(kind=CallKind.SEND, dtype="float32", count=2)
    places = Places(((0,), (1,), (2,)))
    sender = plan_of(call, (Sizes((8,), ()),), 4, places, 0, 2)
    receiver = plan_of(call, (Sizes((), (8,)),), 4, places, 2, 0)

    assert (sender.peers, sender.gives_bytes(2), sender.gets_bytes(2)) == ((2,), 8, 0)
    assert (receiver.peers, receiver.gives_bytes(0), receiver.gets_bytes(0)) == ((0,), 0, 8)
