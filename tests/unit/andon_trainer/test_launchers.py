"""What launchers say of the processes that they start."""

from __future__ import annotations

from typing import Any

import pytest

from andon_trainer.launchers import (
    LaunchStore,
    place_in_launch,
    refuse_to_be_many,
    store_of_launch,
)

MEETING = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MEETING,
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
BY_ENVIRONMENT = {**MEETING, "RANK": "3", "WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
BATCH_SCRIPT = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ONE_TASK = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
PLACE = {"launch_slot": 3, "launch_size": 4, "local_rank": 1}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (OPEN_MPI, PLACE),
        (MPICH, PLACE),
        (SRUN, PLACE),
        # mpirun starts one task of srun on each host, and that starts the processes.
        ({**ONE_TASK, **OPEN_MPI}, PLACE),
        ({**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, {**PLACE, "launch_slot": 2}),
        # One process, whatever started it, takes the slot that the line gives it.
        (ONE_TASK, {}),
        (BATCH_SCRIPT, {}),
        ({}, {}),
        # These are read as settings; and srun that started torchrun or `andon run` says nothing.
        ({**TORCHRUN, **SRUN}, {}),
        ({**SRUN, "TORCHELASTIC_RUN_ID": "7f3a", "ANDON_RUN_ID": "7f3a"}, {}),
        ({**SRUN, "RANK": "0"}, {}),
    ],
)
def test_a_place_is_read_from_one_launcher_that_started_several(
    env: dict[str, str], place: dict[str, int]
) -> None:
    assert place_in_launch(env) == place


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, {"hosted_by_agent": True}),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, {}),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, {"hosted_by_agent": True, "one_host": True}),
        (
            {**TORCHRUN, "MASTER_ADDR": "127.0.0.1"},
            {"hosted_by_agent": True, "one_host": True, "host": "127.0.0.1"},
        ),
        (BY_ENVIRONMENT, {}),
        ({**BY_ENVIRONMENT, "ANDON_PORT": "7070"}, {"service_port": 7070}),
        ({**OPEN_MPI, **MEETING}, {}),
        ({**SRUN, **MEETING}, {}),
    ],
)
def test_a_store_is_where_all_can_meet(env: dict[str, str], expected: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"host": "alpha", "port": 29500, "rank": 3, "world_size": 4}
    away: dict[str, Any] = {"hosted_by_agent": False, "one_host": False}

    assert store_of_launch(env) == LaunchStore(**plain | away | expected)


@pytest.mark.parametrize(
    "env",
    [
        {},
        MEETING,
        OPEN_MPI,
        SRUN,
        {**MEETING, "RANK": "0", "WORLD_SIZE": "1"},
        {**MEETING, "WORLD_SIZE": "4"},
        {**TORCHRUN, "MASTER_PORT": ""},
    ],
)
def test_there_is_no_store_where_a_rank_a_host_or_another_process_is_missing(
    env: dict[str, str],
) -> None:
    assert store_of_launch(env) is None


@pytest.mark.parametrize(
    ("job", "run"),
    [
        ("none", ""),
        ("8c2a2f9e-6f0b-4d0e-9d5c-6d1f0f3a7b11", ""),
        ("261482395723984572398457239845723984", ""),
        ("gpt-small", "gpt-small"),
        ("123", "123"),
        ("job_7.batch", "job_7-batch-4c71ae06"),
        ("--a", "a-e0b98eac"),
    ],
)
def test_a_job_id_that_somebody_chose_names_the_run(job: str, run: str) -> None:
    found = store_of_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": job})

    assert found is not None
    assert found.run_name == run


def test_ids_that_a_run_cannot_have_stay_apart_and_short() -> None:
    one, other = (
        store_of_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": job}) for job in ("a.1", "a 1")
    )
    long = store_of_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x" * 90})

    assert one is not None
    assert other is not None
    assert long is not None
    assert one.run_name != other.run_name
    assert len(long.run_name) == 64


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({**MEETING, "WORLD_SIZE": "4"}, "WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (MPICH, "PMI_SIZE"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_several_processes_that_cannot_meet_are_refused_with_what_to_set(
    env: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named} is 4.* would train alone") as refused:
        refuse_to_be_many(env)

    for remedy in ("andon run --workers 4", "ANDON_ADDRESS", "MASTER_ADDR", f"unset {named}"):
        assert remedy in str(refused.value)


@pytest.mark.parametrize("env", [{}, ONE_TASK, BATCH_SCRIPT, {"WORLD_SIZE": "1"}])
def test_one_process_may_train_alone(env: dict[str, str]) -> None:
    refuse_to_be_many(env)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK must be a whole number"):
        place_in_launch({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "first"})
    with pytest.raises(ValueError, match="MASTER_PORT must be a whole number"):
        store_of_launch({**TORCHRUN, "MASTER_PORT": "auto"})


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_at_which_processes_can_not_meet_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match=f"MASTER_PORT is {port}, where no process finds another"):
        store_of_launch({**TORCHRUN, "MASTER_PORT": port})
