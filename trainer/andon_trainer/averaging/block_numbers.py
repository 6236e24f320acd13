"""Numbers that are no gradients, and travel as such: in blocks of the layout.

Theory of operation. The protocol averages gradients, which are blocks of the layout, and has no
exchange for other numbers. So they are laid one after another into some blocks, filled up with
zeros; `rooms_for` says which. If all blocks together have too little room, there are more exchanges
than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from andon_trainer.averaging.averaging import Averages, Averaging
from andon_trainer.core.calls import Call, Floats, NodePart
from andon_trainer.exchange.path import Exchange

__all__ = ["BlockNumbers", "rooms_for"]


class BlockNumbers:
    """Exchanges numbers in the place of gradients. Used by one thread."""

    def __init__(self, averaging: Averaging) -> None:
        """`averaging` is that of the round's other exchanges."""
        self._averaging = averaging
        self.sizes = averaging.sizes

    def share(
        self, call: Call, weight: float, mine: Floats, mean: Floats, *, last: bool = False
    ) -> bool:
        """Exchanges as many numbers as the call's blocks have room for; False if it is void.

        Args:
            call: says which blocks carry the numbers.
            weight: this worker's; with 0 it only receives.
            mine: what it gives, perhaps followed by more.
            mean: what all give, on average; as long as `mine`.
            last: whether this is the round's last exchange.
        """
        opened = self._averaging.open(weight, call)
        if opened is None:
            return False
        with _memory_kept(opened.exchange, call.blocks if opened.gives else range(0)):
            for block, part in self._pieces(call.blocks, mine) if opened.gives else ():
                # A new vector each time: what was submitted must not change until the round is
                # over.
                flat = np.zeros(self.sizes[block], dtype=np.float32)
                flat[: part.size] = part
                opened.submit_numbers(block, flat)
            averages = opened.finish(last=last)
        return self._take(averages, call, mean)

    def _take(self, averages: Averages | None, call: Call, mean: Floats) -> bool:
        """Takes the averages of an exchange, if there are any."""
        if averages is None:
            return False
        for block, part in self._pieces(call.blocks, mean):
            # Copied at once: the next exchange may use the memory of the averages again.
            part[:] = averages.blocks[block][: part.size]
        return True

    def share_nodes(
        self,
        call: Call,
        nodes: tuple[NodePart, ...],
        mine: Sequence[Floats],
        mean: Floats,
        *,
        last: bool = False,
    ) -> bool:
        """As `share`, on a line of grains: `mine` has a vector for each node.

        What lies in lent memory is written over: sums of nodes are kept elsewhere.
        """
        opened = self._averaging.open(0.0, call, nodes)
        if opened is None:
            return False
        pieces = [list(self._pieces(call.blocks, each)) for each in mine]
        for parts in zip(*pieces, strict=True) if opened.gives else ():
            block = parts[0][0]
            flats = [np.zeros(self.sizes[block], dtype=np.float32) for _ in parts]
            for flat, (_, part) in zip(flats, parts, strict=True):
                flat[: part.size] = part
            opened.submit_nodes(block, flats)
        return self._take(opened.finish(last=last), call, mean)

    def _pieces(self, blocks: range, numbers: Floats) -> Iterator[tuple[int, Floats]]:
        """Each block with the piece of `numbers` that travels in it."""
        at = 0
        for block in blocks:
            yield block, numbers[at : at + self.sizes[block]]
            at += self.sizes[block]


def rooms_for(sizes: Sequence[int], elements: int) -> Iterator[range]:
    """The runs of blocks that `elements` numbers travel in, one exchange each.

    While there are more numbers than all blocks hold, a run is all blocks. The last run is the one
    with the fewest elements that has room for the rest; the first such, if there are several.
    """
    total = sum(sizes)
    # From the layout alone, so that all workers choose the same blocks without a word.
    for _ in range(elements // total):
        yield range(len(sizes))
    if rest := elements % total:
        yield _least_run(sizes, rest)


def _least_run(sizes: Sequence[int], needed: int) -> range:
    best, least = range(len(sizes)), math.inf
    start = held = 0
    for stop, size in enumerate(sizes, 1):
        held += size
        while held - sizes[start] >= needed:
            held -= sizes[start]
            start += 1
        # Of several such runs the protocol takes the first, so an equal one does not count.
        if needed <= held < least:
            best, least = range(start, stop), held
    return best


@contextmanager
def _memory_kept(exchange: Exchange, blocks: range) -> Iterator[None]:
    """Puts back what lies in memory that the exchange lends for `blocks`.

    A vector that is not in that memory is copied there when it is sent. But a kept gradient may lie
    there, from which it is sent again if the round is void. Nobody reads the memory any more once
    the averages are here, or the round is over.
    """
    lent = [vector for block in blocks if (vector := _lent_vector(exchange, block)) is not None]
    before = [vector.copy() for vector in lent]
    try:
        yield
    finally:
        for vector, values in zip(lent, before, strict=True):
            np.copyto(vector, values)


def _lent_vector(exchange: Exchange, block: int) -> Floats | None:
    lent = exchange.lend(block)
    return None if lent is None else lent[0]
