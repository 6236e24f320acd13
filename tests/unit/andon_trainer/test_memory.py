"""Memory that neighbours share: how it is agreed on, and how waiting for it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from andon.host.arena import SharedMemoryUnavailable
from andon.protocol.peer_calls import CallKind
from andon_trainer.core.announcement import MAX_NEIGHBOURS
from andon_trainer.peers.memory import Neighbour, NeighbourLeft, NeighbourMemory, can_share
from andon_trainer.peers.memory_calls import run
from unit.andon_trainer.neighbours import (
    GROUP,
    KEY,
    RANKS,
    memory_of,
    opened,
    together,
    work,
)

pytestmark = pytest.mark.skipif(
    not can_share(), reason="memory is shared on Linux, with the compiled part: apt-get install gcc"
)

FILE_BYTES = 4096 + 2 * 4096


def never(_: tuple[int, ...]) -> None:
    """Waits on."""


def name_for(folder: Path, maker: int, reader: int) -> Path:
    """The file of one place for another, as that one looks for it."""
    reads = memory_of(folder, reader, 3)
    token_from = reads._neighbours[maker].token_from
    return folder / reads._name(token_from)


def unavailable(folder: Path, count: int = 2) -> list[str]:
    """Has all neighbours open their memory in vain, and close it; returns why."""
    memories = [memory_of(folder, place, count) for place in range(count)]
    answers = together(count, lambda place: memories[place].open(never))
    for memory in memories:
        assert not memory.opened
        memory.close()
    assert all(isinstance(each, SharedMemoryUnavailable) for each in answers), answers
    return [str(each) for each in answers]


def test_a_rank_waits_for_those_that_come_later(tmp_path: Path) -> None:
    asked = {place: threading.Event() for place in (0, 2)}
    waited: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    memories = [memory_of(tmp_path, place, 3) for place in range(3)]

    def act(place: int) -> None:
        def still(ranks: tuple[int, ...]) -> None:
            waited[place].append(ranks)
            if ranks == (RANKS[1],):
                asked[place].set()

        if place == 1:
            assert all(each.wait(10) for each in asked.values())
        memories[place].open(still)

    assert together(3, act) == [None] * 3
    # Others may be waited for as well, if their threads are slow, but not before it by place 0.
    assert waited[0][0] == (RANKS[1],)
    assert (RANKS[1],) in waited[2]
    assert os.listdir(tmp_path) == []


def too_short(path: Path) -> None:
    path.write_bytes(bytes(FILE_BYTES - 1))
    path.chmod(0o600)


def not_of_the_session(path: Path) -> None:
    path.write_bytes(bytes(FILE_BYTES))
    path.chmod(0o600)


def open_to_others(path: Path) -> None:
    path.write_bytes(bytes(FILE_BYTES))
    path.chmod(0o644)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    not_of_the_session(elsewhere)
    path.symlink_to(elsewhere)


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    not_of_the_session(path)
    os.chown(path, 1, -1)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (too_short, "not a file of the size"),
        (not_of_the_session, "is not that of this session"),
        (open_to_others, "others may open"),
        (a_link, "can't be opened"),
        (of_another_user, "runs as another user"),
    ],
)
def test_who_finds_a_forged_file_uses_lanes_and_so_do_the_others(
    tmp_path: Path, put: Callable[[Path], None], why: str
) -> None:
    path = name_for(tmp_path, 2, 0)
    put(path)

    with path.open() as forged:
        # Else it would be swept as the file of a dead process.
        fcntl.flock(forged, fcntl.LOCK_EX)
        said = unavailable(tmp_path, 3)

    assert why in said[0]
    # Who mapped the forged file has removed its name, perhaps before its true owner came.
    assert "File exists" in said[2] or "could not map" in said[2]
    assert {each.name for each in tmp_path.iterdir()} <= {"elsewhere"}


def test_without_room_no_neighbour_shares_memory(tmp_path: Path) -> None:
    memories = [memory_of(tmp_path, 0, 2, slot_bytes=2**50), memory_of(tmp_path, 1, 2)]

    first, second = together(2, lambda place: memories[place].open(never))

    assert "MiB free and one arena needs" in str(first)
    assert "not a file of the size" in str(second)
    for memory in memories:
        memory.close()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    [said, other] = unavailable(tmp_path / "none")

    assert "set ANDON_SHARED_DIR" in said
    assert "set ANDON_SHARED_DIR" in other


def test_more_neighbours_than_have_places_share_no_memory(tmp_path: Path) -> None:
    neighbours = [Neighbour(rank=rank) for rank in range(MAX_NEIGHBOURS + 1)]

    with pytest.raises(SharedMemoryUnavailable, match="more than 64 ranks"):
        NeighbourMemory(tmp_path, KEY, GROUP, neighbours, 0).open(never)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("who", [0, 1], ids=["here", "in a neighbour"])
def test_nobody_waits_once_the_session_is_over(tmp_path: Path, who: int) -> None:
    memories, started = opened(tmp_path, 2), threading.Event()
    over = threading.Event()

    def still(_: tuple[int, ...]) -> None:
        started.set()
        if over.is_set():
            raise EOFError

    def act(place: int) -> None:
        if place == 0:
            run(memories[0], work(CallKind.BARRIER), 0, still)
        else:
            assert started.wait(10)
            over.set()
            memories[who].end()

    answers = together(2, act)

    assert isinstance(answers[0], EOFError)
    assert memories[0].missing == (RANKS[1],)
    assert answers[1] is None


def test_a_call_that_needs_who_has_left_fails_and_an_earlier_one_does_not(tmp_path: Path) -> None:
    memories = opened(tmp_path, 2)

    def act(place: int) -> None:
        run(memories[place], work(CallKind.BARRIER), 0, never)
        if place == 1:
            memories[1].leave()
        else:
            run(memories[0], work(CallKind.BARRIER), 1, never)

    first, second = together(2, act)

    assert isinstance(first, NeighbourLeft)
    assert first.rank == RANKS[1]
    assert second is None


KILLED = """
import sys
from pathlib import Path
import numpy as np
from andon.protocol.peer_calls import CallKind
from andon_trainer.peers.memory_calls import run
from unit.andon_trainer.neighbours import memory_of, work

folder, count = Path(sys.argv[1]), int(sys.argv[2])
memory, values = memory_of(folder, 0, count), np.ones(100_000, np.float32)
memory.open(lambda ranks: print("waits", *ranks, flush=True))
for number in range(sys.maxsize):
    asked = work(CallKind.ALL_REDUCE, ([values], [values]), reduction="avg", ranks=count)
    run(memory, asked, number, lambda _: None)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[int], subprocess.Popen[str]]:
    """Starts the process of place 0, among so many."""

    def start(count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(count)]
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, text=True)

    return start


def test_a_neighbour_that_is_killed_in_a_call_leaves_nobody_waiting_and_no_file(
    tmp_path: Path, killed: Callable[[int], subprocess.Popen[str]]
) -> None:
    with killed(2) as process:
        memory, values = memory_of(tmp_path, 1, 2), np.ones(100_000, np.float32)
        memory.open(never)

        def still(ranks: tuple[int, ...]) -> None:
            assert ranks == (RANKS[0],)
            if process.poll() is not None:
                raise EOFError

        def act(_: int) -> None:
            for number in range(sys.maxsize):
                if number == 20:
                    process.send_signal(signal.SIGKILL)
                parts = ([values], [values])
                asked = work(CallKind.ALL_REDUCE, parts, reduction="avg", ranks=2)
                run(memory, asked, number, still)

        [answer] = together(1, act)

    assert isinstance(answer, EOFError)
    memory.close()
    assert os.listdir(tmp_path) == []


def test_a_neighbour_that_is_killed_before_all_have_come_leaves_no_file(
    tmp_path: Path, killed: Callable[[int], subprocess.Popen[str]]
) -> None:
    with killed(3) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"waits {RANKS[1]}\n"
        memory = memory_of(tmp_path, 1, 3)
        mine = len(os.listdir(tmp_path))
        process.send_signal(signal.SIGKILL)
        process.wait()

        def still(_: tuple[int, ...]) -> None:
            raise EOFError

        with pytest.raises(EOFError):
            memory.open(still)

    assert mine == 2
    memory.close()
    assert os.listdir(tmp_path) == []
