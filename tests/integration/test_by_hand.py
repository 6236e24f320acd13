"""A GAN on real processes: two models and two optimizers, with manual steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from integration.harness import (
    Service,
    Worker,
    finish,
    on_line,
    start_line,
    start_worker,
    train,
    train_alone,
)

pytestmark = pytest.mark.integration

SCRIPT = "gan.py"
SPEC: dict[str, Any] = {"steps": 12}


def started(
    folder: Path, workers: int = 2, *flags: str, **spec: Any
) -> AbstractContextManager[tuple[Service, list[Worker]]]:
    """A line of this script."""
    return start_line(folder, {**SPEC, **spec}, workers, *flags, script=SCRIPT)


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    tensors = load_file(worker.out.with_suffix(".safetensors"))
    return {name: tensor for name, tensor in tensors.items() if "layers" in name or name[0] == "0"}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The weights' digest after each step of an undisturbed run of two workers."""
    one, other = train(tmp_path_factory.mktemp("clean"), SPEC, 2, script=SCRIPT)
    assert one["digests"] == other["digests"]
    return list(one["digests"])


def test_a_gan_on_two_workers_is_the_gan_of_one_process(tmp_path: Path) -> None:
    plain = train_alone(tmp_path / "plain", {**SPEC, "plain": True}, SCRIPT)

    with started(tmp_path / "line", drift=True) as (_, workers):
        seen = finish(workers)

    assert len({each["digest"] for each in seen}) == 1
    assert len({each["buffers"] for each in seen}) == 1
    assert "nan" in seen[0]["buffers"]
    assert [each["step"] for each in seen] == [12, 12]
    assert [each["told"] for each in seen] == [[[0, step] for step in range(1, 13)]] * 2
    for name, expected in weights(plain).items():
        error = (weights(workers[0])[name] - expected).norm() / expected.norm()
        assert error <= 1e-5, name
    with JournalReader(tmp_path / "line" / "run" / "journal.sqlite") as journal:
        assert journal.steps() == 12
        assert journal.ledger_faults() == []


def test_the_same_script_alone_computes_the_same_bits_as_pytorch_alone(tmp_path: Path) -> None:
    plain = train_alone(tmp_path / "plain", {**SPEC, "plain": True}, SCRIPT).seen

    solo = train_alone(tmp_path / "solo", SPEC, SCRIPT).seen

    assert solo["digest"] == plain["digest"]
    assert (solo["step"], solo["stopped"]) == (12, "steps")


def test_f_dp_003_a_nan_in_the_second_model_is_told_to_all_and_the_step_is_computed_again(
    tmp_path: Path, digests: list[str]
) -> None:
    poison = {"slot": 1, "step": 5}
    with started(tmp_path, poison=poison, survive=True) as (service, workers):
        service.clear_halt(service.await_halt().id)
        seen = finish(workers)

    for each in seen:
        ((reason, who, step, parameter, text),) = each["halts"]
        assert (reason, who, step) == ("non_finite_gradient", 1, 5)
        assert parameter == "1.layers.0.weight"
        assert "worker 1 sent nan in 1.layers.0.weight[2, 1] (block " in text
        assert " says " not in text, "the service's own reducer saw it"
        assert each["digests"] == digests


def test_f_dp_006_a_worker_that_is_killed_and_comes_back_costs_one_attempt(
    tmp_path: Path, digests: list[str]
) -> None:
    lingers = tmp_path / "lingers"

    where = {"linger": [1, 6], "lingers": str(lingers)}
    with started(tmp_path, 2, "--min-workers", "2", **where) as (service, workers):
        survivor, killed = workers
        killed.await_true(lingers.exists)
        killed.kill()
        again = start_worker(tmp_path, SPEC, slot=1, script=SCRIPT, **on_line(service, 1, 2))
        workers.append(again)
        finish([survivor, again])

    assert survivor.seen["again"] == [[6, 6, 2]]
    assert again.seen["joined_at"] == 5
    assert again.seen["committed"] == [[step, 1, 2] for step in range(6, 13)]
    assert survivor.seen["digest"] == again.seen["digest"] == digests[-1]


def test_the_line_goes_on_with_fewer_workers_and_they_are_told(tmp_path: Path) -> None:
    spec = {"poison": {"slot": 1, "step": 6}, "survive": True}

    with started(tmp_path, 3, **spec) as (service, workers):
        service.clear_halt(service.await_halt().id, pb.HALT_ANSWER_DROP, worker=1)
        codes = [worker.wait() for worker in workers]

    first, _dropped, last = workers
    assert codes == [0, 5, 0], first.output + last.output
    # After the halt they still computed their shares of three.
    assert first.seen["again"] == last.seen["again"] == [[6, 6, 2]]
    assert last.seen["committed"] == [
        *([step, 2, 3] for step in range(1, 6)),
        *([step, 1, 2] for step in range(6, 13)),
    ]
    assert first.seen["digest"] == last.seen["digest"]


def test_workers_without_a_given_number_learn_it_at_the_first_step(
    tmp_path: Path,
) -> None:

    with Service(tmp_path / "run", 2) as service:
        where = {"ANDON_ADDRESS": service.address, "ANDON_RUN_ID": service.run_id}
        workers = [
            start_worker(tmp_path, SPEC, slot=slot, script=SCRIPT, **where) for slot in range(2)
        ]
        seen = finish(workers)

    for each in seen:
        assert each["again"] == [[1, 1, 2]]
        assert len(each["committed"]) == 12
    assert seen[0]["digest"] == seen[1]["digest"]
    assert sorted(each["committed"][0] for each in seen) == [[1, 0, 2], [1, 1, 2]]


def test_calls_that_do_not_pair_stop_the_line_and_say_what_was_called(tmp_path: Path) -> None:
    spec = {**SPEC, "mispair": [1, 3]}

    for seen in train(tmp_path, spec, 2, script=SCRIPT, expect_exit=3):
        ((reason, _who, step, _parameter, text),) = seen["halts"]
        assert (reason, step) == ("protocol_violation", 3)
        assert "rank 1 called barrier as call 5 of the step" in text


def test_stop_busy_mean_and_split_go_with_steps_by_hand(tmp_path: Path) -> None:
    upload = tmp_path / "upload"

    with started(tmp_path, stop_at=[1, 3], upload=str(upload)) as (service, workers):
        service.await_status(lambda line: [each.detail for each in line.workers] == ["upload"] * 2)
        upload.touch()
        seen = finish(workers)

    assert [(each["step"], each["stopped"]) for each in seen] == [(4, "enough")] * 2
    assert [each["mean"] for each in seen] == [(1 * 1 + 2 * 2) / 3] * 2
    assert seen[0]["split"] + seen[1]["split"] == list(range(7))
