"""The containers are what the documentation says: private, unprivileged, and able to start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import pytest

from andon.host.tls import is_loopback
from andon_cli.app import read_config
from andon_cli.questions import HealthConfig
from andon_server.settings import ServeConfig
from andon_trainer.config import LineConfig
from unit.project.containers import FORMS, SERVICE, TRAINER, Dockerfile, compose
from unit.project.documents import ROOT

every_form = pytest.mark.parametrize("services", FORMS, indirect=True)
every_dockerfile = pytest.mark.parametrize(
    "dockerfile", [SERVICE, TRAINER], ids=lambda dockerfile: str(dockerfile.name)
)
TRAINERS = ("trainer-0", "trainer-1")
RUNS = "/srv/andon/runs"


class Watched(Mapping[str, str]):
    """An environment that remembers what was asked of it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


@pytest.fixture(scope="module")
def composed() -> dict[str, dict[str, Any]]:
    return {form: compose(form) for form in FORMS}


@pytest.fixture
def services(
    request: pytest.FixtureRequest, composed: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = composed[request.param]["services"]
    return found


def _devices(service: dict[str, Any]) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = service["deploy"]["resources"]["reservations"]["devices"]
    return devices


# What is started


@every_form
def test_one_command_starts_the_line_its_trainers_and_what_watches_them(
    services: dict[str, dict[str, Any]],
) -> None:
    watchers = {"prometheus", "alertmanager", "alerts", "grafana"}

    assert services.keys() == {"andon", *TRAINERS, *watchers}


@every_form
def test_the_service_is_started_by_a_command_that_andon_understands(
    services: dict[str, dict[str, Any]],
) -> None:
    service = services["andon"]

    config = read_config(service["command"][1:], service["environment"])

    assert isinstance(config, ServeConfig)
    assert (config.bind, config.line_port, config.endpoint_port) == ("0.0.0.0", 7070, 9400)
    assert config.workers == len(TRAINERS)
    assert str(config.folder) == "runs/demo"
    assert [volume["target"] for volume in service["volumes"]] == [RUNS]


@every_form
def test_the_trainers_find_the_line_and_keep_their_files_in_its_run(
    services: dict[str, dict[str, Any]],
) -> None:
    configs = [LineConfig.read(services[name]["environment"]) for name in TRAINERS]

    assert [config.launch_slot for config in configs] == [0, 1]
    for config in configs:
        assert config.address == "andon:7070"
        assert config.run_id == services["andon"]["environment"]["ANDON_RUN_ID"]
        assert str(config.run_dir) == f"{RUNS}/{config.run_id}"
        assert config.launch_size == len(TRAINERS)
        assert config.on_halt == "wait"


@every_form
def test_every_variable_that_a_container_is_given_is_read(
    services: dict[str, dict[str, Any]],
) -> None:
    service = Watched(services["andon"]["environment"])
    read_config(services["andon"]["command"][1:], service)
    trainer = Watched(services["trainer-0"]["environment"])
    LineConfig.read(trainer)

    for environment in (service, trainer):
        assert {name for name in environment if name.startswith("ANDON_")} <= environment.asked


@every_form
def test_trainers_wait_until_the_service_is_healthy(services: dict[str, dict[str, Any]]) -> None:
    for name in TRAINERS:
        assert services[name]["depends_on"]["andon"]["condition"] == "service_healthy"


@every_form
def test_no_restart_ends_a_halted_line(services: dict[str, dict[str, Any]]) -> None:
    assert services["andon"]["restart"] == "unless-stopped"
    assert "--until-complete" not in services["andon"]["command"]
    for name in TRAINERS:
        assert services[name]["restart"].startswith("on-failure:")


def test_each_trainer_has_a_gpu_of_its_own(composed: dict[str, dict[str, Any]]) -> None:
    devices = [_devices(composed["gpu"]["services"][name]) for name in TRAINERS]

    assert [[device["device_ids"] for device in each] for each in devices] == [[["0"]], [["1"]]]
    assert all(device["capabilities"] == ["gpu"] for each in devices for device in each)


def test_without_gpus_nothing_is_reserved(composed: dict[str, dict[str, Any]]) -> None:
    cpu = composed["cpu"]["services"]

    assert not any("deploy" in service for service in cpu.values())
    assert all(cpu[name]["build"]["args"]["TORCH"] == "pip" for name in TRAINERS)


# Who may reach it, and what it may do


@every_form
def test_every_port_is_published_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    published = {
        port["published"]: port.get("host_ip", "")
        for service in services.values()
        for port in service.get("ports", [])
    }

    assert published.keys() == {"7070", "9400", "9090", "9093", "3000"}
    assert all(is_loopback(host) for host in published.values())


@every_form
def test_trainers_have_no_network_but_the_line(services: dict[str, dict[str, Any]]) -> None:
    for name in TRAINERS:
        assert services[name]["networks"].keys() == {"line"}
        assert "ports" not in services[name]


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
        assert not {"privileged", "cap_add", "network_mode", "pid", "user"} & service.keys(), name
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or volume["read_only"], name


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
    assert SERVICE.final("EXPOSE").split() == [str(config.line_port), str(config.endpoint_port)]


def test_the_service_image_has_no_torch() -> None:
    said = " ".join(rest for _, rest in SERVICE.instructions)
    installed = [
        rest.split()[-1]
        for _, rest in SERVICE.instructions
        if "pip" in rest and " install " in rest
    ]

    assert "torch" not in said
    assert installed == ["."], "the base install, and no extra"


def test_the_trainer_image_runs_the_demo_that_it_holds() -> None:
    program, script = TRAINER.command

    assert program == "python"
    assert (ROOT / script).is_file()


def test_the_trainer_image_has_a_cuda_base_unless_it_is_told_otherwise() -> None:
    arguments = dict(rest.split("=", 1) for kind, rest in TRAINER.instructions if kind == "ARG")

    assert "-cuda" in arguments["BASE"]
    assert arguments["TORCH"] == "base"
    assert TRAINER.stages[-1][0] == ("FROM", "${BASE}")
