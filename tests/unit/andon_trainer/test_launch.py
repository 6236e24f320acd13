"""The service that rank 0 of a launch starts: its command line, and who may be served."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it by a star

from andon.protocol.run_settings import Topology
from andon_cli.app import read_config
from andon_coordinator.config import LineOptions
from andon_coordinator.core.spikes import SpikeAction
from andon_server.serve import _TELLING_S
from andon_server.serving import GRACE_S
from andon_server.settings import ServeConfig
from andon_trainer.config import LineConfig
from andon_trainer.errors import JoinRefused
from andon_trainer.launchers import LaunchStore
from andon_trainer.process.launch import WorkerLaunch
from andon_trainer.process.launched_service import (
    Served,
    command_of,
    served_before,
    to_go_on_with,
)
from andon_trainer.process.tickets import tell_late

ONE_HOST = LaunchStore(
    host="alpha", port=29500, rank=0, world_size=4, hosted_by_agent=True, one_host=True
)
SEVERAL = replace(ONE_HOST, one_host=False)
EARLIER = Served(port=41000, run_id="7f3a", run_dir="/runs/7f3a")


def asked(config: LineConfig, launch: LaunchStore, earlier: Served | None = None) -> ServeConfig:
    """What `andon serve` reads from its command line."""
    _python, _m, _andon, *argv = command_of(config, launch, earlier)
    serve = read_config(argv, {})
    assert isinstance(serve, ServeConfig)
    return serve


def test_a_launch_on_one_host_is_served_on_loopback() -> None:
    serve = asked(LineConfig(launch=ONE_HOST), ONE_HOST)

    assert (serve.bind, serve.port, serve.workers) == ("127.0.0.1", 0, 4)
    assert serve.until_complete
    assert serve.announce


def test_a_launch_on_several_hosts_is_served_to_all_with_the_settings_of_rank_0(
    tmp_path: Path,
) -> None:
    launch = replace(SEVERAL, service_port=7070)

    encrypted = asked(LineConfig(launch=launch, tls=tmp_path), launch)
    open_to_all = asked(LineConfig(launch=launch, insecure=True), launch)
    by_ipv6 = asked(LineConfig(launch=launch, insecure=True), replace(launch, host="fd00::1"))

    assert (encrypted.bind, encrypted.port) == ("0.0.0.0", 7070)
    assert (encrypted.access.tls_dir, encrypted.access.insecure) == (tmp_path, False)
    assert (open_to_all.access.tls_dir, open_to_all.access.insecure) == (None, True)
    assert by_ipv6.bind == "[::]"


@pytest.mark.parametrize(
    "options",
    [
        LineOptions(
            schedule="local", local_steps=32, fragments=4, mix=0.5, encoding="topk", topk_kept=7
        ),
        LineOptions(
            on_spike=SpikeAction.SKIP,
            topology=Topology.RING,
            max_grad_norm=1.5,
            average_buffers=True,
        ),
        LineOptions(),
    ],
    ids=["schedule", "spikes", "defaults"],
)
def test_a_service_gets_the_options_of_the_script(options: LineOptions) -> None:
    assert asked(LineConfig(launch=ONE_HOST, line_options=options), ONE_HOST).line == options


def test_several_hosts_without_certificates_or_consent_are_refused_and_nobody_waits() -> None:
    alone = replace(SEVERAL, rank=1)
    asking = LineConfig(launch=alone, insecure=True)
    store = HashStore()

    with pytest.raises(JoinRefused, match=r"spans several hosts.*alpha.*ANDON_TLS_DIR") as refused:
        located(LineConfig(launch=alone), no_store)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(located, asking, lambda _: store)
        while not store.add("andon/1/tickets", 0):
            time.sleep(0.001)
        with pytest.raises(JoinRefused, match="spans several hosts"):
            located(LineConfig(launch=replace(SEVERAL, world_size=2)), lambda _: store)
        told = asked.exception()

    assert refused.value.reason == "insecure"
    assert isinstance(told, JoinRefused)
    assert str(told) == f"rank 0 of this launch, at alpha, serves no line: {refused.value}"


def located(config: LineConfig, store: Callable[[LaunchStore], HashStore]) -> LineConfig:
    """As the first line of a process, whose others have all asked by now."""
    return WorkerLaunch(config, store, count(1), linger_s=0).locate(config)


def no_store(_launch: LaunchStore) -> HashStore:
    raise AssertionError("this worker is refused without asking anybody")


def test_a_launch_that_starts_again_goes_on_in_the_same_run_and_folder() -> None:
    launch = replace(ONE_HOST, run_name="job")

    first = asked(LineConfig(launch=launch), launch)
    again = asked(LineConfig(launch=launch), launch, EARLIER)

    assert (first.run_id, first.folder) == ("job", Path("runs/job"))
    assert (again.run_id, again.folder, again.port) == ("7f3a", Path("/runs/7f3a"), 41000)


def test_a_run_without_a_name_and_a_checkpoint_is_not_gone_on_with(tmp_path: Path) -> None:
    left = replace(EARLIER, run_dir=str(tmp_path))
    unnamed = LineConfig(launch=ONE_HOST)

    # Workers of another host may hold its state. And who named a run wants that one.
    several = to_go_on_with(left, LineConfig(launch=SEVERAL), SEVERAL)
    named = to_go_on_with(left, unnamed, replace(ONE_HOST, run_name="job"))

    assert to_go_on_with(left, unnamed, ONE_HOST) is None
    assert several == named == left


def test_a_folder_that_a_run_has_left_says_which_run_and_port_it_was(tmp_path: Path) -> None:
    config = LineConfig(launch=ONE_HOST, run_dir=tmp_path)
    kept = Served(port=41000, run_id="7f3a", run_dir=str(tmp_path))

    fresh = served_before(config, ONE_HOST)
    (tmp_path / "service.json").write_text("{")
    torn = served_before(config, ONE_HOST)
    found = {"run_id": "7f3a", "address": "127.0.0.1:41000", "pid": 1}
    (tmp_path / "service.json").write_text(json.dumps(found))

    assert fresh is None
    assert torn is None
    assert served_before(config, ONE_HOST) == kept
    # The service compares: the journal is of another run.
    own = replace(ONE_HOST, run_name="job")
    assert served_before(config, own) == replace(kept, run_id="job")


def test_a_job_id_names_the_folder_where_an_earlier_start_left_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    (folder / "service.json").write_text(json.dumps({"run_id": "job", "address": "[::1]:41000"}))

    named = served_before(LineConfig(launch=ONE_HOST), replace(ONE_HOST, run_name="job"))

    assert named == Served(port=41000, run_id="job", run_dir=str(folder))
    assert served_before(LineConfig(launch=ONE_HOST), ONE_HOST) is None


def test_a_worker_with_an_address_or_of_no_launch_asks_nobody() -> None:
    for config in (LineConfig(), LineConfig(address="a:1", launch=SEVERAL)):
        assert WorkerLaunch(config, no_store).locate(config) == config


class _Slow:
    """A service that ends only when it is told to."""

    def __init__(self) -> None:
        self.terminated = False
        self.patience_s = 0.0

    def wait(self, timeout: float | None = None) -> int:
        if not self.terminated:
            assert timeout is not None
            self.patience_s = timeout
            raise subprocess.TimeoutExpired("andon serve", timeout)
        return 0

    def terminate(self) -> None:
        self.terminated = True


@pytest.mark.parametrize("done", [True, False])
def test_rank_0_outwaits_its_service_and_tells_the_late_that_the_run_is_over(
    done: bool,
) -> None:
    store, service = HashStore(), _Slow()
    launch = WorkerLaunch(LineConfig())
    launch._service = service  # type: ignore[assignment]  # What `end` needs of a process.
    launch._tell_late = lambda: tell_late(store, "andon/1", {"refused": "over"})

    launch.leaving(done=done)
    launch.end()

    assert service.terminated
    assert store.check(["andon/1/late"]) is done
    if done:
        closing_s = GRACE_S + 2.0  # Of the server, then of what the board's viewers read.
        assert service.patience_s > _TELLING_S + closing_s
