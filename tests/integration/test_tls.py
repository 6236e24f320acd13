"""A line over TLS: it trains, strangers learn why they are refused, and certificates change."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_trainer import JoinRefused
from integration.fixtures.console import andon, fork
from integration.fixtures.console import finish as end_of
from integration.harness import Service, Worker, await_exit, finish, on_line, start_worker, train
from integration.newcomer import refusal_of
from unit.andon.certificates import certify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAUSED, STEPS = 100, 130
"""The line waits for the last stranger before step `PAUSED`; for the test, before the last step."""
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": STEPS}
HOST = "127.0.0.1"


class Line:
    """A line over mTLS with two workers that train."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ca = folder, folder / "ca"
        self.certs = certify(self.ca, folder / "host", HOST)
        self.on, self.go = folder / "on", folder / "go"
        flags = ("--max-workers", "3", "--min-workers", "2")
        self.service = Service(folder / "run", 2, *flags, certs=self.certs)
        pauses = ((PAUSED, self.on), (STEPS, self.go))
        self.spec = {
            **SPEC,
            "pauses": [{"slot": 0, "step": step, "until": str(file)} for step, file in pauses],
        }
        self.workers = [self.worker(slot, self.certs, f"worker-{slot}") for slot in range(2)]
        self.service.await_status(lambda line: line.step >= 1)

    def worker(self, slot: int, certs: Path, name: str) -> Worker:
        """A training script."""
        folder = self.folder / name
        folder.mkdir()
        variables = {**on_line(self.service, slot, 2), "ANDON_TLS_DIR": str(certs)}
        # The last steps take a while, until the newcomer, which is not slow, is on a roster.
        slow = {} if slot == 2 else {"slow": {"step": PAUSED, "until": str(self.go)}}
        return start_worker(folder, {**self.spec, **slow}, slot=slot, **variables)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Then waits for a step more, or until both workers wait for the test."""
        before = self.service.status().step
        yield
        self.service.await_status(lambda line: line.step > before or line.step == PAUSED - 1)
        after = self.service.status()
        assert (after.state, after.live, after.participating) == (pb.LINE_STATE_RUNNING, 2, 2)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.service.stop()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with closing(Line(tmp_path_factory.mktemp("tls"))) as line:
        yield line


def refused(line: Line, certs: Path | None, **more: str) -> JoinRefused:
    """The error of a worker that asks for the third slot; also checks that the others continue."""
    tls = {} if certs is None else {"ANDON_TLS_DIR": str(certs)}
    with line.undisturbed():
        return refusal_of(line.spec, 2, {**on_line(line.service, 2, 2), **tls, **more})


def having(file: Path, folder: Path) -> Path:
    """A folder of certificates with another line's file in place of its own."""
    folder.mkdir(exist_ok=True)
    shutil.copy(file, folder)
    return folder


STRANGERS: dict[str, tuple[Callable[[Line], Path | None], tuple[str, ...]]] = {
    "of another CA": (
        lambda line: certify(line.folder / "other-ca", line.folder / "other", HOST),
        (
            "does not trust the certificate of what listens at",
            "ca.crt is not of the CA that signed it; copy the line's ca.crt here",
        ),
    ),
    "trusts the line and is not trusted": (
        lambda line: having(
            line.certs / "ca.crt",
            certify(line.folder / "third-ca", line.folder / "third", HOST),
        ),
        ("tls.crt is not signed by ca.crt beside it",),
    ),
    "without a certificate": (
        lambda line: having(line.certs / "ca.crt", line.folder / "bare"),
        ("asks for a certificate, and", "holds no tls.crt"),
    ),
    "with another one's key": (
        lambda line: having(line.certs / "tls.key", certify(line.ca, line.folder / "mixed", HOST)),
        ("tls.key is not the key of",),
    ),
    "in the clear": (
        lambda _: None,
        ("speaks TLS, and this process does not", "ANDON_TLS_DIR"),
    ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_told_what_is_wrong_and_the_others_train_on(
    line: Line, stranger: str
) -> None:
    make, told = STRANGERS[stranger]

    refusal = refused(line, make(line))

    assert refusal.reason == "tls"
    for part in told:
        assert part in str(refusal)


def test_a_worker_with_an_expired_certificate_is_told_to_renew_it(line: Line) -> None:
    late = certify(line.ca, line.folder / "late", HOST, expired=True)

    with line.undisturbed():
        worker = line.worker(2, late, "expired")
        await_exit([worker], 4)

    assert worker.seen["reason"] == "tls"
    assert "tls.crt has expired: make it anew with `andon certs --renew`" in worker.output


def test_a_worker_of_a_line_elsewhere_sends_nothing_in_the_clear(line: Line) -> None:
    stranger = refused(line, None, ANDON_ADDRESS="andon.invalid:7070")

    assert stranger.reason == "insecure"
    assert "ANDON_TLS_DIR" in str(stranger)
    assert "ANDON_INSECURE=1" in str(stranger)


def test_strangers_who_shake_hands_at_once_crash_nothing(line: Line) -> None:
    context = ssl.create_default_context(cafile=line.certs / "ca.crt")
    context.set_alpn_protocols(["h2"])
    where = (HOST, int(line.service.address.rpartition(":")[2]))

    def shake_hands(_: int) -> None:
        # They show no certificate: TLS 1.3 tells a client so only after its handshake.
        with socket.create_connection(where) as raw, context.wrap_socket(raw, server_hostname=HOST):
            pass

    with line.undisturbed(), ThreadPoolExecutor(8) as threads:
        list(threads.map(shake_hands, range(400)))


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
    begun = line.service.metric("andon_tls_handshakes_total")
    old = shutil.copytree(line.certs, line.folder / "old")
    certify(line.folder / "new-ca", line.certs, HOST)  # in place: the service's and the workers'

    late = line.worker(2, old, "left-behind")
    await_exit([late], 4)
    newcomer = line.worker(2, line.certs, "newcomer")
    line.service.await_status(lambda status: status.live == 3)
    line.on.touch()
    line.service.await_status(lambda status: status.participating == 3)
    line.go.touch()
    seen = finish([*line.workers, newcomer])

    assert "does not trust the certificate" in late.output
    assert line.service.metric("andon_tls_handshakes_total") > begun
    assert len({each["digest"] for each in seen}) == 1
    assert {each["step"] for each in seen} == {STEPS}


@pytest.mark.parametrize(
    ("encrypted", "why"),
    [
        # 127.0.0.2 is also this host, but no certificate of `andon certs alpha` contains it.
        (True, "is not for 127.0.0.2: make one that names it"),
        (False, "does not speak TLS, and this process does: start it with --tls"),
    ],
)
def test_a_worker_is_told_that_a_certificate_is_for_another_host_or_that_the_line_has_none(
    tmp_path: Path, *, encrypted: bool, why: str
) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    bind, own = ("127.0.0.2", certs) if encrypted else ("127.0.0.1", None)
    with Service(tmp_path / "run", 1, "--bind", bind, certs=own) as service:
        environment = {**on_line(service, 0, 1), "ANDON_TLS_DIR": str(certs)}
        refusal = refusal_of(SPEC, 0, environment)

    assert refusal.reason == "tls"
    assert why in str(refusal)


def test_a_worker_waits_for_a_line_over_tls_that_is_not_up_yet(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    with Service(tmp_path / "first", 1, certs=certs) as service:
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

    with Service(tmp_path / "run", 1, "--run-id", "late", port=port, certs=certs):
        await_exit([worker])


def test_a_ring_runs_over_mtls(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "alpha", "alpha")
    spec = {**SPEC, "steps": 6}
    flags = ("--tls", str(certs), "--topology", "ring")

    seen = train(tmp_path, spec, 2, *flags, ANDON_TLS_DIR=str(certs))

    assert len({each["digest"] for each in seen}) == 1


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
        averaging = fork(tmp_path, *reducer, "--tls", str(certs))
        worker = start_worker(
            tmp_path,
            spec,
            slot=0,
            ANDON_TLS_DIR=str(certs),
            ANDON_SHARED_DIR="off",
            **on_line(service, 0, 1),
        )
        code = worker.wait()
        ended = end_of(averaging)

    assert stranger[0] == 4
    assert "does not trust the certificate of what listens at" in stranger[2]
    assert (code, ended[0]) == (0, 0), (worker.output, ended)
