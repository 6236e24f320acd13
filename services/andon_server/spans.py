"""Spans: the line's steps and halts as OpenTelemetry traces, as the coordinator sees them.

Each step is a trace of its own: from its first assignment to its durable record. Inside it are the
`exchange`, as the worker with the longest one reported it, and the `commit`, which is the journal's
time. What happened meanwhile, such as a worker that was lost, is an event of the step's span. A
halt ends the step's span with an error, and has a span of its own until it is answered.

Only the `OTEL_*` variables switch this on, and without them nothing is imported. Steps that took
one attempt are exported at most once a second; every other one is exported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from andon.host.logs import LogEvent
from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Key, RecordKind
from andon_coordinator.core import effects, events
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.core.step_results import StepResult

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

__all__ = ["LineSpans", "spans_wanted", "tracer_provider"]

_log = logging.getLogger(__name__)
_EXPORT_EVERY_NS = 10**9
_MOST_EVENTS = 64
"""Events of a step's span; later ones of the same step are left out."""


def spans_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces over OTLP."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    places = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or (not exporter and any(environment.get(each) for each in places))


def tracer_provider(run_id: str, environment: Mapping[str, str]) -> TracerProvider | None:
    """What exports spans over OTLP by HTTP; None if the extra `andon[otel]` is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning(LogEvent("no_opentelemetry", remedy="pip install 'andon[otel]'"))
        return None
    facts = {"andon.run": run_id}
    named = "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not (environment.get("OTEL_SERVICE_NAME") or named):
        facts["service.name"] = "andon"
    # The sampler, the limits of the queue and the collector's address are the SDK's own variables.
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@dataclass(slots=True)
class _Step:
    """A step that has begun; times are nanoseconds since the Unix epoch."""

    number: int
    key: Key
    began_ns: int
    workers: int
    attempt: int = 0
    happened: list[RunEvent] = field(default_factory=list)
    ready_ns: int = 0
    exchange_s: float = 0.0
    saving_ns: int = 0


class LineSpans:
    """An observer of the line that makes spans of what it sees."""

    def __init__(self, tracer: Tracer, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """`wall_ns` is the time since the Unix epoch."""
        self._tracer = tracer
        self._wall_ns = wall_ns
        self._step: _Step | None = None
        self._saving: dict[Key, tuple[_Step, StepResult]] = {}
        self._halt: tuple[HaltEvidence, int] | None = None
        self._exported_ns = 0

    def tick(self, status: LineSnapshot) -> None:
        """Takes no note: what counts is an event or an effect."""

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Takes an event and its effects."""
        step = self._step
        if isinstance(event, events.WorkerReady) and step and event.ready.key == step.key:
            step.ready_ns = self._wall_ns()
            step.exchange_s = max(step.exchange_s, event.ready.timings.exchange_s)
        elif isinstance(event, events.RecordSaved) and event.key in self._saving:
            self._committed(*self._saving.pop(event.key))
        elif isinstance(event, events.JournalFailed):
            self._saving.clear()
        for effect in done:
            self._did(effect)

    def close(self) -> None:
        """Ends the span of a halt that nobody answered."""
        self._answered("none")

    def _did(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Assign():
                self._assigned(effect.assignment)
            case effects.SaveRecord(result=result) if effect.record.kind is RecordKind.STEP:
                if self._step is not None and result is not None:
                    self._step.saving_ns = self._wall_ns()
                    self._saving[effect.record.key] = self._step, result
                    self._step = None
            case effects.SaveRunEvent(event=event) if event.kind is not RunEventKind.HALTED:
                if self._step is not None and len(self._step.happened) < _MOST_EVENTS:
                    self._step.happened.append(event)
            case effects.SaveHalt(evidence=evidence):
                self._halted(evidence)
            case effects.SaveAnswer():
                self._answered(effect.answer.name.lower())

    def _assigned(self, assignment: effects.Assignment) -> None:
        step = self._step
        if step is not None and step.key == assignment.key:
            return  # The assignment of another member of the round.
        if step is None or step.number != assignment.step:
            step = _Step(assignment.step, assignment.key, self._wall_ns(), len(assignment.roster))
        step.key, step.attempt = assignment.key, assignment.attempt
        step.ready_ns, step.exchange_s = 0, 0.0
        self._step = step

    def _committed(self, step: _Step, result: StepResult) -> None:
        now_ns = self._wall_ns()
        usual = step.attempt == 0 and not step.happened
        if usual and now_ns - self._exported_ns < _EXPORT_EVERY_NS:
            return
        facts = {"andon.loss": result.loss, "andon.samples": result.samples}
        self._export(step, now_ns, facts)

    def _halted(self, evidence: HaltEvidence) -> None:
        now_ns = self._wall_ns()
        self._halt = evidence, now_ns
        step, self._step = self._step, None
        if step is not None:
            self._export(step, now_ns, {}, evidence)

    def _export(
        self, step: _Step, end_ns: int, facts: dict[str, Any], halt: HaltEvidence | None = None
    ) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        self._exported_ns = end_ns
        facts |= {"andon.step": step.number, "andon.attempt": step.attempt}
        facts["andon.workers"] = step.workers
        # An empty context: each step is the root of a trace.
        span = self._tracer.start_span(
            "step", Context(), attributes=facts, start_time=step.began_ns
        )
        inside = set_span_in_context(span)
        for event in step.happened:
            told = {"andon.step": event.step, "message": event.text}
            told |= {} if event.worker is None else {"andon.worker": event.worker}
            span.add_event(event.kind.value, told, int(event.at_unix_s * 1e9))
        if step.ready_ns and step.exchange_s > 0:
            began_ns = max(step.began_ns, step.ready_ns - int(step.exchange_s * 1e9))
            child = self._tracer.start_span("exchange", inside, start_time=began_ns)
            child.end(step.ready_ns)
        if step.saving_ns:
            self._tracer.start_span("commit", inside, start_time=step.saving_ns).end(end_ns)
        if halt is not None:
            span.add_event("halted", _facts_of(halt), end_ns)
            span.set_status(Status(StatusCode.ERROR, halt.message))
        span.end(end_ns)

    def _answered(self, answer: str) -> None:
        from opentelemetry.context import Context

        if self._halt is None:
            return
        (evidence, since_ns), self._halt = self._halt, None
        facts = _facts_of(evidence) | {"andon.answer": answer}
        span = self._tracer.start_span("halt", Context(), attributes=facts, start_time=since_ns)
        span.end(self._wall_ns())


def _facts_of(halt: HaltEvidence) -> dict[str, Any]:
    facts = {"andon.step": halt.step, "andon.reason": halt.reason.label, "message": halt.message}
    if halt.claimed:
        facts["andon.reported_by"] = halt.reported_by
    return facts if halt.worker is None else facts | {"andon.worker": halt.worker}
