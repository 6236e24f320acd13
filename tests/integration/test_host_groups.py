"""Hosts with several processes: DistributedDataParallel inside, the line between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.harness import Service, Worker, start_host, start_worker, wait_until

pytestmark = pytest.mark.integration

# 43 samples in batches of 10: the last batch of an epoch has 3 samples for 4 processes.
SPEC: dict[str, Any] = {"steps": 20, "samples": 43, "batch": 10, "micro": 2, "clip": 0.5}


def start_waiting(folder: Path, service: Service, spec: dict[str, Any], name: str) -> list[Worker]:
    """A host of two processes, which wait if the line halts."""
    return start_host(folder / name, service, spec, ANDON_ON_HALT="wait")


def test_f_dp_005_f_dp_006_hosts_of_several_processes_match_one_though_a_process_is_killed(
    tmp_path: Path,
) -> None:
    """Before a process is killed, one of the other host finds a NaN in its first micro-batch.

    There the model waits for the other process in forward and backward, as SyncBatchNorm does.
    """
    until = tmp_path / "beta" / "killed"
    pauses = [{"slot": 1, "step": 7, "until": str(until)}]
    again = tmp_path / "joined"
    of_alpha = {
        "synced": True,
        "pauses": [{"slot": 0, "step": 12, "until": str(again)}],
        "bad_loss": {"slot": 1, "step": 3},
    }
    with Service(tmp_path / "run", 2) as service:
        alpha = start_waiting(tmp_path, service, {**SPEC, **of_alpha}, "alpha")
        beta = start_waiting(tmp_path, service, {**SPEC, "pauses": pauses}, "beta")
        started = [*alpha, *beta]

        def paused() -> bool:
            assert all(each.process.poll() is None for each in started), beta[1].output
            return until.with_suffix(".here").exists()

        try:
            halt = service.await_halt()
            service.clear_halt(halt.id)
            wait_until(paused)
            beta[1].kill()  # in the middle of a step, while its leader waits for it
            codes = [beta[0].wait(), beta[1].process.wait()]
            service.await_status(lambda line: line.live == 1 and line.step >= 8)
            restarted = start_waiting(tmp_path, service, SPEC, "beta again")
            started += restarted
            service.await_status(lambda line: line.live == 2)
            again.touch()
            ends = [each.wait() for each in (*alpha, *restarted)]
        finally:
            for each in started:
                each.kill()
    (tmp_path / "plain").mkdir()
    plain = start_worker(tmp_path / "plain", {**SPEC, "plain": True})
    assert plain.wait() == 0, plain.output

    assert (halt.step, halt.value) == (3, "nan")
    assert "loss is nan" in halt.message
    assert codes == [1, -9], beta[0].output
    assert "the host leaves the line as a whole" in beta[0].output
    assert ends == [0, 0, 0, 0], restarted[0].output
    assert len({each.seen["digest"] for each in (*alpha, *restarted)}) == 1
    assert {each["step"] for each in (alpha[0].seen, restarted[1].seen)} == {20}
    assert alpha[0].seen["losses"] == pytest.approx(plain.seen["losses"], rel=1e-5)
    mine, theirs = (load_file(each.out.with_suffix(".safetensors")) for each in (alpha[0], plain))
    for name, value in theirs.items():
        error = (mine[name].double() - value.double()).norm() / value.double().norm()
        assert float(error) <= 1e-6, name
    assert torch.equal(mine["unused"], torch.ones(3)), "nobody used it, so no decay, no momentum"
