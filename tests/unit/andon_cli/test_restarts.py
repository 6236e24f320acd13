"""Restarts: which deaths another try may mend, and how long it waits."""

from __future__ import annotations

import signal

import pytest

from andon_cli.restarts import Restarts


@pytest.mark.parametrize("code", [0, 3, 4, 5, 130, -signal.SIGINT])
def test_what_ended_on_purpose_stays_ended(code: int) -> None:
    restarts = Restarts(3)

    assert restarts.spend(code, trained=True) is None
    assert restarts.used == 0


@pytest.mark.parametrize("code", [1, 2, 139, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_what_died_comes_back_once_the_line_has_trained(code: int) -> None:
    assert Restarts(3).spend(code, trained=True) == 0.5


def test_before_the_first_step_only_a_signal_is_an_accident() -> None:
    restarts = Restarts(3)

    assert restarts.spend(1, trained=False) is None
    assert restarts.spend(-signal.SIGKILL, trained=False) == 0.5


def test_each_restart_waits_twice_as_long_up_to_a_limit_and_they_run_out() -> None:
    restarts = Restarts(7)

    waits = [restarts.spend(1, trained=True) for _ in range(8)]

    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, None]
    assert restarts.used == 7
