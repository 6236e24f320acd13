"""The picture of a line on terminals of several kinds."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import PositionRange
from andon_cli.client import Hardware, LineStatus, WorkerStatus
from andon_cli.drawing.picture import LinePicture, Lost
from andon_cli.drawing.seen import Seen

STATUS = LineStatus(
    run_id="7f3a",
    state="RUNNING",
    step=118,
    total_steps=1000,
    loss=2.413,
    samples=64,
    correct=52,
    samples_per_second=1204.0,
    exchange_s=0.006,
    hidden_ratio=0.81,
    live=2,
    participating=2,
    metrics_url="http://127.0.0.1:9400/metrics",
    workers=(
        WorkerStatus(
            worker=0, rank=0, host="alpha", activity="computing", step=118, live=True,
            samples_per_second=812.3, waiting_ratio=0.31, heartbeat_age_s=0.2,
            hardware=Hardware(name="NVIDIA L4"),
        ),
        WorkerStatus(
            worker=1, rank=1, host="beta", device="cpu", activity="sending", step=118, live=True,
            samples_per_second=391.7, waiting_ratio=0.01, heartbeat_age_s=0.4,
        ),
    ),
)  # fmt: skip
NAN = HaltEvidence(
    id=5, reason=HaltReason.NON_FINITE_GRADIENT, step=119, worker=1, at_unix_s=1000.0, epoch=0,
    positions=PositionRange(7552, 7616), message="worker 1 sent nan in fc.weight[3] (block 0)",
)  # fmt: skip


def drawn(
    *statuses: LineStatus,
    width: int = 100,
    height: int = 40,
    silent_s: float = 0.2,
    lost: Lost | None = None,
    flags: str = "",
) -> str:
    """The picture after some statuses, a second apart, without styles."""
    seen = Seen([3.0, 2.8, 2.6], first_step=117)
    for second, status in enumerate(statuses):
        seen.note(status, float(second), 1000.0 + second)
    heard_at = len(statuses) - 1.0
    now = heard_at + silent_s
    picture = LinePicture(
        seen=seen,
        now=now,
        at_unix_s=1000.0 + now,
        heard_at=heard_at,
        lost=lost,
        flags=flags,
        board_url="http://127.0.0.1:9400/",
    )
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, no_color=True, legacy_windows=False)
    console.print(picture)
    return file.getvalue()


def test_a_running_line_shows_its_light_its_progress_and_who_is_waited_for() -> None:
    lines = drawn(STATUS).splitlines()

    assert [line.rstrip() for line in lines] == [
        "● run 7f3a  RUNNING  2 live, 2 participating",
        "step      118/1000  ━━━━──────────────────────────────────── 12 %  eta 47s",
        "loss      2.413  █▆▃▁  accuracy 81.2 %",
        "speed     1 204 samples/s  53 ms a step  exchange 6 ms (81 % hidden)",
        "",
        "   worker  rank  host   device     state      step  samples/s  waits  heartbeat",
        "●       0     0  alpha  NVIDIA L4  computing   118        812   31 %      0.2 s",
        "◐       1     1  beta   cpu        sending     118        392    1 %      0.4 s",
        "worker 1 holds the line up: others wait for up to 31 % of a step (andon top)",
        "in a browser: http://127.0.0.1:9400/",
    ]


def test_a_halt_shows_its_evidence_and_the_answers_above_everything_else() -> None:
    halted = replace(STATUS, state="HALTED", halt=NAN)

    lines = drawn(STATUS, halted, flags="--run 7f3a").splitlines()

    assert lines[0].startswith("■ run 7f3a  HALTED")
    assert lines[1].startswith(
        "HALTED at step 119 (epoch 0, positions 7552 to 7615): worker 1 sent"
    )
    text = "\n".join(lines)
    assert "It has waited 1.2s for an answer." in text.replace("\n", " ")
    assert "andon resume --run 7f3a --skip   leave its 64 samples out" in text
    assert "andon resume --run 7f3a --drop 1 go on without worker 1" in text
    [at_fault] = [line for line in lines if "beta" in line]
    assert at_fault.startswith("■")
    assert "HALTED at step 119 (epoch 0" in lines[-1]


def test_a_lost_service_leaves_no_picture_of_workers_that_may_be_gone() -> None:
    lost = Lost("the service at alpha:7070 does not answer any more", 0.0, 300.0)

    text = drawn(STATUS, lost=lost, silent_s=12.0)

    assert text.splitlines()[0] == "○ run 7f3a  LOST"
    assert "last seen 12s ago: RUNNING, step 118/1000, loss 2.413" in text
    assert "trying again, for 4m48s more" in text
    assert "computing" not in text


def test_a_service_that_hangs_is_silent_and_no_light_is_green() -> None:
    text = drawn(STATUS, silent_s=7.0)

    assert text.splitlines()[0].startswith("◐ run 7f3a  SILENT for 7.0s")
    assert "●" not in text


def test_a_narrow_terminal_drops_columns_and_keeps_who_does_what_and_what_it_costs() -> None:
    lines = drawn(STATUS, width=36).splitlines()

    assert max(map(len, lines)) <= 36
    [headings] = [line for line in lines if "worker  state" in line]
    assert headings.split() == ["worker", "state", "waits"]


def test_a_low_terminal_leaves_out_workers_of_which_there_is_nothing_to_tell() -> None:
    first, second = STATUS.workers
    fine = [replace(first, worker=at, rank=at, host=f"h{at}") for at in range(30)]
    many = (*fine, replace(second, worker=30, rank=30), replace(first, worker=31, live=False))

    text = drawn(replace(STATUS, workers=many), height=20)

    assert len(text.splitlines()) <= 20
    assert "... and " in text
    assert "◐      30" in text
    assert "○      31" in text


@pytest.mark.parametrize("environment", ["NO_COLOR", "colours"])
def test_without_colour_nothing_but_bold_and_dim_is_left(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if environment == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=100, height=40, color_system="256",
        legacy_windows=False,
    )  # fmt: skip
    seen = Seen()
    seen.note(STATUS, 0.0, 0.0)

    console.print(LinePicture(seen=seen, now=0.0, at_unix_s=0.0, heard_at=0.0))

    assert ("\x1b[32m" in file.getvalue()) == (environment == "colours")


def test_a_terminal_without_unicode_gets_other_signs() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=100, height=40, no_color=True, legacy_windows=False)
    seen = Seen([3.0, 1.0], first_step=117)
    seen.note(STATUS, 0.0, 0.0)

    console.print(LinePicture(seen=seen, now=0.0, at_unix_s=0.0, heard_at=0.0))

    file.flush()
    lines = file.buffer.getvalue().decode("ascii").splitlines()
    assert lines[0].startswith("o run 7f3a")
    assert "####------" in lines[1]


def test_what_a_worker_sent_can_not_move_the_cursor() -> None:
    first, second = STATUS.workers
    evil = replace(first, detail="\x1b[2Jboo\nhoo", host="[red]x[/red]")

    text = drawn(replace(STATUS, workers=(evil, second)), width=140)

    assert "\x1b[2J" not in text
    assert "[red]x[/red]" in text
    assert " [2Jboo hoo" in text
