"""Neighbours that share memory, each on a thread of its own, or in a process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from andon.protocol.peer_calls import Call, CallKind
from andon.protocol.records import Key
from andon_trainer.core.peer_work import Found, Gate, Part, Work
from andon_trainer.peers.memory import Neighbour, NeighbourMemory

KEY, GROUP = Key(3, 7), 2**63 + 5
RANKS = (4, 1, 6, 9)
"""Ranks of the session, in the order of the group."""

Array = npt.NDArray[np.generic]
Result = TypeVar("Result")


def token(sender: int, receiver: int) -> bytes:
    return hashlib.sha256(b"%d to %d" % (sender, receiver)).digest()


def memory_of(folder: Path, place: int, count: int, slot_bytes: int = 4096) -> NeighbourMemory:
    mine = RANKS[place]
    neighbours = [
        Neighbour(rank=each, token_to=token(mine, each), token_from=token(each, mine))
        if each != mine
        else Neighbour(rank=each)
        for each in RANKS[:count]
    ]
    return NeighbourMemory(folder, KEY, GROUP, neighbours, mine, slot_bytes=slot_bytes)


def together(count: int, act: Callable[[int], Result]) -> list[Result | BaseException]:
    """What `act` returns or raises for each place, all at once."""
    answers: list[Result | BaseException] = [RuntimeError("it did not end")] * count

    def run(place: int) -> None:
        try:
            answers[place] = act(place)
        except BaseException as error:
            answers[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return answers


def opened(folder: Path, count: int, slot_bytes: int = 4096) -> list[NeighbourMemory]:
    """Memory of each place, mapped by all."""
    memories = [memory_of(folder, place, count, slot_bytes) for place in range(count)]
    answers = together(count, lambda place: memories[place].open(lambda _: None))
    assert answers == [None] * count, answers
    return memories


def reduce_by(name: str, itemtype: np.dtype[np.generic], ranks: int) -> Callable[..., None]:
    """Reduces with NumPy."""
    operation = {"sum": np.add, "avg": np.add, "max": np.maximum}[name]

    def reduce(out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> None:
        result = np.frombuffer(inputs[0], itemtype).copy()
        with np.errstate(all="ignore"):
            for each in inputs[1:]:
                result = operation(result, np.frombuffer(each, itemtype))
        if name == "avg" and last:
            result = result / itemtype.type(ranks)  # numbers
        np.frombuffer(out, itemtype)[...] = result

    return reduce


def view(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def work(
    kind: CallKind,
    *parts: tuple[Sequence[Array], Sequence[Array]],
    root: int | None = None,
    reduction: str = "",
    ranks: int = 2,
    gate: Gate | None = None,
) -> Work:
    """The work of one rank: for each tensor what it gives, and what it takes."""
    if not parts:
        return Work(call=Call(kind=kind), itemsize=1)
    gives, takes = parts[0]
    array = (*gives, *takes)[0]
    even = kind not in (CallKind.ALL_TO_ALL, CallKind.REDUCE_SCATTER, CallKind.SCATTER)
    call = Call(
        kind=kind,
        dtype=array.dtype.name,
        count=array.size if even else 0,
        reduction=reduction,
        root=root,
        tensors=len(parts),
    )
    return Work(
        call=call,
        itemsize=array.itemsize,
        parts=tuple(
            Part(tuple(view(each) for each in gives), tuple(view(each) for each in takes))
            for gives, takes in parts
        ),
        reduce=reduce_by(reduction, array.dtype, ranks) if reduction else None,
        gate=gate,
    )


class Closed:
    """A gate that no value passes that is not finite."""

    def __init__(self, itemtype: type[np.floating[npt.NBitBase]], *, expects: bool = False) -> None:
        self._type = itemtype
        self._expects = expects
        self.asked = 0

    def first_bad(self, values: memoryview) -> int | None:
        bad = np.flatnonzero(~np.isfinite(np.frombuffer(values, self._type)))
        return int(bad[0]) if bad.size else None

    def expected(self) -> bool:
        self.asked += 1
        return self._expects

    def explain(self, part: int, element: int) -> Found:
        return Found(element=(part, element))
