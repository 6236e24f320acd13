"""Pods on Kubernetes: what follows when one ends, who may reach it, and what it may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.host.errors import ExitCode
from andon_trainer.config import LineConfig
from unit.project.containers import SERVICE, TRAINER
from unit.project.manifests import Manifests, environment, render, served

pytestmark = pytest.mark.kubectl


# What ends a pod, and what follows


def outcome(job: dict[str, Any], code: int) -> str:
    """What the Job's policy does about an exit code; the first rule that fits decides."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["operator"] == "In" and code in codes["values"]:
            action: str = rule["action"]
            return action
    return "Count"


def test_a_halt_is_not_answered_by_a_restart(form: Manifests) -> None:
    pod = form.pods["workers"]

    assert pod.environment()["ANDON_ON_HALT"] == "wait"
    assert outcome(form.job, ExitCode.HALTED) == "FailJob"


def test_a_worker_that_was_told_to_end_comes_back_and_has_not_failed(form: Manifests) -> None:
    for code in (ExitCode.TERMINATED, ExitCode.INTERRUPTED):
        assert outcome(form.job, code) == "Ignore"
    conditions = [
        condition["type"]
        for rule in form.job["podFailurePolicy"]["rules"]
        if rule["action"] == "Ignore"
        for condition in rule.get("onPodConditions", [])
    ]
    assert conditions == ["DisruptionTarget"]


def test_a_worker_that_failed_is_tried_again_a_few_times(form: Manifests) -> None:
    for code in (ExitCode.FAILED, ExitCode.LOST, 137, 139):
        assert outcome(form.job, code) == "Count"
    assert 0 < form.job["backoffLimitPerIndex"] < 10
    assert "maxFailedIndexes" not in form.job, "the others train on"


def test_a_refused_worker_is_not_tried_again(form: Manifests) -> None:
    assert outcome(form.job, ExitCode.REFUSED) == "FailIndex"


def test_two_pods_never_have_one_slot(form: Manifests) -> None:
    assert form.job["podReplacementPolicy"] == "Failed"
    assert form.pods["workers"].spec["restartPolicy"] == "Never"


def test_a_worker_is_always_left(form: Manifests) -> None:
    budget = form.of("PodDisruptionBudget")["andon-workers"]["spec"]

    assert 1 <= budget["minAvailable"] < form.job["completions"]
    assert budget["selector"]["matchLabels"].items() <= form.pods["workers"].labels.items()


# Who may reach it, and what it may do


def test_every_pod_is_without_privileges_and_writes_to_volumes_only(form: Manifests) -> None:
    for pod in form.pods.values():
        whole, container = pod.spec["securityContext"], pod.container["securityContext"]

        user = f"{whole['runAsUser']}:{whole['runAsGroup']}"
        assert user == SERVICE.final("USER") == TRAINER.final("USER")
        assert whole["runAsNonRoot"]
        assert whole["fsGroup"] == whole["runAsGroup"], "volumes belong to it"
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["readOnlyRootFilesystem"]
        assert not container["allowPrivilegeEscalation"]
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert pod.spec["automountServiceAccountToken"] is False
        assert "/tmp" in {path for path, _, _ in pod.mounts()}
        assert not any("hostPath" in volume for _, _, volume in pod.mounts())


def test_no_service_of_the_cluster_becomes_a_setting(form: Manifests) -> None:
    for pod in form.pods.values():
        assert pod.spec["enableServiceLinks"] is False


def test_secrets_are_files_that_only_the_group_reads(form: Manifests) -> None:
    for pod in form.pods.values():
        for _, mount, volume in pod.mounts():
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert mount["readOnly"]


def test_the_operators_token_is_not_for_workers(form: Manifests) -> None:
    assert "/run/andon-tokens/operator-token" in form.pods["line"].files()
    assert form.pods["workers"].environment().keys().isdisjoint({"ANDON_OPERATOR_TOKEN_FILE"})
    assert not any("operator" in path for path in form.pods["workers"].files())


def test_every_pod_shows_a_token_or_proves_a_secret(form: Manifests, tmp_path: Path) -> None:
    for name, pod in form.pods.items():
        variables = environment(pod, tmp_path)
        if name == "workers":
            assert LineConfig.read(variables).token
        elif name == "line":
            access = served(pod, variables).access
            assert access.run_token
            assert access.operator_token
        else:
            assert served(pod, variables).secret_file is not None


def test_each_port_is_open_to_those_who_need_it(form: Manifests) -> None:
    policies = form.of("NetworkPolicy")
    for name, pod in form.pods.items():
        policy = policies[f"andon-{name}"]["spec"]
        peers = {
            port["port"]: [next(iter(peer)) for peer in rule["from"]]
            for rule in policy["ingress"]
            for port in rule["ports"]
        }

        assert policy["podSelector"]["matchLabels"].items() <= pod.labels.items()
        wanted = {
            "grpc": ["podSelector"],
            "lanes": ["podSelector"],
            "metrics": ["namespaceSelector"],
        }
        assert peers == {pod.ports[each]: wanted[each] for each in pod.ports}


def test_with_certificates_nothing_is_sent_in_the_clear(tmp_path: Path) -> None:
    manifests = render("gpu", "tls")

    for name, pod in manifests.pods.items():
        variables = environment(pod, tmp_path)
        folder = variables["ANDON_TLS_DIR"]
        assert "ANDON_INSECURE" not in variables
        assert {f"{folder}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")} <= pod.files()
        secrets = {
            path: volume["secret"]["secretName"]
            for path, _, volume in pod.mounts()
            if "secret" in volume
        }
        (certificate,) = (
            each["spec"]
            for each in manifests.of("Certificate").values()
            if each["spec"]["secretName"] == secrets[folder]
        )
        assert {"server auth", "client auth"} <= set(certificate["usages"]), name
        if name != "workers":
            assert {"localhost"} <= set(certificate["dnsNames"])
            assert certificate["ipAddresses"] == ["127.0.0.1"], "probes call it there"


def test_the_lines_certificate_names_what_workers_call_it() -> None:
    manifests = render("cpu", "tls")
    called = manifests.pods["workers"].environment()["ANDON_ADDRESS"].rpartition(":")[0]

    assert called in manifests.of("Certificate")["andon-line"]["spec"]["dnsNames"]
