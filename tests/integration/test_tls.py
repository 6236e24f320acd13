"""A line over TLS: it trains, strangers learn why they are refused, and certificates change."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from andon.host.tls import open_channel
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_trainer import JoinRefused
from integration.fixtures.console import andon, finish, start
from integration.harness import Service, Worker, on_line, start_worker
from integration.newcomer import refusal_of
from unit.andon.certificates import certify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAUSED, STEPS = 100, 130
"""The line waits for the last stranger before step `PAUSED`; for the test, before the last step."""
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": STEPS}
HOST = "127.0.0.1"
_PATIENCE_S = 60


class Line:
    """A line over mTLS with two workers that train."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.ca = folder, folder / "ca"
        self.certs = certify(self.ca, folder / "host", HOST)
        self.on, self.go = folder / "on", folder / "go"
        where = ("--tls", str(self.certs), "--max-workers", "3", "--min-workers", "2")
        self.service = Service(folder / "run", 2, *where, *flags)
        pauses = ((PAUSED, self.on), (STEPS, self.go))
        self.spec = {
            **SPEC,
            "pauses": [{"slot": 0, "step": step, "until": str(file)} for step, file in pauses],
        }
        self.workers = [self.worker(slot, self.certs) for slot in range(2)]
        self.await_status(lambda line: line.step >= 1)

    def worker(self, slot: int, certs: Path | None, name: str = "", **more: str) -> Worker:
        """A training script; if `certs` is None, it uses plaintext."""
        folder = self.folder / (name or f"worker-{slot}")
        folder.mkdir()
        tls = {} if certs is None else {"ANDON_TLS_DIR": str(certs)}
        variables = {**on_line(self.service, slot, 2), **tls, **more}
        return start_worker(folder, self.spec, slot=slot, **variables)

    def status(self) -> pb.LineStatus:
        with open_channel(self.service.address, (), self.certs) as channel:
            return CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10).status

    def await_status(self, reached: Callable[[pb.LineStatus], bool]) -> None:
        with open_channel(self.service.address, (), self.certs) as channel:
            watch = CoordinatorStub(channel).WatchStatus(
                pb.WatchStatusRequest(), timeout=_PATIENCE_S
            )
            assert any(reached(update.status) for update in watch)
            watch.cancel()

    def undisturbed(self, before: int) -> None:
        """Waits for a step after `before`, or until both workers wait for the test."""
        self.await_status(lambda status: status.step > before or status.step == PAUSED - 1)
        after = self.status()
        assert (after.state, after.live, after.participating) == (pb.LINE_STATE_RUNNING, 2, 2)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.service.metrics_url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def finish(self, *others: Worker) -> None:
        """Lets the run end; checks that all workers exit successfully with the same weights."""
        self.go.touch()
        workers = [*self.workers, *others]
        for worker in workers:
            assert worker.wait() == 0, worker.output
        assert len({worker.seen["digest"] for worker in workers}) == 1
        assert {worker.seen["step"] for worker in workers} == {STEPS}

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.service.stop()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    line = Line(tmp_path_factory.mktemp("tls"))
    try:
        yield line
    finally:
        line.close()


def refused(line: Line, certs: Path | None, **more: str) -> JoinRefused:
    """The error of a worker that asks for the third slot; also checks that the others continue."""
    before = line.status().step
    tls = {} if certs is None else {"ANDON_TLS_DIR": str(certs)}
    refusal = refusal_of(line.spec, 2, {**on_line(line.service, 2, 2), **tls, **more})
    line.undisturbed(before)
    return refusal


def test_a_worker_of_another_ca_is_told_whose_ca_does_not_fit(line: Line) -> None:
    other = certify(line.folder / "other-ca", line.folder / "other", HOST)

    stranger = refused(line, other)

    assert stranger.reason == "tls"
    assert "does not trust the certificate of what listens at" in str(stranger)
    assert "ca.crt is not of the CA that signed it; copy the line's ca.crt here" in str(stranger)


def test_a_worker_that_trusts_the_line_and_is_not_trusted_is_told_so(line: Line) -> None:
    other = certify(line.folder / "third-ca", line.folder / "third", HOST)
    shutil.copy(line.certs / "ca.crt", other / "ca.crt")

    stranger = refused(line, other)

    assert stranger.reason == "tls"
    assert "tls.crt is not signed by ca.crt beside it" in str(stranger)


def test_a_worker_with_an_expired_certificate_is_told_to_renew_it(line: Line) -> None:
    late = certify(line.ca, line.folder / "late", HOST, expired=True)

    before = line.status().step
    worker = line.worker(2, late, "expired")
    code = worker.wait()
    line.undisturbed(before)

    assert (code, worker.seen["reason"]) == (4, "tls")
    assert "tls.crt has expired: make it anew with `andon certs --renew`" in worker.output


def test_a_worker_without_a_certificate_is_told_that_one_is_asked_for(line: Line) -> None:
    bare = line.folder / "bare"
    bare.mkdir()
    shutil.copy(line.certs / "ca.crt", bare)

    stranger = refused(line, bare)

    assert stranger.reason == "tls"
    assert "asks for a certificate, and" in str(stranger)
    assert "holds no tls.crt" in str(stranger)


def test_a_worker_in_the_clear_is_told_that_the_line_speaks_tls(line: Line) -> None:
    stranger = refused(line, None)

    assert stranger.reason == "tls"
    assert "speaks TLS, and this process does not" in str(stranger)
    assert "ANDON_TLS_DIR" in str(stranger)


def test_a_worker_whose_key_is_another_ones_is_told_before_it_sends_anything(line: Line) -> None:
    mixed = certify(line.ca, line.folder / "mixed", HOST)
    shutil.copy(line.certs / "tls.key", mixed)

    stranger = refused(line, mixed)

    assert stranger.reason == "tls"
    assert "tls.key is not the key of" in str(stranger)


def test_a_worker_of_a_line_elsewhere_sends_nothing_in_the_clear(line: Line) -> None:
    stranger = refused(line, None, ANDON_ADDRESS="andon.invalid:7070")

    assert stranger.reason == "insecure"
    assert "ANDON_TLS_DIR" in str(stranger)
    assert "ANDON_INSECURE=1" in str(stranger)


def test_strangers_who_shake_hands_at_once_crash_nothing(line: Line) -> None:
    context = ssl.create_default_context(cafile=line.certs / "ca.crt")
    context.set_alpn_protocols(["h2"])
    where = (HOST, int(line.service.address.rpartition(":")[2]))
    before = line.status().step

    def shake_hands(_: int) -> None:
        # They show no certificate: TLS 1.3 tells a client so only after its handshake.
        with socket.create_connection(where) as raw, context.wrap_socket(raw, server_hostname=HOST):
            pass

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(shake_hands, range(400)))

    line.undisturbed(before)


def test_the_console_says_what_is_wrong_and_asks_with_certificates(line: Line) -> None:
    where = ("--address", line.service.address)
    good = andon(line.folder, "status", *where, "--tls", str(line.certs), "--format", "json")
    plain = andon(line.folder, "status", *where)
    health = andon(line.folder, "health", *where, ANDON_TLS_DIR=str(line.certs))
    unhealthy = andon(line.folder, "health", *where)
    doctor = andon(line.folder, "doctor", *where, "--tls", str(line.certs))

    assert json.loads(good[1])["state"] == "RUNNING"
    assert plain[0] == 5
    assert "speaks TLS, and this process does not" in plain[2]
    assert (health[0], health[1].split()[0]) == (0, "SERVING")
    assert unhealthy[0] == 1
    assert "speaks TLS" in unhealthy[1]
    assert f"{line.certs} holds a certificate and its CA" in doctor[1]
    assert "is SERVING" in doctor[1]
    assert "fail" not in doctor[1]


def test_certificates_change_while_the_line_runs(line: Line) -> None:
    begun = line.metric("andon_tls_handshakes_total")
    old = shutil.copytree(line.certs, line.folder / "old")
    certify(line.folder / "new-ca", line.certs, HOST)  # in place: the service's and the workers'

    late = line.worker(2, old, "left-behind")
    code = late.wait()
    newcomer = line.worker(2, line.certs, "newcomer")
    line.await_status(lambda status: status.live == 3)
    line.on.touch()
    line.await_status(lambda status: status.participating == 3)

    assert code == 4
    assert "does not trust the certificate" in late.output
    assert line.metric("andon_tls_handshakes_total") > begun
    line.finish(newcomer)


def test_a_certificate_for_another_host_is_refused_by_the_worker(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    # 127.0.0.2 is also this host, but no certificate of `andon certs alpha` contains it.
    flags = ("--tls", str(certs), "--bind", "127.0.0.2")
    with Service(tmp_path / "run", 1, *flags) as service:
        environment = {**on_line(service, 0, 1), "ANDON_TLS_DIR": str(certs)}
        refusal = refusal_of(SPEC, 0, environment)

    assert refusal.reason == "tls"
    assert "is not for 127.0.0.2: make one that names it" in str(refusal)


def test_a_worker_with_certificates_is_told_that_the_line_has_none(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    with Service(tmp_path / "run", 1) as service:
        environment = {**on_line(service, 0, 1), "ANDON_TLS_DIR": str(certs)}
        refusal = refusal_of(SPEC, 0, environment)

    assert refusal.reason == "tls"
    assert "does not speak TLS, and this process does: start it with --tls" in str(refusal)


def test_a_worker_waits_for_a_line_over_tls_that_is_not_up_yet(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    with Service(tmp_path / "first", 1, "--tls", str(certs)) as service:
        port = int(service.address.rpartition(":")[2])
    spec = {**SPEC, "steps": 3}
    worker = start_worker(
        tmp_path,
        spec,
        ANDON_TLS_DIR=str(certs),
        ANDON_ADDRESS=service.address,
        ANDON_RUN_ID="late",
        RANK="0",
    )
    worker.await_output("waiting for a coordinator")

    with Service(tmp_path / "run", 1, "--tls", str(certs), "--run-id", "late", port=port):
        assert worker.wait() == 0, worker.output


def test_a_ring_runs_over_mtls(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    spec = {**SPEC, "steps": 6}
    with Service(tmp_path / "run", 2, "--tls", str(certs), "--topology", "ring") as service:
        workers = [
            start_worker(
                tmp_path, spec, slot=slot, ANDON_TLS_DIR=str(certs), **on_line(service, slot, 2)
            )
            for slot in range(2)
        ]
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0], [worker.output for worker in workers]
    assert len({worker.seen["digest"] for worker in workers}) == 1


def test_reducers_elsewhere_average_over_mtls_and_a_stranger_among_them_is_told(
    tmp_path: Path,
) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    other = certify(tmp_path / "other-ca", tmp_path / "other", "alpha")
    secret = tmp_path / "secret"
    secret.write_text("the secret of these tests")
    spec = {**SPEC, "steps": 4}
    flags = ("--tls", str(certs), "--secret-file", str(secret), "--reducers", "2")
    with Service(tmp_path / "run", 1, *flags) as service:
        reducer = (
            *("serve", "--role", "reducer", "--coordinator", service.address, "--port", "0"),
            *("--metrics-port", "0", "--secret-file", str(secret), "--until-complete"),
        )
        stranger = andon(tmp_path, *reducer, "--tls", str(other))
        averaging = start(tmp_path, *reducer, "--tls", str(certs))
        worker = start_worker(
            tmp_path,
            spec,
            slot=0,
            ANDON_TLS_DIR=str(certs),
            ANDON_SHARED_DIR="off",
            **on_line(service, 0, 1),
        )
        code = worker.wait()
        ended = finish(averaging)

    assert stranger[0] == 4
    assert "does not trust the certificate of what listens at" in stranger[2]
    assert (code, ended[0]) == (0, 0), (worker.output, ended)
