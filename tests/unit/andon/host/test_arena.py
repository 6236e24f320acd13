"""Arenas: places in shared memory, and whose memory is mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.host.arena import (
    HEADER_BYTES,
    NONCE_BYTES,
    ArenaLayout,
    SharedMemoryUnavailable,
    folder_identity,
    map_offer,
)
from andon.host.shared_dir import DEFAULT_SHARED_DIR, shared_dir_of
from andon.protocol.messages import SharedMemoryOffer
from unit.andon.strategies import BOUNDED

PLACES = ArenaLayout((10, 0, 33))
NAME = "andon-0123456789abcdef"


def made(folder: Path, *, size: int | None = None, mode: int = 0o600) -> SharedMemoryOffer:
    """A file as a reducer makes it."""
    path = folder / NAME
    path.write_bytes(bytes(range(NONCE_BYTES)).ljust(size or PLACES.size_bytes, b"\0"))
    path.chmod(mode)
    return SharedMemoryOffer(NAME, PLACES.size_bytes, 0)


def test_blocks_lie_one_after_the_other_each_at_64_bytes() -> None:
    assert PLACES.starts == (HEADER_BYTES, HEADER_BYTES + 64, HEADER_BYTES + 64)
    assert PLACES.size_bytes == 2 * 4096
    assert PLACES.offset_of(2, 32, 1) == HEADER_BYTES + 64 + 32 * 4


@pytest.mark.parametrize(
    ("block", "offset", "count"),
    [(3, 0, 1), (-1, 0, 1), (0, 10, 1), (0, 9, 2), (0, 0, 0), (1, 0, 1), (0, 2**64 - 1, 2)],
)
def test_elements_that_the_layout_lacks_have_no_place(block: int, offset: int, count: int) -> None:
    assert PLACES.offset_of(block, offset, count) is None


@BOUNDED
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(sum),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_no_place_lies_beyond_its_block(
    elements: list[int], block: int, offset: int, count: int
) -> None:
    places = ArenaLayout(tuple(elements))

    at = places.offset_of(block % 6, offset % 128, count % 128)

    ends = [*places.starts[1:], places.size_bytes]
    if at is not None:
        assert places.starts[block % 6] <= at
        assert at + 4 * (count % 128) <= ends[block % 6]


@pytest.mark.parametrize("elements", [(), (0, 0), (2**48, 1)])
def test_a_layout_of_nothing_or_of_too_much_has_no_places(elements: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no place"):
        ArenaLayout(elements)


def test_offered_memory_is_mapped_and_its_nonce_read(tmp_path: Path) -> None:
    mapping, nonce = map_offer(tmp_path, made(tmp_path), PLACES, writable=True)

    mapping[HEADER_BYTES] = 7
    assert nonce == bytes(range(NONCE_BYTES))
    assert (tmp_path / NAME).read_bytes()[HEADER_BYTES] == 7


def test_averages_are_mapped_to_be_read_alone(tmp_path: Path) -> None:
    mapping, _ = map_offer(tmp_path, made(tmp_path), PLACES, writable=False)

    with pytest.raises(TypeError):
        mapping[HEADER_BYTES] = 7


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../andon", "a/b", "a\0b"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    offer = SharedMemoryOffer(name, PLACES.size_bytes, 0)

    with pytest.raises(SharedMemoryUnavailable, match="no file can have"):
        map_offer(tmp_path, offer, PLACES, writable=True)


def test_a_link_is_not_followed_and_no_name_is_shown(tmp_path: Path) -> None:
    offer = made(tmp_path)
    (tmp_path / NAME).rename(tmp_path / "elsewhere")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SharedMemoryUnavailable, match="can't be opened") as refused:
        map_offer(tmp_path, offer, PLACES, writable=True)

    assert NAME not in str(refused.value)


def test_a_file_that_is_gone_is_refused_without_its_name(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="No such file") as refused:
        map_offer(tmp_path, SharedMemoryOffer(NAME, PLACES.size_bytes, 0), PLACES, writable=True)

    assert NAME not in str(refused.value)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME, 0o600)

    with pytest.raises(SharedMemoryUnavailable, match="not a file of the size"):
        map_offer(tmp_path, SharedMemoryOffer(NAME, PLACES.size_bytes, 0), PLACES, writable=True)


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="others may open"):
        map_offer(tmp_path, made(tmp_path, mode=0o644), PLACES, writable=True)


def test_a_file_of_another_size_than_it_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="not a file of the size"):
        map_offer(tmp_path, made(tmp_path, size=64), PLACES, writable=True)


def test_an_offer_of_another_size_than_the_layout_is_refused(tmp_path: Path) -> None:
    made(tmp_path)

    with pytest.raises(SharedMemoryUnavailable, match="another size"):
        map_offer(tmp_path, SharedMemoryOffer(NAME, 4096, 0), PLACES, writable=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    offer = made(tmp_path)
    os.chown(tmp_path / NAME, 1, -1)

    with pytest.raises(SharedMemoryUnavailable, match="another user"):
        map_offer(tmp_path, offer, PLACES, writable=True)


def test_two_folders_are_two_and_one_is_the_same(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()

    assert folder_identity(one) == folder_identity(tmp_path / "other" / ".." / "one")
    assert folder_identity(one) != folder_identity(other)


def test_a_file_in_place_of_the_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SharedMemoryUnavailable, match="set ANDON_SHARED_DIR"):
        folder_identity(tmp_path / "none")
    with pytest.raises(SharedMemoryUnavailable, match="set ANDON_SHARED_DIR"):
        folder_identity(tmp_path / "file")


def test_the_shared_folder_is_named_left_out_or_switched_off() -> None:
    assert shared_dir_of("") == DEFAULT_SHARED_DIR
    assert shared_dir_of("/tmp") == Path("/tmp")
    assert shared_dir_of("off") is None
