"""Processes of an earlier version and of this one work on one line, in any mixture.

By default two mixtures run, in which both versions have every part once. `ANDON_UPGRADES=all` runs
every one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
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
FEW = [("earlier", "current", "earlier", "current"), ("current", "earlier", "current", "earlier")]
ALL = [mix for mix in product(BOTH, repeat=4) if len(set(mix)) > 1]
EVERY = os.environ.get("ANDON_UPGRADES") == "all"
MIXES = ALL if EVERY else FEW


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def alone(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same training in one process of this version, without a line."""
    with mixed_line(versions, tmp_path_factory.mktemp("alone")) as line:
        worker = line.work("current", 0, SPEC, ANDON_ADDRESS="", RANK="0", WORLD_SIZE="1")
        assert worker.wait() == 0, worker.text
        return line.trained(0)


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
    versions: Versions, alone: Trained, tmp_path: Path, mix: Sequence[str]
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
    assert_as_alone(trained[0], alone)
    assert trained[1].steps == trained[0].steps[-len(trained[1].steps) :]
    assert len(trained[1].steps) >= STEPS - 4
    assert trained[0].mean == trained[1].mean == 1.5


def test_a_line_is_upgraded_part_by_part_while_it_trains(
    versions: Versions, tmp_path: Path
) -> None:
    spec = {**SPEC, "steps": 10**6, "batchnorm": True, "pause_s": 0.02}
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


@pytest.mark.parametrize(
    ("writer", "reader"), [("earlier", "current"), ("current", "earlier")][: 2 if EVERY else 1]
)
def test_a_checkpoint_of_the_other_version_is_gone_on_from(
    versions: Versions, tmp_path: Path, writer: Version, reader: Version
) -> None:
    # What is not trained has a file of its own since, which an earlier version does not read.
    spec = {**SPEC, "frozen": writer == "earlier"}
    solo = {"ANDON_ADDRESS": "", "RANK": "0", "WORLD_SIZE": "1"}
    keeping = {"ANDON_RUN_DIR": str(tmp_path / "run"), "ANDON_CHECKPOINT_EVERY": "4"}
    with mixed_line(versions, tmp_path) as line:
        first = line.work(writer, 0, spec, **solo, **keeping)
        assert first.wait() == 0, first.text
        whole = line.trained(0)
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
        second = line.work(reader, 0, spec, **solo, ANDON_RESUME=str(checkpoint))
        assert second.wait() == 0, second.text
        rest = line.trained(0)

    assert rest.steps == whole.steps[4:]
    assert_same([whole, rest])
