"""A worker computes grains of others beside its own, and attests both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from andon.protocol.attestations import Attestation, NodeOwner
from andon.protocol.grains import Node
from andon.protocol.halts import indexed
from andon.protocol.limits import MAX_HASHED_SAMPLES
from andon.protocol.records import PositionRange
from andon_trainer.averaging.attesting import component_hash, digest_of
from andon_trainer.averaging.node_sums import leaves_of
from andon_trainer.data.sample_hashes import sample_hashes
from unit.andon.golden import golden
from unit.andon_trainer.step_bench import StepBench

# Batches of 12 positions in grains of 3; this worker has grains 0 and 1, and verifies others.
OWN = (0, 6)


def bench_of(verifies: tuple[int, ...], **options: Any) -> StepBench:
    bench = StepBench(grain=3, **options)
    bench.assign(OWN, end="commit", attests=True, verifies=verifies)
    return bench


def attested(bench: StepBench, number: int = -1) -> dict[Node, Attestation]:
    """What was attested, by node; of a grain that is there twice, as it was verified."""
    return {each.node: each for each in bench.member.reports[number].attested}


@pytest.mark.parametrize("case", golden("attestations", "digests"), ids=lambda case: case["name"])
def test_a_digest_is_that_of_the_vectors(case: dict[str, Any]) -> None:
    components = [
        None if each is None else torch.frombuffer(bytearray.fromhex(each), dtype=torch.float32)
        for each in case["components"]
    ]

    hashes = [component_hash(each) for each in components]

    assert [each.hex() for each in hashes] == case["hashes"]
    assert digest_of(hashes).hex() == case["digest"]


def test_a_gradient_is_hashed_in_the_order_of_its_elements_whatever_its_strides() -> None:
    values = torch.arange(24.0).reshape(1, 2, 3, 4)

    assert component_hash(values.to(memory_format=torch.channels_last)) == component_hash(values)
    assert component_hash(values.to(torch.bfloat16)) == component_hash(values)


def test_what_is_verified_is_neither_sent_nor_counted() -> None:
    plain, bench = (
        StepBench(grain=3, middle=nn.Dropout(0.5)),
        bench_of((2, 3), middle=nn.Dropout(0.5)),
    )
    plain.assign(OWN, end="commit")

    plain.run()
    bench.run()

    assert bench.computed[2:] == plain.computed
    assert [len(each) for each in bench.computed[:2]] == [3, 3]
    assert bench.sent == plain.sent
    (mine,), (theirs,) = bench.member.reports, plain.member.reports
    assert (mine.loss_sum, mine.weight, mine.correct) == (
        theirs.loss_sum,
        theirs.weight,
        theirs.correct,
    )
    assert mine.timings.computed == theirs.timings.computed == 6
    assert not theirs.attested
    assert not theirs.averages_digest


def test_an_owner_and_whoever_verifies_attest_the_same_of_a_grain_with_dropout() -> None:
    owner = bench_of((2, 3), middle=nn.Dropout(0.5))
    other = StepBench(grain=3, middle=nn.Dropout(0.5))
    other.assign((6, 12), end="commit", attests=True, verifies=(0, 1))

    owner.run()
    other.run()

    nodes = [Node(0, 1), Node(0, 2), Node(1, 2), Node(2, 3), Node(2, 4), Node(3, 4)]
    assert sorted(attested(owner)) == nodes
    assert attested(owner) == attested(other)
    assert all(len(attested(owner)[each].samples) == 24 for each in nodes if len(each) == 1)


def test_a_bit_of_one_gradient_changes_the_digests_of_its_grain_and_of_its_node() -> None:
    honest, wrong = bench_of((2,)), bench_of((2,))

    def flip(body: int, loss: torch.Tensor) -> torch.Tensor:
        return loss if body != 2 else loss * (1 + 2.0**-20)

    wrong.spoil = flip
    honest.run()
    wrong.run()

    differ = {node for node, each in attested(wrong).items() if each != attested(honest)[node]}
    assert differ == {Node(1, 2), Node(0, 2)}  # The third body is its own second grain.


def test_without_grains_of_its_own_a_worker_verifies() -> None:
    bench = StepBench(grain=3)
    bench.assign(end="commit", attests=True, verifies=(1,))
    other = bench_of(())

    bench.run()
    other.run()

    assert attested(bench) == {Node(1, 2): attested(other)[Node(1, 2)]}
    assert bench.member.reports[0].weight == 0


def test_sums_of_a_void_attempt_keep_what_is_attested_of_them() -> None:
    bench = StepBench(grain=3)
    bench.assign(OWN, end="void late", attests=True, verifies=(2,))
    bench.assign((0, 9), end="commit", attempt=1, attests=True, verifies=(3,))

    bench.run()

    assert [len(each) for each in bench.computed] == [3] * 5
    first, second = attested(bench, 0), attested(bench, 1)
    assert sorted(second) == [Node(0, 1), Node(0, 2), Node(1, 2), Node(2, 3), Node(3, 4)]
    assert all(second[node] == first[node] for node in first)


@pytest.mark.parametrize("before", [True, False])
def test_what_is_to_be_computed_anew_or_was_not_hashed_is_not_kept(*, before: bool) -> None:
    bench = StepBench(grain=3)
    bench.assign(OWN, end="void late", attests=before)
    bench.assign(OWN, end="commit", attempt=1, attests=True, anew=before, verifies=(1,))

    bench.run()

    assert len(bench.computed) == 5
    # A grain of its own that is verified as well is there twice.
    nodes = [each.node for each in bench.member.reports[-1].attested]
    assert nodes == [Node(0, 1), Node(0, 2), Node(1, 2), Node(1, 2)]


def test_an_itemised_attestation_has_the_hash_of_each_component() -> None:
    bench = StepBench(grain=3)
    bench.assign(OWN, end="commit", attests=True, verifies=(2,), itemised=True)

    bench.run()

    found = attested(bench)
    components = found[Node(2, 3)].components
    assert digest_of([components]) == found[Node(2, 3)].digest
    assert len(components) == 16 * 5
    assert component_hash(None) in components  # The parameter that nothing uses.
    assert not found[Node(0, 1)].components


def averages(bench: StepBench) -> bytes:
    """The digest of what the line's averages are in `p.grad`."""
    plan = bench.plan.parameters
    flats = map(torch.from_numpy, bench.member.exchange.averages)
    components = [
        part.reshape(parameter.shape) if parameter is not bench.unused else None
        for block, flat in zip(plan, flats, strict=True)
        for parameter, part in zip(
            block, torch.split(flat, [each.numel() for each in block]), strict=True
        )
    ]
    return digest_of(map(component_hash, components))


def test_the_averages_are_attested_as_the_optimizer_will_read_them() -> None:
    bench = bench_of(())

    bench.run()  # It clips them.

    assert bench.member.reports[0].averages_digest == averages(bench)


def with_other_sums(relayed: set[int], divisor: float = 4.0) -> tuple[StepBench, StepBench]:
    """A worker that verifies all grains of the other one, and that one, which has sent its sums.

    `relayed` are the ranks whose sums the line relays to it.
    """
    other, bench = StepBench(grain=3), StepBench(grain=3)
    other.assign((6, 12), end="commit")
    other.run()
    sums = tuple(
        NodeOwner(node=Node(2 * rank, 2 * rank + 2), rank=rank, relayed=rank in relayed)
        for rank in (0, 1)
    )
    bench.assign(OWN, end="commit", attests=True, verifies=(2, 3), sums=sums)
    exchange = bench.member.exchange
    exchange.divisor, exchange.others, exchange.weight_of_others = divisor, other.sent[0], 6.0
    return bench, other


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("divisor", [4.0, 4.0 + 2.0**-20])
def test_the_mean_that_came_is_compared_with_that_of_all_sums(
    divisor: float, *, relayed: bool
) -> None:
    bench, _ = with_other_sums({0} if relayed else set(), divisor)

    bench.run()

    check = bench.member.reports[0].mean_check
    assert check is not None
    assert check.relayed == ((attested(bench)[Node(0, 2)].digest,) if relayed else ())
    assert (check.expected == check.came) is (divisor == 4.0)
    if divisor == 4.0:
        assert check.apart is None
    else:
        assert check.apart is not None
        assert check.apart.came == pytest.approx(check.apart.expected * 4 / divisor)
        assert check.apart.came != check.apart.expected


def seen_by(bench: StepBench, number: int = -1) -> dict[Node, tuple[str, float, float]]:
    """Of each node that a report has two results of: the first element, and both values."""
    layout = bench.plan.layout
    found = {}
    for each in bench.member.reports[number].apart:
        place = layout.place(each.element.block, each.element.element)
        name = indexed(place.parameter, place.element)
        found[each.node] = name, each.element.expected, each.element.came
    return found


def test_the_first_element_is_named_of_a_sum_that_came_changed_and_of_averages_that_were() -> None:
    bench, other = with_other_sums({1})
    sums = [np.frombuffer(block, np.float32).copy() for _, block in sorted(other.sent[0].items())]
    exchange = bench.member.exchange
    first: Any = bench.model[0].weight
    before = float(sums[-1][2])
    sums[-1][2:4] *= 2

    def wait() -> None:
        if bench.member.calls[-1:] not in ([], [None]) and first.grad is not None:
            exchange.averages[:] = sums
            first.grad[1, 1] = 7.0

    bench.member.waited = wait
    bench.run()

    (report,) = bench.member.reports
    assert report.mean_check is not None
    (node, averages) = report.apart
    assert (node.own, node.other) == (
        attested(bench)[Node(2, 4)].digest,
        *report.mean_check.relayed,
    )
    assert averages.own == report.averages_digest
    names = seen_by(bench)
    assert names[Node(2, 4)][1:] == (before, 2 * before)
    assert names[Node(0, 4)][:2] == ("0.weight[1, 1]", 7.0)


def test_who_was_wrong_once_names_the_element_when_it_computes_the_grains_anew() -> None:
    bench = StepBench(grain=3)
    bench.assign(OWN, end="void late", attests=True, verifies=(2,))
    bench.assign(OWN, end="void", attempt=1, attests=True, anew=True, verifies=(2, 3))
    bench.assign(OWN, end="commit", attempt=2, attests=True, anew=True, verifies=(2,))
    bench.spoil = lambda body, loss: loss if body not in (0, 2) else loss * 1.5

    bench.run()

    first, last = bench.member.reports
    assert not first.apart
    named = {each.node: each for each in last.apart}
    assert [*named] == [Node(0, 2), Node(2, 3)]  # One of its own, and one that it verifies.
    for node, each in named.items():
        assert (each.other, each.own) == (
            attested(bench, 0)[node].digest,
            attested(bench)[node].digest,
        )
    _, right, wrong = seen_by(bench)[Node(2, 3)]
    assert wrong == pytest.approx(1.5 * right)


def test_a_grain_of_weight_0_is_absent_for_everybody() -> None:
    (absent,) = {component_hash(each) for each in leaves_of([None], 1.0)}

    assert absent == component_hash(None)


def hashes(batch: Any, samples: int = 3) -> list[bytes]:
    found = sample_hashes(batch, samples, samples)
    return [found[at : at + 8] for at in range(0, len(found), 8)]


def test_a_sample_that_changed_is_the_one_whose_hash_differs() -> None:
    images, labels = torch.rand(3, 2, 2), torch.tensor([4, 5, 6])
    before = hashes({"x": images, "y": [labels, ["a", "b", "c"]]})

    images[1, 0, 0] += 1
    after = hashes({"x": images, "y": [labels, ["a", "b", "C"]]})

    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]


def test_what_belongs_to_no_sample_is_a_part_of_each_hash() -> None:
    rows = torch.arange(3)

    assert not set(hashes((rows, 1.0))) & set(hashes((rows, 2.0)))
    assert hashes({"x": rows, "s": {"b", "a"}}) == hashes({"s": {"a", "b"}, "x": rows})
    assert len(hashes(torch.arange(4))) == 1
    assert len(hashes(rows.to_sparse())) == 1


def test_of_a_large_batch_each_grain_has_one_hash_that_changes_with_each_sample() -> None:
    rows = torch.arange(3)

    whole = sample_hashes(rows, 3, 3, divided=False)

    assert len(whole) == 8
    assert whole != sample_hashes(rows.flip(0), 3, 3, divided=False)
    for positions, size in ((MAX_HASHED_SAMPLES, 24), (MAX_HASHED_SAMPLES + 1, 8)):
        bench = StepBench(grain=3)
        bench.assign(OWN, batch=PositionRange(0, positions), end="commit", attests=True)
        bench.run()
        assert len(attested(bench)[Node(0, 1)].samples) == size


def test_a_position_without_a_sample_has_the_hash_of_no_bytes() -> None:
    assert sample_hashes(None, 0, 2) == bytes.fromhex("2d06800538d394c2") * 2
