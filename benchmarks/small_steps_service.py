"""The service of `small_steps.py`: `andon serve` that counts its event loop's calls when told to.

SIGUSR1 starts the counting; SIGUSR2 ends it, and writes the counts to the file that
ANDON_CALLS names: a list of [file, line, function, calls]. A built-in function counts as a call of
the function that called it.

What this service does by the clock, and not by the step, is made so rare that it does not count:
looks at leases, and statuses for people.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from andon_cli.app import main
from andon_coordinator.transport.task import LineTask, TaskSettings

__all__: list[str] = []

_RARELY_S = 3600.0


def _count_to(file: Path) -> None:
    """Counts in the thread that handles signals, which is the event loop's."""
    profile, written = cProfile.Profile(), file.with_suffix(".part")

    def stop(number: int, frame: object) -> None:
        profile.disable()
        written.write_text(json.dumps(_calls_of(profile)))
        written.rename(file)  # At once: who waits for the file reads it whole.

    signal.signal(signal.SIGUSR1, lambda number, frame: profile.enable())
    signal.signal(signal.SIGUSR2, stop)


def _look_rarely() -> None:
    """Makes the line's task do by the clock what it can't leave out, and no more."""
    begin = LineTask.__init__

    def begin_slow(self: LineTask, *parts: Any, settings: TaskSettings, **rest: Any) -> None:
        settings = replace(settings, tick_s=_RARELY_S, observe_s=_RARELY_S)
        begin(self, *parts, settings=settings, **rest)

    LineTask.__init__ = begin_slow  # type: ignore[method-assign]  # that is the point


def _calls_of(profile: cProfile.Profile) -> list[tuple[str, int, str, int]]:
    # Not by `pstats`, which takes functions of one name and line for one: all that are made by
    # `dataclass` are of line 2 of no file.
    calls: Counter[tuple[str, int, str]] = Counter()
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            continue
        place = entry.code.co_filename, entry.code.co_firstlineno, entry.code.co_name
        calls[place] += entry.callcount
        for called in entry.calls or ():
            if isinstance(called.code, str):
                calls[place] += called.callcount
    return [(*place, count) for place, count in calls.items()]


if __name__ == "__main__":
    _look_rarely()
    _count_to(Path(os.environ["ANDON_CALLS"]))
    main()
