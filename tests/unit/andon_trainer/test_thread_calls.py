"""The calls of other threads are read without a garbage collection in between."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest

from andon_trainer.exchange.control.thread_calls import thread_calls


def deep(calls: int, then: Callable[[], object]) -> object:
    return deep(calls - 1, then) if calls else then()


@pytest.fixture
def waiting() -> Iterator[int]:
    """A thread that waits, fifty calls deep."""
    there, over = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        over.wait()

    thread = threading.Thread(target=deep, args=(50, wait))
    thread.start()
    assert thread.ident is not None
    assert there.wait(20)
    yield thread.ident
    over.set()
    thread.join()


@pytest.fixture
def _collects() -> Iterator[None]:
    """Leaves the collector as it was."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.usefixtures("_collects")
@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_starts_while_calls_are_read(waiting: int, *, enabled: bool) -> None:
    inside: list[str] = []
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(20)  # Fewer than there are calls to make an object of.

    def note(_phase: str, _info: object) -> None:
        inside.extend(each.name for each in traceback.extract_stack() if each.name == "_calls_of")

    gc.callbacks.append(note)
    try:
        found = thread_calls()
    finally:
        gc.callbacks.remove(note)

    assert sum(name == "deep" for _, _, name in found[waiting]) == 51
    assert not inside
    assert gc.isenabled() is enabled
