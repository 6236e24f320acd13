"""Which lines of a worker a person sees while the run goes on."""

from __future__ import annotations

import pytest

from andon_cli.drawing.worker_output import Alarms, OutputMode, WorkerOutput, colored, plain

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
ValueError: batch 7 is empty""".splitlines()


def worker(mode: OutputMode = "last", alarms: Alarms | None = None, slot: int = 0) -> WorkerOutput:
    return WorkerOutput(f"worker {slot}", mode, alarms or Alarms())


def shown(output: WorkerOutput, *lines: str) -> list[str]:
    return [passed for line in lines for passed in output.take(line)]


def test_ordinary_lines_are_kept_back_but_the_last_one_is_known() -> None:
    output = worker()

    passed = shown(output, "epoch 1", "epoch 2", "", "   ")

    assert passed == []
    assert output.last == "epoch 2"


def test_all_output_passes_as_it_is() -> None:
    assert shown(worker("all"), "a", "", "\x1b[31mb") == ["a", "", "\x1b[31mb"]


@pytest.mark.parametrize(
    "line",
    [
        "train.py:3: UserWarning: this is slow",
        "WARNING:root:this is slow",
        "2026-11-22 10:00:00 ERROR data: no such file",
        "[rank0]: CRITICAL out of memory",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_a_warning_passes(line: str) -> None:
    assert shown(worker(), line) == [line]


def test_a_warning_does_not_take_the_place_of_what_the_worker_says() -> None:
    output = worker()

    shown(output, "epoch 1", "WARNING: waiting for a coordinator at 127.0.0.1:7070 (UNAVAILABLE)")

    assert output.last == "epoch 1"


@pytest.mark.parametrize("line", ["no warnings so far", "error rate 0.3", "loss 1.0 WARNINGS 0"])
def test_a_line_that_only_speaks_of_warnings_does_not(line: str) -> None:
    assert shown(worker(), line) == []


def test_of_a_record_in_json_a_person_sees_level_and_message() -> None:
    output = worker()
    record = '{"time": "2026-11-22T10:00:00.000Z", "level": "%s", "message": "the disk is slow"}'

    passed = shown(output, record % "WARNING", record % "INFO", '{"time": cut')

    assert passed == ["WARNING: the disk is slow"]
    assert output.last == '{"time": cut'


def test_a_warning_of_every_step_and_worker_passes_once() -> None:
    alarms = Alarms()

    passed = [
        line
        for slot in (0, 1)
        for step in range(3)
        for line in worker(alarms=alarms, slot=slot).take(f"WARNING: step {step} at 0x7f{step}a")
    ]

    assert passed == ["WARNING: step 0 at 0x7f0a"]


def test_a_flood_of_different_warnings_is_bounded() -> None:
    output = worker()

    passed = shown(output, *(f"WARNING: {'x' * number}" for number in range(1000)))

    assert len(passed) == 200


def test_a_traceback_passes_whole_once_it_has_ended() -> None:
    output = worker()

    assert shown(output, "before", *TRACEBACK[:-1]) == []
    assert shown(output, TRACEBACK[-1], "after") == TRACEBACK


def test_a_traceback_of_torch_with_ranks_passes_whole() -> None:
    lines = [f"[rank1]: {line}" for line in TRACEBACK]

    assert shown(worker(), *lines) == lines


def test_a_very_long_traceback_keeps_its_beginning_and_its_end() -> None:
    frames = [f"    frame {number}" for number in range(1000)]

    passed = shown(worker(), TRACEBACK[0], *frames, TRACEBACK[-1])

    assert len(passed) == 60
    assert (passed[0], passed[1], passed[-2:]) == (
        TRACEBACK[0], frames[0], [frames[-1], TRACEBACK[-1]]
    )  # fmt: skip


def test_the_same_traceback_of_another_worker_is_named_when_that_fails() -> None:
    alarms = Alarms()
    first, second = worker(alarms=alarms), worker(alarms=alarms, slot=1)
    shown(first, *TRACEBACK)

    passed = shown(second, *TRACEBACK[:-1], "ValueError: batch 8 is empty")

    assert (passed, first.end(failed=True)) == ([], [])
    assert second.end(failed=True) == [
        "ValueError: batch 8 is empty  (with the traceback of worker 0, above)"
    ]


STEPS = [f"step {number}" for number in range(50)]
MORE = "Compile with DEBUG=1 to know more."


@pytest.mark.parametrize(
    ("output", "said", "passed", "failed", "end"),
    [
        ("last", TRACEBACK[:2], [], True, TRACEBACK[:2]),
        (
            "alarms",
            [*STEPS, "the data is not here"],
            [],
            True,
            [*STEPS[-9:], "the data is not here"],
        ),
        ("last", ["before", *TRACEBACK, MORE], TRACEBACK, True, [MORE]),
        ("last", ["step 1", *TRACEBACK], TRACEBACK, False, []),
        ("off", ["step 1", "WARNING: slow", *TRACEBACK], [], True, TRACEBACK),
    ],
    ids=["cut short", "without a traceback", "below its first line", "ends well", "no output"],
)
def test_a_worker_that_fails_shows_what_was_not_shown_before(
    output: OutputMode, said: list[str], passed: list[str], failed: bool, end: list[str]
) -> None:
    made = worker(output)

    assert shown(made, *said) == passed
    assert made.end(failed=failed) == end


def test_the_next_process_of_a_slot_does_not_show_the_lines_of_the_last_one() -> None:
    output = worker()
    shown(output, "of the first process")
    output.end(failed=True)

    assert output.last == "of the first process"
    output.forget()
    assert output.last == ""
    assert output.end(failed=True) == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("up\x1b[2Aone\x1b[K", "upone"),
        ("\x1b]0;title\x07text\x1b(B", "text"),
        ("bell\x07 back\x08 null\x00 c1\x9b2J", "bell back null c12J"),
        ("a\tb", "a   b"),
        ("\x1b", ""),
    ],
)
def test_nothing_that_a_terminal_would_obey_is_left(line: str, text: str) -> None:
    assert plain(line) == text


def test_colours_stay_where_every_line_is_shown_and_end_with_it() -> None:
    assert colored("\x1b[2A\x1b[31mred\x1b[K") == "\x1b[31mred\x1b[0m"
    assert colored("plain\x1b[2J") == "plain"
