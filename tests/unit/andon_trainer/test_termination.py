"""Termination: what SIGTERM does to a worker's process, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from andon_trainer.termination import Terminated, Termination


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def installed(wake: Callable[[str], bool] = lambda _why: True) -> Termination:
    termination = Termination()
    termination.install(wake)
    return termination


def test_the_first_sigterm_wakes_the_worker_and_raises_nothing() -> None:
    woken: list[bool] = []

    def wake(_why: str) -> bool:
        woken.append(True)
        return True

    termination = installed(wake)

    signal.raise_signal(signal.SIGTERM)

    assert (termination.wanted, woken) == (True, [True])


def test_the_second_sigterm_ends_the_process_where_it_is() -> None:
    installed()
    signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Terminated) as ended:
        signal.raise_signal(signal.SIGTERM)

    assert ended.value.code == 143


def test_a_worker_without_a_step_to_finish_ends_at_the_first_sigterm() -> None:
    installed(lambda _why: False)

    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)


def test_a_handler_that_the_script_had_is_called_as_well() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    termination = installed()

    signal.raise_signal(signal.SIGTERM)

    assert (seen, termination.wanted) == ([signal.SIGTERM], True)


def test_a_handler_that_the_script_sets_later_stays_in_place() -> None:
    termination = installed()
    seen: list[int] = []
    mine = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number)) and (
        signal.getsignal(signal.SIGTERM)
    )

    signal.raise_signal(signal.SIGTERM)
    termination.remove()

    assert (seen, termination.wanted) == ([signal.SIGTERM], False)
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_process_that_ignores_sigterm_goes_on_so_and_hears_of_a_notice_all_the_same() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told: list[str] = []

    def wake(why: str) -> bool:
        told.append(why)
        return True

    termination = installed(wake)
    handler = signal.getsignal(signal.SIGTERM)

    termination.ask("a notice")
    termination.remove()

    assert handler == signal.SIG_IGN
    assert (told, termination.why) == (["a notice"], "a notice")


def test_whoever_closes_the_line_has_the_old_handler_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = installed()

    termination.remove()

    assert signal.getsignal(signal.SIGTERM) == before


def test_a_line_of_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=installed)

    thread.start()
    thread.join()

    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_ended_by_sigterm_as_any_other() -> None:
    termination = installed()

    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(7)  # only if it was not ended
    _, status = os.waitpid(child, 0)

    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not termination.wanted
