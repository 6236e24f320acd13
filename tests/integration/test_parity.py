"""Workers on a line match one process on the union batch, and each other bit for bit."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, finish, start_line, start_workers, train, train_alone

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {"samples": 45, "batch": 8, "steps": 20}
EPOCHS = 7
IN_PARTS = {
    **SPEC,
    "steps": EPOCHS * 6,
    "micro": 2,
    "loader_processes": 1,
    "optimizer": "adamw",
    "clip": 0.5,
}
"""Epochs of 45 samples in 6 steps each, with micro-batches and a loading process."""


Trained = tuple[Path, list[dict[str, Any]]]
"""A line's folder, and what its workers wrote."""


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two workers that have trained `IN_PARTS`."""
    folder = tmp_path_factory.mktemp("in-parts")
    return folder, train(folder, IN_PARTS, 2)


def train_plainly(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    return train_alone(folder, {**spec, "plain": True}).seen


def weights(folder: Path, slot: int) -> dict[str, Any]:
    return load_file(folder / f"out-{slot}.safetensors")


def relative_error(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    return max(
        float((ours[name] - value).norm() / value.norm())
        for name, value in theirs.items()
        if value.norm() > 0
    )


def test_f_dp_005_three_workers_match_one_process_with_sgd(tmp_path: Path) -> None:
    # 45 samples in batches of 8: shares of 4 or 3 and 2 samples, and a last batch of 5.
    plain = train_plainly(tmp_path / "plain", SPEC)

    seen = train(tmp_path, SPEC, 3)

    assert seen[0]["step"] == plain["step"] == 20
    assert relative_error(weights(tmp_path, 0), weights(tmp_path / "plain", 0)) <= 1e-6
    assert seen[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_f_dp_005_losses_match_one_process_with_adamw_and_clipping(
    tmp_path: Path, in_parts: Trained
) -> None:
    folder, seen = in_parts

    plain = train_plainly(tmp_path, IN_PARTS)

    assert seen[0]["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    # No worker has a gradient for it, so not even weight decay changes it.
    assert weights(folder, 0)["unused"].tolist() == [1.0, 1.0, 1.0]


def test_f_dp_005_batches_smaller_than_the_roster_leave_ranks_without_samples(
    tmp_path: Path,
) -> None:
    # 13 samples in batches of 4: the last batch of an epoch has one sample for three workers.
    spec = {**SPEC, "samples": 13, "batch": 4, "clip": 0.1}
    train_plainly(tmp_path / "plain", spec)

    seen = train(tmp_path, spec, 3)

    assert relative_error(weights(tmp_path, 0), weights(tmp_path / "plain", 0)) <= 1e-6
    assert len({each["digest"] for each in seen}) == 1


def test_f_dp_005_a_cadence_matches_one_process_on_what_its_steps_took(tmp_path: Path) -> None:
    spec = {**SPEC, "samples": 3000, "steps": 12, "lr": 0.02, "micro": 3}
    flags = ("--schedule", "cadence", "--lr-scaling", "linear", "--growth-cost", "1")
    hints = ({"ANDON_SPEED_HINT": "3"}, {"ANDON_SPEED_HINT": "1"})
    with (
        Service(tmp_path / "run", 2, *flags) as service,
        start_workers(tmp_path, service, spec, 2, each=hints) as workers,
    ):
        seen = finish(workers)
    steps: list[list[int]] = [[] for _ in range(12)]
    for step, _rank, indices in chain(*(each["indices"] for each in seen)):
        steps[step - 1] += indices
    plain = train_plainly(tmp_path / "plain", {**spec, "unions": steps})

    assert len(steps[0]) == 8, "the script's batch, six samples on one worker and two on the other"
    assert max(map(len, steps)) > 8, "exchanging takes longer than computing, so windows grow"
    assert relative_error(weights(tmp_path, 0), weights(tmp_path / "plain", 0)) <= 1e-6
    assert seen[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert seen[0]["digest"] == seen[1]["digest"]


@pytest.mark.parametrize(
    "flags",
    [(), ("--topology", "ring"), ("--schedule", "local", "--local-steps", "3", "--overlap")],
    ids=["every step", "ring", "local"],
)
def test_f_dp_001_c_ring_001_all_workers_hold_the_same_bits_from_different_initial_weights(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    spec = {**SPEC, "optimizer": "adamw", "micro": 2, "clip": 1.0, "mean": True, "batchnorm": True}

    seen = train(tmp_path, {**spec, "steps": 8 if flags else 20}, 3, *flags)

    assert len({each["digest"] for each in seen}) == 1
    assert seen[0]["losses"] == seen[1]["losses"] == seen[2]["losses"]
    assert [each["mean"] for each in seen] == [(1 * 1 + 2 * 2 + 3 * 3) / 6] * 3
    assert [each["means"] for each in seen] == [{"rank": (0 * 1 + 1 * 2 + 2 * 3) / 6}] * 3
    gathered = [2**60 + 1000 * rank + each for rank in range(3) for each in range(300 * (rank + 1))]
    assert [each["gathered"] for each in seen] == [gathered] * 3
    # BatchNorm's statistics are also equal, although the digest excludes them, so evaluations
    # agree. After local steps they are averages.
    ours = weights(tmp_path, 0)
    assert ours["batchnorm.running_var"].std() > 0
    for slot in (1, 2):
        assert all(weights(tmp_path, slot)[name].equal(ours[name]) for name in ours)


def test_f_dp_001_who_has_no_sample_in_the_last_window_ends_with_the_lines_weights(
    tmp_path: Path,
) -> None:
    # 17 samples in windows of 4: of the last window of an epoch one worker has nothing, and what
    # it did not send of the window before is its own.
    spec = {**SPEC, "samples": 17, "batch": 4, "steps": 10}
    flags = ("--schedule", "local", "--local-steps", "2", "--fragments", "2")

    seen = train(tmp_path, spec, 2, *flags)

    assert seen[0]["digest"] == seen[1]["digest"]


def test_c_ddp_001_every_worker_steps_with_the_same_gradient_and_no_other(
    in_parts: Trained,
) -> None:
    _, seen = in_parts

    # Shares of 4 are 2 micro-batches each: no gradient after the first, the mean after the last.
    complete = [[digest for digest in each["gradients"] if digest] for each in seen]
    assert complete[0] == complete[1]
    assert len(complete[0]) == EPOCHS * 6
    assert len(set(complete[0])) == EPOCHS * 6
    assert seen[0]["gradients"][:4] == ["", complete[0][0], "", complete[0][1]]


def test_workers_with_other_samples_of_the_same_number_are_refused_by_name(tmp_path: Path) -> None:
    spec = {**SPEC, "own_split": 0.8}

    with start_line(tmp_path, spec, 2) as (_service, workers):
        while not (refused := [each for each in workers if each.process.poll() is not None]):
            time.sleep(0.02)
        code = refused[0].wait()

    assert (code, refused[0].seen["component"]) == (4, "data_digest")
    assert "seed whatever splits, shuffles or generates it" in refused[0].output


def test_f_dp_002_every_position_of_every_epoch_is_committed_once(in_parts: Trained) -> None:
    folder, seen = in_parts

    with JournalReader(folder / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        assert journal.samples() == EPOCHS * 45
    for epoch in range(EPOCHS):
        assigned = [
            index
            for each in seen
            for step, _rank, indices in each["indices"]
            for index in indices
            if (step - 1) // 6 == epoch
        ]
        assert sorted(assigned) == list(range(45))
