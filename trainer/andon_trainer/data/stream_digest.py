"""The digest of a stream, and what must hold of it before anybody trains on it.

Theory of operation. All workers must see the same items in the same order. The digest covers the
first items, as the stream yields them under the run's seed. They are read twice: what differs
between the two readings is drawn from generators that nobody seeded, and is left out. If everything
differs that tells one item from another, the order itself is drawn so. A `skip` is tried out, too:
a worker that comes later, or reads again, relies on it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from andon_trainer.data.digest import leaves_of

__all__ = ["StreamRefused", "stream_digest"]

_ITEMS, _SKIPPED = 8, 4


class StreamRefused(ValueError):
    """A stream of which workers would see different items."""


class _Reading(Protocol):
    """Reads the first items anew."""

    def __call__(self, count: int, *, skip: int = 0, salt: int = 0) -> list[Any]:
        """The first items after `skip`, under the run's seed changed by `salt`."""


def stream_digest(stream: Any, header: str, read: _Reading) -> str:
    """SHA-256 of a stream's first items, hexadecimal.

    Args:
        stream: the script's dataset.
        header: what else must be equal on all workers.
        read: reads its first items anew each time that it is called.

    Raises:
        StreamRefused: there is no item, other items come each time, or `skip` skips wrongly.
    """
    name = type(stream).__name__
    items, again = read(_ITEMS), read(_ITEMS)
    if not items:
        raise StreamRefused(f"the {name} yields no item: there is nothing to train on")
    if not again:
        raise StreamRefused(
            f"the {name} yields items only the first time that it is iterated: its __iter__ must "
            "begin anew each time, since an epoch or a worker that joins begins again"
        )
    first, second = leaves_of(items), leaves_of(again)
    # By path over all items: some elements of a random part are equal twice.
    unstable = {
        path
        for path, number in first.keys() | second.keys()
        if first.get((path, number)) != second.get((path, number))
    }
    # What is the same in all items, such as the name of a file, says nothing of their order.
    telling = {path for path, number in first if first[path, number] != first.get((path, 0))}
    if unstable and not telling - unstable:
        raise StreamRefused(
            f"the {name} yields other items each time that it is read, so every worker would see "
            "another order: seed what shuffles it with a number, or let it use the generators of "
            "random, numpy.random or torch, which the line seeds. ANDON_CHECK_DATA=0 if all may "
            "differ"
        )
    if callable(getattr(stream, "skip", None)) and len(items) > _SKIPPED:
        _try_skip(name, items, read, unstable)
    digest = hashlib.sha256(header.encode())
    for (path, number), content in sorted(first.items()):
        if path not in unstable:
            digest.update(f"{number}{path}".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _try_skip(name: str, items: list[Any], read: _Reading, unstable: set[str]) -> None:
    """Raises StreamRefused if `skip` does not leave out as many items as it should."""
    expected = leaves_of(items[_SKIPPED:])
    found = leaves_of(read(len(items) - _SKIPPED, skip=_SKIPPED))
    wrong = {
        path for path, number in expected if found.get((path, number)) != expected[path, number]
    }
    if not wrong - unstable:
        return
    # Random augmentation may draw other numbers, since nothing was drawn for what was skipped.
    salted = leaves_of(read(len(items), salt=1))
    plain = leaves_of(items)
    drawn = {path for path, number in plain if salted.get((path, number)) != plain[path, number]}
    if wrong - unstable - drawn:
        raise StreamRefused(
            f"{name}.skip({_SKIPPED}) does not leave out the first {_SKIPPED} items: workers rely "
            "on it when they join or read again. Correct it, or take it away; items are then read "
            "and dropped"
        )
