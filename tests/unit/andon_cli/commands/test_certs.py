"""`andon certs`: what it makes, keeps and refuses."""

from __future__ import annotations

import ipaddress
import json
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from andon.host.errors import CommandError, UsageError
from andon.host.tls import read_identity
from andon.host.tls_diagnosis import check_own_certificate
from andon_cli.commands.certs import make_certificates
from andon_cli.questions import CertsConfig, CertsSettings


def make(out: Path, *hosts: str, renew: bool = False) -> None:
    assert (
        make_certificates(
            CertsConfig(settings=CertsSettings(out=out, days=30, renew=renew), hosts=hosts)
        )
        == 0
    )


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())


def test_each_host_gets_a_folder_that_tls_takes(tmp_path: Path) -> None:
    make(tmp_path, "alpha", "10.0.0.7")

    for host in ("alpha", "10.0.0.7"):
        assert read_identity(tmp_path / host).pair is not None
        assert check_own_certificate(tmp_path / host).problem == ""


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    make(tmp_path, "alpha")

    for key in (tmp_path / "ca/ca.key", tmp_path / "alpha/tls.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_certificate_names_its_host_and_loopback_and_does_for_both_ends(tmp_path: Path) -> None:
    make(tmp_path, "alpha", "10.0.0.7")

    found = certificate_in(tmp_path / "alpha")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["alpha", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    numbered = certificate_in(tmp_path / "10.0.0.7")
    names = numbered.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.0.0.7") in names.get_values_for_type(x509.IPAddress)


def test_a_certificate_of_a_host_signs_no_others(tmp_path: Path) -> None:
    make(tmp_path, "alpha")

    host = certificate_in(tmp_path / "alpha")
    ca = x509.load_pem_x509_certificate((tmp_path / "ca/ca.crt").read_bytes())
    signs = [
        each.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        for each in (host, ca)
    ]
    assert signs == [False, True]
    assert timedelta(days=29) < host.not_valid_after_utc - datetime.now(UTC) < timedelta(days=31)
    host.verify_directly_issued_by(ca)


def test_another_call_keeps_the_ca_and_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "alpha")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    make(tmp_path, "alpha", "beta")

    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "beta/ca.crt").read_bytes() == (tmp_path / "ca/ca.crt").read_bytes()
    assert f"kept  {tmp_path}/alpha: --renew makes it anew" in capsys.readouterr().out


def test_renewing_makes_a_new_pair_under_the_same_ca(tmp_path: Path) -> None:
    make(tmp_path, "alpha")
    before = read_identity(tmp_path / "alpha")
    make(tmp_path, "alpha", renew=True)

    after = read_identity(tmp_path / "alpha")
    assert before.key != after.key
    assert before.ca == after.ca
    assert check_own_certificate(tmp_path / "alpha").problem == ""


@pytest.mark.parametrize("name", ["ca.key", "ca.crt"])
def test_half_a_ca_is_never_made_whole_silently(tmp_path: Path, name: str) -> None:
    make(tmp_path, "alpha")
    (tmp_path / "ca" / name).unlink()

    with pytest.raises(CommandError, match="without the other: restore the other"):
        make(tmp_path, "beta")


def test_the_key_of_another_ca_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "one", "alpha")
    make(tmp_path / "two", "alpha")
    (tmp_path / "one/ca/ca.key").write_bytes((tmp_path / "two/ca/ca.key").read_bytes())

    with pytest.raises(CommandError, match=r"ca.key is not the key of .*ca.crt"):
        make(tmp_path / "one", "beta")


@pytest.mark.parametrize("host", ["../alpha", "ca", "", "al pha", "-alpha", "..", "a/b"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="a host is a name or an address"):
        CertsConfig(settings=CertsSettings(out=tmp_path), hosts=(host,))


def test_without_the_library_the_command_that_brings_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "andon_cli.commands.authority", None)

    with pytest.raises(CommandError, match=r"not installed .*pip install 'andon\[certs\]'"):
        make(tmp_path, "alpha")


def test_json_says_what_was_made_and_what_was_kept_and_until_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "alpha")
    capsys.readouterr()
    settings = CertsSettings(out=tmp_path, days=30, format="json")

    make_certificates(CertsConfig(settings=settings, hosts=("alpha", "beta")))

    told = json.loads(capsys.readouterr().out)
    until = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
    assert told["authority"] == {"folder": f"{tmp_path}/ca", "made": False}
    assert told["hosts"] == [
        {"host": "alpha", "folder": f"{tmp_path}/alpha", "made": False, "valid_until": until},
        {"host": "beta", "folder": f"{tmp_path}/beta", "made": True, "valid_until": until},
    ]
