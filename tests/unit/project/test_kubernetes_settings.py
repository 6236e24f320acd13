"""Andon understands the manifests: its parsers read each command and variable as a pod has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.v1.coordinator_pb2 import DESCRIPTOR as COORDINATOR
from andon.v1.reducer_pb2 import DESCRIPTOR as REDUCER
from andon_cli.app import read_config
from andon_cli.questions import HealthConfig, StatusConfig
from andon_trainer.config import LineConfig
from unit.project.containers import SERVICE, TRAINER
from unit.project.manifests import Manifests, Pod, environment, render, served

pytestmark = pytest.mark.kubectl


def test_the_service_is_started_by_a_command_that_andon_understands(
    form: Manifests, tmp_path: Path
) -> None:
    pod = form.pods["line"]

    config = served(pod, environment(pod, tmp_path))

    assert config.role == "all"
    assert config.bind == "0.0.0.0"
    assert pod.ports == {
        "grpc": config.line_port,
        "lanes": config.tcp_port,
        "metrics": config.endpoint_port,
    }
    assert config.workers == form.job["completions"]
    assert config.line.max_workers is not None
    assert config.line.max_workers >= form.job["completions"]
    assert not config.until_complete


def test_the_reducers_register_under_names_that_the_cluster_resolves(tmp_path: Path) -> None:
    manifests = render("gpu", "tls")
    pod, line = manifests.pods["reducers"], manifests.pods["line"]
    replicas = manifests.of("StatefulSet")["andon-reducers"]["spec"]

    config = served(pod, environment(pod, tmp_path))

    assert config.role == "reducer"
    assert config.coordinator == f"andon:{line.ports['grpc']}"
    assert config.advertise == f"{pod.name}.{replicas['serviceName']}"
    assert pod.ports == {
        "grpc": config.line_port,
        "lanes": config.tcp_port,
        "metrics": config.endpoint_port,
    }
    names = manifests.of("Certificate")["andon-reducers"]["spec"]["dnsNames"]
    for index in range(replicas["replicas"]):
        assert f"andon-reducers-{index}.{replicas['serviceName']}" in names


def test_the_line_waits_for_its_reducers_and_its_own(gpu: Manifests, tmp_path: Path) -> None:
    line = gpu.pods["line"]

    config = served(line, environment(line, tmp_path))

    others = gpu.of("StatefulSet")["andon-reducers"]["spec"]["replicas"]
    assert config.line.reducers == others + 1
    assert config.secret_file is not None


def test_a_worker_gets_its_slot_from_its_index_in_the_job(form: Manifests, tmp_path: Path) -> None:
    first = form.pods["workers"]
    second = Pod(name="x", manifests=form, template=first.template, index=1)

    configs = [LineConfig.read(environment(pod, tmp_path)) for pod in (first, second)]

    assert form.job["completionMode"] == "Indexed"
    assert [config.launch_slot for config in configs] == [0, 1]
    assert all(config.local_rank == 0 for config in configs)


def test_workers_find_the_line_and_keep_their_files_on_the_volume(
    form: Manifests, tmp_path: Path
) -> None:
    line, pod = form.pods["line"], form.pods["workers"]
    variables = environment(pod, tmp_path)

    config = LineConfig.read(variables)

    assert config.address == f"andon:{line.ports['grpc']}"
    assert line.manifests.of("Service")["andon"]["spec"]["clusterIP"] == "None"
    assert config.run_id == line.environment()["ANDON_RUN_ID"]
    assert config.on_halt == "wait"
    assert config.checkpoint_every > 0
    assert variables["ANDON_RESUME"] == "latest"
    assert config.metrics_endpoint == ("0.0.0.0", pod.ports["metrics"])
    volumes = {path: volume for path, _, volume in pod.mounts()}
    assert volumes[str(config.run_dir)]["persistentVolumeClaim"] == {
        "claimName": "andon-checkpoints"
    }


def test_the_service_sees_the_checkpoints_where_it_looks_for_them(form: Manifests) -> None:
    line, worker = form.pods["line"], form.pods["workers"]
    folder = line.environment()["ANDON_RUN_DIR"]
    there = {path: (mount, volume) for path, mount, volume in line.mounts()}
    written = {volume["name"]: mount for _, mount, volume in worker.mounts() if "name" in volume}

    mount, volume = there[f"{folder}/checkpoints"]

    assert volume["persistentVolumeClaim"] == {"claimName": "andon-checkpoints"}
    assert mount["subPathExpr"] == written["checkpoints"]["subPathExpr"] + "/checkpoints"
    assert mount["readOnly"]


def test_the_journal_is_on_a_volume_of_one_node(form: Manifests) -> None:
    line = form.pods["line"]
    volumes = {path: volume for path, _, volume in line.mounts()}

    journal = volumes[line.environment()["ANDON_RUN_DIR"]]

    assert journal["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert form.of("StatefulSet")["andon"]["spec"]["replicas"] == 1


def test_every_variable_that_a_container_is_given_is_read(form: Manifests, tmp_path: Path) -> None:
    for name, pod in form.pods.items():
        variables = environment(pod, tmp_path)
        if name == "workers":
            LineConfig.read(variables)
        else:
            read_config(pod.command[1:], variables)
        if name == "line":
            asked = read_config(["status"], variables)
            assert isinstance(asked, StatusConfig)
            assert asked.address == f"127.0.0.1:{pod.ports['grpc']}"

        assert {each for each in variables if each.startswith("ANDON_")} <= variables.asked


def test_the_commands_are_those_that_the_images_hold(form: Manifests) -> None:
    images = {"line": SERVICE, "reducers": SERVICE, "workers": TRAINER}
    for name, pod in form.pods.items():
        assert pod.command[0] == images[name].command[0]
        assert (
            pod.container["image"]
            .rpartition("/")[2]
            .startswith("andon-trainer:" if name == "workers" else "andon-service:")
        )


# Probes


def test_probes_ask_for_services_that_are_served(form: Manifests, tmp_path: Path) -> None:
    names = {"line": COORDINATOR, "reducers": REDUCER}
    for name, pod in form.pods.items():
        if name == "workers":
            continue
        served_there = {each.full_name for each in names[name].services_by_name.values()}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = pod.container[kind]
            if "grpc" in probe:
                port, service = probe["grpc"]["port"], probe["grpc"].get("service", "")
            else:
                command = probe["exec"]["command"]
                health = read_config(command[1:], environment(pod, tmp_path))
                assert command[0] == "andon"
                assert isinstance(health, HealthConfig)
                port, service = int(health.address.rpartition(":")[2]), health.service

            assert port == pod.ports["grpc"]
            assert service in (served_there if kind == "readinessProbe" else {""})


def test_kubernetes_own_probes_are_used_where_nothing_is_encrypted(form: Manifests) -> None:
    for name, pod in form.pods.items():
        if name != "workers":
            encrypted = "ANDON_TLS_DIR" in pod.environment()
            assert ("exec" if encrypted else "grpc") in pod.container["livenessProbe"]


def test_no_worker_has_a_probe_that_could_end_it(form: Manifests) -> None:
    probes = {"startupProbe", "livenessProbe", "readinessProbe"}

    assert not probes & form.pods["workers"].container.keys()


def test_workers_reach_the_line_while_it_is_not_ready(form: Manifests) -> None:
    for service in form.of("Service").values():
        assert service["spec"]["publishNotReadyAddresses"]
