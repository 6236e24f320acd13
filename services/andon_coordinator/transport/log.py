"""The log: one entry for each change of the line, with fields; nothing for a normal step."""

from __future__ import annotations

import logging
from collections import Counter

from andon.protocol.limits import MAX_SCALAR_NAMES, clipped
from andon_coordinator.core import effects
from andon_coordinator.core.events import Device
from andon_coordinator.core.status import LineSnapshot

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
        awaited = status.waiting_for if status.state is effects.LineState.FORMING else ""
        if awaited != self._awaited:
            self._awaited, self._since, self._said = awaited, now, False
        elif awaited and not self._said and now - self._since >= _WAITING_LASTS_S:
            self._said = True
            log.info("line_waits for=%r", awaited)


class DeviceLog:
    """Logs each worker's device once the line has formed, and whether the devices differ."""

    def __init__(self) -> None:
        """Has logged none."""
        self._said: dict[int, tuple[str, Device | None]] = {}
        """Of each slot, the host and the device that were logged."""
        self._mixture = ""

    def note(self, status: LineSnapshot) -> None:
        """Takes the line's status."""
        if status.state is effects.LineState.FORMING:
            return
        for worker in status.workers:
            device = worker.hardware
            # A slot may change hands: what is new about it is logged again, and nothing else.
            if not worker.live or self._said.get(worker.worker) == (worker.node_id, device):
                continue
            self._said[worker.worker] = worker.node_id, device
            log.info(
                "worker_device worker=%d host=%s kind=%s device=%r memory_gib=%.1f cores=%d "
                "speed_hint=%s",
                *(worker.worker, worker.node_id, device.kind if device else worker.device),
                *(device.name if device else "", (device.memory_bytes if device else 0) / 2**30),
                *(device.cores if device else 0, worker.speed_hint or "unknown"),
            )
        names = Counter(
            worker.hardware.name for worker in status.workers if worker.live and worker.hardware
        )
        mixture = ", ".join(f"{name} x{count}" for name, count in sorted(names.items()))
        if len(names) > 1 and mixture != self._mixture:
            self._mixture = mixture
            log.info("devices_differ devices=%r", mixture)


def log_effect(effect: effects.Effect) -> None:
    """Logs an effect that people may want to know of later."""
    match effect:
        case effects.AcceptJoin():
            status = effect.join_status.name.lower()
            log.info("worker_joined worker=%d join_status=%s", effect.worker, status)
        case effects.RefuseJoin():
            reason = effect.refusal.reason.name.lower()
            message = clipped(effect.refusal.message)
            log.warning("join_refused reason=%s message=%r", reason, message)
        case effects.SaveDeparture():
            reason = "lost" if effect.reason is None else effect.reason.name.lower()
            log.info(
                "worker_gone worker=%d reason=%s step=%d message=%r",
                *(effect.worker, reason, effect.step, effect.message),
            )
        case effects.SaveHalt():
            evidence = effect.evidence
            log.error(
                "line_halted id=%d reason=%s step=%d message=%r",
                *(evidence.id, evidence.reason.label, evidence.step, evidence.message),
            )
        case effects.SaveAnswer():
            answer = effect.answer.name.lower()
            log.info("halt_answered id=%d answer=%s by=%r", effect.halt_id, answer, effect.operator)
        case effects.NoteWriter() | effects.NoteCheckpoint() | effects.NoteOverdue():
            _log_checkpoints(effect)
        case _:
            _log_rare(effect)


def _log_rare(effect: effects.Effect) -> None:
    match effect:
        case effects.NoteSetback():
            log.warning(
                "state_not_received worker=%d host=%s failures=%d next_try_s=%.1f message=%r",
                *(effect.worker, effect.host, effect.failures, effect.pause_s, effect.why),
            )
        case effects.NoteSchedule():
            log.info("schedule_chosen schedule=%s why=%r", effect.schedule.value, effect.why)
        case effects.NoteScalarsRefused():
            log.warning(
                "scalar_not_kept worker=%d name=%s why='the run has %d names, which is the limit'",
                *(effect.worker, effect.name, MAX_SCALAR_NAMES),
            )
        case effects.SaveTerm():
            log.warning("term_raised term=%016x", effect.term)


def _log_checkpoints(
    effect: effects.NoteWriter | effects.NoteCheckpoint | effects.NoteOverdue,
) -> None:
    match effect:
        case effects.NoteWriter():
            where = "another host than the service's" if effect.elsewhere else "the service's host"
            if effect.worker is None:
                log.warning("checkpoints_not_written reason='no worker in the round can write'")
            else:
                log.log(
                    logging.WARNING if effect.elsewhere else logging.INFO,
                    "checkpoint_writer worker=%d host=%s folder=%r at=%r",
                    *(effect.worker, effect.host, effect.folder, where),
                )
        case effects.NoteCheckpoint():
            log.info(
                "checkpoint_written worker=%d step=%d folder=%r",
                *(effect.worker, effect.step, effect.folder),
            )
        case effects.NoteOverdue():
            log.warning(
                "checkpoint_missing step=%d last=%d writer=%s",
                *(effect.step, effect.last, effect.writer),
            )
