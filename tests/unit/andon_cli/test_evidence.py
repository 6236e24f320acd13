"""Evidence: one halt reads the same wherever it is shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key, PositionRange
from andon_cli.client import LineStatus
from andon_cli.evidence import answer_lines, evidence_fields, halted_line
from andon_cli.progress import halt_lines
from andon_cli.status import status_json, status_lines

HALT = HaltEvidence(
    id=7,
    reason=HaltReason.NON_FINITE_GRADIENT,
    step=3,
    key=Key(2**32, 7),
    worker=1,
    block=2,
    parameter="blocks.2.weight",
    element=(1, 2),
    value="nan",
    message="worker 1 sent nan in blocks.2.weight[1, 2] (block 2)",
)
STATUS = LineStatus(run_id="7f3a", state="HALTED", step=2, halt=HALT)


def test_the_status_and_the_terminal_of_the_run_tell_a_halt_in_the_same_words() -> None:
    assert halted_line(HALT) in status_lines(STATUS)
    assert halt_lines(HALT, on_halt="wait")[0] == halted_line(HALT)
    assert set(answer_lines(HALT)) < set(status_lines(STATUS))


def test_json_has_every_field_of_the_evidence_and_its_place() -> None:
    fields = json.loads(status_json(STATUS))["halt"]

    assert fields == json.loads(json.dumps(evidence_fields(HALT)))
    assert fields["reason"] == "non_finite_gradient"
    assert fields["key"] == "1.00000000/7"
    assert fields["element"] == [1, 2]
    assert fields["place"] == "blocks.2.weight[1, 2] (block 2)"


def test_a_halt_that_names_no_worker_offers_to_drop_any() -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3)

    assert answer_lines(halt) == [
        "        andon resume               try the step again",
        "        andon resume --skip        leave its samples out, and record them as skipped",
        "        andon resume --drop WORKER go on without a worker",
    ]


def test_a_line_elsewhere_is_named_in_every_answer() -> None:
    halt = replace(HALT, epoch=0, positions=PositionRange(4, 5))

    lines = answer_lines(halt, flags="--address alpha:7070")

    assert all("andon resume --address alpha:7070" in line for line in lines)
    assert "leave its 1 sample out" in lines[1]
    assert halted_line(halt).startswith("HALTED at step 3 (epoch 0, position 4): ")


@pytest.mark.parametrize("reason", [HaltReason.JOURNAL, HaltReason.STATE_LOST])
def test_where_skipping_would_mend_nothing_only_trying_again_is_offered(
    reason: HaltReason,
) -> None:
    assert len(answer_lines(HaltEvidence(id=1, reason=reason, step=3))) == 1


def test_trying_a_spike_again_is_accepting_its_value() -> None:
    retry, skip, drop = answer_lines(HaltEvidence(id=1, reason=HaltReason.LOSS_SPIKE, step=3))

    assert retry.endswith("accept the value: the step passes")
    assert "--skip" in skip
    assert "--drop" in drop
