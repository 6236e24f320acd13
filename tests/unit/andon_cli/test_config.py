"""Configuration of `andon run` and `andon serve`: what reaches the service, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import Argument

from andon.host.access import Access
from andon.host.errors import UsageError
from andon.host.settings import GivenSettings
from andon.host.tls import is_loopback
from andon.protocol.arithmetic import ArithmeticRule
from andon.protocol.records import Key
from andon.protocol.run_settings import Topology
from andon_cli.app import read_config
from andon_cli.config import RunConfig, RunSettings
from andon_cli.config import run_config as of_a_run
from andon_cli.settings import app_of, as_flags, as_table, settings_of, variables_of
from andon_coordinator.config import LineOptions
from andon_coordinator.core.spikes import SpikeAction
from andon_reducer.config import ReducerLimits
from andon_server.limits import Limits
from andon_server.settings import ServeConfig

OWN = {"resume", "resume_step", "report", "expect"}
"""Settings of `andon run` itself that a run which joins another's line has no use for."""


def run_config(*argv: str, **environment: str) -> RunConfig:
    config = read_config(["run", *argv], environment)
    assert isinstance(config, RunConfig)
    return config


def serve_config(*argv: str, **environment: str) -> ServeConfig:
    config = read_config(["serve", *argv], environment)
    assert isinstance(config, ServeConfig)
    return config


def test_without_flag_or_variable_a_service_listens_on_loopback_at_the_known_ports() -> None:
    config = serve_config()

    assert (config.bind, config.line_port, config.endpoint_port) == ("127.0.0.1", 7070, 9400)
    assert config.folder == Path("runs") / config.run_id
    assert len(config.run_id) == 4


def test_a_run_takes_any_free_port_of_loopback_so_that_two_runs_do_not_meet() -> None:
    service = run_config("train.py").service

    assert service is not None
    assert (service.bind, service.line_port, service.endpoint_port) == ("127.0.0.1", 0, 0)


def test_a_run_that_others_join_listens_at_the_known_port() -> None:
    service = run_config("--bind", "0.0.0.0", "--insecure", "--expect", "4", "train.py").service

    assert service is not None
    assert (service.line_port, service.workers) == (7070, 4)


def test_what_follows_the_script_is_the_scripts_own() -> None:
    config = run_config("--workers", "2", "train.py", "--workers", "7", "-m", "--lr=1")

    assert config.settings.workers == 2
    assert config.command == ("train.py", "--workers", "7", "-m", "--lr=1")
    assert config.service is not None
    assert config.service.script == "train.py"
    assert not config.settings.module


def test_the_board_names_the_script_without_its_folders() -> None:
    service = run_config("code/train.py").service

    assert service is not None
    assert service.script == "train.py"


@pytest.mark.parametrize("url", ["javascript:alert(1)", "git.example.com"])
def test_links_of_the_board_lead_to_web_addresses_only(url: str) -> None:
    with pytest.raises(UsageError, match="begins with https://"):
        ServeConfig(docs_url=url)


def test_a_module_may_stand_in_for_the_script() -> None:
    config = run_config("-m", "package.train", "--lr", "1")

    assert config.settings.module
    assert config.command == ("package.train", "--lr", "1")


def test_steps_of_a_run_bound_the_line_that_it_serves() -> None:
    service = run_config("--steps", "20", "train.py").service

    assert service is not None
    assert service.line.max_steps == 20
    assert service.until_complete


def test_a_run_waits_at_a_halt_unless_it_is_told_to_raise() -> None:
    assert run_config("train.py").settings.on_halt == "wait"
    assert run_config("--on-halt", "raise", "train.py").settings.on_halt == "raise"
    assert run_config("train.py", ANDON_ON_HALT="raise").settings.on_halt == "raise"


def test_a_run_that_joins_serves_nothing() -> None:
    config = run_config("--workers", "4", "--join", "127.0.0.1:7070", "train.py")

    assert config.service is None
    assert config.settings.join == "127.0.0.1:7070"


EVERYTHING = ServeConfig(
    log_format="json",
    run_id="7f3a",
    run_dir="runs/elsewhere",
    bind="0.0.0.0",
    advertise="beta:7071",
    port=1,
    metrics_port=2,
    metrics_hosts="beta.example",
    metrics_token_file=Path("metrics"),
    access=Access(
        tls_dir=Path("certs"),
        token_file=Path("run"),
        operator_token_file=Path("operators"),
        viewer_token_file=Path("viewers"),
        insecure=True,
    ),
    workers=3,
    published_on="127.0.0.1",
    docs_url="https://git.example.com/andon",
    script="train.py",
    role="coordinator",
    secret_file=Path("secret"),
    withdrawn_file=Path("withdrawn"),
    line=LineOptions(
        min_workers=2,
        max_workers=8,
        reducers=3,
        encoding="bfloat16",
        answer_encoding="int8",
        max_steps=4,
        journal_sync="full",
        digest_every=5,
        may_stop="operators",
        liveness_s=6.5,
        forming_timeout_s=600.5,
        straggler_timeout_s=30.5,
        topology=Topology.RING,
        loss_spike=7.5,
        grad_norm_spike=8.5,
        worker_grad_norm=9.5,
        on_spike=SpikeAction.SKIP,
        max_grad_norm=1.5,
        average_buffers=True,
        schedule="local",
        shares="balanced-interleaved",
        overhead_target=0.25,
        max_anchor=32,
        max_batch_diff=5,
        lr_scaling="sqrt",
        growth_cost=0.125,
        local_steps=64,
        outer="nesterov",
        overlap=True,
        overlap_steps=2,
        arithmetic=ArithmeticRule.TELL,
        on_wrong_arithmetic="drop",
        price_per_hour=0.75,
        currency="EUR",
    ),
    resume_from=Key(3, 4),
    until_complete=True,
    announce=True,
    shared_dir=None,
    tcp_port=None,
    connections=4,
    parent_pid=7,
    limits=Limits(
        max_message_bytes=2_000_000,
        chunk_elements=1024,
        max_connections=77,
        max_streams_per_connection=17,
        max_calls=50,
        max_calls_per_host=40,
        max_silent_calls=30,
        max_watchers=3,
        first_message_timeout_s=2.5,
        reducer=ReducerLimits(
            max_streams_per_worker=4, max_held_bytes=1_000_000_000, max_state_pieces=2
        ),
    ),
)
"""A service with no setting at its default, but those of another role."""

ALONE = [
    ServeConfig(run_id="7f3a", line=line)
    for line in (
        LineOptions(same_bits=True, verify=0.5),
        LineOptions(
            schedule="local", local_steps=64, fragments=4, mix=0.5, encoding="topk", topk_kept=7
        ),
        LineOptions(schedule="local", quorum=0.75, grace="2.5", max_late=3),
        LineOptions(evict_slower_than=3.5),
        LineOptions(noise_scale=True),
        LineOptions(mean="trimmed", max_workers=5),
    )
]
"""Services with the settings that can't go with many of the others."""


def test_flags_of_a_service_give_all_its_settings_again() -> None:
    limits = EVERYTHING.limits
    for schema in (EVERYTHING, EVERYTHING.line, EVERYTHING.access, limits, limits.reducer):
        default: Any = type(schema)()
        left_out = {
            each.name
            for each in fields(schema)
            if getattr(schema, each.name) == getattr(default, each.name)
        }
        # These can't go with many of the others.
        apart = {
            "same_bits",
            "verify",
            "fragments",
            "mix",
            "quorum",
            "grace",
            "max_late",
            "topk_kept",
            "evict_slower_than",
            "noise_scale",
            "mean",
        }
        assert left_out <= {"config", "coordinator", "token", *apart}

    for settings in (replace(EVERYTHING, role="all"), *ALONE):
        again = read_config(["serve", *as_flags(settings)], {})

        assert again == settings


def arguments_of_a_run() -> list[Argument]:
    return settings_of(app_of(RunSettings).assemble_argument_collection())


def test_every_setting_of_a_run_reaches_its_service_from_variables_and_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {each.name for each in fields(RunSettings)} - {each.name for each in fields(ServeConfig)}
    shared = {
        argument.name.removeprefix("--"): variables_of(argument)[0]
        for argument in arguments_of_a_run()
        if argument.keys[0] not in own | {"workers", "config"}
    }
    reached = {"token"}  # A variable alone: test_settings.py.

    for wanted in (EVERYTHING, *ALONE):
        values = {key: text for key, text in as_table(wanted).items() if key in shared}
        told = run_config(
            *("--expect", "3", "train.py"), **{shared[key]: text for key, text in values.items()}
        ).service
        Path("andon.toml").write_text("".join(f"{k} = {text!r}\n" for k, text in values.items()))
        written = run_config("--expect", "3", "train.py").service
        Path("andon.toml").unlink()
        for service in (told, written):
            assert service is not None
            assert as_table(service).items() >= values.items()
        reached |= values.keys()

    # Without a folder in memory and without lanes, which is what EVERYTHING asks for.
    assert shared.keys() == reached


def test_a_service_reads_no_file_and_no_variables_but_what_its_run_hands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("andon.toml").write_text("workers = 2\n[run]\nworkers = 1\nport = 7\n")

    service = run_config("train.py").service

    assert service is not None
    handed = as_flags(replace(service, config=Path("/dev/null")))
    again = read_config(["serve", *handed], {})
    assert (again.workers, again.port) == (service.workers, 7) == (1, 7)


def test_a_run_that_joins_refuses_each_flag_that_it_can_not_obey() -> None:
    settings = RunSettings(join="127.0.0.1:1")
    obeyed = {"access", "config", "log_format", "shared_dir", "workers"}
    shared = {each.name for each in fields(ServeConfig)} - obeyed
    of_the_line = [
        argument for argument in arguments_of_a_run() if argument.keys[0] in shared | OWN
    ]

    assert of_the_line
    for argument in of_the_line:
        given = GivenSettings(settings, {argument.keys: argument.name})
        with pytest.raises(UsageError, match=argument.name):
            of_a_run(given, ["train.py"])


def test_a_run_that_joins_says_which_variables_and_keys_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("andon.toml").write_text("port = 7\nshared-dir = 'off'\n")

    config = run_config("--join", "127.0.0.1:1", "train.py", ANDON_STEPS="3", ANDON_WORKERS="2")

    assert set(config.unused) == {"ANDON_STEPS", "port in andon.toml"}
    assert config.settings.workers == 2


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["serve", "--bind", "0.0.0.0"], "--insecure"),
        (["serve", "--port", "7070", "--metrics-port", "7070"], "a port of its own"),
        (["serve", "--workers", "0"], "--workers must be from 1"),
        (["serve", "--workers", "2", "--min-workers", "3"], "lower it, or start more workers"),
        (["serve", "--workers", "2", "--max-workers", "1"], "raise it, or start fewer workers"),
        (["serve", "--port", "65536"], "--port must be from 0 to 65535"),
        (["serve", "--port", "many"], "--port must be a whole number"),
        (["serve", "--liveness", "nan"], "--liveness must be at least 0.1 s"),
        (["serve", "--forming-timeout", "0"], "--forming-timeout must be above 0 s, not 0"),
        (["run", "--straggler-timeout", "x", "a.py"], "--straggler-timeout must be a number"),
        (["serve", "--journal-sync", "never"], "--journal-sync must be normal or full"),
        (["serve", "--run-id", "../7f3a"], "--run-id"),
        (["run"], "andon run --workers 2 train.py"),
        (["run", "--on-halt", "ignore", "train.py"], "--on-halt must be wait or raise"),
        (["run", "--workers", "3", "--expect", "2", "train.py"], "below --workers 3"),
        (["run", "--join", "127.0.0.1:1", "--report", "r.json", "train.py"], "the journal"),
        (["run", "--join", "127.0.0.1:1", "--steps", "7", "train.py"], "give it there"),
        (["run", "--join", "alpha:7070", "train.py"], "--insecure"),
        (["run", "--join", "alpha", "train.py"], "--join must be HOST:PORT"),
        (["run", "--preemption-notice", "ftp://a/b", "t.py"], "--preemption-notice must be a file"),
        (["status", "--address", ":7070"], "--address must be HOST:PORT"),
        (["resume", "--skip", "--drop", "1"], "give --skip or --drop, not both"),
        (["resume", "--drop", "one"], "--drop must be a whole number"),
        (["resume", "--halt", "0"], "--halt must be from 1"),
        (["halt", "--address", "alpha"], "--address must be HOST:PORT"),
        (["history", "--format", "xml"], "--format must be table or json"),
        (["health", "--timeout", "0"], "--timeout must be at least 0.1 s"),
        (["health", "--service", "x" * 128], "--service must be at most 127 bytes"),
    ],
)
def test_values_that_make_no_sense_are_refused_with_the_remedy(
    argv: list[str], remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_config(argv, {})

    assert remedy in str(refused.value)


def test_a_run_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").touch()

    with pytest.raises(UsageError, match="holds a run already"):
        run_config("--run-dir", str(tmp_path), "train.py")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True),
     ("0.0.0.0", False), ("::", False), ("alpha", False), ("192.168.1.2", False)],
)  # fmt: skip
def test_only_this_host_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "many"])
def test_a_factor_that_makes_no_sense_is_refused_by_its_flag(factor: str) -> None:
    with pytest.raises(UsageError, match=r"^--grad-norm-spike must be"):
        serve_config("--grad-norm-spike", factor)


def test_a_run_with_spares_has_room_for_them_and_does_not_wait_for_them() -> None:
    service = run_config("--workers", "3", "--spares", "1", "train.py").service

    assert service is not None
    assert (service.workers, service.line.max_workers) == (3, 4)


def test_spares_may_come_alone_to_a_line_that_is_served_elsewhere() -> None:
    config = run_config("--join", "127.0.0.1:7", "--workers", "0", "--spares", "2", "train.py")

    assert (config.settings.workers, config.settings.spares) == (0, 2)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--workers", "0"), "starts nobody who trains"),
        (("--join", "127.0.0.1:7", "--workers", "0"), "starts nobody who trains"),
        (("--workers", "0", "--spares", "1"), "starts nobody who trains"),
        (("--workers", "2", "--spares", "1", "--topology", "ring"), "--topology ring"),
        (("--workers", "2", "--spares", "1", "--schedule", "local"), "--schedule local"),
        (("--workers", "2", "--spares", "1", "--max-workers", "2"), "leaves no room"),
    ],
)
def test_spares_that_the_line_could_not_have_are_refused(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        run_config(*flags, "train.py")
