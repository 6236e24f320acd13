"""Buffers: memory comes back by itself, and not before its last view is gone."""

from __future__ import annotations

import numpy as np

from andon_reducer.transport.buffers import Buffers

MIB = 2**20


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    buffers = Buffers(4 * MIB)
    view = buffers.lend(MIB)
    part, at = view[8:16], address_of(view)

    del view
    while_in_use = buffers.kept_bytes
    del part

    assert while_in_use == 0
    assert buffers.kept_bytes == MIB
    again = buffers.lend(MIB - 5)
    assert (address_of(again), again.nbytes, buffers.kept_bytes) == (at, MIB - 5, 0)


def test_an_array_over_the_memory_keeps_it() -> None:
    buffers = Buffers(4 * MIB)

    numbers = np.frombuffer(buffers.lend(MIB), np.float32)[5:]

    assert buffers.kept_bytes == 0
    assert numbers.size == MIB // 4 - 5


def test_two_users_never_share_memory() -> None:
    buffers = Buffers(4 * MIB)

    views = [buffers.lend(MIB) for _ in range(3)]

    assert len({address_of(view) for view in views}) == 3


def test_no_more_is_kept_than_allowed_and_what_is_kept_stays() -> None:
    buffers = Buffers(3 * MIB)
    views = [buffers.lend(MIB) for _ in range(5)]
    first = {address_of(view) for view in views[:3]}

    for _ in range(5):
        del views[0]

    assert buffers.kept_bytes == 3 * MIB
    again = [buffers.lend(MIB) for _ in range(3)]
    assert {address_of(view) for view in again} == first


def test_memory_of_other_lengths_makes_room() -> None:
    buffers = Buffers(3 * MIB)
    views = [buffers.lend(MIB) for _ in range(3)]
    longer = buffers.lend(2 * MIB)
    at = address_of(longer)
    views.clear()

    del longer

    assert buffers.kept_bytes == 3 * MIB
    assert address_of(buffers.lend(2 * MIB)) == at


def test_what_is_behind_a_view_is_charged_whole() -> None:
    view = Buffers(MIB).lend(MIB - 100)

    assert memoryview(view.obj).nbytes == MIB


def test_short_memory_is_not_kept() -> None:
    buffers = Buffers(MIB)
    view = buffers.lend(100)
    size = view.nbytes

    del view

    assert (size, buffers.kept_bytes) == (100, 0)
