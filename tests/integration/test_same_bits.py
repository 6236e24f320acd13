"""The same bits on any number of workers: alone, on lines, and when a worker is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.backends import mkl

from andon.host.errors import ExitCode
from andon_cli.app import main
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from integration.harness import (
    SCRIPTS,
    Service,
    finish,
    on_line,
    start_line,
    start_line_with_host,
    start_worker,
    start_workers,
    train,
    train_alone,
)

pytestmark = pytest.mark.integration

STEPS, KILLED_IN = 7, 4
FLAGS = ("--same-bits", "--min-workers", "1", "--liveness", "2", "--digest-every", "1")
VERIFY = ("--verify", "1.0")
"""Grains of others are computed as well, which must change no bit."""
WIRE: dict[str, Any] = {"ANDON_SHARED_DIR": "off", "ANDON_TCP": "off"}
LANES = {"ANDON_SHARED_DIR": "off"}
ANSWER = ("digest", "losses", "draws", "evaluations")
"""What is the same on all lines: weights and optimizer, losses, and what the script draws and
evaluates."""

# Batches of 20 and 5 in grains of 3: 7 and 2, the last ones short; 2 grains for 4 workers.


@pytest.fixture(scope="module", params=["gpt", "cnn"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    spec = {"kind": request.param, "steps": STEPS}
    return request.param, train_alone(folder, spec, "grains.py").seen


one_kind = pytest.mark.parametrize("alone", ["cnn"], indirect=True)
"""Storms of both kinds go through losses and checkpoints (tests/chaos)."""


def answers(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: seen[name] for name in ANSWER}


@one_kind
@pytest.mark.parametrize(("workers", "path"), [(1, WIRE), (4, LANES)])
def test_any_number_of_workers_trains_the_same_bits(
    tmp_path: Path, alone: tuple[str, dict[str, Any]], workers: int, path: dict[str, Any]
) -> None:
    kind, expected = alone
    spec = {"kind": kind, "steps": STEPS}

    flags = *FLAGS, "--shares", "balanced", *VERIFY
    seen = train(tmp_path, spec, workers, *flags, script="grains.py", **path)

    assert [answers(each) for each in seen] == [answers(expected)] * workers


@one_kind
def test_a_host_of_two_processes_beside_a_worker_trains_the_same_bits(
    tmp_path: Path, alone: tuple[str, dict[str, Any]]
) -> None:
    kind, expected = alone
    spec = {"kind": kind, "steps": STEPS}

    flags = *FLAGS, "--shares", "balanced", *VERIFY
    with start_line_with_host(tmp_path, (spec, spec), 1, *flags, script="grains.py") as (_, three):
        seen = finish(three)

    assert [answers(each) for each in seen] == [answers(expected)] * 3


def test_a_host_whose_only_other_worker_is_killed_changes_no_bit(
    tmp_path: Path, alone: tuple[str, dict[str, Any]]
) -> None:
    kind, expected = alone
    path = WIRE if kind == "gpt" else {}  # Else over shared memory.
    spec = {"kind": kind, "steps": STEPS, "kill": [2, KILLED_IN]}

    line = start_line_with_host(tmp_path, (spec, spec), 1, *FLAGS, script="grains.py", **path)
    with line as (_, workers):
        seen = finish(workers[:2])

    assert [answers(each) for each in seen] == [answers(expected)] * 2
    # What a survivor had summed when the worker died was not computed again. Two samples may be
    # borrowed ones.
    grains = [
        content
        for each in seen
        for step, samples, content in each["grains"]
        if step == KILLED_IN and samples == 3
    ]
    assert len(grains) == len(set(grains)) == 6


@one_kind
def test_others_compute_the_batches_of_a_worker_that_dies_evaluating(
    tmp_path: Path,
    alone: tuple[str, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    forked_python: list[str],
) -> None:
    kind, expected = alone
    spec = {"kind": kind, "steps": STEPS, "dies_evaluating": [2, 0]}

    with start_line(tmp_path, spec, 3, *FLAGS, script="grains.py") as (_, workers):
        seen = finish(workers[:2])

    assert [answers(each) for each in seen] == [answers(expected)] * 2
    # An audit is answered as the workers were, who gathered twice. In the first step they verified.
    script = [str(each) for each in (SCRIPTS / "grains.py", tmp_path / "alone.json", tmp_path)]
    (tmp_path / "alone.json").write_text(json.dumps({**spec, "dies_evaluating": None, "slot": 0}))
    words = ["audit", str(tmp_path / "run"), "--format", "json", "--", *forked_python, *script]
    assert main(words) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["verdict"] == f"steps 1 to {STEPS} recomputed: all weights equal, and all losses"
    assert fields["grains_compared"]


@one_kind
def test_a_run_goes_on_from_a_checkpoint_with_fewer_workers(
    tmp_path: Path, alone: tuple[str, dict[str, Any]]
) -> None:
    kind, expected = alone
    more: dict[str, Any] = {
        "ANDON_RUN_DIR": str(tmp_path / "kept"),
        "ANDON_CHECKPOINT_EVERY": "2",
    }
    train(tmp_path / "first", {"kind": kind, "steps": 4}, 3, *FLAGS, script="grains.py", **more)

    (tmp_path / "second").mkdir()
    spec = {"kind": kind, "steps": STEPS}
    more["ANDON_RESUME"] = "latest"
    resumed = start_worker(tmp_path / "second", spec, script="grains.py", **more)
    (seen,) = finish([resumed])

    assert seen["digest"] == expected["digest"]
    assert sorted(seen["losses"]) == ["5", "6", "7"]
    for name in ("losses", "draws", "evaluations"):
        assert seen[name].items() <= expected[name].items()


@pytest.mark.skipif(not mkl.is_available(), reason="this torch computes without Intel's MKL")  # type: ignore[no-untyped-call]  # torch has no types here
def test_a_product_has_one_result_wherever_it_lies_or_the_line_comes_too_late(
    tmp_path: Path,
) -> None:
    assert train_alone(tmp_path / "placed", {}, "placed.py").seen == {"different": 1}

    late = start_worker(tmp_path, {"computes_first": True}, script="placed.py")

    assert late.wait() == ExitCode.FAILED
    assert "MKL is in use already" in late.output


@pytest.mark.parametrize("rule", ["require", "tell"])
def test_a_worker_with_another_number_of_threads_is_refused_or_told(
    tmp_path: Path, rule: str
) -> None:
    spec: dict[str, Any] = {"kind": "cnn", "steps": 2}
    with (
        Service(tmp_path / "run", 2, "--arithmetic", rule) as service,
        start_workers(tmp_path, service, spec, 1, script="grains.py") as workers,
    ):
        # It waits for the other one, and its arithmetic is the line's.
        service.await_status(lambda line: line.live == 1)
        here = {**on_line(service, 1, 2), "OMP_NUM_THREADS": "2"}
        other = start_worker(tmp_path, spec, slot=1, script="grains.py", **here)
        workers.append(other)
        if rule == "require":
            assert other.wait() == ExitCode.REFUSED
            assert "computes with threads 2, and the line with threads 1" in other.output
            return
        finish(workers)

    with JournalReader(service.journal) as reader:
        stated = [dict(each.items) for each in reader.arithmetics()]
        told = [each.text for each in reader.run_events() if each.kind is RunEventKind.ARITHMETIC]
    assert [each["threads"] for each in stated] == ["1", "2"]
    assert told == ["it computes with threads 2, and the line with 1"]


def test_a_trainer_gives_the_same_bits_alone_and_on_a_line(tmp_path: Path) -> None:
    expected = train_alone(tmp_path / "alone", {}, "grain_trainer.py").seen

    seen = train(tmp_path / "line", {}, 2, *FLAGS, script="grain_trainer.py")

    assert seen == [expected] * 2
    assert len(expected["evaluations"]) == 5


@pytest.mark.parametrize("kind", ["stream", "batches", "shards"])
def test_however_samples_come_the_bits_are_the_same(tmp_path: Path, kind: str) -> None:
    spec = {"kind": kind}
    expected = train_alone(tmp_path / "alone", spec, "grain_data.py").seen

    # Processes that load ahead do not know which steps are verified.
    there, verify = {**spec, "loading": 1}, ("--verify", "0.5")
    seen = train(tmp_path / "line", there, 3, *FLAGS, *verify, script="grain_data.py")

    assert [each["digest"] for each in seen] == [expected["digest"]] * 3
    for each in seen:
        assert each["losses"] == expected["losses"]


def test_averages_that_are_rounded_are_the_same_bits_on_every_line(tmp_path: Path) -> None:
    spec = {"kind": "cnn", "steps": 3}
    flags = *FLAGS, "--answer-encoding", "bfloat16"

    (one,) = train(tmp_path / "one", spec, 1, *flags, script="grains.py")
    three = train(tmp_path / "three", spec, 3, *flags, script="grains.py", **WIRE)

    assert [answers(each) for each in three] == [answers(one)] * 3
