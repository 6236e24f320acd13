"""The log: one entry for each change of the line, with fields; nothing for a normal step."""

from __future__ import annotations

import logging
from collections import Counter

from andon.host.logs import LogEvent
from andon.protocol.halts import HaltEvidence
from andon.protocol.limits import MAX_SCALAR_NAMES, clipped
from andon_coordinator.core import effects
from andon_coordinator.core.events import Device
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.transport.outgoing import CommitAndAssign

__all__ = ["DeviceLog", "WaitLog", "log_effect"]

log = logging.getLogger("andon_coordinator.line")

_WAITING_LASTS_S = 5.0
"""A wait is logged once it has lasted this long; a healthy line waits for moments only."""


class WaitLog:
    """Logs what a FORMING line waits for: once, and again when it waits for something else."""

    def __init__(self) -> None:
        """Starts before the first wait."""
        self._awaited = ""
        self._since = 0.0
        self._said = False

    def note(self, status: LineSnapshot, now: float) -> None:
        """Takes the line's status at a monotonic time, in seconds."""
        awaited = status.waiting_for if status.state is LineState.FORMING else ""
        if awaited != self._awaited:
            self._awaited, self._since, self._said = awaited, now, False
        elif awaited and not self._said and now - self._since >= _WAITING_LASTS_S:
            self._said = True
            log.info(LogEvent("line_waits", waits_for=awaited))


class DeviceLog:
    """Logs each worker's device once the line has formed, and whether the devices differ."""

    def __init__(self) -> None:
        """Has logged none."""
        self._said: dict[int, tuple[str, Device | None]] = {}
        """Of each slot, the host and the device that were logged."""
        self._mixture = ""

    def note(self, status: LineSnapshot) -> None:
        """Takes the line's status."""
        if status.state is LineState.FORMING:
            return
        for worker in status.workers:
            device = worker.hardware
            # A slot may change hands: what is new about it is logged again, and nothing else.
            if not worker.live or self._said.get(worker.worker) == (worker.node_id, device):
                continue
            self._said[worker.worker] = worker.node_id, device
            log.info(
                LogEvent(
                    "worker_device",
                    worker=worker.worker,
                    host=worker.node_id,
                    kind=device.kind if device else worker.device,
                    device=device.name if device else "",
                    memory_gib=round((device.memory_bytes if device else 0) / 2**30, 1),
                    cores=device.cores if device else 0,
                    speed_hint=worker.speed_hint or "unknown",
                )
            )
        names = Counter(
            worker.hardware.name for worker in status.workers if worker.live and worker.hardware
        )
        mixture = ", ".join(f"{name} x{count}" for name, count in sorted(names.items()))
        if len(names) > 1 and mixture != self._mixture:
            self._mixture = mixture
            log.info(LogEvent("devices_differ", devices=mixture))


def log_effect(effect: effects.Effect | CommitAndAssign) -> None:
    """Logs an effect that people may want to know of later."""
    match effect:
        case effects.AcceptJoin():
            status = effect.join_status.name.lower()
            own: dict[str, str | float] = {"token": effect.credential} if effect.credential else {}
            if effect.mistaken_s is not None:
                own["suspected_wrongly_after_s"] = round(effect.mistaken_s, 3)
            log.info(LogEvent("worker_joined", worker=effect.worker, join_status=status, **own))
        case effects.RefuseJoin():
            reason = effect.refusal.reason.name.lower()
            message = clipped(effect.refusal.message)
            log.warning(LogEvent("join_refused", reason=reason, message=message))
        case effects.SaveDeparture():
            reason = "lost" if effect.reason is None else effect.reason.name.lower()
            log.info(
                LogEvent(
                    "worker_gone",
                    worker=effect.worker,
                    reason=reason,
                    step=effect.step,
                    message=effect.message,
                )
            )
        case effects.SaveRunEvent(event) if event.kind is RunEventKind.ATTEMPT:
            log.warning(LogEvent("step_retried", step=event.step, message=event.text))
        case effects.SaveHalt():
            log.error(_halted(effect.evidence))
        case (
            effects.SaveVerdict()
            | effects.NoteDifference()
            | effects.NoteUnverified()
            | effects.NoteNotice()
            | effects.SaveSpike()
            | effects.NoteSlowness()
        ):
            _log_finding(effect)
        case effects.SaveAnswer():
            answer = effect.answer.name.lower()
            log.info(
                LogEvent("halt_answered", id=str(effect.halt_id), answer=answer, by=effect.operator)
            )
        case effects.NoteWriter() | effects.NoteCheckpoint() | effects.NoteOverdue():
            _log_checkpoints(effect)
        case _:
            _log_rare(effect)


def _log_bits(effect: effects.NoteFewGrains | effects.NoteArithmetic) -> None:
    if isinstance(effect, effects.NoteFewGrains):
        text = (
            f"a batch has {effect.grains} grains for {effect.workers} workers, so some compute "
            "nothing: use a smaller micro_batch_size, or larger batches"
        )
        log.warning(LogEvent("few_grains", text, grains=effect.grains, workers=effect.workers))
    else:
        text = "bits may depend on the workers, and what such workers computed is never compared"
        fields = {"worker": effect.worker, "message": effect.in_words}
        log.warning(LogEvent("arithmetic_differs", text, **fields))


def _of_slow(effect: effects.NoteSuspected | effects.NoteSlow) -> LogEvent:
    if isinstance(effect, effects.NoteSlow):
        what, message = effect.what.value, effect.in_words
        return LogEvent("worker_slow", worker=effect.worker, what=what, message=message)
    return LogEvent(
        "worker_suspected",
        worker=effect.worker,
        silent_s=round(effect.silent_s, 3),
        usual_s=round(effect.usual_s, 4),
    )


def _log_rare(effect: effects.Effect | CommitAndAssign) -> None:
    match effect:
        case effects.NoteCaughtUp():
            log.info(
                LogEvent(
                    "worker_caught_up",
                    worker=effect.worker,
                    learnt=effect.learnt,
                    seconds=round(effect.seconds, 3),
                    waited_s=round(effect.waited_s, 3),
                )
            )
        case effects.NoteSuspected() | effects.NoteSlow():
            log.warning(_of_slow(effect))
        case effects.NoteSetback():
            log.warning(
                LogEvent(
                    "state_not_received",
                    worker=effect.worker,
                    host=effect.host,
                    failures=effect.failures,
                    next_try_s=round(effect.pause_s, 1),
                    message=effect.why,
                )
            )
        case effects.NoteWentBack():
            log.warning(
                LogEvent(
                    "line_went_back",
                    step=effect.step,
                    lost=effect.lost,
                    message=effect.in_words,
                )
            )
        case effects.NoteFewGrains() | effects.NoteArithmetic():
            _log_bits(effect)
        case effects.NoteSchedule():
            log.info(LogEvent("schedule_chosen", schedule=effect.schedule.value, why=effect.why))
        case effects.NoteScalarsRefused():
            why = f"the run has {MAX_SCALAR_NAMES} names, which is the limit"
            log.warning(
                LogEvent("scalar_not_kept", worker=effect.worker, name=effect.name, why=why)
            )
        case effects.NoteStopRefused():
            text = (
                f"worker {effect.worker}'s script wants to end the run ({effect.why}), and the "
                "line goes on: it was started with --may-stop operators, who may `andon drain`"
            )
            log.warning(LogEvent("stop_refused", text, worker=effect.worker, why=effect.why))
        case effects.SaveTerm():
            log.warning(LogEvent("term_raised", term=f"{effect.term:016x}"))


def _log_finding(
    effect: effects.SaveVerdict
    | effects.NoteDifference
    | effects.NoteUnverified
    | effects.NoteNotice
    | effects.SaveSpike
    | effects.NoteSlowness,
) -> None:
    match effect:
        case effects.NoteSlowness(slow):
            log.warning(
                LogEvent(
                    "worker_slow",
                    slow.text,
                    worker=slow.worker,
                    step=slow.step,
                    phase=slow.phase.label,
                    late_s=round(slow.late_s, 3),
                )
            )
        case effects.NoteNotice(worker, why):
            text = f"the machine of worker {worker} is about to go: {why}"
            log.warning(LogEvent("notice", text, worker=worker, why=why))
        case effects.SaveSpike(made):
            what = f"{made.action.value}: {made.what}"
            log.warning(LogEvent("spike", what, step=made.step, action=made.action.value))
        case effects.SaveVerdict():
            convicted = {} if effect.worker is None else {"worker": effect.worker}
            log.error(
                LogEvent("verified_wrong", step=effect.step, message=effect.text, **convicted)
            )
        case effects.NoteDifference():
            text = (
                f"workers {', '.join(map(str, effect.workers))} computed different results of "
                f"{effect.node} of step {effect.step}: all compute it anew"
            )
            log.warning(LogEvent("results_differ", text, step=effect.step, node=effect.node))
        case effects.NoteUnverified():
            text = (
                f"steps of workers {', '.join(map(str, effect.workers))} are not verified: nobody "
                "beside each of them has stated the same arithmetic"
            )
            log.warning(LogEvent("not_verified", text))


def _halted(evidence: HaltEvidence) -> LogEvent:
    """The event of a halt. What is known of its place is there, in JSON under the same names."""
    place = {
        "worker": evidence.worker,
        "reported_by": evidence.reported_by if evidence.claimed else None,
        "parameter": evidence.parameter or None,
        "value": evidence.value or None,
    }
    return LogEvent(
        "line_halted",
        # 64 bits, which not every reader of JSON keeps.
        id=str(evidence.id),
        reason=evidence.reason.label,
        step=evidence.step,
        message=evidence.message,
        **{name: value for name, value in place.items() if value is not None},
    )


def _log_checkpoints(
    effect: effects.NoteWriter | effects.NoteCheckpoint | effects.NoteOverdue,
) -> None:
    match effect:
        case effects.NoteWriter():
            where = "another host than the service's" if effect.elsewhere else "the service's host"
            if effect.worker is None:
                why = "no worker in the round can write"
                log.warning(LogEvent("checkpoints_not_written", reason=why))
            else:
                log.log(
                    logging.WARNING if effect.elsewhere else logging.INFO,
                    LogEvent(
                        "checkpoint_writer",
                        worker=effect.worker,
                        host=effect.host,
                        folder=effect.folder,
                        at=where,
                    ),
                )
        case effects.NoteCheckpoint():
            log.info(
                LogEvent(
                    "checkpoint_written",
                    worker=effect.worker,
                    step=effect.step,
                    folder=effect.folder,
                )
            )
        case effects.NoteOverdue():
            log.warning(
                LogEvent(
                    "checkpoint_missing",
                    step=effect.step,
                    last=effect.last,
                    writer=effect.writer,
                )
            )
