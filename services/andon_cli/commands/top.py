"""`andon top`: who holds a line up, what it costs the others, and where each one's time goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from andon.host.errors import ExitCode
from andon.host.strict_json import strict_json
from andon.protocol.limits import on_one_line
from andon_cli.client import LineClient, LineStatus, StepTimes, WorkerStatus
from andon_cli.drawing.picture import (
    Column,
    device_of,
    fitted_table,
    headline,
    light_of_worker,
    lost_lines,
    step_text,
)
from andon_cli.drawing.texts import aligned, grouped, late_worker, short_time
from andon_cli.drawing.watching import Watcher, can_draw
from andon_cli.questions import TopConfig
from andon_cli.target import find_target

__all__ = ["TopPicture", "WorkerCost", "WorkerCosts", "show_top", "top_json", "top_lines"]

_STEPS = 100
"""The figures are those of so many last steps that were seen."""
_WORTH_TELLING = 0.02
"""A worker that costs the others less than this part of their time is not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCost:
    """What a worker costs the others, and where its own time goes; all are parts of 1."""

    worker: int
    costs: float = 0.0
    """Of the others' time, what they wait for this worker because it is the last one."""
    late: float = 0.0
    """In how many of the steps it was the last one."""
    compute: float = 0.0
    data: float = 0.0
    """It waits for its own samples."""
    exchange: float = 0.0
    """The part of the exchange that is not hidden behind computing."""
    waits: float = 0.0
    """It waits for other workers."""
    other: float = 0.0
    """The optimizer, the commit, the script itself."""


@dataclass(frozen=True, slots=True)
class _SeenStep:
    seconds: float
    times: dict[int, StepTimes]

    @property
    def last(self) -> int:
        """The worker that was done last: it waited least."""
        return min(self.times, key=lambda worker: (self.times[worker].wait_s, worker))

    @property
    def exchange_s(self) -> float:
        """What everybody waits for, even the last one: the exchange itself."""
        return min(each.wait_s for each in self.times.values())

    @property
    def waited_s(self) -> float:
        """How long the others waited for the last one, all together."""
        return sum(each.wait_s - self.exchange_s for each in self.times.values())


class WorkerCosts:
    """What the workers cost each other in the last steps that were seen."""

    def __init__(self) -> None:
        """Has seen no step."""
        self._steps: deque[_SeenStep] = deque(maxlen=_STEPS)
        self._step = -1

    def __len__(self) -> int:
        """How many steps the figures are of."""
        return len(self._steps)

    @property
    def step_s(self) -> float:
        """The mean time of a step, in seconds; 0 before the first."""
        return sum(each.seconds for each in self._steps) / max(1, len(self._steps))

    def note(self, status: LineStatus) -> None:
        """Takes the times of the last step in, unless it was seen before."""
        if status.step == self._step:
            return
        self._step = status.step
        workers = [each for each in status.workers if each.live and each.samples_per_second > 0]
        times = {each.worker: each.timings for each in workers if each.timings is not None}
        if times:
            self._steps.append(_SeenStep(max(each.step_s for each in workers), times))

    def of(self, worker: int) -> WorkerCost:
        """The figures of one worker; zeros if it was in none of the steps."""
        mine = [each for each in self._steps if worker in each.times]
        whole = sum(each.seconds for each in mine)
        if whole <= 0:
            return WorkerCost(worker=worker)
        late = [each for each in mine if each.last == worker and len(each.times) > 1]
        others = sum(each.seconds * (len(each.times) - 1) for each in mine)
        times = [each.times[worker] for each in mine]
        compute = sum(each.busy_s or max(0.0, each.compute_s - each.data_s) for each in times)
        data = sum(each.data_s for each in times)
        exchange = sum(each.exchange_s for each in mine)
        waits = sum(each.wait_s for each in times) - exchange
        parts = [min(1.0, max(0.0, part / whole)) for part in (compute, data, exchange, waits)]
        return WorkerCost(
            worker=worker,
            costs=sum(each.waited_s for each in late) / others if others else 0.0,
            late=len(late) / len(mine),
            compute=parts[0],
            data=parts[1],
            exchange=parts[2],
            waits=parts[3],
            other=max(0.0, 1.0 - sum(parts)),
        )

    def ranked(self, status: LineStatus) -> list[tuple[WorkerStatus, WorkerCost]]:
        """The workers of a status, first who costs the others most; those that are gone last."""
        found = [(each, self.of(each.worker)) for each in status.workers]
        return sorted(found, key=lambda each: (not each[0].live, -each[1].costs, each[0].worker))


async def show_top(config: TopConfig) -> int:
    """Shows who holds the line up, once or until the run is over. Returns the exit code.

    Raises:
        CommandError: the line can't be reached, or refuses.
    """
    console = Console()
    costs = WorkerCosts()
    if not config.once and config.format != "json" and can_draw(console):
        watcher = Watcher(config)
        await watcher.draw(console, lambda: _picture(watcher, costs), costs.note)
        return ExitCode.COMPLETE
    target = find_target(config.address, config.run)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        status = await client.status()
    costs.note(status)
    print(top_json(status, costs) if config.format == "json" else _text(status, costs))
    return ExitCode.COMPLETE


def top_json(status: LineStatus, costs: WorkerCosts) -> str:
    """Who costs whom what, as one line of JSON."""
    workers = [
        {
            **{name: getattr(worker, name) for name in _FIELDS},
            "device": device_of(worker),
            **asdict(cost),
        }
        for worker, cost in costs.ranked(status)
    ]
    return strict_json(
        {
            "run_id": status.run_id,
            "state": status.state,
            "step": status.step,
            "total_steps": status.total_steps,
            "steps_seen": len(costs),
            "step_s": costs.step_s,
            "holds_up": late_worker(status),
            "waiting_for": status.waiting_for,
            "workers": workers,
        }
    )


_FIELDS = (
    "rank", "host", "live", "activity", "samples_per_second", "share", "micro_batches",
    "heartbeat_age_s",
)  # fmt: skip


def top_lines(status: LineStatus, costs: WorkerCosts) -> list[str]:
    """The same as a table without colours."""
    rows = [_cells(worker, cost) for worker, cost in costs.ranked(status)]
    head = f"run {status.run_id}  {status.state}  step {step_text(status)}{_over(costs)}"
    table = aligned([[each.name for each in _COLUMNS], *rows]) if rows else []
    return [head, *_verdict(status, costs), *table]


def _text(status: LineStatus, costs: WorkerCosts) -> str:
    return "\n".join(top_lines(status, costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopPicture:
    """What a terminal shows at `now`, a monotonic time in seconds."""

    watcher: Watcher
    costs: WorkerCosts
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it for the width that there is."""
        status, lost = self.watcher.seen.last, self.watcher.lost
        if status is None:
            return
        ascii_only, silent_s = options.ascii_only, self.now - self.watcher.heard_at
        yield headline(status, silent_s, lost, ascii_only=ascii_only)
        if lost is not None:
            yield from lost_lines(status, lost, silent_s, self.now)
            return
        yield Text(f"step {step_text(status)}{_over(self.costs)}")
        yield from (Text(each, style="yellow") for each in _verdict(status, self.costs))
        yield Text()
        late = late_worker(status)
        rows = [
            [
                light_of_worker(worker, status, late).text(ascii_only=ascii_only),
                *(Text(on_one_line(each)) for each in _cells(worker, cost)),
            ]
            for worker, cost in self.costs.ranked(status)
        ]
        if rows:
            yield fitted_table((Column(""), *_COLUMNS), rows, options.max_width)


_COLUMNS = (
    Column("worker", right=True), Column("host", 4), Column("device", 7),
    Column("costs", right=True), Column("late", 6, right=True), Column("compute", 1, right=True),
    Column("data", 2, right=True), Column("exchange", 3, right=True),
    Column("waits", 1, right=True), Column("other", 8, right=True),
    Column("samples/s", 5, right=True), Column("state", 6),
)  # fmt: skip


def _picture(watcher: Watcher, costs: WorkerCosts) -> RenderableType:
    return TopPicture(watcher=watcher, costs=costs, now=time.monotonic())


def _cells(worker: WorkerStatus, cost: WorkerCost) -> Sequence[str]:
    parts = (cost.costs, cost.late, cost.compute, cost.data, cost.exchange, cost.waits, cost.other)
    return (
        str(worker.worker),
        worker.host or "-",
        device_of(worker),
        *(f"{part * 100:.0f} %" for part in parts),
        grouped(worker.samples_per_second),
        worker.activity if worker.live else "gone",
    )


def _over(costs: WorkerCosts) -> str:
    if not len(costs):
        return ""
    steps = "the last step" if len(costs) == 1 else f"the last {len(costs)} steps seen"
    return f"  of {steps}, {short_time(costs.step_s)} each"


def _verdict(status: LineStatus, costs: WorkerCosts) -> list[str]:
    """Who is to blame, in words, and what the line waits for at this moment."""
    if status.state not in ("RUNNING", "DRAINING"):
        return [f"waiting for {status.waiting_for}"] if status.waiting_for else []
    if not len(costs):
        return ["no step was seen yet"]
    ranked = costs.ranked(status)
    if len(ranked) < 2:
        return ["one worker: nobody waits for anybody"]
    worker, cost = ranked[0]
    if cost.costs < _WORTH_TELLING:
        return ["nobody holds the line up"]
    return [
        f"worker {worker.worker} holds the line up: the others spend {cost.costs * 100:.0f} % of "
        "their time waiting for it"
    ]
