"""View: a line's snapshot as the JSON that the board's page reads.

Everything in it that a worker or a person wrote (names, messages, details) is plain text. The page
shows it as text, and never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import accuracy_of
from andon.protocol.run_settings import MeanKind
from andon.protocol.slowness import Slowness
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.run_events import RunEvent
from andon_coordinator.core.spikes import SPAN
from andon_coordinator.core.status import LineSnapshot, WorkerSnapshot, holds_up
from andon_server.board.session_view import session_view
from andon_server.crashes import Crash
from andon_server.halt_words import answers_to, evidence_fields, halted_line, help_page

__all__ = ["NO_FACTS", "LineFacts", "crash_view", "event_view", "halt_view", "state_view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFacts:
    """What the page shows of a line beside its snapshots, and what does not change."""

    host: str = ""
    """Where the service runs."""
    script: str = ""
    """What the workers run; empty: nobody said."""
    encoding: str = ""
    """How gradients and averages travel, in words."""
    keeps_output: bool = False
    """Whether what workers print can be asked for."""
    docs_url: str = ""
    """Where the documentation is, up to `docs/`; empty: nobody said."""


NO_FACTS = LineFacts()


def state_view(
    line: LineSnapshot,
    *,
    facts: LineFacts = NO_FACTS,
    paths: Sequence[str] = (),
    pace_s: float | None,
    now_unix_s: float,
) -> dict[str, Any]:
    """The line for the page; what a visitor may do is added for each visitor.

    A run whose ranks attend sessions has no workers, and a `session`: see `session_view`.

    Args:
        line: what the line does.
        facts: what does not change.
        paths: the ways that gradients took in the last round, as far as the service knows.
        pace_s: how long a step takes at present, from commit to commit; None: not known yet.
        now_unix_s: the time of the snapshot.
    """
    rate = line.samples_per_second
    slow = holds_up(
        {
            each.worker: each.waiting_ratio
            for each in line.workers
            if each.live and each.rank is not None and each.samples_per_second > 0
        }
    )
    return {
        "run_id": line.run_id,
        "host": facts.host,
        "script": facts.script,
        # Ranks of a session send what their script gives, between each other.
        "encoding": facts.encoding if line.session is None else "",
        "keeps_output": facts.keeps_output,
        "paths": list(paths),
        "state": line.state.name,
        "step": line.step,
        "attempt": line.attempt,
        "epoch": line.cursor.epoch,
        "total_steps": line.total_steps,
        "eta_s": _eta_s(line, pace_s),
        "loss": line.loss,
        "accuracy": accuracy_of(line.correct, line.samples),
        "samples_per_second": rate,
        "step_seconds": line.samples / rate if rate > 0 else None,
        "exchange_s": line.exchange_s,
        "hidden_ratio": line.hidden_ratio,
        "live": line.live,
        "participating": line.participating,
        "expect_workers": line.expect_workers,
        "expect_reducers": line.expect_reducers,
        "reducers": [
            {"address": address, "elements": elements} for address, elements in line.reducers
        ],
        "waiting_for": line.waiting_for,
        "stop_reason": line.stop_reason,
        "schedule": line.schedule,
        "schedule_note": line.schedule_note,
        "noise_scale": line.noise_scale,
        "cost": asdict(line.cost),
        "fragments": _fragments(line),
        "spikes": _spikes(line),
        "trimmed": {"left_out": line.trimmed} if line.mean is MeanKind.TRIMMED else None,
        "grain": line.grain,
        "one_arithmetic": line.one_arithmetic,
        "verification": _verification(line),
        "checkpoints": _checkpoints(line.checkpoints),
        "workers": [
            _worker(each, holds_up=each.worker == slow)
            for each in (line.workers if line.session is None else ())
        ],
        "session": None if line.session is None else session_view(line.session),
        "halt": None if line.halt is None else halt_view(line.halt, facts.docs_url),
        "server_unix_s": now_unix_s,
    }


def _fragments(line: LineSnapshot) -> dict[str, Any] | None:
    """Which part of the model is exchanged; None if it always is the whole."""
    if line.fragments <= 1:
        return None
    return {"count": line.fragments, "exchanged": line.fragment, "mix": line.mix}


def _spikes(line: LineSnapshot) -> dict[str, Any] | None:
    """What the line may still do about spikes by itself; None if it halts for each."""
    if not line.spikes_left:
        return None
    return {"steps": SPAN, "left": {each.value: left for each, left in line.spikes_left.items()}}


def _verification(line: LineSnapshot) -> dict[str, Any] | None:
    """How much was computed twice; None if no step is drawn."""
    return {"fraction": line.verify} | asdict(line.verified) if line.verify else None


def halt_view(halt: HaltEvidence, docs_url: str = "") -> dict[str, Any]:
    """A halt for the page: the evidence, the terminal's sentence, the possible answers, and where
    the documentation says more.

    The id is text, because a browser's numbers are exact up to 2^53 only.
    """
    return evidence_fields(halt) | {
        "id": str(halt.id),
        "sentence": halted_line(halt),
        "help": help_page(halt),
        "help_url": docs_url and docs_url + help_page(halt),
        "answers": [
            {
                "answer": each.answer.name.lower(),
                "worker": each.worker,
                "label": each.label,
                "effect": each.effect,
                "command": each.command,
            }
            for each in answers_to(halt)
        ],
    }


def event_view(event: RunEvent) -> dict[str, Any]:
    """Something that happened, for the page."""
    return {
        "id": event.id,
        "kind": event.kind.value,
        "worker": event.worker,
        "step": event.step,
        "text": event.text,
        "at_unix_s": event.at_unix_s,
    }


def _eta_s(line: LineSnapshot, pace_s: float | None) -> float | None:
    over = line.state is LineState.COMPLETE
    if pace_s is None or line.total_steps is None or over:
        return None
    return max(0, line.total_steps - line.step) * pace_s


def _worker(worker: WorkerSnapshot, *, holds_up: bool) -> dict[str, Any]:
    device = worker.hardware
    return {
        "worker": worker.worker,
        "rank": worker.rank,
        "host": worker.node_id,
        "device": worker.device,
        "hardware": None
        if device is None
        else {
            "kind": device.kind,
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "cores": device.cores,
        },
        "activity": worker.activity.name.lower(),
        "detail": worker.detail,
        "step": worker.step,
        "samples_per_second": worker.samples_per_second,
        "waiting_ratio": worker.waiting_ratio,
        "heartbeat_age_s": worker.heartbeat_age_s,
        "live": worker.live,
        "busy_cores": worker.use.busy_cores,
        "memory_bytes": worker.use.memory_bytes,
        "share": worker.share,
        "micro_batches": worker.micro_batches,
        "holds_up": holds_up,
        "notice": worker.notice,
        "slowness": None if worker.slowness is None else _slowness(worker.slowness),
    }


def _slowness(slow: Slowness) -> dict[str, Any]:
    """Why a worker was slow the last time, in short; `andon why` has the rest."""
    return {
        "step": slow.step,
        "phase": slow.phase.label,
        "late_s": slow.late_s,
        "text": slow.text,
        "at_unix_s": slow.at_unix_s,
    }


def _checkpoints(known: RunCheckpoints | None) -> dict[str, Any] | None:
    if known is None:
        return None
    return {
        "writer": known.writer,
        "host": known.host,
        "folder": known.place,
        "step": known.step,
        "every": known.every,
        "overdue": known.overdue,
    }


def crash_view(crash: Crash) -> dict[str, Any]:
    """How a process of a worker failed or had to leave, without its output."""
    return {
        "kind": crash.kind.value,
        "text": crash.text,
        "step": crash.step,
        "at_unix_s": crash.at_unix_s,
        "ran_s": crash.ran_s,
        "memory_bytes": crash.memory_bytes,
        "starts_again": crash.starts_again,
    }
