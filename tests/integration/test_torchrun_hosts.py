"""torchrun on two hosts, which are network namespaces, with its own rendezvous.

A host's ranks are forked from its torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from andon.host.manifest import checkpoints_in, step_of
from integration.harness import SCRIPTS, clean_environment, start_worker

pytestmark = [pytest.mark.integration, pytest.mark.netns]

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 120}
PATIENCE_S = 60
MEETING = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
KEEPS = {
    "ANDON_INSECURE": "1",
    "ANDON_CHECKPOINT_EVERY": "5",
    # Otherwise torchrun waits for ever: the agent that stays publishes its store in the first
    # round only.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
WARM_TORCHRUN = Path(__file__).with_name("fixtures") / "warm_torchrun.py"
_numbers = count()


class Host:
    """A network namespace that has one link, to the other host."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self.folder = folder
        self.name = name
        self.address = address
        self._started: list[subprocess.Popen[bytes]] = []
        folder.mkdir()

    def torchrun(self, spec: dict[str, Any], *flags: str, **more: str) -> subprocess.Popen[bytes]:
        """Starts torchrun in this host's folder; its output goes to a file there."""
        (self.folder / "spec.json").write_text(json.dumps({**spec, "slot": 0}))
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, str(WARM_TORCHRUN)),
            *("--local-addr", self.address, *flags),
            *(str(SCRIPTS / "train.py"), "spec.json", "out.json"),
        ]
        with (self.folder / f"{len(self._started)}.log").open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=clean_environment(PYTHONPATH=":".join(filter(None, sys.path)), **more),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    @property
    def output(self) -> str:
        return "".join(each.read_text() for each in sorted(self.folder.glob("*.log")))

    def lose_power(self) -> None:
        """Kills all of its processes."""
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        for process in self._started:
            process.wait(PATIENCE_S)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them; skips the test if this process can't make any."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    number = (os.getpid() + next(_numbers)) % 250
    hosts = [
        Host(folder / name, f"andon-tr{number}-{name}", f"10.215.{number}.{last}")
        for last, name in enumerate(("alpha", "beta"), 1)
    ]
    made: list[Host] = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system allows no network namespaces: {error.stderr.strip()}")
        one, other = (host.name for host in hosts)
        _ip(
            "-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other
        )
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", link, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in made:
            host.lose_power()
            _ip("netns", "delete", host.name)


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def wait_for(what: str, reached: Callable[[], object], hosts: Sequence[Host]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        said = "\n".join(f"== {each.name}\n{each.output}" for each in hosts)
        assert time.monotonic() < deadline, f"waited for {what}\n{said}"
        time.sleep(0.05)


def newest(run: Path) -> int:
    """The step of the run's newest checkpoint; 0 if it has none."""
    return max(map(step_of, checkpoints_in(run)), default=0)


def test_a_host_that_is_killed_comes_back_and_both_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    run, spec = tmp_path / "run", {**SPEC, "slow": {"step": 10, "until": str(tmp_path / "back")}}
    plain = start_worker(tmp_path, {**SPEC, "plain": True})
    with two_hosts(tmp_path) as hosts:
        alpha, beta = hosts
        meeting = [*MEETING, "--rdzv-endpoint", f"{alpha.address}:29400", "--rdzv-id", "job"]
        # torchrun tells its own host by its name, and these two have one. The rest: how soon a
        # host that is gone is noticed.
        soon = "keep_alive_interval=1,keep_alive_max_attempt=3"
        of_alpha, of_beta = ([*meeting, "--rdzv-conf", f"{soon},is_host={n}"] for n in (1, 0))
        keeps = {**KEEPS, "ANDON_RUN_DIR": str(run)}
        first = alpha.torchrun(spec, *of_alpha, **keeps)
        beta.torchrun(spec, *of_beta, **keeps)
        wait_for("both to train", lambda: newest(run) >= 10, hosts)

        beta.lose_power()
        left_at, service = newest(run), (run / "service.json").read_text()
        wait_for("alpha to go on alone", lambda: newest(run) > left_at + 5, hosts)
        back = beta.torchrun(spec, *of_beta, **keeps)
        wait_for("a new start", lambda: (run / "service.json").read_text() != service, hosts)
        (tmp_path / "back").touch()
        wait_for("the end", lambda: None not in (first.poll(), back.poll()), hosts)

        assert (first.returncode, back.returncode) == (0, 0), alpha.output + beta.output
    seen = [json.loads((each.folder / "out.json").read_text()) for each in hosts]
    assert [each["step"] for each in seen] == [SPEC["steps"]] * 2
    assert seen[0]["digest"] == seen[1]["digest"]
    (began,) = {each["indices"][0][0] - 1 for each in seen}
    # From a checkpoint that alpha has written alone: a due one, or that of its last step.
    assert began > left_at
    assert plain.wait() == 0, plain.output
    # Not the same bits: the shares changed, and so the order of the sums.
    expected, trained = (
        load_file(each)
        for each in (tmp_path / "out-0.safetensors", alpha.folder / "out.safetensors")
    )
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-3)
