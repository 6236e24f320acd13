"""In which part of a worker's work its script is, by its stack; and what an answer may hold."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from andon.protocol.slowness import (
    CodeLine,
    Explanation,
    ProcessFacts,
    SlowPhase,
    ThreadStack,
    bounded,
)
from andon_trainer.core.stacks import CodePlaces, RawFrame, phase_of, stack_of, waits_for_loading
from andon_trainer.exchange.control.gpu_clock import GpuClock, read_gpu
from andon_trainer.exchange.control.written_stacks import frames_in

PLACES = CodePlaces(("/usr/lib/python3.11",), ("/opt/andon_trainer", "/opt/andon"))
TRAIN = ("/home/ada/train.py", 9, "main")
DATASET = ("/home/ada/dataset.py", 42, "__getitem__")
HOOK = ("/home/ada/train.py", 5, "hook")
WAITS = ("/usr/lib/python3.11/threading.py", 324, "wait")
TORCH = "/v/site-packages/torch"
FETCH = (f"{TORCH}/utils/data/_utils/fetch.py", 51, "fetch")
FORWARD = (f"{TORCH}/nn/modules/module.py", 1, "_call_impl")
BACKWARD = (f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward")
OPTIMIZER = (f"{TORCH}/optim/optimizer.py", 1, "wrapper")
PICTURES = ("/v/site-packages/PIL/Image.py", 7, "open")
INBOX = ("/opt/andon_trainer/exchange/path.py", 55, "take")
AVERAGING = ("/opt/andon_trainer/averaging/line_averaging.py", 1, "run")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([WAITS, DATASET, FETCH, TRAIN], SlowPhase.DATA),
        ([FORWARD, DATASET, FETCH, TRAIN], SlowPhase.DATA),
        ([WAITS, (f"{TORCH}/utils/data/dataloader.py", 1, "__next__"), TRAIN], SlowPhase.DATA),
        ([WAITS, ("/home/ada/model.py", 3, "forward"), FORWARD, TRAIN], SlowPhase.FORWARD),
        ([WAITS, HOOK, BACKWARD, AVERAGING, TRAIN], SlowPhase.BACKWARD),
        ([HOOK, OPTIMIZER, TRAIN], SlowPhase.OPTIMIZER),
        ([WAITS, INBOX, AVERAGING, TRAIN], SlowPhase.EXCHANGE),
        ([INBOX, AVERAGING, BACKWARD, TRAIN], SlowPhase.EXCHANGE),
        ([("/opt/andon_trainer/state/checkpoint_files.py", 1, "write"), TRAIN], SlowPhase.DISK),
        ([WAITS, TRAIN], SlowPhase.SCRIPT),
        ([], SlowPhase.UNSPECIFIED),
    ],
)
def test_the_innermost_code_that_is_known_tells_the_phase(
    frames: list[RawFrame], phase: SlowPhase
) -> None:
    assert phase_of(frames, PLACES) is phase


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ([WAITS, (f"{TORCH}/utils/data/dataloader.py", 1, "_try_get_data"), TRAIN], True),
        ([WAITS, DATASET, FETCH, TRAIN], False),
        ([WAITS, INBOX, AVERAGING, TRAIN], False),
    ],
)
def test_a_script_that_loads_by_itself_waits_for_no_loading_process(
    frames: list[RawFrame], *, waits: bool
) -> None:
    assert waits_for_loading(frames, PLACES) is waits


@pytest.mark.parametrize(
    ("frames", "guilty"),
    [
        ([WAITS, DATASET, FETCH, TRAIN], "dataset.py:42 in __getitem__"),
        ([PICTURES, DATASET, FETCH, TRAIN], "dataset.py:42 in __getitem__"),
        ([WAITS, INBOX, AVERAGING, TRAIN], "train.py:9 in main"),
        ([WAITS, PICTURES], "None"),
    ],
)
def test_the_guilty_line_is_the_innermost_of_the_users_own_code(
    frames: list[RawFrame], guilty: str
) -> None:
    answer = Explanation(1, SlowPhase.DATA, stacks=(stack_of("the script", frames, PLACES),))

    assert str(answer.guilty) == guilty


def test_a_hook_that_backward_calls_on_another_thread_is_guilty() -> None:
    script = stack_of("the script", [BACKWARD, TRAIN], PLACES)
    other = stack_of("Dummy-1", [WAITS, HOOK], PLACES)

    answer = Explanation(1, SlowPhase.BACKWARD, stacks=(script, other))

    assert str(answer.guilty) == "train.py:5 in hook"


def test_a_huge_answer_is_cut_and_shown_on_one_line() -> None:
    line = CodeLine("x\n" * 500 + "end.py", 1, "f\x1b[2J" * 100, own=True)
    stack = ThreadStack("t" * 500, (line,) * 99)
    facts = ProcessFacts(script_cores=math.nan, held_s=math.inf, gpu_throttled="<b>" * 99)

    kept = bounded(Explanation(1, SlowPhase.DATA, "d" * 5000, (stack,) * 9, facts))

    assert (len(kept.stacks), len(kept.stacks[0].lines), len(kept.detail)) == (4, 24, 998)
    first = kept.stacks[0].lines[0]
    assert first.file.endswith("end.py")
    assert len(first.file.encode()) <= 200
    assert first.function.isprintable()
    assert (kept.facts.script_cores, kept.facts.held_s) == (None, 0.0)


def test_the_stack_of_a_thread_is_read_out_of_what_faulthandler_wrote() -> None:
    first = (
        "Stack (most recent call first):\n"
        '  File "/home/ada/train.py", line 5 in hook\n'
        '  File "/home/ada/train.py", line 9 in main\n'
    )

    assert frames_in(first + first) == (HOOK, TRAIN)
    assert frames_in("") == ()


def _nvml(process: int, bits: int) -> SimpleNamespace:
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda index: [SimpleNamespace(pid=process)] * index,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: bits,
        nvmlDeviceGetClockInfo=lambda device, _: 300 * (device + 1),
        nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
    )


def test_the_clock_is_that_of_the_gpu_that_this_process_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)

    assert read_gpu(_nvml(7, 0x21)) == GpuClock(600.0, 1980.0, "thermal")
    assert read_gpu(_nvml(8, 0x21)) is None
