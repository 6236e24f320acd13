"""Slow words: readings of a slow worker as a sentence: whose fault, the fact, the remedy.

Pure. What surrounds a process explains more than the line that it is in: a process that waits for
a core, for a page or for its GPU's clock is slow wherever it is. So those are looked for first,
and the line is named with each.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from andon.protocol.limits import clipped
from andon.protocol.slowness import CodeLine, Explanation, ProcessFacts, SlowPhase
from andon_coordinator.core.events import Activity, ProcessUse, StepTimings

__all__ = ["UNSENT_BYTES", "SlowCause", "by_heartbeat", "by_timings", "cause_of", "sentence"]

_HELD_S = 0.7
"""So long a thread does not wait for a switch of threads alone."""
_SHORT_OF_CORES = 0.2
"""A thread that waits for a core for so much of its time would be faster with more of them."""
_BUSY_OTHERS = 0.5
"""Cores that others keep busy, from which on they are a cause."""
_FAULTS = 50.0
"""Major page faults a second; each takes a tenth of a millisecond to ten."""
_SWAPPED_IN = 2.0**20
_WAITS_FOR_DISK = 0.2
_THROTTLED = 0.8
"""A GPU below this part of its greatest clock is slow, if it says that something holds it back."""
_SLEEPS, _COMPUTES = 0.15, 0.6
"""Cores that a thread uses which sleeps, or computes."""
UNSENT_BYTES = 2**16
"""What waits to be sent on a connection that is too slow; less is on its way on any one."""

_PLACES = {
    SlowPhase.DATA: "its data loading",
    SlowPhase.FORWARD: "its forward",
    SlowPhase.BACKWARD: "its backward",
    SlowPhase.OPTIMIZER: "its optimizer",
    SlowPhase.EXCHANGE: "the exchange",
    SlowPhase.DISK: "files",
    SlowPhase.SCRIPT: "its script's own code",
    SlowPhase.UNSPECIFIED: "its script",
}


class SlowCause(enum.Enum):
    """What makes a worker slow, as far as its readings say."""

    LOCK = "lock"
    """Nothing of the process but one call ran."""
    NEIGHBOUR = "neighbour"
    """Other programs of its host take its cores."""
    CORES = "cores"
    """It has more threads and processes than cores."""
    MEMORY = "memory"
    """Pages come back from a disk."""
    GPU = "gpu"
    """Its GPU holds itself back."""
    NETWORK = "network"
    DISK = "disk"
    SCRIPT = "script"
    """The code that it is in."""


def cause_of(answer: Explanation) -> SlowCause:
    """The cause that readings tell of; SCRIPT if nothing but its own code is to be seen."""
    facts = answer.facts
    if facts.held_s >= _HELD_S:
        return SlowCause.LOCK
    # Before the wait for a core: a thread that waits for pages competes for the disk, too.
    faults, swapped = facts.major_faults or 0.0, facts.swapped_in or 0.0
    if faults >= _FAULTS or (facts.swap_bytes and swapped >= _SWAPPED_IN):
        return SlowCause.MEMORY
    if facts.gpu_throttled and _clock(facts) < _THROTTLED:
        return SlowCause.GPU
    if (facts.waited_for_core or 0.0) >= _SHORT_OF_CORES:
        return SlowCause.NEIGHBOUR if _others(facts) >= _BUSY_OTHERS else SlowCause.CORES
    if (facts.waited_for_disk or 0.0) >= _WAITS_FOR_DISK:
        return SlowCause.DISK
    if answer.phase is SlowPhase.EXCHANGE and (
        (facts.unsent_bytes or 0) >= UNSENT_BYTES or facts.retransmitted
    ):
        return SlowCause.NETWORK
    return SlowCause.DISK if answer.phase is SlowPhase.DISK else SlowCause.SCRIPT


def sentence(worker: int, answer: Explanation) -> str:
    """Whose fault it is that the others wait, the fact, and the remedy."""
    who, at = f"worker {worker}", _at(answer.guilty)
    facts, place = answer.facts, _PLACES[answer.phase]
    if answer.detail and answer.phase in (SlowPhase.SCRIPT, SlowPhase.UNSPECIFIED):
        place = f'"{answer.detail}"'
    return clipped(_SAID[cause_of(answer)](_Told(who, at, place, answer.phase, facts)))


@dataclass(frozen=True, slots=True)
class _Told:
    who: str
    at: str
    place: str
    phase: SlowPhase
    facts: ProcessFacts


def _of_lock(told: _Told) -> str:
    return (
        f"{told.who} stood still for {told.facts.held_s:.1f} s in {told.place}{told.at}: one call "
        "kept Python's interpreter lock, or the process was stopped. Let that call give the lock "
        "up, or make it in another process"
    )


def _of_neighbour(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: it waited for a core "
        f"{_percent(facts.waited_for_core)} of the time, while other programs of its host kept "
        f"{_others(facts):.1f} of {facts.host_cores} cores busy. Stop those, or move the worker"
    )


def _of_cores(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: it waited for a core "
        f"{_percent(facts.waited_for_core)} of the time, and its own threads and processes take "
        f"them all ({_own(facts):.1f} of {facts.host_cores} cores). Use fewer threads or loading "
        "processes, or fewer workers on this host"
    )


def _of_memory(told: _Told) -> str:
    facts = told.facts
    swapped = f", {_size(facts.swap_bytes)} of it are swapped out" if facts.swap_bytes else ""
    return (
        f"{told.who} waits for memory in {told.place}{told.at}: "
        f"{facts.major_faults or 0.0:.0f} pages a second come back from a disk{swapped}. Use less "
        "memory (a smaller micro-batch, fewer loading processes), or a host that has more"
    )


def _of_gpu(told: _Told) -> str:
    facts = told.facts
    clock = ""
    if facts.gpu_mhz and facts.gpu_most_mhz:
        clock = f" at {facts.gpu_mhz:.0f} of {facts.gpu_most_mhz:.0f} MHz"
    return (
        f"{told.who}'s GPU runs{clock}, held back ({facts.gpu_throttled}), in {told.place}"
        f"{told.at}. Look at its cooling and its power limit (`nvidia-smi -q -d PERFORMANCE`)"
    )


def _of_network(told: _Told) -> str:
    facts, parts = told.facts, []
    if facts.unsent_bytes:
        parts.append(f"{_size(facts.unsent_bytes)} wait to be sent or acknowledged")
    if facts.delivered:
        parts.append(f"{_size(facts.delivered)} a second arrive")
    if facts.retransmitted:
        parts.append(f"{facts.retransmitted} segments were sent again")
    return (
        f"{told.who}'s network is slow: {', '.join(parts)}. Look at its link, or send less: "
        "--encoding int8-block, or local steps"
    )


def _of_disk(told: _Told) -> str:
    facts = told.facts
    waits = ""
    if facts.waited_for_disk:
        waits = f", {_percent(facts.waited_for_disk)} of the time for the disk"
    place = told.place if told.phase is not SlowPhase.DISK else "a disk"
    return (
        f"{told.who} waits for {place}{told.at}{waits}{_rate(facts)}. Keep those files on a faster "
        "disk or in memory, or read and write them in the background"
    )


def _of_script(told: _Told) -> str:
    facts, does = told.facts, _does(told.facts)
    if told.phase is SlowPhase.DATA:
        some = ""
        if facts.children:
            some = f", and {facts.children} loading processes use {facts.child_cores or 0.0:.1f}"
        more = "more loading processes (num_workers)" if not facts.children else "faster ones"
        remedy = f"Make that faster, or load ahead with {more}"
        return f"{told.who} waits for data{told.at}: {does}{some}. {remedy}"
    if told.phase is SlowPhase.EXCHANGE:
        return f"{told.who} is in the exchange{told.at}: {does}. Look at its network"
    remedy = "Look at what it does there"
    sleeps = facts.script_cores is not None and facts.script_cores <= _SLEEPS
    if sleeps:
        remedy = "Look at what it waits for there: a lock, a sleep, another program"
    elif told.phase in (SlowPhase.FORWARD, SlowPhase.BACKWARD):
        remedy = "If its machine is slower than the others, give it less: --shares balanced"
    elif told.phase is SlowPhase.SCRIPT:
        remedy = "Do it less often, or beside training"
    return f"{told.who} is in {told.place}{told.at}: {does}. {remedy}"


_SAID: dict[SlowCause, Callable[[_Told], str]] = {
    SlowCause.LOCK: _of_lock,
    SlowCause.NEIGHBOUR: _of_neighbour,
    SlowCause.CORES: _of_cores,
    SlowCause.MEMORY: _of_memory,
    SlowCause.GPU: _of_gpu,
    SlowCause.NETWORK: _of_network,
    SlowCause.DISK: _of_disk,
    SlowCause.SCRIPT: _of_script,
}


# ------------------------------------------------------------------ of a worker that is not asked


def by_timings(
    worker: int, mine: StepTimings, others: Sequence[StepTimings]
) -> tuple[SlowPhase, str]:
    """What the times of one step say of the worker that the others waited for."""

    def more(of: Callable[[StepTimings], float]) -> float:
        return of(mine) - statistics.median(map(of, others))

    parts = {
        SlowPhase.DATA: more(lambda each: each.data_s),
        SlowPhase.FORWARD: more(lambda each: each.busy_s),
        # Computing that is neither data nor forward and backward is the script's.
        SlowPhase.SCRIPT: more(lambda each: max(0.0, each.compute_s - each.data_s - each.busy_s)),
        # What its exchange took beyond the end of backward, against those that waited for it.
        SlowPhase.EXCHANGE: more(lambda each: each.wait_s),
    }
    phase = max(parts, key=lambda each: parts[each])
    named = {
        SlowPhase.DATA: "it waited for data",
        SlowPhase.FORWARD: "its forward and backward took",
        SlowPhase.SCRIPT: "its script did something else",
        SlowPhase.EXCHANGE: "its exchange took",
    }[phase]
    longer = "" if "took" in named else " for"
    text = (
        f"worker {worker} is last: {named}{longer} {max(0.0, parts[phase]):.2f} s longer a step "
        f"than the others' ({_REMEDIES[phase]})"
    )
    return phase, text


def by_heartbeat(
    worker: int, activity: Activity, detail: str, use: ProcessUse
) -> tuple[SlowPhase, str]:
    """What a worker's last heartbeat says, of one that can't be asked."""
    phase = {Activity.LOADING: SlowPhase.DATA, Activity.COMPUTING: SlowPhase.UNSPECIFIED}.get(
        activity, SlowPhase.SCRIPT
    )
    what = activity.name.lower() + (f' ("{detail}")' if detail else "")
    cores = "" if use.busy_cores is None else f", and its process uses {use.busy_cores:.1f} cores"
    text = (
        f"worker {worker} says that it is {what}{cores}. It is of a version that can't say more: "
        "give it the version of the line's service"
    )
    return phase, clipped(text)


_REMEDIES = {
    SlowPhase.DATA: "load ahead with more processes",
    SlowPhase.FORWARD: "give it less: --shares balanced",
    SlowPhase.SCRIPT: "look at its loop body",
    SlowPhase.EXCHANGE: "look at its link",
}


# ------------------------------------------------------------------------------------ numbers


def _at(guilty: CodeLine | None) -> str:
    return "" if guilty is None else f" at `{guilty}`"


def _does(facts: ProcessFacts) -> str:
    cores = facts.script_cores
    if cores is None:
        return "nobody knows what it does"
    word = "sleeping" if cores <= _SLEEPS else "computing" if cores >= _COMPUTES else "waiting"
    return f"{word} ({cores * 100:.0f} % of a core used)"


def _rate(facts: ProcessFacts) -> str:
    return f", {_size(facts.disk_bytes)} a second" if facts.disk_bytes else ""


def _own(facts: ProcessFacts) -> float:
    return (facts.process_cores or 0.0) + (facts.child_cores or 0.0)


def _others(facts: ProcessFacts) -> float:
    return max(0.0, (facts.host_busy_cores or 0.0) - _own(facts))


def _clock(facts: ProcessFacts) -> float:
    """The GPU's clock as a part of its greatest; 0 if it is not known, and only said to be low."""
    return (facts.gpu_mhz or 0.0) / facts.gpu_most_mhz if facts.gpu_most_mhz else 0.0


def _percent(part: float | None) -> str:
    return f"{(part or 0.0) * 100:.0f} %"


def _size(count: float | None) -> str:
    amount = count or 0.0
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
