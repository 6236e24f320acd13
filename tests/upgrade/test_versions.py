"""Processes of an earlier version and of this one work on one line, in any mixture.

By default one mixture runs, and the upgrade of a line, which has others. `ANDON_UPGRADES=all` runs
every one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from andon_coordinator.transport.reader import JournalReader
from upgrade.rig import MixedLine, Trained, mixed_line
from upgrade.versions import Version, Versions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS = 10
SPEC = {"samples": 48, "batch": 8, "steps": STEPS, "frozen": True}
BOTH: tuple[Version, ...] = ("earlier", "current")
ONE = ("earlier", "current", "current", "earlier")
ALL = [mix for mix in product(BOTH, repeat=4) if len(set(mix)) > 1]
EVERY = os.environ.get("ANDON_UPGRADES") == "all"
MIXES = ALL if EVERY else [ONE]
SOLO = {"ANDON_ADDRESS": "", "RANK": "0", "WORLD_SIZE": "1"}
many = pytest.mark.skipif(not EVERY, reason="one of many mixtures: ANDON_UPGRADES=all runs it")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"))


@dataclass(frozen=True)
class Alone:
    """The same training in one process, without a line."""

    trained: Trained
    checkpoint: Path
    """What it wrote after step 4."""


def train_alone(version: Version, versions: Versions, folder: Path, **spec: Any) -> Alone:
    keeping = {"ANDON_RUN_DIR": str(folder / "run"), "ANDON_CHECKPOINT_EVERY": "4"}
    with mixed_line(versions, folder) as line:
        worker = line.work(version, 0, {**SPEC, **spec}, **SOLO, **keeping)
        assert worker.wait() == 0, worker.text
        return Alone(line.trained(0), folder / "run" / "checkpoints" / "step-00000004")


def go_on(version: Version, versions: Versions, folder: Path, alone: Alone, **spec: Any) -> Trained:
    """What a process that resumes from the checkpoint trains."""
    resuming = {**SOLO, "ANDON_RESUME": str(alone.checkpoint)}
    with mixed_line(versions, folder) as line:
        worker = line.work(version, 0, {**SPEC, **spec}, **resuming)
        assert worker.wait() == 0, worker.text
        return line.trained(0)


@pytest.fixture(scope="module")
def alone(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """In a process of the earlier version."""
    return train_alone("earlier", versions, tmp_path_factory.mktemp("alone"))


def late_newcomer(line: MixedLine, first: Version, second: Version, **spec: Any) -> list[Trained]:
    """Trains with a worker of one version, and from step 4 on with one of another."""
    go = line.folder / "go"
    whole = {**SPEC, **spec}
    one = line.work(first, 0, {**whole, "hold_at": 3, "until": str(go)})
    line.await_hold(one, 0)
    two = line.work(second, 1, whole)
    line.await_status("both workers", lambda status: len(status.workers) == 2)
    go.touch()
    assert one.wait() == 0, line.output()
    assert two.wait() == 0, line.output()
    return [line.trained(0), line.trained(1)]


def assert_same(trained: Sequence[Trained]) -> None:
    """All workers have the same bits, running statistics included."""
    first, *others = trained
    for other in others:
        assert first.weights.keys() == other.weights.keys()
        for name, tensor in first.weights.items():
            assert torch.equal(tensor, other.weights[name]), name


def assert_as_alone(trained: Trained, alone: Trained) -> None:
    """It learned what one process learns; sums of floats are made in another order."""
    assert trained.steps == alone.steps
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, tensor in alone.weights.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_a_late_newcomer_of_another_version_gets_the_state_and_trains_on(
    versions: Versions, alone: Alone, tmp_path: Path, mix: Sequence[str]
) -> None:
    coordinator, reducer, first, second = (cast(Version, each) for each in mix)
    with mixed_line(versions, tmp_path) as line:
        line.serve(
            coordinator,
            *("--role", "coordinator", "--secret-file", str(line.secret())),
            *("--workers", "1", "--max-workers", "2"),
        )
        line.reduce(reducer)
        trained = late_newcomer(line, first, second)

    assert_same(trained)
    assert_as_alone(trained[0], alone.trained)
    assert trained[1].steps == trained[0].steps[-len(trained[1].steps) :]
    assert len(trained[1].steps) >= STEPS - 4
    assert trained[0].mean == trained[1].mean == 1.5


def test_a_line_is_upgraded_part_by_part_while_it_trains(
    versions: Versions, tmp_path: Path
) -> None:
    spec = {**SPEC, "steps": 10**6, "batchnorm": True, "pause_s": 0.1}
    with mixed_line(versions, tmp_path) as line:
        secret = str(line.secret())
        flags = ("--role", "coordinator", "--workers", "2", "--secret-file", secret)
        service = line.serve("earlier", *flags)
        reducer = line.reduce("earlier")
        workers = [line.work("earlier", slot, spec) for slot in range(2)]
        line.await_steps(3, workers=2)

        # From the one version to the other, as after a crash, back, and again.
        for version in ("current", "current", "earlier", "current"):
            service.end(signal.SIGTERM)
            service = line.serve(version, *flags)
            line.await_steps(3, workers=2)

        newer = line.reduce("current")
        newer.announcement()
        line.await_status("both reducers", lambda status: len(status.reducers) == 2)
        reducer.end(signal.SIGTERM)
        line.await_status("the newer reducer", lambda status: len(status.reducers) == 1)
        line.await_steps(3, workers=2)

        for slot in (1, 0):
            workers[slot].end(signal.SIGTERM)
            assert workers[slot].process.returncode == 143, workers[slot].text
            workers[slot] = line.work("current", slot, spec)
            line.await_steps(3, workers=2)
        line.drain()
        for worker in workers:
            assert worker.wait() == 0, line.output()

        assert_same([line.trained(0), line.trained(1)])
        with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
            steps = [entry.record.step for entry in journal.entries()]
        assert steps == list(range(len(steps)))
        shown = line.start("current", "show", "-m", "andon_cli", "show", str(tmp_path / "run"))
        assert shown.wait() == 0, shown.text
        assert str(steps[-1]) in shown.text


def test_a_checkpoint_of_the_earlier_version_is_gone_on_from(
    versions: Versions, alone: Alone, tmp_path: Path
) -> None:
    rest = go_on("current", versions, tmp_path, alone)

    assert rest.steps == alone.trained.steps[4:]
    assert_same([alone.trained, rest])


@many
def test_the_earlier_version_goes_on_from_a_checkpoint_in_which_nothing_is_new(
    versions: Versions, tmp_path: Path
) -> None:
    # Frozen weights have a file of their own since.
    whole = train_alone("current", versions, tmp_path / "one", frozen=False)

    rest = go_on("earlier", versions, tmp_path / "other", whole, frozen=False)

    assert rest.steps == whole.trained.steps[4:]
    assert_same([whole.trained, rest])


@many
@pytest.mark.parametrize("coordinator", BOTH)
def test_a_ring_has_workers_of_both_versions(
    versions: Versions, tmp_path: Path, coordinator: Version
) -> None:
    flags = ("--topology", "ring", "--encoding", "bfloat16")
    with mixed_line(versions, tmp_path) as line:
        line.serve(coordinator, "--workers", "1", "--max-workers", "2", *flags)

        assert_same(late_newcomer(line, "earlier", "current", batchnorm=True))


@many
@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        (("--max-grad-norm", "1"), "norms.v1"),
        (("--worker-grad-norm", "10"), "norms.v1"),
        (("--average-buffers",), "mean-buffers.v1"),
        (("--encoding", "int8"), "int8.v1"),
        (("--shares", "balanced"), "balance.v1"),
        (("--schedule", "cadence"), "cadence.v1"),
        (("--schedule", "local"), "local.v1"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_a_worker_of_the_earlier_version_would_not_heed_is_refused_by_name(
    versions: Versions, tmp_path: Path, flags: Sequence[str], capability: str
) -> None:
    with mixed_line(versions, tmp_path) as line:
        line.serve("current", "--workers", "1", *flags)
        worker = line.work("earlier", 0, SPEC)

        assert worker.wait() == 4, worker.text
        assert f"the line needs {capability}, which the worker lacks: " in worker.text
