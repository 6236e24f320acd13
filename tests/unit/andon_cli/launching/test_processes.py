"""Processes: what a worker finds in its environment, what its end means, and who starts again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon.protocol.arithmetic import ArithmeticRule
from andon_cli.config import RunConfig, RunSettings
from andon_cli.launching.processes import ended_how, exit_code_of, worker_environment
from andon_cli.launching.restarts import Restarts
from andon_coordinator.config import LineOptions
from andon_server.settings import ServeConfig

LINE = {"ANDON_ADDRESS": "127.0.0.1:7", "ANDON_RUN_ID": "7f3a", "ANDON_RUN_DIR": "/runs/7f3a"}
SERVICE = ServeConfig(run_id="7f3a", workers=3)


def environment(config: RunConfig, **base: str) -> dict[str, str]:
    return worker_environment(config, 1, base=base, line=LINE, master_port=4711)


def test_a_worker_finds_the_line_and_all_that_torchrun_would_set() -> None:
    settings = RunSettings(
        workers=2,
        checkpoint_every=7,
        preemption_notice="/run/preempted",
        line=LineOptions(max_steps=90, same_bits=True),
    )
    config = RunConfig(settings=settings, command=("train.py",), service=SERVICE, seed=5)

    found = environment(config)

    assert found == {
        **LINE,
        "ANDON_ON_HALT": "wait",
        "ANDON_LOG_FORMAT": "text",
        "ANDON_SEED": "5",
        "ANDON_CHECKPOINT_EVERY": "7",
        "ANDON_PREEMPTION_NOTICE": "/run/preempted",
        "ANDON_STEPS": "90",
        "ANDON_SAME_BITS": "1",
        "MKL_CBWR": "AVX2,STRICT",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "7f3a",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_spare_has_a_slot_beyond_those_of_all_workers() -> None:
    config = RunConfig(
        settings=RunSettings(workers=2, spares=1), command=("train.py",), service=SERVICE
    )

    found = worker_environment(config, 2, base={}, line=LINE, master_port=4711, spare=True)

    # Worker 2 of the line's three comes from another host.
    assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "3")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "3")
    assert found["ANDON_SPARE"] == "1"


def test_a_launcher_that_is_a_spares_own_child_starts_workers() -> None:
    config = RunConfig(settings=RunSettings(workers=2), command=("train.py",), service=SERVICE)

    assert "ANDON_SPARE" not in environment(config, ANDON_SPARE="1")


def test_threads_that_the_user_asked_for_are_kept() -> None:
    config = RunConfig(settings=RunSettings(), command=("train.py",), service=SERVICE)

    assert environment(config, OMP_NUM_THREADS="4")["OMP_NUM_THREADS"] == "4"


def test_workers_of_same_bits_have_what_decides_bits_unless_the_user_chose_it() -> None:
    line = LineOptions(same_bits=True, arithmetic=ArithmeticRule.TELL)
    config = RunConfig(settings=RunSettings(line=line), command=("train.py",), service=SERVICE)

    found = environment(config, MKL_CBWR="COMPATIBLE")

    assert found["MKL_CBWR"] == "COMPATIBLE"
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["ANDON_ARITHMETIC"] == "tell"


def test_a_workers_metrics_are_for_those_who_may_read_the_services() -> None:
    settings = RunSettings(metrics_hosts="andon.example", metrics_token_file=Path("/m/token"))

    found = environment(RunConfig(settings=settings, command=("train.py",), service=SERVICE))

    assert found["ANDON_METRICS_HOSTS"] == "andon.example"
    assert found["ANDON_METRICS_TOKEN_FILE"] == "/m/token"


def test_workers_share_memory_where_their_run_does_whatever_said_so() -> None:
    def told(settings: RunSettings, **base: str) -> str | None:
        config = RunConfig(settings=settings, command=("train.py",), service=SERVICE)
        return environment(config, **base).get("ANDON_SHARED_DIR")

    assert told(RunSettings()) is None
    assert told(RunSettings(shared_dir=Path("/mnt/shared"))) == "/mnt/shared"
    assert told(RunSettings(shared_dir=None)) == "off"
    assert told(RunSettings(), ANDON_SHARED_DIR="off") == "/dev/shm"


def test_slots_of_a_line_that_is_served_elsewhere_are_its_own_to_give() -> None:
    config = RunConfig(
        settings=RunSettings(join="127.0.0.1:7"), command=("train.py",), service=None
    )

    found = environment(config, RANK="9", WORLD_SIZE="10")

    assert "RANK" not in found
    assert "WORLD_SIZE" not in found
    assert found["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, ExitCode.COMPLETE), (1, ExitCode.FAILED), (2, ExitCode.FAILED), (3, ExitCode.HALTED),
     (4, ExitCode.REFUSED), (5, ExitCode.LOST), (77, ExitCode.FAILED), (-9, ExitCode.FAILED)],
)  # fmt: skip
def test_a_workers_exit_code_decides_the_runs(code: int, verdict: ExitCode) -> None:
    assert exit_code_of(code) is verdict


def test_an_end_is_told_in_words() -> None:
    assert ended_how(3) == "ended with exit code 3"
    assert ended_how(-signal.SIGKILL) == "was killed by SIGKILL"


@pytest.mark.parametrize("code", [0, 3, 4, 5, 130, -signal.SIGINT])
def test_what_ended_on_purpose_stays_ended(code: int) -> None:
    restarts = Restarts(3)

    assert restarts.spend(code, 0.0, trained=True) is None
    assert restarts.used == 0


@pytest.mark.parametrize("code", [1, 2, 139, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_what_died_comes_back_once_the_line_has_trained(code: int) -> None:
    assert Restarts(3).spend(code, 0.0, trained=True) == 0.0


def test_before_the_first_step_only_a_signal_is_an_accident() -> None:
    restarts = Restarts(3)

    assert restarts.spend(1, 0.0, trained=False) is None
    assert restarts.spend(-signal.SIGKILL, 0.0, trained=False) == 0.0


def test_the_first_restart_is_at_once_and_each_later_one_waits_twice_as_long() -> None:
    restarts = Restarts(7)

    waits = [restarts.spend(1, 0.0, trained=True) for _ in range(8)]

    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, None]
    assert restarts.used == 7


def test_a_worker_that_trained_since_its_last_restart_starts_again_at_once() -> None:
    restarts = Restarts(7)

    waits = [restarts.spend(-9, 0.0, trained=True, slot=1, recovered=each > 2) for each in range(5)]

    assert waits == [0.0, 0.5, 1.0, 0.0, 0.0]


def test_a_worker_does_not_wait_for_what_happened_to_another() -> None:
    restarts = Restarts(4)

    waits = [restarts.spend(-9, 0.0, trained=True, slot=slot) for slot in (0, 0, 1, 0, 1)]

    assert waits == [0.0, 0.5, 0.0, 1.0, None]
