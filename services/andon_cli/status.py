"""`andon status`: what a line is doing, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.text import Text

from andon_cli.client import LineClient, LineStatus, WorkerStatus
from andon_cli.config import StatusConfig
from andon_cli.errors import ExitCode, LineUnreachable
from andon_cli.progress import grouped, halted_line, waiting_line
from andon_cli.runs import newest_service

__all__ = ["show_status", "status_json", "status_lines"]

_HEADINGS = (
    "worker", "rank", "host", "device", "state", "step", "samples/s", "waits", "heartbeat",
)  # fmt: skip


async def show_status(config: StatusConfig) -> int:
    """Shows the line's status once, or until the line goes away; the exit code."""
    async with LineClient(config.address or _newest_address()) as client:
        if config.watch:
            await _watch(client, config)
        else:
            status = await client.status()
            print(status_json(status) if config.format == "json" else _table(status))
    return ExitCode.COMPLETE


def status_lines(status: LineStatus) -> list[str]:
    """The table of one status, line by line."""
    lines = [_summary(status)]
    if waiting := waiting_line(status):
        lines.append(waiting)
    if status.halt is not None:
        lines.append(halted_line(status.halt))
    if status.workers:
        rows = [_HEADINGS, *(_row(worker) for worker in status.workers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    return lines


def status_json(status: LineStatus) -> str:
    """One status as one line of JSON; a halt's reason by name, its key as text."""
    fields = asdict(status)
    if status.halt is not None:
        fields["halt"] |= {
            "reason": status.halt.reason.label,
            "key": None if status.halt.key is None else str(status.halt.key),
            "place": status.halt.place,
        }
    return json.dumps(fields)


async def _watch(client: LineClient, config: StatusConfig) -> None:
    console = Console()
    if config.format == "json" or not console.is_terminal:
        async for status in client.watch():
            print(status_json(status) if config.format == "json" else _table(status), flush=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        async for status in client.watch():
            live.update(Text(_table(status), no_wrap=True), refresh=True)


def _newest_address() -> str:
    service = newest_service()
    if service is None:
        raise LineUnreachable(
            "there is no run under runs/ here: go to the directory that the run was started in, "
            "or pass --address HOST:PORT"
        )
    if not service.alive:
        raise LineUnreachable(
            f"the newest run, {service.run_id}, is not served any more; its journal is "
            f"{service.journal}"
        )
    return service.address


def _table(status: LineStatus) -> str:
    return "\n".join(status_lines(status))


def _summary(status: LineStatus) -> str:
    step = f"step {status.step}" + (f"/{status.total_steps}" if status.total_steps else "")
    parts = [f"run {status.run_id}", status.state, step, f"epoch {status.epoch}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    parts.append(f"{status.live} live, {status.participating} participating")
    return "  ".join(parts)


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    activity = worker.activity if worker.live else "gone"
    return (
        str(worker.worker),
        "-" if worker.rank is None else str(worker.rank),
        worker.host or "-",
        worker.device or "-",
        activity + (f" ({worker.detail})" if worker.detail else ""),
        str(worker.step),
        grouped(worker.samples_per_second),
        f"{worker.waiting_ratio * 100:.0f} %",
        f"{worker.heartbeat_age_s:.1f} s",
    )
