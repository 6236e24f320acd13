"""`set_epoch` of a dataset: called for each epoch, here and in the processes that load.

Theory of operation. A dataset may have a method `set_epoch(epoch)`, for a curriculum or for random
numbers of its own; so may a dataset that it wraps. The line calls it when an epoch begins. A
loading process has a copy of the dataset, and loads batches of the next epoch early; so the calls
that a batch needs travel with its indices, and are made there before it is loaded.

The script may call the method itself. If it says what the line would say, nothing changes. If it
says something else, that holds from then on, until it follows the epochs again.
"""

from __future__ import annotations

import inspect
import logging
import pickle
from collections import deque
from typing import Any

from andon_trainer.data.digest import nested_datasets

log = logging.getLogger(__name__)

__all__ = ["METHOD", "Changes", "DatasetEpochs", "EpochCall", "EpochCalls", "set_changes"]

EpochCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call of `set_epoch`."""
EpochCalls = dict[int, EpochCall]
"""A call for each dataset that has the method, by its place among `nested_datasets`."""

Changes = list[tuple[int, str, Any]]
"""Attributes that were set: the dataset's place among `nested_datasets`, name and value."""

_Attributes = dict[str, tuple[Any, int]]
"""Attributes of a dataset, with how many things each holds: a list may grow."""

METHOD = "set_epoch"
_MOST_BYTES = 2**16
"""More is not sent with each batch."""


class DatasetEpochs:
    """The calls of `set_epoch` that a dataset needs, and those that the script makes itself."""

    def __init__(self, dataset: Any) -> None:
        """Finds the methods; calls none."""
        self._parts: dict[int, Any] = {}
        self._methods: dict[int, Any] = {}
        for place, part in enumerate(nested_datasets(dataset)):
            # Of the class: some datasets answer to any name.
            if callable(getattr(type(part), METHOD, None)):
                self._parts[place], self._methods[place] = part, getattr(part, METHOD)
        self._own: EpochCalls = {}
        """The script's last calls."""
        self._epoch: int | None = None
        self._all = list(nested_datasets(dataset))
        self._remembered: list[_Attributes] = []
        """Those of each dataset when the loading processes got theirs."""
        self.changes = b""
        """What the script has set since then, pickled: `Changes`; empty: nothing."""
        self._warned: list[str] = []

    def remember(self) -> None:
        """The loading processes have the datasets as they are now."""
        self._remembered = [_attributes(part) for part in self._all]

    def look_for_changes(self, *, ends_with_data: bool = False) -> None:
        """Notes which attributes of the datasets have other values than in the processes.

        Args:
            ends_with_data: whether an epoch ends where the data ends, so that one from old data
                would have another length.

        Raises:
            ValueError: an epoch ends with the data, and data is too much to be sent.
        """
        found: Changes = []
        unseen, is_data = [], False
        for place, (part, before) in enumerate(zip(self._all, self._remembered, strict=True)):
            for name, now in _attributes(part).items():
                if name == METHOD or _alike(now, before.get(name)):
                    continue
                value, held = now
                size = _pickled_bytes(value)
                if size is not None and size <= _MOST_BYTES:
                    found.append((place, name, value))
                    continue
                unseen.append(f"{name} of the {type(part).__name__}")
                # What is neither may be an open file.
                is_data = is_data or size is not None or held > 0
        self.changes = pickle.dumps(found) if found else b""
        if not unseen or unseen == self._warned:
            return
        text = (
            f"{', '.join(unseen)} has changed since line.prepare, and can't be sent to the "
            f"loading processes (it can't be pickled, or is larger than {_MOST_BYTES} bytes): "
            "they %s the old value. Give the DataLoader multiprocessing_context='forkserver', "
            "which starts new ones in each epoch"
        )
        if ends_with_data and is_data:
            raise ValueError(text % "would end this epoch by" + ", or num_workers=0")
        self._warned = unseen
        log.warning("%s", text % "go on with")

    def calls(self, epoch: int) -> EpochCalls:
        """What is to be called before a sample of this epoch is loaded."""
        calls = {}
        for place, method in self._methods.items():
            own = self._own.get(place)
            if own is not None and (self._epoch is None or own != _call(method, self._epoch)):
                calls[place] = own
            elif (line := _call(method, epoch)) is not None:
                calls[place] = line
        return calls

    def enter(self, epoch: int) -> None:
        """Makes the calls of an epoch in this process; the script has made its own itself."""
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            # These followed the epochs. If the script does not go on with it, the line does.
            past = self._epoch
            self._own = {
                place: call
                for place, call in self._own.items()
                if call != _call(self._methods[place], past)
            }
        calls = self.calls(epoch)
        self._epoch = epoch
        for place, (arguments, named) in calls.items():
            if self._own.get(place) != (arguments, named):
                self._call_here(self._methods[place], arguments, named)

    def observe(self) -> None:
        """Notes what the script calls from now on; call it after a fork, never before.

        The children must have the dataset's own method.
        """
        for place, part in self._parts.items():
            if hasattr(part, "__dict__"):
                setattr(part, METHOD, _ObservedMethod(self._methods[place], place, self))

    def stop_observing(self) -> None:
        """Gives the datasets their own methods back; a second call does nothing."""
        for part in self._parts.values():
            if isinstance(getattr(part, "__dict__", {}).get(METHOD), _ObservedMethod):
                vars(part).pop(METHOD)

    def call(self, place: int, call: EpochCall) -> Any:
        """The script's own call of a method."""
        answer = self._call_here(self._methods[place], *call)
        self._own[place] = _plain(self._methods[place], call)
        return answer

    def _call_here(self, method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a method; what it changes here, the same call changes in the processes."""
        before = [_attributes(part) for part in self._all]
        answer = method(*arguments, **named)
        for part, old, known in zip(self._all, before, self._remembered, strict=False):
            for name, now in _attributes(part).items():
                # If the script had changed it too, the processes would begin with something else.
                if not _alike(now, old.get(name)) and _alike(known.get(name), old.get(name)):
                    known[name] = now
        return answer


def set_changes(dataset: Any, changes: bytes) -> None:
    """Sets, in a loading process, what the script has set of its dataset."""
    parts = list(nested_datasets(dataset))
    found: Changes = pickle.loads(changes)
    for place, name, value in found:
        setattr(parts[place], name, value)


def _attributes(part: Any) -> _Attributes:
    return {
        name: (value, len(value) if isinstance(value, list | dict | set | deque) else 0)
        for name, value in getattr(part, "__dict__", {}).items()
    }


def _alike(one: tuple[Any, int] | None, other: tuple[Any, int] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _pickled_bytes(value: Any) -> int | None:
    """None: it can't be pickled."""
    try:
        return len(pickle.dumps(value))
    except Exception:  # Whatever the script's own objects raise.
        return None


def _call(method: Any, epoch: int) -> EpochCall | None:
    """The line's call; None if the method wants other arguments."""
    try:
        inspect.signature(method).bind(epoch)
    except (TypeError, ValueError):
        return None
    return (epoch,), {}


def _plain(method: Any, call: EpochCall) -> EpochCall:
    """The call with its arguments by position where that means the same."""
    arguments, named = call
    try:
        bound = inspect.signature(method).bind(*arguments, **named)
    except (TypeError, ValueError):
        return call
    return bound.args, bound.kwargs


class _ObservedMethod:
    """A dataset's `set_epoch` that reports its calls. Pickling restores the method."""

    def __init__(self, method: Any, place: int, epochs: DatasetEpochs) -> None:
        self._method = method
        self._place = place
        self._epochs = epochs

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._epochs.call(self._place, (arguments, named))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.__self__, METHOD)
