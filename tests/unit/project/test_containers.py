"""The containers are what the documentation says: private, unprivileged, and able to start."""

from __future__ import annotations

import json
import os
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from andon.host.tls import is_loopback
from andon_cli.app import read_config
from andon_cli.questions import CertsConfig, HealthConfig
from andon_server.settings import ServeConfig
from andon_trainer.config import LineConfig
from unit.project.containers import FORMS, SERVICE, TRAINER, Dockerfile, compose
from unit.project.documents import ROOT
from unit.project.watched import Watched

every_form = pytest.mark.parametrize("services", FORMS, indirect=True)
every_dockerfile = pytest.mark.parametrize(
    "dockerfile", [SERVICE, TRAINER], ids=lambda dockerfile: str(dockerfile.name)
)
encrypted_forms = pytest.mark.parametrize("services", ["tls", "cpu-tls"], indirect=True)
RUNS = "/srv/andon/runs"
SHARED = "/dev/shm"


@pytest.fixture(scope="module")
def composed() -> dict[str, dict[str, Any]]:
    return {form: compose(form) for form in FORMS}


@pytest.fixture
def services(
    request: pytest.FixtureRequest, composed: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = composed[request.param]["services"]
    return found


def settings_of(service: dict[str, Any]) -> ServeConfig:
    """What `andon serve` makes of a container's command and environment."""
    config = read_config(service["command"][1:], service["environment"])
    assert isinstance(config, ServeConfig)
    return config


def _mounted(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is mounted in a container, by where."""
    return {volume["target"]: volume for volume in service.get("volumes", [])}


# What is started


@every_form
def test_one_command_starts_the_line_its_trainers_and_what_watches_them(
    services: dict[str, dict[str, Any]],
) -> None:
    watchers = {"prometheus", "alertmanager", "alerts", "grafana"}

    assert services.keys() - {"certs"} == {"andon", "trainer", *watchers}


@every_form
def test_the_service_is_started_by_a_command_that_andon_understands(
    services: dict[str, dict[str, Any]],
) -> None:
    service = services["andon"]

    config = settings_of(service)

    assert (config.bind, config.line_port, config.endpoint_port) == ("0.0.0.0", 7070, 9400)
    assert config.tcp_port == 7170
    assert config.workers == services["trainer"]["scale"] == 2
    assert str(config.folder) == "runs/demo"
    assert RUNS in _mounted(service)


@every_form
def test_the_trainers_find_the_line_and_keep_their_files_in_its_run(
    services: dict[str, dict[str, Any]],
) -> None:
    trainer = services["trainer"]
    # `latest` would look into the folder now.
    config = LineConfig.read(trainer["environment"] | {"ANDON_RESUME": ""})

    assert config.address == f"{services['andon']['hostname']}:7070"
    assert config.run_id == services["andon"]["environment"]["ANDON_RUN_ID"]
    assert str(config.run_dir) == f"{RUNS}/{config.run_id}"
    assert config.on_halt == "wait"
    assert RUNS in _mounted(trainer)


@every_form
def test_no_trainer_has_a_rank_so_that_there_can_be_any_number(
    services: dict[str, dict[str, Any]],
) -> None:
    trainer, service = services["trainer"], services["andon"]
    config = settings_of(service)

    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & trainer["environment"].keys()
    assert "container_name" not in trainer
    assert config.line.max_workers is not None
    assert config.line.max_workers > config.workers


@every_form
def test_a_run_that_was_taken_down_goes_on_from_its_checkpoints(
    services: dict[str, dict[str, Any]],
) -> None:
    environment = services["trainer"]["environment"]

    assert environment["ANDON_RESUME"] == "latest"
    assert LineConfig.read(environment | {"ANDON_RESUME": ""}).checkpoint_every > 0


@every_form
def test_a_variable_of_andon_that_a_container_is_given_is_read(
    services: dict[str, dict[str, Any]],
) -> None:
    service = Watched(services["andon"]["environment"])
    read_config(services["andon"]["command"][1:], service)
    trainer = Watched(services["trainer"]["environment"] | {"ANDON_RUN_DIR": "/nonexistent"})
    LineConfig.read(trainer)
    demo = (ROOT / services["trainer"]["command"][1]).read_text("utf-8")

    read_by_the_demo = {name for name in trainer if f'environ.get("{name}"' in demo}
    assert {name for name in service if name.startswith("ANDON_")} <= service.asked
    assert {name for name in trainer if name.startswith("ANDON_")} <= (
        trainer.asked | read_by_the_demo
    )


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("2.24.0", "new enough"),
        ("5.0.1", "new enough"),
        ("2.23.3", "too old"),
        ("2.9.0", "too old"),
    ],
)
def test_the_documented_command_knows_which_compose_is_new_enough(
    tmp_path: Path, version: str, says: str
) -> None:
    page = (ROOT / "docs/places/compose.md").read_text("utf-8")
    (command,) = re.findall(r"^\$ (printf .*)$", page, re.MULTILINE)
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\ntest "$*" = "compose version --short" && echo {version}\n')
    docker.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])

    done = subprocess.run(
        ["sh", "-c", command], env={"PATH": path}, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{says}\n"


def test_run_steps_script_images_and_workers_are_chosen_by_variables() -> None:
    chosen = compose(
        "cpu",
        ANDON_RUN_ID="second",
        ANDON_STEPS="7",
        ANDON_SCRIPT="code/train.py --lr 0.1",
        ANDON_CODE="/home/me/project",
        ANDON_SERVICE_IMAGE="registry.example/service:1",
        ANDON_TRAINER_IMAGE="registry.example/trainer:1",
        ANDON_WORKERS="3",
        ANDON_MAX_WORKERS="5",
        ANDON_TOKEN="a-token-of-enough-bytes",
        ANDON_CHECKPOINT_EVERY="10",
    )["services"]
    service, trainer = chosen["andon"], chosen["trainer"]

    config = settings_of(service)
    worker = LineConfig.read(trainer["environment"] | {"ANDON_RESUME": ""})

    assert (config.run_id, worker.run_id) == ("second", "second")
    assert (str(config.folder), str(worker.run_dir)) == ("runs/second", f"{RUNS}/second")
    assert (config.line.max_steps, trainer["environment"]["ANDON_STEPS"]) == (7, "7")
    assert trainer["command"] == ["python", "code/train.py", "--lr", "0.1"]
    assert _mounted(trainer)["/srv/andon/code"]["source"] == "/home/me/project"
    assert [chosen[name]["image"] for name in ("andon", "alerts", "trainer")] == [
        "registry.example/service:1", "registry.example/service:1", "registry.example/trainer:1",
    ]  # fmt: skip
    assert (config.workers, trainer["scale"], config.line.max_workers) == (3, 3, 5)
    assert config.access.run_token == worker.token == b"a-token-of-enough-bytes"
    assert worker.checkpoint_every == 10


@every_form
def test_service_and_trainers_share_one_memory_that_outlives_a_restart(
    services: dict[str, dict[str, Any]],
) -> None:
    mounts = [_mounted(services[name])[SHARED] for name in ("andon", "trainer")]

    assert [mount["source"] for mount in mounts] == ["shm", "shm"]
    # Docker would give the volume the image's owner and mode of that folder.
    assert all(mount["volume"]["nocopy"] for mount in mounts)
    assert not any({"ipc", "shm_size"} & service.keys() for service in services.values())


def test_the_shared_memory_is_in_memory(composed: dict[str, dict[str, Any]]) -> None:
    for form in composed.values():
        options = form["volumes"]["shm"]["driver_opts"]

        assert options["type"] == "tmpfs"
        assert "mode=1777" in options["o"].split(",")


@every_form
@pytest.mark.parametrize("name", ["trainer", "prometheus"])
def test_who_needs_the_service_waits_until_it_is_healthy(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    assert services[name]["depends_on"]["andon"]["condition"] == "service_healthy"


@every_form
def test_no_restart_ends_a_halted_line(services: dict[str, dict[str, Any]]) -> None:
    assert services["andon"]["restart"] == "unless-stopped"
    assert "--until-complete" not in services["andon"]["command"]
    assert services["trainer"]["restart"].startswith("on-failure:")


@pytest.mark.parametrize("form", ["gpu", "tls"])
def test_trainers_see_all_gpus_and_are_told_which_only_if_somebody_says_so(
    composed: dict[str, dict[str, Any]], form: str
) -> None:
    trainer = composed[form]["services"]["trainer"]
    chosen = compose(form, CUDA_VISIBLE_DEVICES="2,3")["services"]["trainer"]

    assert trainer["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}
    ]
    # Set to nothing it would hide all of them.
    assert trainer["environment"]["CUDA_VISIBLE_DEVICES"] is None
    assert chosen["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("form", ["cpu", "cpu-tls"])
def test_without_gpus_nothing_is_reserved(composed: dict[str, dict[str, Any]], form: str) -> None:
    services = composed[form]["services"]

    assert not any("deploy" in service for service in services.values())
    assert services["trainer"]["build"]["args"]["TORCH"] == "pip"


# Encrypted


@encrypted_forms
def test_with_certificates_nothing_may_go_unencrypted(services: dict[str, dict[str, Any]]) -> None:
    service, trainer = services["andon"], services["trainer"]
    config = settings_of(service)
    worker = LineConfig.read(trainer["environment"] | {"ANDON_RESUME": ""})

    assert str(config.access.tls_dir) in _mounted(service)
    assert str(worker.tls) in _mounted(trainer)
    assert not config.access.insecure
    assert not worker.insecure


@encrypted_forms
def test_certificates_are_made_before_the_service_starts_for_the_names_that_are_called(
    services: dict[str, dict[str, Any]],
) -> None:
    certs = services["certs"]
    config = read_config(certs["command"][1:], {})

    assert isinstance(config, CertsConfig)
    assert config.hosts == (services["andon"]["hostname"], "trainer")
    out = f"/srv/andon/{config.settings.out}"
    assert _mounted(certs).keys() == {f"{out}/{name}" for name in ("ca", *config.hosts)}
    for name in config.hosts:
        assert (
            _mounted(services[name])[f"{out}/{name}"]["source"]
            == _mounted(certs)[f"{out}/{name}"]["source"]
        )
    waits = services["andon"]["depends_on"]["certs"]["condition"]
    assert waits == "service_completed_successfully"


@encrypted_forms
def test_nobody_but_their_maker_has_the_key_of_the_ca_and_nobody_anothers_certificate(
    services: dict[str, dict[str, Any]],
) -> None:
    holders: dict[str, set[str]] = {}
    for name, service in services.items():
        for volume in _mounted(service).values():
            if volume.get("source", "").startswith("certs-"):
                holders.setdefault(volume["source"], set()).add(name)
                assert name == "certs" or volume["read_only"]

    assert holders == {
        "certs-ca": {"certs"},
        "certs-andon": {"certs", "andon"},
        "certs-trainer": {"certs", "trainer"},
    }


@encrypted_forms
def test_a_volume_for_certificates_gets_its_owner_from_a_folder_of_the_image(
    services: dict[str, dict[str, Any]],
) -> None:
    made = next(rest for kind, rest in SERVICE.stages[-1] if "install -d -o andon" in rest)

    assert set(_mounted(services["certs"])) <= set(made.split())


# Who may reach it, and what it may do


@every_form
def test_every_port_is_published_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    published = {
        port["published"]: port.get("host_ip", "")
        for service in services.values()
        for port in service.get("ports", [])
    }

    assert published.keys() == {"7070", "7170", "9400", "9090", "9093", "3000"}
    assert all(is_loopback(host) for host in published.values())


@every_form
def test_the_board_is_open_to_this_host_because_its_port_is_published_on_loopback(
    services: dict[str, dict[str, Any]],
) -> None:
    service = services["andon"]
    config = settings_of(service)
    (port,) = (each for each in service["ports"] if each["target"] == 9400)

    assert is_loopback(config.board_bind)
    assert port["host_ip"] == config.board_bind


def test_a_board_that_is_published_to_other_hosts_knows_of_it() -> None:
    service = compose("cpu", ANDON_PUBLISHED_ON="0.0.0.0")["services"]["andon"]
    config = settings_of(service)
    published = {port["target"]: port["host_ip"] for port in service["ports"]}

    assert config.board_bind == "0.0.0.0"
    assert published == {7070: "127.0.0.1", 7170: "127.0.0.1", 9400: "0.0.0.0"}


@every_form
def test_trainers_have_no_network_but_the_line(services: dict[str, dict[str, Any]]) -> None:
    assert services["trainer"]["networks"].keys() == {"line"}
    assert "ports" not in services["trainer"]


def test_the_network_of_the_line_leads_nowhere(composed: dict[str, dict[str, Any]]) -> None:
    assert all(form["networks"]["line"]["internal"] for form in composed.values())


@every_form
def test_every_container_is_without_privileges_and_writes_to_volumes_only(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "ipc", "user"} & service.keys(), name
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or volume["read_only"], name
        assert "networks" in service or service["network_mode"] == "none", name


@every_form
def test_images_of_others_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if "build" not in service:
            assert service["image"].rpartition(":")[2][-1].isdigit(), name


# The images


@every_dockerfile
def test_an_image_is_built_in_stages_and_belongs_to_nobody(dockerfile: Dockerfile) -> None:
    assert len(dockerfile.stages) > 1
    assert dockerfile.final("USER") == "10001:10001"
    assert not any("pip" in rest.split() for kind, rest in dockerfile.stages[-1] if kind == "RUN")


@every_dockerfile
def test_whatever_an_image_is_made_from_is_there_and_is_sent(dockerfile: Dockerfile) -> None:
    ignore = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    sent = [line.removeprefix("!") for line in ignore if line.startswith("!")]

    for kind, rest in dockerfile.instructions:
        if kind == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), f"{dockerfile.name} copies {source}"
                assert any(fnmatch(source, each) for each in sent), f".dockerignore: {source}"


def test_the_service_image_serves_a_line_and_asks_after_its_health() -> None:
    config = read_config(SERVICE.command[1:], {})
    health = json.loads(SERVICE.final("HEALTHCHECK").partition("CMD ")[2])
    asked = read_config(health[1:], {})

    assert isinstance(config, ServeConfig)
    assert (SERVICE.command[0], health[0]) == ("andon", "andon")
    assert isinstance(asked, HealthConfig)
    assert asked.address == f"127.0.0.1:{config.line_port}"
    ports = (config.line_port, config.tcp_port, config.endpoint_port)
    assert SERVICE.final("EXPOSE").split() == [str(port) for port in ports]


def test_the_service_image_has_no_torch() -> None:
    said = " ".join(rest for _, rest in SERVICE.instructions)
    extras = {name for _, rest in SERVICE.instructions for name in re.findall(r"\.\[(.+?)\]", rest)}

    assert "torch" not in said
    # What the container needs that makes certificates.
    assert extras == {"certs"}


def test_the_trainer_image_runs_the_demo_that_it_holds() -> None:
    program, script = TRAINER.command

    assert program == "python"
    assert (ROOT / script).is_file()


def test_the_trainer_image_has_a_cuda_base_unless_it_is_told_otherwise() -> None:
    arguments = dict(rest.split("=", 1) for kind, rest in TRAINER.instructions if kind == "ARG")

    assert "-cuda" in arguments["BASE"]
    assert arguments["TORCH"] == "base"
    assert TRAINER.stages[-1][0] == ("FROM", "${BASE}")


def test_the_base_for_gpus_has_the_pytorch_that_everything_is_tested_with() -> None:
    base = next(rest for kind, rest in TRAINER.instructions if rest.startswith("BASE="))
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert pinned is not None
    assert base.partition(":")[2].partition("-")[0] == pinned.group(1)


@every_dockerfile
def test_an_image_without_the_c_part_is_not_built(dockerfile: Dockerfile) -> None:
    building = [rest for kind, rest in dockerfile.instructions if re.search(r"install|wheel", rest)]

    assert any("ANDON_C_PART=required" in rest for rest in building)
    # Not only built: it must load in the image's own Python.
    assert any("import andon.protocol._fused" in rest for rest in building)


@every_dockerfile
def test_the_classic_builder_understands_every_step(dockerfile: Dockerfile) -> None:
    assert not any("--mount" in rest or "<<" in rest for _, rest in dockerfile.instructions)
    assert "syntax=" not in (ROOT / "docker" / dockerfile.name).read_text("utf-8")
