"""Why a worker failed, and how often one may."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from andon.protocol.halts import HaltReason
from andon.protocol.run_settings import RunPlan
from andon_cli.launching.endings import Ending, explained, kind_of, oom_kills_in, traceback_in
from andon_cli.launching.restarts import HOUR_S, Restarts
from andon_server.crashes import CrashKind

RAISED = (
    "step 3",
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "{}",
)
CAUGHT = (
    "Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "caught it",
    *RAISED[:3],
    "KeyError: 'x'",
)


def raised(error: str) -> tuple[str, ...]:
    return tuple(line.format(error) for line in RAISED)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (Ending(code=1, output=raised("KeyError: 'x'")), CrashKind.SCRIPT_ERROR),
        (Ending(code=1, output=CAUGHT), CrashKind.SCRIPT_ERROR),
        (
            Ending(code=1, output=raised("torch.OutOfMemoryError: CUDA out of memory.")),
            CrashKind.GPU_OUT_OF_MEMORY,
        ),
        (Ending(code=1, output=raised("MemoryError")), CrashKind.OUT_OF_MEMORY),
        (
            Ending(code=1, output=raised("RuntimeError: [...] can't allocate memory: 9 bytes")),
            CrashKind.OUT_OF_MEMORY,
        ),
        (Ending(code=-signal.SIGKILL), CrashKind.KILLED),
        (Ending(code=-signal.SIGKILL, killed_for_memory=True), CrashKind.KILLED_FOR_MEMORY),
        (Ending(code=-signal.SIGTERM, killed_for_memory=True), CrashKind.KILLED),
        (Ending(code=-signal.SIGSEGV), CrashKind.FAULT),
        (Ending(code=3, halt=HaltReason.NON_FINITE_LOSS), CrashKind.NON_FINITE),
        (Ending(code=3, halt=HaltReason.WRONG_ARITHMETIC), CrashKind.WRONG_ARITHMETIC),
        (Ending(code=3), CrashKind.HALTED),
        (Ending(code=143, output=raised("KeyError: 'x'")), CrashKind.NOTICE),
        (Ending(code=-signal.SIGKILL, notice="SIGTERM"), CrashKind.NOTICE),
        (Ending(code=-signal.SIGSEGV, notice="SIGTERM"), CrashKind.FAULT),
        (Ending(code=1, output=raised("KeyError: 'x'"), notice="SIGTERM"), CrashKind.SCRIPT_ERROR),
        (Ending(code=4), CrashKind.REFUSED),
        (Ending(code=5), CrashKind.LINE_LOST),
    ],
)
def test_why_a_worker_failed_is_known_from_how_it_ended(ending: Ending, kind: CrashKind) -> None:
    assert kind_of(ending) is kind


@pytest.mark.parametrize(
    "kind",
    [CrashKind.GPU_OUT_OF_MEMORY, CrashKind.OUT_OF_MEMORY, CrashKind.KILLED_FOR_MEMORY],
)
def test_a_lack_of_memory_names_the_batch_and_the_micro_batch_size(kind: CrashKind) -> None:
    said = explained(kind, Ending(code=1), RunPlan(global_batch=64), workers=3)
    of_grains = explained(kind, Ending(code=1), RunPlan(global_batch=64, grain=8, tree=1), 3)

    assert "64 samples, 22 a worker" in said
    assert "micro_batch_size=11" in said
    assert "micro_batch_size=4" in of_grains


@pytest.mark.parametrize(
    ("output", "told"),
    [
        pytest.param((*raised("KeyError: 'x'"), ""), "KeyError: 'x'", id="a-traceback"),
        pytest.param(
            (*raised("KeyError: 'x'"), "WARNING: a transfer failed"),
            "KeyError: 'x'",
            id="something-after-it",
        ),
        pytest.param(("usage: train.py", "train.py: error: no data"), "train.py: error: no data"),
        pytest.param(("Traceback (most recent call last):",), "Traceback (most recent call last):"),
    ],
)
def test_a_script_error_is_told_by_its_exception_or_its_last_line(
    output: tuple[str, ...], told: str
) -> None:
    ending = Ending(code=1, output=output)

    assert explained(CrashKind.SCRIPT_ERROR, ending, None, 1) == f"its script failed: {told}"


def test_a_traceback_begins_with_its_heading() -> None:
    assert traceback_in(raised("KeyError: 'x'"))[0] == "Traceback (most recent call last):"


def test_the_kernels_count_of_processes_that_it_killed_for_memory_is_read() -> None:
    assert oom_kills_in("nr_free 3\noom_kill 12\nx 1\n") == 12
    assert oom_kills_in("nr_free 3\n") is None
    here = Path("/proc/vmstat")
    assert not here.exists() or oom_kills_in(here.read_text()) is not None


def test_over_a_week_the_budget_is_that_of_an_hour_and_waits_begin_anew_after_a_stable_one() -> (
    None
):
    """Workers die at random for a week, and once an hour for a day; then one dies in a row."""
    restarts, chance = Restarts(3), random.Random(1)
    now, granted = 0.0, []
    while now < 6 * 24 * HOUR_S:
        now += chance.uniform(1.1 * HOUR_S, 9 * HOUR_S)
        granted.append(restarts.spend(-9, now, trained=True, slot=chance.randrange(4)))
    for _ in range(24):
        now += HOUR_S
        granted.append(restarts.spend(1, now, trained=True))

    assert set(granted) == {0.0}  # Each after a stable hour: at once, and none is refused.
    assert restarts.used == len(granted) > 40

    now += HOUR_S
    row = [restarts.spend(-9, now + 60 * each, trained=True) for each in range(5)]
    assert row == [0.0, 0.5, 1.0, None, None]
    assert restarts.spend(-9, now + HOUR_S - 1, trained=True) is None
    # The first of the three is an hour ago, and the row goes on: the last one is not.
    assert restarts.spend(-9, now + HOUR_S, trained=True) == 2.0
    assert restarts.spend(-9, now + HOUR_S, trained=True) is None
