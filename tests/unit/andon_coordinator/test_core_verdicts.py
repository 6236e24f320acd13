"""Whom an inquest convicts: whoever is wrong, if two others prove it, and never anybody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.attestations import Attestation
from andon.protocol.grains import Node
from andon.protocol.halts import HaltReason
from andon.protocol.records import PositionRange
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.given import Given
from andon_coordinator.core.verdicts import Inquest, different_nodes, judge, open_inquest
from andon_coordinator.core.verification import deal, in_attested, is_drawn
from scenarios import line_values
from scenarios.attesting import attested

ARITHMETIC = (("processor", "x"),)
Change = Callable[[tuple[Attestation, ...]], tuple[Attestation, ...]]


def shares(workers: int, count: int) -> list[tuple[int, ...]]:
    """Whole grains for each of them, in one run each."""
    ends = [count * rank // workers for rank in range(workers + 1)]
    return [tuple(range(*pair)) for pair in pairwise(ends)]


def verified(
    given: dict[int, Given],
    count: int,
    verifies: list[tuple[int, ...]],
    wrong: Mapping[int, Mapping[str, str]],
) -> None:
    """Each worker attests its own grains and these; `wrong` is by worker."""
    for worker, owned in enumerate(shares(len(verifies), count)):
        terms = line_values.assignment(
            batch=PositionRange(0, count),
            positions=tuple(PositionRange(grain, grain + 1) for grain in owned),
            attests=True,
            verifies=verifies[worker],
            itemised=True,
        )
        one = given.setdefault(worker, Given(worker, worker, ARITHMETIC))
        one.add(attested(terms, 1, wrong=wrong.get(worker, {})))


def inquest_of(
    workers: int, count: int, first: Mapping[int, Mapping[str, str]]
) -> tuple[Inquest | None, dict[int, Given]]:
    """What a first round leads to in which these workers were wrong."""
    given: dict[int, Given] = {}
    dealt = deal(shares(workers, count), [ARITHMETIC] * workers)
    verified(given, count, list(dealt), first)
    if not different_nodes(given.values()):
        return None, given
    return open_inquest(given, count=count, components=4), given


@st.composite
def errors(draw: st.DrawFn, count: int) -> dict[str, str]:
    """What a worker computes wrong: grains, and sums of nodes."""
    grains = draw(st.dictionaries(st.integers(0, count - 1).map(str), st.sampled_from("ab")))
    nodes = [f"{first}+{size}" for size in (2, 4) for first in range(0, count - size + 1, size)]
    sums = draw(st.dictionaries(st.sampled_from(nodes or ["9+2"]), st.sampled_from("ab")))
    return grains | sums


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_one_faulty_worker_of_three_or_more_is_convicted(data: st.DataObject) -> None:
    workers, count = data.draw(st.integers(3, 6)), data.draw(st.integers(3, 13))
    faulty = data.draw(st.integers(0, workers - 1))
    once, later = data.draw(errors(count)), data.draw(errors(count))

    inquest, known = inquest_of(workers, count, {faulty: once})
    if inquest is None:
        return
    asked = [inquest.grains[ARITHMETIC]] * workers
    verified(known, count, asked, {faulty: later})
    found = judge(inquest)

    assert [each.worker for each in found.convicted] == [faulty]
    assert faulty in found.differ


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_two_workers_convict_nobody(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    inquest, known = inquest_of(2, count, {1: {"0": "a"}, 0: data.draw(errors(count))})
    if inquest is None:
        return
    verified(known, count, [inquest.grains[ARITHMETIC]] * 2, {1: data.draw(errors(count))})

    assert not judge(inquest).convicted


def test_a_worker_that_is_wrong_in_each_grain_and_in_the_control_is_convicted() -> None:
    wrong = {str(grain): "always" for grain in range(3)}
    inquest, known = inquest_of(3, 3, {1: wrong})
    assert inquest is not None
    assert inquest.grains[ARITHMETIC] == (0, 1, 2), "the control is what nobody disputes: grain 0"
    verified(known, 3, [inquest.grains[ARITHMETIC]] * 3, {1: wrong})

    found = judge(inquest)

    assert [each.worker for each in found.convicted] == [1]
    assert (found.witnesses, found.apart) == ((0, 2), 2)


def test_two_pairs_that_contradict_each_other_convict_nobody() -> None:
    odd = {"0": "a"}
    inquest, known = inquest_of(4, 4, {0: odd, 1: odd})
    assert inquest is not None
    verified(known, 4, [inquest.grains[ARITHMETIC]] * 4, {0: odd, 1: odd})

    found = judge(inquest)

    assert (found.convicted, found.why) == ((), "witnesses contradict each other")


def test_who_has_its_weights_from_the_accused_is_no_witness_against_it() -> None:
    inquest, known = inquest_of(3, 6, {0: {"0": "a"}})
    assert inquest is not None
    verified(known, 6, [inquest.grains[ARITHMETIC]] * 3, {0: {"0": "a"}})

    for dependent, convicted in (({}, [0]), ({1: 0}, []), ({1: 2, 2: 1}, [0])):
        inquest.given = {at: replace(each, source=dependent.get(at)) for at, each in known.items()}
        assert [each.worker for each in judge(inquest).convicted] == convicted


def test_another_arithmetic_is_neither_accused_nor_a_witness() -> None:
    inquest, known = inquest_of(3, 6, {0: {"0": "a"}})
    assert inquest is not None
    verified(known, 6, [inquest.grains[ARITHMETIC]] * 3, {0: {"0": "a"}})
    inquest.given = known | {1: replace(known[1], arithmetic=(("processor", "y"),))}

    assert not judge(inquest).convicted


def test_a_control_leaves_the_disputed_sums_as_they_are() -> None:
    inquest, _ = inquest_of(3, 6, {0: {"0+2": "a"}})

    assert inquest is not None
    assert inquest.nodes[ARITHMETIC] == (Node(0, 2),)
    assert inquest.grains[ARITHMETIC] == (0, 1, 2)


@pytest.mark.parametrize(("components", "grains"), [(4, 5), (2**14, 2), (2**15, 5)])
def test_components_are_itemised_as_far_as_they_fit_a_report(components: int, grains: int) -> None:
    wrong = {str(grain): "a" for grain in range(5)}
    _, known = inquest_of(3, 6, {0: wrong, 1: wrong})

    inquest = open_inquest(known, count=6, components=components)

    assert len(inquest.grains[ARITHMETIC]) == grains
    assert inquest.itemised is (components < 2**15)


def test_of_two_disputed_sums_that_would_be_joined_one_is_computed_again() -> None:
    # Worker 0 adds wrong twice: in its own sum, and in that of worker 1, which it verifies.
    inquest, known = inquest_of(4, 8, {0: {"0+2": "a", "2+2": "a"}})
    assert inquest is not None
    assert inquest.nodes[ARITHMETIC] == (Node(0, 2), Node(2, 4))
    assert inquest.grains[ARITHMETIC] == (0, 1, 4), "with those of the other sum: 0 to 3"

    verified(known, 8, [inquest.grains[ARITHMETIC]] * 4, {})

    assert [each.worker for each in judge(inquest).convicted] == [0]


def test_grains_are_dealt_to_the_next_rank_with_grains_and_the_same_arithmetic() -> None:
    other = (("processor", "y"),)
    owned = [(0, 1), (2, 3, 4, 5), (), (6,)]

    assert deal(owned, [ARITHMETIC] * 4) == ((2, 3, 4), (6,), (6,), (0, 1))
    assert deal(owned, [ARITHMETIC, other, other, ARITHMETIC]) == ((6,), (), (2,), (0, 1))
    assert deal(owned, [()] * 4) == ((), (), (), ())


def test_so_many_steps_are_drawn_as_were_asked_for() -> None:
    drawn = [step for step in range(4000) if is_drawn(b"key", step, 0.25)]

    assert 900 < len(drawn) < 1100
    assert drawn != [step for step in range(4000) if is_drawn(b"another", step, 0.25)]
    assert not any(is_drawn(b"key", step, 0.0) for step in range(99))
    assert all(is_drawn(b"key", step, 1.0) for step in range(99))


def _without(first: int) -> Change:
    return lambda given: tuple(each for each in given if each.node != Node(first, first + 1))


@pytest.mark.parametrize(
    ("change", "averages", "said"),
    [
        (_without(1), bytes(16), "attested nothing of grain 1"),
        (_without(4), bytes(16), "attested nothing of grain 4"),
        (lambda given: given[:2], bytes(16), "attested nothing of grains 0 to 1"),
        (lambda given: (*given, given[0]), bytes(16), "attested grain 0, unasked"),
        (lambda given: given, b"", "nothing of the averages"),
        (
            lambda given: (*given[:-1], replace(given[-1], components=b"")),
            bytes(16),
            "attested 0 of 4 components of grain 4",
        ),
    ],
)
def test_a_report_attests_all_that_was_asked_and_nothing_else(
    change: Change, averages: bytes, said: str
) -> None:
    own, verifies = (PositionRange(0, 2),), (4,)
    terms = line_values.assignment(
        batch=PositionRange(0, 6), positions=own, attests=True, verifies=verifies, itemised=True
    )
    given = attested(terms, 1)

    def defect(given: tuple[Attestation, ...], averages: bytes) -> LineDefect | None:
        ready = line_values.ready(attested=given, averages_digest=averages)
        return in_attested(3, ready, own, verifies, count=6, components=4)

    assert defect(given, bytes(16)) is None
    found = defect(change(given), averages)
    assert found is not None
    assert (found.reason, found.worker) == (HaltReason.PROTOCOL_VIOLATION, 3)
    assert said in found.message
