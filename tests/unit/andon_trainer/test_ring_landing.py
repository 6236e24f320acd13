"""What is done with a ring's chunk while it is received comes to the same as done afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from andon.protocol.encoding import Encoding, encode
from andon.protocol.messages import RingChunk, RingStage
from andon.protocol.records import Key
from andon.wire.checksums import crc32c_of
from andon_trainer.core.ring_landing import (
    PIECE_BYTES,
    Landings,
    MeanLanding,
    SumLanding,
    checked_own,
)
from andon_trainer.core.values import NotFinite, Source, add_product
from unit.andon_trainer.ring_bench import KEY, Floats, land

COUNT = 2 * PIECE_BYTES // 4 + 1001
"""Elements of two pieces and a short third one."""


def numbers(seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(COUNT, dtype=np.float32)


def chunk(stage: RingStage, given: Floats, key: Key = KEY, sequence: int = 0) -> RingChunk:
    message = RingChunk(
        key=key,
        sequence=sequence,
        stage=stage,
        block=1,
        offset=5,
        count=given.size,
        payload=encode(given, Encoding.FLOAT32),
    )
    return replace(message, crc32c=crc32c_of(message))


def sum_landing(own: Floats, out: Floats) -> SumLanding:
    sent = chunk(RingStage.PARTIAL_SUM, out)
    return SumLanding(own=own, share=0.25, came_share=0.75, out=out, sent=sent)


def landed(landing: MeanLanding | SumLanding, came: RingChunk) -> MeanLanding | SumLanding:
    landings = Landings(KEY, 0, checked=True)
    landings.add(came.stage, came.block, came.offset, landing)
    taken = landings.take(came)
    assert taken is landing
    land(taken, came.payload)
    return taken


def test_a_sum_that_lands_in_pieces_has_the_bits_of_one_that_is_added_whole() -> None:
    came, own, out, whole = numbers(1), numbers(2), np.empty(COUNT, np.float32), numbers(3)
    add_product(came, 0.75, own, 0.25, whole)

    landing = landed(sum_landing(own, out), chunk(RingStage.CONTRIBUTION, came))

    assert isinstance(landing, SumLanding)
    assert out.tobytes() == whole.tobytes()
    assert landing.wrong is None


def test_checksums_are_made_on_the_way() -> None:
    came, own, out = numbers(1), numbers(2), np.empty(COUNT, np.float32)
    message = chunk(RingStage.CONTRIBUTION, came)

    landing = landed(sum_landing(own, out), message)

    assert isinstance(landing, SumLanding)
    assert landing.crc32c == message.crc32c
    assert landing.sent_crc32c == crc32c_of(landing.sent)


def test_a_mean_lands_in_its_place() -> None:
    mean, place = numbers(1), np.zeros(COUNT, np.float32)
    message = chunk(RingStage.AVERAGE, mean)

    landing = landed(MeanLanding(place), message)

    assert place.tobytes() == mean.tobytes()
    assert landing.crc32c == message.crc32c


@pytest.mark.parametrize("source", [Source.CAME, Source.OWN])
def test_f_dp_003_a_bad_value_in_a_later_piece_is_traced_to_where_it_came_from(
    source: Source,
) -> None:
    came, own, at = numbers(1), numbers(2), COUNT - 3
    (came if source is Source.CAME else own)[at] = np.inf

    landing = landed(
        sum_landing(own, np.empty(COUNT, np.float32)), chunk(RingStage.CONTRIBUTION, came)
    )

    assert isinstance(landing, SumLanding)
    assert landing.wrong == NotFinite(at, float("inf"), source)


def test_f_dp_003_own_numbers_are_looked_at_on_their_way_out() -> None:
    good, bad = numbers(1), numbers(1)
    bad[COUNT - 1] = np.nan
    huge = np.full(COUNT, 3e38, np.float32)  # finite, and their sum is not

    made = chunk(RingStage.CONTRIBUTION, good)
    assert checked_own(made, checksums=True) == (True, made.crc32c)
    assert checked_own(made, checksums=False) == (True, None)
    assert checked_own(chunk(RingStage.CONTRIBUTION, huge), checksums=False) == (True, None)
    assert checked_own(chunk(RingStage.CONTRIBUTION, bad), checksums=True) == (False, None)


def test_a_landing_is_given_away_once_and_only_to_its_chunk() -> None:
    given = numbers(1)
    landings = Landings(KEY, 0, checked=True)
    landings.add(RingStage.AVERAGE, 1, 5, MeanLanding(np.zeros(COUNT, np.float32)))

    other_key = Key(KEY.term, KEY.round + 1)
    for stranger in (
        chunk(RingStage.PARTIAL_SUM, given),
        chunk(RingStage.AVERAGE, given[:-1]),
        chunk(RingStage.AVERAGE, given, key=other_key),
        chunk(RingStage.AVERAGE, given, sequence=1),
    ):
        assert landings.take(stranger) is None
    assert landings.take(chunk(RingStage.AVERAGE, given)) is not None
    assert landings.take(chunk(RingStage.AVERAGE, given)) is None
