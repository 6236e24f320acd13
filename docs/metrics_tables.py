"""The tables of docs/metrics.md, made of the registries that the processes fill.

`python docs/metrics_tables.py docs/metrics.md` writes them; with `--check` it says whether they are
up to date. A table stands between two markers, `<!-- metrics NAME -->` and `<!-- end -->`; the text
around them is written by hand. What a metric means is its help text, as Prometheus shows it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from andon.host.telemetry import (
    ExchangeDurations,
    HandshakeCounter,
    RefusalCounter,
    new_registry,
)
from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import Scalar
from andon.protocol.sessions import RankReport
from andon_coordinator.core import effects, events, session_events
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.telemetry import LineMetrics, SessionMetrics, Totals
from andon_reducer.telemetry import ReducerTelemetry
from andon_trainer.telemetry import GPU_MEMORY, GpuReading, WorkerMetrics

__all__ = ["Described", "page", "process", "service", "table_of", "worker"]

_KEY = Key(1, 1)
"""Of the session whose ranks have labels."""
_ENDINGS = {"counter": "_total", "info": "_info"}
_UNITS = ("seconds", "bytes", "ratio", "steps", "samples")
_OF_A_HISTOGRAM = {"le", "quantile"}
_MARKED = re.compile(r"<!-- metrics ([a-z]+) -->\n.*?<!-- end -->", re.DOTALL)

_PARTS: Mapping[str, tuple[str, ...]] = {
    "run": (
        "andon_run",
        "andon_line_",
        "andon_steps_planned",
        "andon_halt",
        "andon_jidoka_",
        "andon_spikes_",
        *("andon_machine_seconds", "andon_cost"),
    ),
    "steps": (
        *("andon_step", "andon_samples_committed", "andon_recovery_", "andon_join"),
        *("andon_faults", "andon_window_", "andon_local_steps", "andon_learning_rate_"),
        *(
            "andon_late_",
            "andon_owed_",
            "andon_gradient_noise_",
            "andon_logged_value",
            "andon_verif",
            "andon_convictions",
        ),
    ),
    "workers": (
        *("andon_workers", "andon_worker_", "andon_heartbeat_", "andon_departures"),
        "andon_notices",
        "andon_evictions",
        *("andon_reducers", "andon_learning_", "andon_slowness_"),
    ),
    "keeping": ("andon_journal_", "andon_checkpoint", "andon_state_transfer_failures"),
    "exchange": (
        *("andon_allreduce_", "andon_exchange_", "andon_state_transfer_bytes"),
        *("andon_inflight_", "andon_reducer_"),
    ),
    "calls": ("andon_refusals", "andon_tls_"),
    "sessions": ("andon_session", "andon_rank_"),
}
"""The service's tables, by how the names of their metrics begin; the longest beginning wins."""


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, as the tables show it."""

    name: str
    kind: str
    labels: frozenset[str]
    unit: str
    meaning: str

    def row(self) -> str:
        """A row of a table."""
        labels = ", ".join(f"`{each}`" for each in sorted(self.labels))
        meaning = self.meaning.replace("|", "\\|")
        return f"| `{self.name}` | {self.kind} | {labels} | {self.unit} | {meaning} |"


def process() -> CollectorRegistry:
    """What every process has."""
    return new_registry()


def service() -> CollectorRegistry:
    """What a service adds, one worker having joined and logged: its labels are then there, too."""
    registry = CollectorRegistry()
    refusals, exchanges = RefusalCounter(registry), ExchangeDurations(registry)
    ReducerTelemetry(registry, refusals, exchanges)
    HandshakeCounter(registry)
    metrics = LineMetrics(registry, Totals(), refusals, exchanges)
    settings = LineSettings(run_id="7f3a", expect_workers=1, min_workers=1, max_workers=1)
    line = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    joined = events.WorkerJoined(
        1,
        events.JoinRequest(
            run_id="7f3a",
            incarnation=1,
            layout=Layout(()),
            plan=RunPlan(global_batch=1, dataset_size=8),
        ),
    )
    logged = effects.SaveScalars(0, (Scalar("val", 0, 0.3),))
    metrics.observe(joined, [*line.receive(joined, 0.0), logged], 0.0)
    metrics.tick(line.status(0.0))
    sessions = SessionMetrics(registry, {})
    reported = session_events.RankReported(1, _KEY, 1, RankReport())
    request = session_events.AttendRequest(rank=0, world_size=1, incarnation=1)
    formed = session_events.SendFormed(
        stream=1,
        rank=0,
        key=_KEY,
        roster=(request,),
        capabilities=frozenset(),
        lease_s=3,
        report_s=1,
    )
    sessions.happened(events.SessionSaved(_KEY), [formed])
    sessions.happened(reported, [session_events.SendReportAnswer(1, 1)])
    return registry


def worker() -> CollectorRegistry:
    """What a worker adds, one with a GPU: its labels are then there, too."""
    registry = CollectorRegistry()
    reading = GpuReading(memory_bytes=dict.fromkeys(GPU_MEMORY, 0), utilization=0.0)
    WorkerMetrics(registry, lambda: reading)
    return registry


def table_of(registry: CollectorRegistry) -> dict[str, Described]:
    """The metrics of a registry by name, in the order in which they were registered."""
    return {each.name: each for each in map(_described, registry.collect())}


def page(text: str) -> str:
    """The page `text` with its tables made anew.

    Raises:
        ValueError: a metric has no table, or a table no marker.
    """
    tables = {
        "process": list(table_of(process()).values()),
        "worker": list(table_of(worker()).values()),
    }
    for metric in table_of(service()).values():
        tables.setdefault(_part_of(metric.name), []).append(metric)
    missing = tables.keys() - set(_MARKED.findall(text))
    if missing:
        raise ValueError(f"the page has no marker for {', '.join(sorted(missing))}")

    def table(match: re.Match[str]) -> str:
        head = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
        rows = [metric.row() for metric in tables[match[1]]]
        return "\n".join([f"<!-- metrics {match[1]} -->", *head, *rows, "<!-- end -->"])

    return _MARKED.sub(table, text)


def _described(family: Metric) -> Described:
    labels = frozenset(name for sample in family.samples for name in sample.labels)
    endings = [each for each in _UNITS if family.name.endswith(f"_{each}")]
    return Described(
        name=family.name + _ENDINGS.get(family.type, ""),
        kind=family.type,
        labels=labels - _OF_A_HISTOGRAM,
        unit=endings[0] if endings else "",
        meaning=family.documentation,
    )


def _part_of(name: str) -> str:
    found = [
        (len(beginning), part)
        for part, beginnings in _PARTS.items()
        for beginning in beginnings
        if name.startswith(beginning)
    ]
    if not found:
        raise ValueError(f"{name} has no table: say in docs/metrics_tables.py to which it belongs")
    return max(found)[1]


def _main(path: Path, finished: Callable[[str], object], *, check: bool) -> int:
    text = path.read_text("utf-8")
    made = page(text)
    if made != text and not check:
        path.write_text(made, "utf-8")
        finished(f"wrote {path}")
    elif made != text:
        finished(f"{path} is not what the processes register: make metrics")
    return int(made != text and check)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), print, check="--check" in sys.argv))
