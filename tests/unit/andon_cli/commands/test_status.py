"""Status: the table and the JSON of one moment."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import Hardware, LineStatus, VerificationStatus, WorkerStatus
from andon_cli.commands.status import status_lines
from andon_cli.drawing.texts import schedule_line
from andon_coordinator.core.machine_time import RunCost

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


def test_the_table_says_who_holds_the_line_up() -> None:
    first, second = STATUS.workers
    workers = (
        replace(first, waiting_ratio=0.31),
        replace(second, rank=1, live=True, samples_per_second=400.0, waiting_ratio=0.01),
    )

    assert status_lines(replace(STATUS, workers=workers))[-1] == (
        "worker 10 holds the line up: others wait for up to 31 % of a step (andon top)"
    )


def test_a_line_that_divides_its_work_unevenly_says_how_and_why() -> None:
    first, second = STATUS.workers
    status = replace(
        STATUS,
        workers=(
            replace(first, share=0.75, micro_batches=3),
            replace(second, live=True, share=0.25, micro_batches=1),
        ),
        schedule="cadence",
        schedule_note="worker 0 has A, worker 10 has B",
    )

    assert status_lines(status)[-1] == (
        "schedule  cadence  samples 75 %, 25 %  micro-batches 3, 1  "
        "(worker 0 has A, worker 10 has B)"
    )


def test_a_worker_that_is_gone_has_no_share_any_more() -> None:
    first, second = STATUS.workers
    workers = (
        replace(first, share=1.0, micro_batches=4),
        replace(second, live=False, share=0.25, micro_batches=1),
    )

    said = schedule_line(replace(STATUS, workers=workers, schedule="cadence"))
    parts = schedule_line(replace(STATUS, workers=workers, schedule="local", fragments=4))
    alone = replace(STATUS, workers=workers, samples=32, schedule="every-step")

    assert said == "schedule  cadence  samples 100 %  micro-batches 4"
    assert parts == "schedule  local in 4 fragments  samples 100 %  micro-batches 4"
    assert schedule_line(alone) == ""
    trimmed = [
        schedule_line(replace(alone, workers=(), mean="TRIMMED", trimmed=left_out))
        for left_out in (None, 0, 2)
    ]
    assert [each.partition("trimmed mean")[2] for each in trimmed] == [
        "",
        ", but the last step had too few contributions: the weighted one",
        " without the 2 lowest and highest of each element",
    ]
    noisy = schedule_line(replace(alone, noise_scale=1480.4))
    assert (
        noisy == "schedule  every-step  samples 100 %  micro-batches 4  noise scale 1 480 samples"
    )


def test_a_run_with_a_price_says_what_it_cost_and_one_without_says_nothing() -> None:
    priced = replace(STATUS, cost=RunCost(5400.0, 0.75, "EUR", 1.125, 6656.0, 3407872.0))

    said = "cost      1.12 EUR for 1.50 machine hours: 6 656 samples, 3 407 872 tokens for 1 EUR"
    assert status_lines(priced)[-1] == said
    assert not any("machine hours" in line for line in status_lines(STATUS))


def test_equal_shares_of_a_batch_that_does_not_divide_are_not_called_uneven() -> None:
    first, second = STATUS.workers
    workers = (replace(first, share=4 / 7), replace(second, live=True, share=3 / 7))
    status = replace(STATUS, workers=workers, samples=7, schedule="every-step")

    assert schedule_line(status) == ""
    assert schedule_line(replace(status, samples=70)) != ""


def test_a_line_of_different_devices_says_why_it_steps_evenly() -> None:
    workers = tuple(
        replace(each, live=True, hardware=Hardware(name=name), share=0.5)
        for each, name in zip(STATUS.workers, ("A", "B"), strict=True)
    )
    status = replace(STATUS, workers=workers, schedule="every-step", schedule_note="one can't")

    assert status_lines(status)[-1] == "schedule  every-step  samples 50 %, 50 %  (one can't)"


def test_a_line_of_equal_bits_says_so() -> None:
    status = replace(STATUS, workers=(), schedule="every-step", schedule_note="", grain=8, live=2)
    said = "schedule  every-step  same bits in grains of 8"

    assert status_lines(replace(status, one_arithmetic=True))[-1] == said
    differ = f"{said}, but the workers' arithmetics differ (andon show)"
    assert status_lines(status)[-1] == differ


def test_a_line_that_verifies_says_how_much_and_what_came_of_it() -> None:
    done = VerificationStatus(fraction=0.1, steps=14, grains=168)
    quiet = replace(STATUS, workers=(), schedule="every-step", schedule_note="", grain=8)
    status = replace(quiet, one_arithmetic=True, verification=done)

    assert status_lines(status)[-1].endswith("grains of 8  verified 14 steps")
    convicted = replace(done, differences=1, convicted=(2,))
    assert status_lines(replace(status, verification=convicted))[-1].endswith(
        "verified 14 steps, results differed 1 time, worker 2 convicted"
    )


def test_what_a_worker_says_can_not_move_the_cursor() -> None:
    evil = replace(STATUS.workers[0], detail="\x1b[2Jboo\nhoo")
    halt = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3, message="\x1b]0;title\x07")

    lines = status_lines(replace(STATUS, workers=(evil,), halt=halt))

    assert all(line.isprintable() for line in lines)
    assert any("[2Jboo hoo" in line for line in lines)
