"""Folder search: what the run's folder has to go on from, said once when a service starts.

A run whose journal has steps may have lost all its workers: its cluster lost power, or was taken
down. The line goes on by itself from a checkpoint that they bring (rule 12 of docs/protocol.md).
What the service itself finds decides nothing; it tells people what to expect, and the words of a
halt name it. The search reads every byte of a checkpoint, so it has a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from andon.host.errors import ResumeRefused
from andon.host.logs import LogEvent
from andon_server.resuming import Findings, search_history

__all__ = ["search_folder"]

log = logging.getLogger(__name__)


def search_folder(
    run_id: str,
    run_dir: Path,
    at_step: int,
    report: Callable[[str, int | None, tuple[str, ...]], None],
) -> threading.Thread:
    """Looks for the newest whole checkpoint, logs it, and reports its step.

    Args:
        run_id: the run.
        run_dir: its folder.
        at_step: the step at which its journal ends.
        report: called from another thread, with the folder, the step (None: there is none), and
            what is wrong with newer checkpoints.

    Returns:
        The thread, started. It is a daemon: a service that stops does not wait for a large file.
    """

    def search() -> None:
        try:
            found = search_history(run_dir)
        except ResumeRefused as error:
            log.warning(LogEvent("checkpoint_not_found", run=run_id, message=str(error)))
            return
        words = _words(at_step, found, run_dir)
        log.info(LogEvent("checkpoint_searched", run=run_id, message=words))
        report(str(run_dir), _step_of(found), found.damaged)

    thread = threading.Thread(target=search, name="andon-checkpoints", daemon=True)
    thread.start()
    return thread


def _step_of(found: Findings) -> int | None:
    return None if found.newest is None else found.newest[1].step


def _words(at_step: int, found: Findings, run_dir: Path) -> str:
    step = _step_of(found)
    if step is not None:
        return (
            f"the run was at step {at_step}; its newest whole checkpoint is of step {step}: the "
            f"line goes on from there if no worker still holds step {at_step}"
        )
    has = "no checkpoint of it"
    if found.damaged:
        has = f"no whole checkpoint of it ({'; '.join(found.damaged)})"
    return (
        f"the run was at step {at_step}, and {run_dir} has {has}: it goes on if a worker still "
        f"holds step {at_step}, or brings a checkpoint"
    )
