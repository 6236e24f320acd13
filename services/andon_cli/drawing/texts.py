"""Texts: a line, its steps and its halts as people and programs read them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from andon.protocol.halts import HaltEvidence
from andon_cli.client import Hardware, LineStatus, VerificationStatus, WorkerStatus
from andon_coordinator.core.machine_time import RunCost
from andon_coordinator.core.status import holds_up
from andon_coordinator.core.verification import VerifiedTotals
from andon_server.halt_words import answers_to, evidence_fields, halted_line

__all__ = [
    "accuracy_text",
    "aligned",
    "answer_lines",
    "bar",
    "cost_line",
    "date_text",
    "device_summary",
    "duration",
    "evidence_fields",
    "grouped",
    "halt_lines",
    "halted_line",
    "hardware_line",
    "late_line",
    "late_worker",
    "measured_parts",
    "moment_text",
    "schedule_line",
    "short_time",
    "sparkline",
    "step_line",
    "step_text",
    "verified_text",
    "waiting_line",
]


def step_line(status: LineStatus) -> str:
    """One line for a committed step, such as
    `step  118/1000  loss 2.413  accuracy 81.2 %  1 204 samples/s  exchange 6 ms (81 % hidden)`.
    """
    return "  ".join([step_text(status), *measured_parts(status)])


def step_text(status: LineStatus) -> str:
    """The step, and of how many: `step  118/1000`."""
    total = status.total_steps
    width = len(str(total)) if total else 1
    return f"step {status.step:{width}d}" + (f"/{total}" if total else "")


def measured_parts(status: LineStatus) -> list[str]:
    """What was measured of the last step, as far as it was."""
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.accuracy is not None:
        parts.append(accuracy_text(status.accuracy))
    if status.samples_per_second > 0:
        parts.append(f"{grouped(status.samples_per_second)} samples/s")
    if status.exchange_s > 0:
        hidden = f"{status.hidden_ratio * 100:.0f} % hidden"
        parts.append(f"exchange {_milliseconds(status.exchange_s)} ({hidden})")
    return parts


def accuracy_text(accuracy: float) -> str:
    """An accuracy, such as `accuracy 81.2 %`."""
    return f"accuracy {accuracy * 100:.1f} %"


def bar(ratio: float, cells: int = 20) -> str:
    """A bar of so many cells between brackets, such as `[#####---------------]`."""
    filled = min(max(int(ratio * cells), 0), cells)
    return f"[{'#' * filled}{'-' * (cells - filled)}]"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Values as a row of little bars, the lowest the smallest; `×` where one is not a number.

    Longer series are averaged into `width` groups, so that the row shows all of them.
    """
    values = list(values)  # a deque has no slices
    if not values or width < 1:
        return ""
    levels = "_.:-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    size = max(1, math.ceil(len(values) / width))
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [each for each in means if math.isfinite(each)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    top = len(levels) - 1

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return "x" if ascii_only else "×"
        return levels[round((value - low) / (high - low) * top) if high > low else 0]

    return "".join(map(cell, means))


def grouped(number: float) -> str:
    """A number for people: `1 204`, `87`, `3.4`."""
    if number < 9.95:
        return f"{number:.1f}"
    return f"{number:,.0f}".replace(",", " ")


def duration(seconds: float) -> str:
    """A time for people: `7.4s`, `58s`, `1m12s`, `2h05m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def date_text(at_unix_s: float) -> str:
    """A moment for people, by this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_unix_s))


def moment_text(at_unix_s: float) -> str:
    """The same without the year, for lists of what happened."""
    return date_text(at_unix_s)[5:]


def short_time(seconds: float) -> str:
    """A time for people, from microseconds on: `240 µs`, `53 ms`, `1.2s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else duration(seconds)


def halt_lines(halt: HaltEvidence, *, on_halt: str, flags: str = "") -> list[str]:
    """A halt for people: who, what, where, and the possible answers.

    `flags` are those of `answer_lines`.
    """
    if on_halt == "wait":
        return [halted_line(halt), *answer_lines(halt, flags=flags)]
    return [
        halted_line(halt),
        "        The workers raise LineHalted, at the weights of the step before.",
    ]


def waiting_line(status: LineStatus) -> str:
    """What a line waits for that is neither running nor halted; else empty."""
    if status.state in ("RUNNING", "HALTED") or not status.waiting_for:
        return ""
    return f"waiting for {status.waiting_for}"


def device_summary(devices: Sequence[str], threads: str) -> str:
    """The workers and their devices: `2 workers on cpu (1 thread each)`."""
    count = len(devices)
    noun = "worker" if count == 1 else "workers"
    kinds = sorted({device for device in devices if device})
    place = f" on {', '.join(kinds)}" if kinds else ""
    each = f" ({threads} thread{'' if threads == '1' else 's'} each)" if threads else ""
    return f"{count} {noun}{place}{each}"


def hardware_line(workers: Sequence[WorkerStatus]) -> str:
    """The devices behind a line, and whether they differ; empty if nobody described one.

    Such as `devices  0, 1: AMD EPYC, 2 cores, 15.6 GiB  2: NVIDIA L4, 58 cores, 22.0 GiB
    (they differ)`.
    """
    known: dict[Hardware, list[int]] = {}
    for worker in workers:
        if worker.hardware is not None and worker.hardware.name:
            known.setdefault(worker.hardware, []).append(worker.worker)
    if not known:
        return ""
    if len(known) == 1 and len(next(iter(known.values()))) == len(workers):
        return f"devices  {_hardware_text(next(iter(known)))}"
    parts = [
        f"{', '.join(map(str, members))}: {_hardware_text(each)}" for each, members in known.items()
    ]
    differ = ["(they differ)"] if len({each.name for each in known}) > 1 else []
    return "  ".join(["devices", *parts, *differ])


def late_worker(status: LineStatus) -> int | None:
    """The worker that the others wait for; None if nobody waits much longer than another."""
    return holds_up(
        {
            each.worker: each.waiting_ratio
            for each in status.workers
            if each.live and each.rank is not None and each.samples_per_second > 0
        }
    )


def late_line(status: LineStatus) -> str:
    """Who holds the line up; empty if nobody does, or if it stands still anyway."""
    late = None if status.state == "HALTED" else late_worker(status)
    if late is None:
        return ""
    longest = max(each.waiting_ratio for each in status.workers if each.rank is not None)
    return (
        f"worker {late} holds the line up: others wait for up to {longest * 100:.0f} % of a step "
        "(andon top)"
    )


def schedule_line(status: LineStatus) -> str:
    """How work is divided, and why; empty if it is divided equally and nobody asks.

    For example `schedule  cadence  samples 67 %, 33 %  micro-batches 2, 1  (...)`.
    """
    trims = status.mean == "TRIMMED"
    if not (status.uneven or status.grain or status.noise_scale is not None or trims):
        return ""
    workers = [each for each in status.workers if each.live and each.share]
    parts = [f"schedule  {status.schedule}"]
    if status.fragments:
        parts[0] += f" in {status.fragments} fragments"
    if workers:
        parts.append("samples " + ", ".join(f"{each.share * 100:.0f} %" for each in workers))
    if any(each.micro_batches for each in workers):
        parts.append("micro-batches " + ", ".join(str(each.micro_batches) for each in workers))
    if status.schedule_note:
        parts.append(f"({status.schedule_note})")
    if status.grain:
        # Nobody is there to compare, or one worker has nobody to differ from.
        one = status.one_arithmetic or status.live < 2
        arithmetic = "" if one else ", but the workers' arithmetics differ (andon show)"
        parts.append(f"same bits in grains of {status.grain}{arithmetic}")
    if status.verification is not None:
        parts.append(verified_text(status.verification))
    if trims:
        parts.append(trimmed_text(status.trimmed))
    if status.noise_scale is not None:
        parts.append(f"noise scale {grouped(round(status.noise_scale))} samples")
    return "  ".join(parts)


def trimmed_text(left_out: int | None) -> str:
    """What a trimmed mean did in the last step; None: there was none yet."""
    match left_out:
        case None:
            return "trimmed mean"
        case 0:
            return "trimmed mean, but the last step had too few contributions: the weighted one"
        case _:
            return f"trimmed mean without the {left_out} lowest and highest of each element"


def cost_line(known: RunCost) -> str:
    """What a run cost so far; empty without a price.

    For example `cost      1.13 EUR for 1.5 machine hours: 6 656 samples for 1 EUR`.
    """
    if known.cost is None:
        return ""
    unit = f" {known.currency}" if known.currency else ""
    hours = known.machine_seconds / 3600
    text = f"cost      {known.cost:.2f}{unit} for {hours:.2f} machine hours"
    worth = worth_text(known.samples_per_unit, known.tokens_per_unit)
    return f"{text}: {worth} for 1{unit}" if worth else text


def worth_text(samples: float | None, tokens: float | None) -> str:
    """What one unit of a currency buys, such as `6 656 samples, 3 407 872 tokens`."""
    parts = [] if samples is None else [f"{grouped(samples)} samples"]
    parts += [] if tokens is None else [f"{grouped(tokens)} tokens"]
    return ", ".join(parts)


def verified_text(done: VerificationStatus | VerifiedTotals) -> str:
    """How much was verified, and what came of it."""
    text = f"verified {grouped(done.steps)} step{'' if done.steps == 1 else 's'}"
    if done.differences:
        text += f", results differed {done.differences} time{'' if done.differences == 1 else 's'}"
    if done.convicted:
        who = "worker" if len(done.convicted) == 1 else "workers"
        text += f", {who} {', '.join(map(str, done.convicted))} convicted"
    return text


def _hardware_text(hardware: Hardware) -> str:
    parts = [hardware.name]
    if hardware.cores:
        parts.append(f"{hardware.cores} core{'' if hardware.cores == 1 else 's'}")
    if hardware.memory_bytes:
        parts.append(f"{hardware.memory_bytes / 2**30:.1f} GiB")
    return ", ".join(parts)


def _milliseconds(seconds: float) -> str:
    number = seconds * 1000
    return f"{number:.1f} ms" if number < 9.95 else f"{grouped(number)} ms"


def answer_lines(halt: HaltEvidence, *, flags: str = "") -> list[str]:
    """The possible answers, each as a command and what it does.

    Args:
        halt: the halt to answer.
        flags: names the line if the command could not find it by itself: `--run 7f3a`.
    """
    answers = answers_to(halt, flags=flags)
    width = max(len(each.command) for each in answers)
    return [f"        {each.command.ljust(width)} {each.effect}" for each in answers]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many cells as lines of aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
