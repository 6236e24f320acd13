"""The line's spans, with the SDK's exporter in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_coordinator.core import effects, events
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_server.spans import LineSpans, spans_wanted
from scenarios import line_values

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel: pip install 'andon[otel]'")

SECOND = 10**9
HALT = HaltEvidence(id=4, reason=HaltReason.NON_FINITE_GRADIENT, step=1, worker=1, message="NaN")


class Watched:
    """Spans of a line whose events the test makes up, at times that it sets."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.now_ns = 1000 * SECOND
        self.spans = LineSpans(provider.get_tracer("test"), lambda: self.now_ns)

    def see(self, event: events.Event, *done: effects.Effect, after_s: float = 0.0) -> None:
        self.now_ns += int(after_s * SECOND)
        self.spans.observe(event, done, 0.0)

    def assign(self, step: int, attempt: int = 0, after_s: float = 0.0) -> Key:
        key = Key(1, 100 * step + attempt)
        shares = [
            effects.Assign(
                stream,
                line_values.assignment(key=key, rank=rank, step=step, attempt=attempt),
            )
            for rank, stream in enumerate((10, 11))
        ]  # fmt: skip
        self.see(events.WorkRequested(11, None), *shares, after_s=after_s)
        return key

    def ready(self, key: Key, exchange_s: float, after_s: float) -> None:
        timings = events.StepTimings(exchange_s=exchange_s)
        ready = line_values.ready(key=key, timings=timings)  # fmt: skip
        self.see(events.WorkerReady(10, ready), after_s=after_s)

    def save(self, key: Key, step: int, after_s: float = 0.0) -> None:
        record = Record(
            key=key, parent=None, kind=RecordKind.STEP, step=step, cursor=Cursor(0, 4), roster=(0,)
        )
        result = line_values.result(loss=0.5)  # fmt: skip
        self.see(events.TimePassed(), effects.SaveRecord(record, result), after_s=after_s)
        self.see(events.RecordSaved(key), after_s=0.25)

    def exported(self) -> list[Any]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def test_a_step_is_a_trace_with_its_exchange_and_its_commit() -> None:
    line = Watched()

    key = line.assign(7)
    line.ready(key, exchange_s=0.5, after_s=2.0)
    line.ready(key, exchange_s=0.25, after_s=1.0)
    line.save(key, 7)

    step, exchange, commit = line.exported()
    assert [each.name for each in (step, exchange, commit)] == ["step", "exchange", "commit"]
    assert {each.parent.span_id for each in (exchange, commit)} == {step.context.span_id}
    seconds = [(each.end_time - each.start_time) / SECOND for each in (step, exchange, commit)]
    assert seconds == [3.25, 0.5, 0.25]
    assert exchange.end_time == commit.start_time
    assert dict(step.attributes) == {
        "andon.step": 7, "andon.attempt": 0, "andon.workers": 2,
        "andon.loss": 0.5, "andon.samples": 4,
    }  # fmt: skip


def test_each_step_is_a_trace_of_its_own_and_at_most_one_a_second_is_exported() -> None:
    line = Watched()

    for number in range(1, 101):
        line.save(line.assign(number), number)

    steps = [each for each in line.exported() if each.name == "step"]
    assert len({each.context.trace_id for each in steps}) == len(steps) == 25
    assert all(each.parent is None for each in steps)


def test_a_step_that_was_tried_again_is_always_exported_with_what_happened() -> None:
    line = Watched()
    line.save(line.assign(1), 1)
    line.assign(2)
    lost = RunEvent(
        id=1, kind=RunEventKind.LOST, worker=1, step=2, text="its lease lapsed", at_unix_s=1000.5
    )

    line.see(events.TimePassed(), effects.SaveRunEvent(lost))
    line.save(line.assign(2, attempt=1), 2)

    (again,) = [each for each in line.exported() if each.attributes.get("andon.step") == 2]
    assert again.attributes["andon.attempt"] == 1
    (event,) = again.events
    assert (event.name, event.timestamp) == ("lost", int(1000.5 * SECOND))
    assert event.attributes == {"andon.step": 2, "andon.worker": 1, "message": "its lease lapsed"}


def test_a_halt_is_an_error_of_its_step_and_a_span_until_it_is_answered() -> None:
    line = Watched()
    line.assign(1)

    line.see(events.TimePassed(), effects.SaveHalt(HALT), after_s=1.0)
    answer = effects.SaveAnswer(4, HaltAnswer.SKIP, None, "ada")
    line.see(events.TimePassed(), answer, after_s=60.0)

    step, halt = line.exported()
    assert (step.status.status_code.name, step.status.description) == ("ERROR", "NaN")
    assert [each.name for each in step.events] == ["halted"]
    assert (halt.name, (halt.end_time - halt.start_time) / SECOND) == ("halt", 60.0)
    assert halt.attributes["andon.answer"] == "skip"
    assert halt.attributes["andon.reason"] == "non_finite_gradient"


def test_a_halt_that_nobody_answered_ends_with_the_service() -> None:
    line = Watched()
    line.see(events.TimePassed(), effects.SaveHalt(HALT))

    line.spans.close()
    line.spans.close()

    (halt,) = line.exported()
    assert halt.attributes["andon.answer"] == "none"


def test_a_record_that_could_not_be_written_is_no_commit() -> None:
    line = Watched()
    key = line.assign(1)
    record = Record(
        key=key, parent=None, kind=RecordKind.STEP, step=1, cursor=Cursor(0, 4), roster=(0,)
    )
    result = line_values.result(loss=0.5)  # fmt: skip

    line.see(events.TimePassed(), effects.SaveRecord(record, result))
    line.see(events.JournalFailed("full"))
    line.see(events.RecordSaved(key))

    assert line.exported() == []


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
    ],
)
def test_only_the_standard_variables_switch_spans_on(
    environment: dict[str, str], *, wanted: bool
) -> None:
    assert spans_wanted(environment) is wanted


def test_a_service_imports_nothing_of_opentelemetry_by_itself() -> None:
    code = "import sys, andon_server.serve; sys.exit('opentelemetry' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
