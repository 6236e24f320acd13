"""`docker compose up` on a host without GPUs, as its user sees it: from outside of the containers.

The tests are one story, in this order: a first run that completes, then a second one that is
scaled, shot at, halted, taken down and brought up again. Each leaves the next one a line that runs.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from containers.stack import Stack

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

DEMO_STEPS = 30
EVERY = 100
SECOND = {"ANDON_RUN_ID": "second", "ANDON_SCRIPT": "code/train.py", "ANDON_STEPS": "100000",
          "ANDON_CHECKPOINT_EVERY": str(EVERY)}  # fmt: skip


def test_up_trains_the_demo_to_its_end(stack: Stack) -> None:
    stack.up(ANDON_RUN_ID="first", ANDON_STEPS=str(DEMO_STEPS))
    stack.wait(lambda: stack.only("andon").health == "healthy", "a healthy service")
    stack.wait(stack.trainers_ended, "the trainers to end")

    assert [each.state["ExitCode"] for each in stack.containers("trainer")] == [0, 0]
    status = stack.status()
    assert (status["state"], status["step"]) == ("COMPLETE", DEMO_STEPS)
    assert stack.only("andon").health == "healthy"
    folder = stack.volume("runs") / "first"
    weights = load_file(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert {"loss.png", "sample.txt"} <= {path.name for path in folder.iterdir()}


def test_up_on_a_complete_run_says_so_in_one_line_and_ends(stack: Stack) -> None:
    before = {each.state["StartedAt"] for each in stack.containers("trainer")}
    stack.up()
    stack.wait(
        lambda: all(
            not each.running and each.state["StartedAt"] not in before
            for each in stack.containers("trainer")
        ),
        "the trainers to end again",
    )

    for trainer in stack.containers("trainer"):
        assert (trainer.state["ExitCode"], trainer.restarts) == (0, 0)
        said = stack.log(trainer, since=trainer.state["StartedAt"])
        assert len(said) == 1, said
        assert f"run first is over after step {DEMO_STEPS}" in said[0]


def test_prometheus_asks_the_service_and_every_worker(stack: Stack) -> None:
    stack.up(**SECOND)
    stack.wait(lambda: stack.metric("andon_workers", state="participating") == 2, "two workers")

    up = [("", "up", ""), ("0", "up", ""), ("1", "up", "")]
    stack.wait(lambda: stack.targets() == up, lambda: f"targets {up}, not {stack.targets()}")
    stack.wait(
        lambda: [value for _, value in stack.prometheus('andon_step{run="second"}') if value > 0],
        "the line's step in Prometheus",
    )


def test_gradients_of_all_containers_go_through_shared_memory(stack: Stack) -> None:
    _await_shared_memory(stack, workers=2)


def test_scale_grows_a_line_that_runs(stack: Stack) -> None:
    before = stack.wait_for_steps(1)
    stack.up("--no-recreate", "--scale", "trainer=4")
    stack.wait(lambda: stack.metric("andon_workers", state="participating") == 4, "four workers")

    assert stack.wait_for_steps() > before
    assert [each.restarts for each in stack.containers("trainer")] == [0, 0, 0, 0]
    assert stack.only("andon").restarts == 0
    _await_shared_memory(stack, workers=4)


def test_a_trainer_that_is_killed_comes_back(stack: Stack) -> None:
    before, joins = stack.step(), stack.metric("andon_joins_total")
    first, victim, *others = stack.containers("trainer")
    stack.kill(victim)
    # The number of workers alone could still be that of before: it is updated twice a second.
    stack.wait(
        lambda: (
            stack.metric("andon_joins_total") > joins
            and stack.metric("andon_workers", state="participating") == 4
        ),
        "all four again",
    )

    assert stack.wait_for_steps() > before
    restarts = [each.restarts for each in (first, victim, *others)]
    restarts[1] += 1
    assert [each.restarts for each in stack.containers("trainer")] == restarts


def test_a_service_that_is_killed_goes_on_and_shares_memory_again(stack: Stack) -> None:
    before = stack.step()
    restarts = [each.restarts for each in stack.containers("trainer")]
    stack.kill(stack.only("andon"))
    stack.wait(lambda: stack.metric("andon_workers", state="participating") == 4, "all four again")

    assert stack.wait_for_steps() > before
    assert [each.restarts for each in stack.containers("trainer")] == restarts
    _await_shared_memory(stack, workers=4)


def test_a_person_halts_and_resumes_the_line_from_within(stack: Stack) -> None:
    stack.exec("andon", "andon", "halt", "--reason", "a look at the data")
    stack.wait(lambda: stack.state("halted"), "a halt")
    halted = stack.step()
    assert "a look at the data" in stack.status()["halt"]["message"]
    stack.exec("andon", "andon", "resume")

    assert stack.wait_for_steps() > halted
    assert stack.metric("andon_jidoka_halts_total", reason="operator") == 1


def test_a_planted_nan_halts_the_line_until_it_is_answered(stack: Stack) -> None:
    bad = stack.volume("runs") / "second" / "bad"
    bad.touch()
    stack.wait(lambda: stack.state("halted"), "a halt")
    halted = stack.step()
    stack.wait(
        lambda: [
            labels["reason"]
            for labels, value in stack.prometheus('andon_halted{run="second"} == 1')
            if labels["reason"].startswith("non_finite")
        ],
        "the halt in Prometheus",
    )

    # A halted line is healthy, and its workers wait.
    assert stack.only("andon").health == "healthy"
    assert all(each.running for each in stack.containers("trainer"))
    assert stack.step() == halted
    bad.unlink()
    stack.exec("andon", "andon", "resume")
    assert stack.wait_for_steps() > halted


def test_down_and_up_goes_on_where_the_run_was(stack: Stack) -> None:
    # Not at a checkpoint, nor so near to the next one that the line is likely there when it stops.
    stack.wait(lambda: stack.step() > EVERY and 20 <= stack.step() % EVERY <= 50, "a step between")
    before = stack.step()
    stack.down()
    stack.up()
    stack.wait(lambda: stack.metric("andon_workers", state="participating") == 2, "two workers")

    assert stack.wait_for_steps() > before
    run = json.loads(stack.exec("andon", "andon", "show", "second", "--format", "json"))
    # The trainers go before the service, and the last one writes a checkpoint.
    assert not [event for event in run["events"] if event["kind"] == "went_back"]
    steps = {
        kind: [event["step"] for event in run["events"] if event["kind"] == kind]
        for kind in ("left", "checkpoint")
    }
    assert before <= steps["left"][-1] in steps["checkpoint"], steps
    # A halt would have asked a person; those of the tests before were answered.
    assert all(halt["answer"] for halt in run["halts"])


def _await_shared_memory(stack: Stack, workers: int) -> None:
    """Waits until the last exchange of every worker went through shared memory, and only so."""

    def paths() -> list[str]:
        found = stack.prometheus('andon_exchange_path{run="second"} == 1')
        return [labels["path"] for labels, _ in found]

    expected = ["shared-memory"] * workers
    stack.wait(lambda: paths() == expected, lambda: f"paths {expected}, not {paths()}")
