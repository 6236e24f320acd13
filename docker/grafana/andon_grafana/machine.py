"""One worker: what do its network and its machine give it?"""

from __future__ import annotations

from andon_grafana.panels import ORANGE, Amounts, Curve, Number, Query, Row
from andon_grafana.promql import OF_WORKER, happened, latest, of, rate, total
from andon_grafana.quantiles import quantiles

__all__ = ["ROW"]

_MINE = (OF_WORKER,)
_STARTED = of("process_start_time_seconds", OF_WORKER)

_EXCHANGE = (
    Curve(
        title="Its exchange: p50, p95, p99",
        tells="From a step's first block sent to its last average received. Long for this worker "
        "alone: its network. Long for all: the slowest worker.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=quantiles("andon_exchange_seconds", exemplars=True, where=_MINE),
        unit="s",
        width=6,
    ),
    Curve(
        title="Its bytes a second",
        tells="Chunks to the reducer or the next rank (up) and from there (down), by the path that "
        "they took. A worker on the reducer's host should use shared memory.",
        see="docs/shared-memory.md",
        queries=(
            Query(
                expr=rate("andon_exchange_bytes_total", "path", "direction", where=_MINE),
                legend="{{path}}, {{direction}}",
            ),
        ),
        unit="Bps",
        width=6,
    ),
    Curve(
        title="Its segments sent again a second",
        tells="TCP segments that its lanes and other connections had to send again, since the "
        "network lost them. Some are usual on a busy link; many, for this worker alone: its "
        "network card, cable or switch. `andon why` has those of a moment at which it was late.",
        see="docs/tcp-lane.md",
        queries=(
            Query(
                expr=rate("andon_worker_retransmitted_segments_total", where=_MINE),
                legend="segments",
                color=ORANGE,
            ),
        ),
        unit="suffix:segments/s",
        may_be_empty="only Linux tells what was sent again",
        width=6,
    ),
    Curve(
        title="Its exchange hidden by backward",
        tells="Part of the last exchange that took place during backward. What is not hidden is "
        "waited for.",
        see="docs/performance.md#what-to-set",
        queries=(Query(expr=latest("andon_exchange_hidden_ratio", where=_MINE), legend="hidden"),),
        unit="percentunit",
        limits=(0, 1),
        width=6,
    ),
)

_HOST = (
    Curve(
        title="Its memory",
        tells="Resident memory of its process, without those of a DataLoader. One that only grows "
        "is a leak of the script; the kernel ends what takes too much.",
        see="docs/performance.md#memory",
        queries=(
            Query(expr=latest("process_resident_memory_bytes", where=_MINE), legend="resident"),
        ),
        width=6,
        unit="bytes",
        may_be_empty="only Linux tells a process's memory",
    ),
    Curve(
        title="Its CPU cores",
        tells="Processor time of its process, without those of a DataLoader. Far below the threads "
        "that it has, with much computing: another process takes its cores.",
        see="docs/performance.md#what-to-set",
        queries=(Query(expr=rate("process_cpu_seconds_total", where=_MINE), legend="cores"),),
        width=6,
        unit="suffix:cores",
        may_be_empty="only Linux tells a process's time",
    ),
    Curve(
        title="Its GPU's utilization",
        tells="Part of the last moments in which its GPU was busy. Low, with much data wait: the "
        "loader is too slow.",
        see="docs/performance.md#what-to-set",
        queries=(Query(expr=latest("andon_gpu_utilization_ratio", where=_MINE), legend="busy"),),
        width=6,
        unit="percentunit",
        limits=(0, 1),
        may_be_empty="there is no GPU, or no NVML",
    ),
    Curve(
        title="Its GPU's memory",
        tells="What tensors use, at most so far, what PyTorch holds, and what the GPU has. A peak "
        "near the total: a larger batch ends the worker.",
        see="docs/performance.md#memory",
        queries=(
            Query(expr=latest("andon_gpu_memory_bytes", "kind", where=_MINE), legend="{{kind}}"),
        ),
        width=6,
        unit="bytes",
        may_be_empty="there is no GPU",
    ),
)

_AGAIN = (
    Number(
        title="Age of its process",
        tells="Time since its process started. Much less than the run's: it was started again.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(Query(expr=f"time() - {latest('process_start_time_seconds', where=_MINE)}"),),
        width=6,
        unit="dtdurations",
        decimals=1,
        may_be_empty="only Linux tells when a process started",
    ),
    Number(
        title="Its processes, in the time shown",
        tells="How many processes had this worker's slot: 1, and one more for each that was "
        "started again in its place.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        # Another process mostly has another port, and so its own series.
        queries=(Query(expr=f"sum(1 + changes({_STARTED}[$__range]))"),),
        width=6,
        thresholds=((2, ORANGE),),
        may_be_empty="only Linux tells when a process started",
    ),
    Amounts(
        title="Its setbacks, in the time shown",
        tells="Joins after its stream broke, rounds that were void and tried again, and falls back "
        "from shared memory to the wire. Often, for this worker alone: its network.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=tuple(
            Query(expr=happened(metric, where=_MINE), legend=name, color=ORANGE)
            for name, metric in (
                ("rejoins", "andon_worker_rejoins_total"),
                ("void rounds", "andon_worker_rounds_voided_total"),
                ("shared memory lost", "andon_shared_memory_fallbacks_total"),
            )
        ),
        width=6,
        empty="none",
        may_be_empty="nothing of the kind happened",
    ),
    Number(
        title="Its part of the cadence",
        tells="Micro-batches that it was told to make of its share, and local steps that it made "
        "between exchanges since its process started.",
        see="docs/guide/uneven-machines.md#let-fast-workers-compute-more-cadence",
        queries=(
            Query(expr=latest("andon_worker_micro_batches", where=_MINE), legend="micro-batches"),
            Query(expr=total("andon_local_steps_total", where=_MINE), legend="local steps"),
        ),
        width=6,
    ),
)

ROW = Row(
    title="What do network and machine give it?",
    panels=((7, _EXCHANGE), (7, _HOST), (5, _AGAIN)),
)
