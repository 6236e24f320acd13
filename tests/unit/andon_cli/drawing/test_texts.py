"""Texts: steps, halts and their answers, as people and programs read them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key, PositionRange
from andon_cli.client import Hardware, LineStatus, WorkerStatus
from andon_cli.commands.status import status_json, status_lines
from andon_cli.drawing.texts import (
    answer_lines,
    bar,
    device_summary,
    duration,
    evidence_fields,
    grouped,
    halt_lines,
    halted_line,
    hardware_line,
    step_line,
    waiting_line,
)

STATUS = LineStatus(
    run_id="7f3a",
    state="RUNNING",
    step=118,
    total_steps=1000,
    loss=2.4128,
    samples_per_second=1204.2,
    exchange_s=0.0121,
    hidden_ratio=0.81,
    waiting_for="workers 0, 1 to finish step 119",
)
ENDLESS = LineStatus(run_id="7f3a", state="RUNNING", step=3, loss=0.5)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (STATUS, "step  118/1000  loss 2.413  1 204 samples/s  exchange 12 ms (81 % hidden)"),
        (ENDLESS, "step 3  loss 0.500"),
        (replace(ENDLESS, samples=16, correct=13), "step 3  loss 0.500  accuracy 81.2 %"),
    ],
    ids=["with its pace", "of a run without end", "with how many samples were right"],
)
def test_a_step_is_shown_with_what_is_known_of_it(status: LineStatus, line: str) -> None:
    assert step_line(status) == line


@pytest.mark.parametrize(
    ("ratio", "filled"), [(-1.0, 0), (0.0, 0), (0.26, 5), (0.999, 19), (1.0, 20), (7.0, 20)]
)
def test_a_bar_has_twenty_cells_whatever_the_ratio(ratio: float, filled: int) -> None:
    assert bar(ratio) == "[" + "#" * filled + "-" * (20 - filled) + "]"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (7.44, "7.4s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"),
     (118, "1m58s"), (3599.7, "1h00m"), (7500, "2h05m")],
)  # fmt: skip
def test_durations_carry_into_the_next_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(3.44, "3.4"), (87.5, "88"), (1204.2, "1 204"), (12345678, "12 345 678")]
)
def test_numbers_are_grouped_by_thousands(number: float, text: str) -> None:
    assert grouped(number) == text


def test_a_halt_is_told_with_who_where_and_the_three_answers() -> None:
    halt = HaltEvidence(
        id=1,
        reason=HaltReason.NON_FINITE_GRADIENT,
        step=119,
        worker=1,
        message="worker 1 sent nan in blocks.3.attn.weight[17, 204] (block 3)",
        epoch=2,
        positions=PositionRange(7552, 7616),
    )

    assert halt_lines(halt, on_halt="wait") == [
        "HALTED at step 119 (epoch 2, positions 7552 to 7615): worker 1 sent nan in "
        "blocks.3.attn.weight[17, 204] (block 3). No weight moved.",
        "        andon resume          try the step again",
        "        andon resume --skip   leave its 64 samples out, and record them as skipped",
        "        andon resume --drop 1 go on without worker 1",
    ]
    assert "LineHalted" in halt_lines(halt, on_halt="raise")[1]


def test_weights_that_differ_are_told_as_such_and_no_retry_is_said_to_mend_them() -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.REPLICA_DIVERGENCE, step=7, worker=2)

    said, *answers = halt_lines(halt, on_halt="wait")

    assert said.endswith("The workers' weights moved apart before this was seen.")
    assert [" ".join(line.split()) for line in answers] == [
        "andon resume go on with weights that differ",
        "andon resume --drop 2 go on without worker 2 and its weights",
    ]


@pytest.mark.parametrize(
    ("message", "told"), [("\x1b[2Jone\ntwo", " [2Jone two"), ("", "operator")]
)
def test_a_halt_can_not_move_the_cursor_and_without_a_message_is_told_by_its_reason(
    message: str, told: str
) -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=7, message=message)

    assert halt_lines(halt, on_halt="wait")[0] == f"HALTED at step 7: {told}. No weight moved."


def test_only_a_line_that_does_not_run_is_said_to_wait() -> None:
    forming = LineStatus(run_id="7f3a", state="FORMING", waiting_for="2 workers, 1 of them here")

    assert waiting_line(forming) == "waiting for 2 workers, 1 of them here"
    assert waiting_line(STATUS) == ""


@pytest.mark.parametrize(
    ("devices", "threads", "text"),
    [
        (["cpu", "cpu"], "1", "2 workers on cpu (1 thread each)"),
        (["cuda:0"], "4", "1 worker on cuda:0 (4 threads each)"),
        (["cpu", "cuda:0"], "1", "2 workers on cpu, cuda:0 (1 thread each)"),
        (["", ""], "1", "2 workers (1 thread each)"),
    ],
)
def test_devices_are_summed_up(devices: list[str], threads: str, text: str) -> None:
    assert device_summary(devices, threads) == text


EPYC = Hardware(kind="cpu", name="AMD EPYC", memory_bytes=2**34, cores=2)
L4 = Hardware(kind="cuda", name="NVIDIA L4", memory_bytes=22 * 2**30, cores=58)


@pytest.mark.parametrize(
    ("hardware", "text"),
    [
        ([], ""),
        ([None, None], ""),
        ([EPYC, EPYC], "devices  AMD EPYC, 2 cores, 16.0 GiB"),
        ([EPYC, None], "devices  0: AMD EPYC, 2 cores, 16.0 GiB"),
        ([Hardware(kind="cpu", name="POWER9", cores=1)], "devices  POWER9, 1 core"),
        (
            [EPYC, L4, EPYC],
            "devices  0, 2: AMD EPYC, 2 cores, 16.0 GiB  1: NVIDIA L4, 58 cores, 22.0 GiB  "
            "(they differ)",
        ),
        (
            [EPYC, replace(EPYC, cores=8)],
            "devices  0: AMD EPYC, 2 cores, 16.0 GiB  1: AMD EPYC, 8 cores, 16.0 GiB",
        ),
    ],
)
def test_the_devices_of_a_line_are_named_once(hardware: list[Hardware | None], text: str) -> None:
    workers = [WorkerStatus(worker=at, hardware=each) for at, each in enumerate(hardware)]

    assert hardware_line(workers) == text


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
HALTED_STATUS = LineStatus(
    run_id="7f3a", state="HALTED", step=2, waiting_for="an answer", halt=HALT
)


def test_the_status_and_the_terminal_of_the_run_tell_a_halt_in_the_same_words() -> None:
    assert halted_line(HALT) in status_lines(HALTED_STATUS)
    assert halt_lines(HALT, on_halt="wait")[0] == halted_line(HALT)
    assert set(answer_lines(HALT)) < set(status_lines(HALTED_STATUS))
    assert not any("waiting" in line for line in status_lines(HALTED_STATUS))


def test_json_is_one_line_with_every_field_of_the_evidence_and_its_place() -> None:
    text = status_json(HALTED_STATUS)
    told = json.loads(text)
    fields = told["halt"]

    assert "\n" not in text
    assert told["state"] == "HALTED"
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
