"""Status: the table and the JSON of one moment."""

from __future__ import annotations

import json

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key
from andon_cli.client import LineStatus, WorkerStatus
from andon_cli.status import status_json, status_lines

STATUS = LineStatus(
    run_id="7f3a",
    state="RUNNING",
    step=118,
    loss=2.413,
    live=2,
    participating=2,
    workers=(
        WorkerStatus(
            worker=0, rank=0, host="alpha", device="cuda:0", activity="computing", step=118,
            samples_per_second=812.3, waiting_ratio=0.01, heartbeat_age_s=0.2, live=True,
        ),
        WorkerStatus(worker=10, host="beta", device="cpu", activity="idle", step=117),
    ),
)  # fmt: skip


def test_the_table_has_a_row_a_worker_under_aligned_headings() -> None:
    assert status_lines(STATUS) == [
        "run 7f3a  RUNNING  step 118  epoch 0  loss 2.413  2 live, 2 participating",
        "worker  rank  host   device  state      step  samples/s  waits  heartbeat",
        "0       0     alpha  cuda:0  computing  118   812        1 %    0.2 s",
        "10      -     beta   cpu     gone       117   0.0        0 %    0.0 s",
    ]


def test_a_halted_line_shows_its_halt() -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.NON_FINITE_LOSS, step=3, message="worker 1: nan")
    status = LineStatus(run_id="7f3a", state="HALTED", waiting_for="an answer", halt=halt)

    lines = status_lines(status)

    assert not any("waiting" in line for line in lines)
    assert "HALTED at step 3: worker 1: nan. No weight moved." in lines


def test_the_json_is_one_line_and_names_a_halts_reason_and_key() -> None:
    halt = HaltEvidence(
        id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, key=Key(2**32, 7), element=(1, 2)
    )
    status = LineStatus(run_id="7f3a", state="HALTED", halt=halt)

    text = status_json(status)

    assert "\n" not in text
    told = json.loads(text)
    assert told["state"] == "HALTED"
    assert told["halt"]["reason"] == "non_finite_gradient"
    assert told["halt"]["key"] == "1.00000000/7"
    assert told["halt"]["element"] == [1, 2]
