"""One folder of certificates: what is wrong with it is said, and what changes in it is followed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import grpc
import pytest

from andon.host.tls import (
    CA,
    CERTIFICATE,
    KEY,
    ServerIdentity,
    TlsError,
    open_channel,
    read_identity,
    readable_by_others,
)
from andon.host.tls_diagnosis import check_own_certificate, is_for_another_host
from unit.andon.certificates import certify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return certify(tmp_path / "ca", tmp_path / "alpha")


def news_of(identity: ServerIdentity) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC asks for a port whose server starts now."""
    return identity.news_since(identity.configuration)


def test_a_folder_holds_a_pair_and_who_is_trusted_and_shows_no_key(folder: Path) -> None:
    identity = read_identity(folder)

    key, certificate = identity.pair or (b"", b"")
    assert (key, certificate, identity.ca) == tuple(
        (folder / name).read_bytes() for name in (KEY, CERTIFICATE, CA)
    )
    assert "PRIVATE" not in repr(identity)


def test_a_missing_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"there is no folder .*andon certs"):
        read_identity(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (KEY, "holds tls.crt and no tls.key"),
        (CERTIFICATE, "holds tls.key and no tls.crt"),
    ],
)
def test_half_a_pair_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).unlink()

    with pytest.raises(TlsError, match=text):
        read_identity(folder)


@pytest.mark.parametrize("name", [KEY, CERTIFICATE, CA])
def test_a_half_written_file_is_refused_by_name(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])

    with pytest.raises(TlsError, match=f"{name}.*half written: copy"):
        read_identity(folder)


def test_the_key_of_another_certificate_is_refused(tmp_path: Path, folder: Path) -> None:
    other = certify(tmp_path / "ca", tmp_path / "beta")
    shutil.copy(other / KEY, folder / KEY)

    with pytest.raises(TlsError, match=r"tls.key is not the key of .*tls.crt: copy both"):
        read_identity(folder)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may read every file: run the tests as another user"
)
def test_a_file_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / KEY).chmod(0)

    with pytest.raises(TlsError, match=r"tls.key can't be read \(Permission denied\)"):
        read_identity(folder)


def test_a_client_without_a_ca_is_told_to_copy_it(folder: Path) -> None:
    (folder / CA).unlink()

    with pytest.raises(TlsError, match=r"a client needs ca.crt.*copy it"):
        open_channel("127.0.0.1:1", (), folder)


def test_a_server_without_a_certificate_is_refused(folder: Path) -> None:
    for name in (CERTIFICATE, KEY):
        (folder / name).unlink()

    with pytest.raises(TlsError, match=r"a server needs tls\.crt and tls\.key"):
        ServerIdentity(folder)


def test_a_server_with_a_ca_demands_certificates_of_its_clients(folder: Path) -> None:
    demands = [ServerIdentity(folder).demands_certificates]
    (folder / CA).unlink()
    demands.append(ServerIdentity(folder).demands_certificates)

    assert demands == [True, False]


def test_a_handshake_takes_the_files_as_they_are_then(tmp_path: Path, folder: Path) -> None:
    begun: list[int] = []
    news = news_of(ServerIdentity(folder, lambda: begun.append(1), count(0, 10).__next__))
    before = [news(), news()]
    certify(tmp_path / "ca", folder)
    renewed = [news(), news()]

    assert before == [None, None]
    assert renewed[0] is not None
    assert renewed[1] is None
    assert len(begun) == 4


def test_each_port_gets_new_files_once(tmp_path: Path, folder: Path) -> None:
    identity = ServerIdentity(folder, clock=count(0, 10).__next__)
    first, second = news_of(identity), news_of(identity)
    certify(tmp_path / "ca", folder)

    given = [first(), second(), first(), second()]

    assert given[0] is given[1] is not None
    assert given[2:] == [None, None]


def test_new_files_wait_for_a_moment_in_which_no_other_handshake_begins(
    tmp_path: Path, folder: Path
) -> None:
    # gRPC frees the old configuration, which a handshake that began just before may still read.
    times = iter([0.0, 10.0, 10.05, 10.1, 10.5])
    news = news_of(ServerIdentity(folder, clock=times.__next__))
    news(), news()
    certify(tmp_path / "ca", folder)

    crowded = [news(), news()]

    assert crowded == [None, None]
    assert news() is not None


@pytest.mark.parametrize("name", [KEY, CERTIFICATE, CA])
def test_a_bad_new_file_keeps_the_old_identity_and_is_logged_once(
    tmp_path: Path, folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    news = news_of(ServerIdentity(folder, clock=count(0, 10).__next__))
    (folder / name).write_text("half a cert")
    kept = [news() for _ in range(3)]
    certify(tmp_path / "ca", folder)

    assert kept == [None] * 3
    assert news() is not None
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "stay in use" in warned[0].getMessage()


def test_a_certificate_is_checked_with_the_ca_beside_it(tmp_path: Path, folder: Path) -> None:
    stranger = certify(tmp_path / "other-ca", tmp_path / "stranger")
    shutil.copy(stranger / CA, folder / CA)
    expired = certify(tmp_path / "ca", tmp_path / "late", expired=True)
    good = certify(tmp_path / "ca", tmp_path / "beta")

    assert "is not signed by ca.crt beside it" in check_own_certificate(folder).problem
    assert "has expired: make it anew" in check_own_certificate(expired).problem
    assert check_own_certificate(good).problem == ""
    assert check_own_certificate(good).valid_until_s is not None


@pytest.mark.parametrize(
    ("host", "refused"),
    [("alpha", False), ("localhost", False), ("127.0.0.1", False), ("beta", True), ("::2", True)],
)
def test_a_name_that_a_certificate_lacks_is_known_before_anybody_calls(
    folder: Path, host: str, refused: bool
) -> None:
    assert is_for_another_host(folder, host) is refused


def test_without_a_ca_of_its_own_nothing_is_said_of_a_certificates_names(
    folder: Path, tmp_path: Path
) -> None:
    other = certify(tmp_path / "ca2", tmp_path / "beta")
    shutil.copy(other / CA, folder / CA)
    by_another_ca = is_for_another_host(folder, "gamma")
    (folder / CA).unlink()

    assert (by_another_ca, is_for_another_host(folder, "gamma")) == (False, False)


def test_a_file_that_every_user_may_read_is_seen(folder: Path) -> None:
    before = readable_by_others(folder / KEY)
    (folder / KEY).chmod(0o644)

    assert (before, readable_by_others(folder / KEY)) == (False, True)
