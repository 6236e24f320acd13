"""Slow words: readings of a slow worker as a sentence: whose fault, the fact, the remedy.

Pure. Whatever the cause is, the line of code is named with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from andon.protocol.limits import clipped
from andon.protocol.slowness import CodeLine, Explanation, ProcessFacts, SlowPhase
from andon_coordinator.core.events import Activity, ProcessUse, StepTimings
from andon_coordinator.core.slow_cause import (
    COMPUTES,
    SLEEPS,
    SlowCause,
    cause_of,
    other_cores,
    own_cores,
    waited_for_core,
)

__all__ = [
    "by_heartbeat",
    "by_timings",
    "sentence",
]

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


def sentence(worker: int, answer: Explanation) -> str:
    """Whose fault it is that the others wait, the fact, and the remedy."""
    who, at = f"worker {worker}", _at(answer.guilty)
    facts, place = answer.facts, _PLACES[answer.phase]
    if answer.detail and answer.phase in (SlowPhase.SCRIPT, SlowPhase.UNSPECIFIED):
        place = f'"{answer.detail}"'
    if answer.loads is not None:
        at += " in a loading process"
    return clipped(_SAID[cause_of(answer)](_Told(who, at, place, answer, facts)))


@dataclass(frozen=True, slots=True)
class _Told:
    who: str
    at: str
    place: str
    answer: Explanation
    facts: ProcessFacts

    @property
    def phase(self) -> SlowPhase:
        """In which part of its work it is."""
        return self.answer.phase

    @property
    def waited(self) -> str:
        """For how much of the time it waited for a core."""
        return f"it waited for a core {_percent(waited_for_core(self.answer))} of the time"


def _of_lock(told: _Told) -> str:
    return (
        f"{told.who} stood still for {told.facts.held_s:.1f} s in {told.place}{told.at}: one call "
        "kept Python's interpreter lock, or the process was stopped. Let that call give the lock "
        "up, or make it in another process"
    )


def _of_neighbour(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: {told.waited}, while other "
        f"programs of its host kept {other_cores(facts):.1f} of {facts.host_cores} cores busy"
        f"{_busiest(facts)}. Stop those, or move the worker"
    )


def _of_cores(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: {told.waited}, and its own "
        f"threads and processes take them all ({own_cores(facts):.1f} of {_allowed(facts)} cores). "
        "Use fewer threads or loading processes, or fewer workers on this host"
    )


def _of_quota(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: its container may use "
        f"{_allowed(facts)} cores, and was held back {_percent(facts.throttled)} of the time. "
        "Raise that limit (cpu.max, `docker run --cpus`, resources.limits.cpu), or use fewer "
        "threads and loading processes"
    )


def _of_stolen(told: _Told) -> str:
    facts = told.facts
    return (
        f"{told.who} is short of processor in {told.place}{told.at}: its host is virtual, and "
        f"others took {facts.stolen_cores or 0.0:.1f} of its {facts.host_cores} cores. "
        "Move the worker, or take a machine whose cores are its own"
    )


def _of_memory(told: _Told) -> str:
    facts = told.facts
    swapped = f", {_size(facts.swap_bytes)} of it are swapped out" if facts.swap_bytes else ""
    if (facts.largest_bytes or 0) > (facts.memory_bytes or 0):
        swapped += f"; most of its host's memory, {_size(facts.largest_bytes)}, has {facts.largest}"
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
        if facts.children:
            some = f"{facts.children} loading processes use {facts.child_cores or 0.0:.1f} cores"
            does = some if told.answer.loads is not None else f"{does}, and {some}"
        more = "more loading processes (num_workers)"
        remedy = f"Make that faster, or load ahead with {more}"
        return f"{told.who} waits for data{told.at}: {does}. {remedy}"
    if told.phase is SlowPhase.EXCHANGE:
        return f"{told.who} is in the exchange{told.at}: {does}. Look at its network"
    remedy = "Look at what it does there"
    sleeps = facts.script_cores is not None and facts.script_cores <= SLEEPS
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
    SlowCause.QUOTA: _of_quota,
    SlowCause.STOLEN: _of_stolen,
    SlowCause.MEMORY: _of_memory,
    SlowCause.GPU: _of_gpu,
    SlowCause.NETWORK: _of_network,
    SlowCause.DISK: _of_disk,
    SlowCause.SCRIPT: _of_script,
}


# ------------------------------------------------------------------ of a worker that is not asked


def by_timings(worker: int, steps: Sequence[Mapping[int, StepTimings]]) -> tuple[SlowPhase, str]:
    """What the times of steps say of the worker that the others waited for in each of them."""

    def more(of: Callable[[StepTimings], float]) -> float:
        # Of each step by itself: one in which it stood still says nothing of the others.
        return statistics.median(
            of(step[worker])
            - statistics.median(of(each) for other, each in step.items() if other != worker)
            for step in steps
        )

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
        f"worker {worker} is last: {named}{longer} {1000 * max(0.0, parts[phase]):.1f} ms longer a "
        f"step than the others' ({_REMEDIES[phase]})"
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
    word = "sleeping" if cores <= SLEEPS else "computing" if cores >= COMPUTES else "waiting"
    return f"{word} ({cores * 100:.0f} % of a core used)"


def _busiest(facts: ProcessFacts) -> str:
    """What takes the cores, as far as the worker sees it."""
    seen = facts.busiest_cores or 0.0
    if not facts.busiest or seen < other_cores(facts) / 4:
        return ", which it can't see (of another user, or outside its container)"
    return f", {seen:.1f} of them {facts.busiest}"


def _allowed(facts: ProcessFacts) -> str:
    return f"{facts.allowed_cores or facts.host_cores:.3g}"


def _rate(facts: ProcessFacts) -> str:
    return f", {_size(facts.disk_bytes)} a second" if facts.disk_bytes else ""


def _percent(part: float | None) -> str:
    return f"{(part or 0.0) * 100:.0f} %"


def _size(count: float | None) -> str:
    amount = count or 0.0
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
