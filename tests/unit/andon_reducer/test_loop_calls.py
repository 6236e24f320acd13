"""Calls from threads to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from andon_reducer.transport.loop_calls import LoopCalls


async def _all_done(calls: LoopCalls) -> None:
    """Returns once the loop has done what was asked for so far."""
    done = asyncio.Event()
    calls.call(done.set)
    await asyncio.wait_for(done.wait(), 10)


def _in_threads(count: int, act: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_call_is_done_once_and_each_threads_are_in_order() -> None:
    done: list[tuple[int, int]] = []

    async def story() -> None:
        calls = LoopCalls()
        calls.attach()

        def ask(number: int) -> None:
            for turn in range(200):
                calls.call(lambda *what: done.append(what), number, turn)

        await asyncio.to_thread(_in_threads, 4, ask)
        await _all_done(calls)

    asyncio.run(story())

    for number in range(4):
        assert [turn for who, turn in done if who == number] == list(range(200))


def test_the_loop_is_woken_once_for_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[object] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(callback: Callable[[], object], **more: Any) -> asyncio.Handle:
            woken.append(callback)
            return wake(callback, **more)

        calls = LoopCalls()
        calls.attach()
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for batch in (1, 2):
            for _ in range(50):
                calls.call(lambda: None)
            assert len(woken) == batch
            # It runs now, and what comes after it needs another wake-up.
            await asyncio.sleep(0)

    asyncio.run(story())


def test_a_call_that_fails_takes_no_other_with_it() -> None:
    done: list[str] = []
    reported: list[dict[str, Any]] = []

    def fail() -> None:
        raise RuntimeError("as requested")

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        calls = LoopCalls()
        calls.attach()
        calls.call(fail)
        calls.call(done.append, "the next")
        await _all_done(calls)

    asyncio.run(story())

    assert done == ["the next"]
    assert [str(each["exception"]) for each in reported] == ["as requested"]


def test_a_loop_that_is_closed_is_said_to_be() -> None:
    calls = LoopCalls()

    async def attach() -> None:
        calls.attach()

    asyncio.run(attach())

    assert not calls.call(lambda: None)
    assert not calls.call(lambda: None), "and not only the first time"
