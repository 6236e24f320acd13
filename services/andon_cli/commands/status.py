"""`andon status`: what a line is doing, as a table or as JSON."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import asdict

from rich.console import Console

from andon.host.errors import ExitCode
from andon.host.strict_json import strict_json
from andon.protocol.limits import on_one_line
from andon_cli.client import CheckpointStatus, LineClient, LineStatus, WorkerStatus
from andon_cli.drawing.picture import LinePicture, Lost
from andon_cli.drawing.session_table import session_lines
from andon_cli.drawing.slow_texts import slow_brief, slow_fields
from andon_cli.drawing.texts import (
    accuracy_text,
    aligned,
    answer_lines,
    cost_line,
    evidence_fields,
    grouped,
    halted_line,
    late_line,
    schedule_line,
    step_line,
    waiting_line,
)
from andon_cli.drawing.watching import Watcher, can_draw, flags_of, statuses
from andon_cli.questions import StatusConfig
from andon_cli.target import find_target

__all__ = ["lost_json", "show_status", "status_json", "status_lines"]

_HEADINGS = (
    "worker", "rank", "host", "device", "state", "step", "samples/s", "waits", "heartbeat",
)  # fmt: skip

_IN_TIME = ("", "steps", "epochs")
"""Stop reasons that the status does not show: the run goes on, or ended as planned."""


async def show_status(config: StatusConfig) -> int:
    """Shows the status once, or with `watch` until the run is over. Returns the exit code."""
    if not config.watch:
        target = find_target(config.address, config.run)
        async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
            print(_shown(await client.status(), config))
        return ExitCode.COMPLETE
    console = Console()
    if config.format == "json" or not can_draw(console):
        await _print_changes(config)
    else:
        watcher = Watcher(config)
        await watcher.draw(console, lambda: _picture(watcher, config))
    return ExitCode.COMPLETE


def status_lines(status: LineStatus, *, flags: str = "") -> list[str]:
    """The table of a status, as lines. `flags` are those of `answer_lines`."""
    if status.session is not None:
        lines = session_lines(status, status.session)
        return [on_one_line(line) for line in lines]
    lines = [_summary(status)]
    if waiting := waiting_line(status):
        lines.append(waiting)
    if status.halt is not None:
        lines += [halted_line(status.halt), *answer_lines(status.halt, flags=flags)]
    if status.workers:
        lines += aligned([_HEADINGS, *(_row(worker) for worker in status.workers)])
    if late := late_line(status):
        lines.append(late)
    if status.slowness:
        lines.append(f"slow      {slow_brief(status.slowness[-1])} (andon why)")
    lines += filter(None, (schedule_line(status), cost_line(status.cost)))
    if status.shared:
        lines.append(_reducers(status))
    if status.checkpoints is not None:
        lines.append(_checkpoints(status.checkpoints))
    # What workers sent must not move the cursor.
    return [on_one_line(line) for line in lines]


def status_json(status: LineStatus) -> str:
    """A status as one line of JSON, with a halt's reason as a name and its key as text."""
    fields = asdict(status)
    if status.halt is not None:
        fields["halt"] = evidence_fields(status.halt)
    fields["slowness"] = [slow_fields(each) for each in status.slowness]
    for worker, shown in zip(status.workers, fields["workers"], strict=True):
        shown["slowness"] = None if worker.slowness is None else slow_fields(worker.slowness)
    return strict_json(fields)


def lost_json(run_id: str, lost: Lost, now: float) -> str:
    """What a program reads while the service is away, in place of a status."""
    fields = {"run_id": run_id, "state": "LOST", "problem": lost.problem}
    return strict_json({**fields, "lost_s": now - lost.since})


def _picture(watcher: Watcher, config: StatusConfig) -> LinePicture:
    return LinePicture(
        seen=watcher.seen,
        now=time.monotonic(),
        at_unix_s=time.time(),
        heard_at=watcher.heard_at,
        lost=watcher.lost,
        flags=flags_of(config),
        address=config.address,
        board_url=watcher.board_url,
    )


async def _print_changes(config: StatusConfig) -> None:
    """Follows a line where there is no terminal: a line of text a step, or JSON a status."""
    watcher = Watcher(config)
    async with aclosing(statuses(config)) as found:
        async for each in found:
            if config.format == "json":
                print(_json(watcher, each), flush=True)
            elif isinstance(each, LineStatus):
                for line in _news(watcher, each, config):
                    print(line, flush=True)
            elif watcher.lost is None:
                watcher.lose(each)
                print(f"LOST: {each.problem}. Trying again", flush=True)


def _json(watcher: Watcher, each: LineStatus | Lost) -> str:
    if isinstance(each, LineStatus):
        watcher.take(each)
        return status_json(each)
    last = watcher.seen.last
    return lost_json("" if last is None else last.run_id, each, time.monotonic())


def _news(watcher: Watcher, status: LineStatus, config: StatusConfig) -> list[str]:
    """What a status adds to those before it, as lines."""
    before, was_lost = watcher.seen.last, watcher.lost is not None
    happened = watcher.take(status)
    if before is None:
        return status_lines(status, flags=flags_of(config))
    lines = ["the service answers again"] if was_lost else []
    for each in happened:
        lines.append(each.text)
        if each.kind == "halted" and status.halt is not None:
            lines += answer_lines(status.halt, flags=flags_of(config))
    if status.step > before.step:
        lines.append(step_line(status))
    return lines


def _shown(status: LineStatus, config: StatusConfig) -> str:
    if config.format == "json":
        return status_json(status)
    return "\n".join(status_lines(status, flags=flags_of(config)))


def _summary(status: LineStatus) -> str:
    step = f"step {status.step}" + (f"/{status.total_steps}" if status.total_steps else "")
    why = "" if status.stop_reason in _IN_TIME else f" ({status.stop_reason})"
    state = f"{status.state}{why}"
    parts = [f"run {status.run_id}", state, step, f"epoch {status.epoch}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.accuracy is not None:
        parts.append(accuracy_text(status.accuracy))
    parts.append(f"{status.live} live, {status.participating} participating")
    return "  ".join(parts)


def _reducers(status: LineStatus) -> str:
    """How much of the model each reducer averages: `reducers  beta:7071 50 %, ...`."""
    whole = max(1, sum(each.elements for each in status.reducers))
    parts = [
        f"{each.address or 'with the coordinator'} {each.elements / whole * 100:.0f} %"
        for each in status.reducers
    ]
    there, expected = len(status.reducers), status.expect_reducers
    short = f" ({there} of {expected} there)" if there < expected else ""
    return f"reducers  {', '.join(parts) or 'none'}{short}"


def _checkpoints(known: CheckpointStatus) -> str:
    """`checkpoints  by worker 0 on alpha in runs/7f3a/checkpoints, the last at step 300`."""
    by = "no worker in the round can write any"
    if known.writer is not None:
        away = ", not the service's host," if known.elsewhere else ""
        by = f"by worker {known.writer} on {known.host}{away} in {known.folder}"
    last = f"the last at step {known.step}" if known.step else "none yet"
    missing = f"; step {known.overdue} has none" if known.overdue else ""
    return f"checkpoints  {by}, {last}{missing}"


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    activity = worker.activity if worker.live else "gone"
    return (
        str(worker.worker),
        "-" if worker.rank is None else str(worker.rank),
        worker.host or "-",
        (worker.hardware.name if worker.hardware else "") or worker.device or "-",
        activity + (f" ({worker.detail})" if worker.detail else ""),
        str(worker.step),
        grouped(worker.samples_per_second),
        f"{worker.waiting_ratio * 100:.0f} %",
        f"{worker.heartbeat_age_s:.1f} s",
    )
