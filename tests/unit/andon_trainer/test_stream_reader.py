"""The reader: a stream's items by position, what it keeps of them, and what makes it read again."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch

from andon.protocol.records import PositionRange
from andon_trainer.data import stream_reader
from andon_trainer.data.stream_reader import StreamPiece, StreamReader, Wanted, copy_of
from unit.andon_trainer.streams import Counting, Sized, Skipping


def wanted(*bounds: tuple[int, int], epoch: int = 0, **other: Any) -> Wanted:
    options: dict[str, Any] = {"following": None, "keep_from": None, "seed": 0}
    ranges = tuple(PositionRange(*each) for each in bounds)
    return Wanted(epoch=epoch, ranges=ranges, **options | other)


def reader_of(stream: Any, **other: Any) -> StreamReader:
    return StreamReader(stream, seed=7, **{"size": None, **other})


def items(piece: StreamPiece) -> list[Any]:
    return piece.items


def test_items_that_are_not_ones_own_are_passed_over_in_one_iteration() -> None:
    stream = Counting(20)
    reader = reader_of(stream)

    read = [items(reader.__getitems__(wanted((start, start + 2)))) for start in range(2, 20, 4)]

    assert read == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]]
    assert (stream.begun, stream.read) == (1, 20)


def test_a_share_of_several_ranges_is_read_in_order() -> None:
    reader = reader_of(Counting(20))

    assert items(reader.__getitems__(wanted((1, 3), (6, 7), (9, 10)))) == [1, 2, 6, 9]


def test_the_end_is_met_within_a_piece_and_known_from_then_on() -> None:
    stream = Counting(6)
    reader = reader_of(stream)

    assert reader.__getitems__(wanted((2, 4))) == StreamPiece([2, 3], None)
    assert reader.__getitems__(wanted((4, 8))) == StreamPiece([4, 5], 6)
    assert reader.__getitems__(wanted((8, 12))) == StreamPiece([], 6)
    assert stream.begun == 1


def test_a_piece_is_known_as_the_last_one_if_nothing_follows_it() -> None:
    reader = reader_of(Counting(6))

    assert reader.__getitems__(wanted((0, 2), following=4)).end is None
    assert reader.__getitems__(wanted((4, 6), following=6)).end == 6


def test_what_was_read_to_find_the_end_is_not_read_again() -> None:
    stream = Counting(6)
    reader = reader_of(stream)
    reader.__getitems__(wanted((0, 2), following=4))

    assert items(reader.__getitems__(wanted((4, 5)))) == [4]
    assert (stream.begun, stream.read) == (1, 5)


def test_a_lost_workers_items_were_kept_while_they_were_passed_over() -> None:
    stream = Counting(40)
    reader = reader_of(stream)
    reader.__getitems__(wanted((12, 16), keep_from=8))

    assert items(reader.__getitems__(wanted((8, 12), keep_from=8))) == [8, 9, 10, 11]
    assert stream.begun == 1


def test_ones_own_items_are_read_again_from_copies_that_nobody_has_changed() -> None:
    class Rows(Counting):
        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.tensor([float(each)])} for each in range(9)])

    reader = reader_of(Rows(0))
    for row in items(reader.__getitems__(wanted((4, 6), keep_from=0))):
        row.pop("x").zero_()

    again = items(reader.__getitems__(wanted((4, 6), keep_from=0)))

    assert [float(row["x"]) for row in again] == [4.0, 5.0]


def test_committed_items_are_forgotten_and_reading_them_begins_the_epoch_anew() -> None:
    stream = Counting(40)
    reader = reader_of(stream)
    reader.__getitems__(wanted((4, 8), keep_from=0))
    reader.__getitems__(wanted((12, 16), keep_from=8))
    assert stream.begun == 1

    assert items(reader.__getitems__(wanted((4, 6), keep_from=4))) == [4, 5]
    assert stream.begun == 2


def test_more_than_the_limit_of_bytes_is_read_again_instead_of_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_reader, "_KEPT_BYTES", 100)
    stream = Counting(40)
    reader = reader_of(stream)
    reader.__getitems__(wanted((30, 32), keep_from=0))

    assert items(reader.__getitems__(wanted((20, 24), keep_from=0))) == [20, 21, 22, 23]
    assert stream.begun == 2


def test_a_worker_that_comes_late_skips_in_the_datasets_own_way() -> None:
    stream = Skipping(40)
    reader = reader_of(stream)

    assert items(reader.__getitems__(wanted((30, 32), epoch=2))) == [2030, 2031]
    assert items(reader.__getitems__(wanted((34, 35), epoch=2))) == [2034]
    assert stream.skips == [30]


def test_a_skip_beyond_the_end_gives_a_bound_that_shrinks_when_less_is_tried() -> None:
    reader = reader_of(Skipping(10))

    assert reader.__getitems__(wanted((30, 32))) == StreamPiece([], 30)
    assert reader.__getitems__(wanted((8, 14))) == StreamPiece([8, 9], 10)


class OwnIterator:
    """A stream that is its own iterator, and skips in place."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.decoded = size, 0, 0

    def __iter__(self) -> OwnIterator:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at >= self.size:
            raise StopIteration
        self.at, self.decoded = self.at + 1, self.decoded + 1
        return self.at - 1

    def skip(self, count: int) -> None:
        self.at += count


def test_an_iterator_that_skips_in_place_decodes_no_other_workers_items() -> None:
    stream = OwnIterator(40)
    reader = reader_of(stream)

    read = [items(reader.__getitems__(wanted((start, start + 2)))) for start in range(2, 20, 4)]

    assert read == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]]
    assert stream.decoded == 10


def test_each_epoch_is_iterated_anew_and_told_to_the_dataset() -> None:
    stream = Counting(4)
    reader = reader_of(stream)

    read = [items(reader.__getitems__(wanted((0, 2), epoch=epoch))) for epoch in (0, 1, 2)]

    assert read == [[0, 1], [1000, 1001], [2000, 2001]]
    assert stream.begun == 3


def test_a_shuffle_by_a_global_generator_is_that_of_run_and_epoch_whatever_else_draws() -> None:
    def orders(*, disturbed: bool) -> list[list[int]]:
        random.seed(99 if disturbed else 1)
        reader = reader_of(Counting(12, shuffled=True))
        read: list[list[int]] = []
        for epoch in (0, 1):
            read.append([])
            for start in range(0, 12, 3):
                read[-1] += items(reader.__getitems__(wanted((start, start + 3), epoch=epoch)))
                if disturbed:
                    random.random(), np.random.rand(), torch.rand(3)
        return read

    first, second = orders(disturbed=False), orders(disturbed=True)

    assert first == second
    assert sorted(first[0]) == list(range(12)) != first[0]
    assert [each - 1000 for each in first[1]] != first[0]


def test_a_buffer_that_draws_between_items_draws_the_same_for_a_worker_that_reads_others() -> None:
    class Buffered(Counting):
        def __iter__(self) -> Iterator[int]:
            buffer = list(range(4))
            for item in range(4, self.size):
                place = random.randrange(len(buffer))
                yield buffer[place]
                buffer[place] = item

    one, other = reader_of(Buffered(40)), reader_of(Buffered(40))
    whole = items(one.__getitems__(wanted((0, 36))))

    parts = []
    for start in range(2, 36, 5):
        parts.append(items(other.__getitems__(wanted((start, start + 1)))))
        random.random()

    assert parts == [[whole[start]] for start in range(2, 36, 5)]


def test_only_whole_batches_of_an_epoch_of_unknown_length_exist() -> None:
    stream = Counting(10)
    reader = reader_of(stream, whole=4)

    assert reader.__getitems__(wanted((0, 2), following=2)) == StreamPiece([0, 1], None)
    assert stream.read == 4
    assert reader.__getitems__(wanted((6, 8))) == StreamPiece([6, 7], None)
    assert reader.__getitems__(wanted((8, 10))) == StreamPiece([], 8)
    assert stream.begun == 1


def test_fewer_items_than_a_stream_says_are_an_error_that_names_both() -> None:
    reader = reader_of(Sized(6, says=10), size=10)
    reader.__getitems__(wanted((0, 4)))

    with pytest.raises(RuntimeError, match=r"len\(Sized\) says 10 items.*before item 6.*__len__"):
        reader.__getitems__(wanted((4, 8)))


def test_more_items_than_a_stream_says_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = reader_of(Sized(9, says=6), size=6)

    with caplog.at_level(logging.WARNING):
        for epoch in (0, 1):
            reader.__getitems__(wanted((0, 6), epoch=epoch))

    assert [record.message[:44] for record in caplog.records] == [
        "len(Sized) says 6 items, and the stream has "
    ]


def test_an_error_of_the_stream_is_no_end_of_it() -> None:
    reader = reader_of(Counting(9, fails_at=5))
    reader.__getitems__(wanted((0, 4)))

    for _ in range(2):  # the same again, not the end of a generator that is over
        with pytest.raises(ValueError, match="item 5 is damaged"):
            reader.__getitems__(wanted((4, 8)))


def test_a_copy_of_a_view_is_no_copy_of_all_that_it_is_a_view_of() -> None:
    whole = torch.zeros(1000, 10)

    again = copy_of((whole[3], np.ones(2), {"a": [1, None]}, "text"))

    assert again[0].untyped_storage().nbytes() == 40
    assert again[2:] == ({"a": [1, None]}, "text")
    assert copy_of((object(), 1)) is None


class Shared(MutableMapping[str, Any]):
    """A mapping whose shallow copy is the same mapping."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"x": 1}

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def test_a_copy_of_a_mapping_loses_nothing_when_the_mapping_does() -> None:
    given = (OrderedDict(x=1), UserDict(x=1))

    copies = [copy_of(each) for each in given]
    for each in given:
        each.pop("x")

    assert [type(each) for each in copies] == [OrderedDict, UserDict]
    assert [dict(each) for each in copies] == [{"x": 1}] * 2
    assert copy_of(Shared()) is None  # Nobody knows how to copy it.
