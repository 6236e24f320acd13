"""The rooms of the code, how many mutants each gets, and the tests that have to kill them.

A room's list takes seconds, so it has what is quick and tells much. The tests that are named like
the module come first, whether they are in the list or not. Keep the lists up to date when tests
move; a pattern may match nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ROOMS", "Room"]

_SEARCH = (
    "tests/search/test_search.py::test_a_line_of_three_reaches_its_goal_from_every_state_without_faults",
    "tests/search/test_search.py::test_overlapped_windows_reach_their_goal_from_every_state_without_faults",
)


@dataclass(frozen=True, kw_only=True)
class Room:
    """Files with code, and tests for them."""

    mutants: int
    code: tuple[str, ...]
    folders: tuple[str, ...]
    """Their tests are tried if named like the module; all of them, if a kill would be lost."""
    tests: tuple[str, ...]
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of modules that no test is named like: the names of tests."""


def _tests(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{each}.py" for each in names.split())


_TRAINER = "tests/unit/andon_trainer"

ROOMS = {
    "coordinator core": Room(
        mutants=45,
        code=("services/andon_coordinator/core/*.py",),
        folders=("tests/unit/andon_coordinator",),
        tests=(
            *_tests(
                "tests/unit/andon_coordinator",
                "core_transcripts core_line core_work core_members core_lost_state core_detectors "
                "core_loss_trend core_ring core_balance core_pacing core_cadence core_growth "
                "core_noise_scale "
                "chronicle",
            ),
            *_SEARCH,
        ),
    ),
    "reducer core": Room(
        mutants=30,
        code=("services/andon_reducer/core/*.py",),
        folders=("tests/unit/andon_reducer",),
        tests=(
            *_tests("tests/unit/andon_reducer", "reducer_transcripts rounds mean averaging"),
            *_tests("tests/unit/andon_reducer", "reduce_stream implausible_messages"),
            *_SEARCH,
        ),
    ),
    "trainer core": Room(
        mutants=35,
        code=("trainer/andon_trainer/core/*.py",),
        folders=(_TRAINER,),
        tests=(
            *_tests(
                _TRAINER,
                "worker_state conversation keeping habit computed scalar_log values own_norm "
                "ring_round ring_mean ring_landing ring stepper telemetry",
            ),
            *_SEARCH,
        ),
    ),
    "averaging": Room(
        mutants=25,
        code=("trainer/andon_trainer/averaging/*.py",),
        folders=(_TRAINER,),
        tests=_tests(
            _TRAINER,
            "tap staging feedback missing norms broadcast readings running_statistics "
            "copied_buffers step_gather compute_clock own_norm scaled_rounds stepper replica hosts "
            "local_steps batch_steps coupled_samples manual",
        ),
        more={"solo_averaging": ("line_backward",), "loss_scale": ("scaling",)},
    ),
    "schedules and gates": Room(
        mutants=25,
        code=("trainer/andon_trainer/schedules/*.py", "trainer/andon_trainer/script/*.py"),
        folders=(_TRAINER,),
        tests=_tests(
            _TRAINER,
            "stepper local_steps batch_steps stream_steps coupled_samples scaled_rounds loss_check "
            "own_norm gates_rates prepared",
        ),
        more={"loop_steps": ("line_backward",), "step_state": ("line_backward",)},
    ),
    "stores": Room(
        mutants=20,
        code=(
            "trainer/andon_trainer/state/*.py",
            "services/andon_coordinator/transport/journal.py",
            "services/andon_coordinator/transport/store.py",
            "services/andon_coordinator/transport/opening.py",
            "services/andon_coordinator/transport/past.py",
            "services/andon_coordinator/transport/reader.py",
            "services/andon_coordinator/transport/logbook.py",
            "services/andon_coordinator/transport/rows.py",
            "proto/andon/host/manifest.py",
        ),
        folders=(
            _TRAINER,
            "tests/unit/andon_coordinator",
            "tests/unit/andon_server",
            "tests/unit/andon_cli",
        ),
        tests=(
            *_tests(
                "tests/unit/andon_coordinator",
                "journal journal_harm journal_ledger journal_logbook journal_resuming",
            ),
            "tests/unit/andon_server/test_runs.py",
            *_tests(_TRAINER, "state checkpoint_files replica replica_format rng"),
        ),
    ),
    "protocol": Room(
        mutants=20,
        code=("proto/andon/protocol/*.py",),
        folders=("tests/unit/andon",),
        tests=(
            *_tests("tests/unit/andon/protocol", "halts limits records reducers ring run_settings"),
            *_tests("tests/unit/andon/protocol", "scalars shards tokens layout strips encoding"),
            "tests/unit/andon/test_conformance*.py",
        ),
    ),
}
