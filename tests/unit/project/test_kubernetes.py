"""The manifests for Kubernetes are valid, and an overlay is what its comment says.

kubectl's own kustomize puts them together, without a cluster, and Kubernetes' published schemas
check them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from andon_grafana.__main__ import written
from unit.project.documents import ROOT
from unit.project.manifests import Manifests, build, render

pytestmark = pytest.mark.kubectl

OLDEST, NEWEST = "1.29", "1.37"
"""Of Kubernetes: the first with all that the files use, and the newest whose schemas are here."""
RELABELING = {"sourceLabels": [str], "regex": str, "targetLabel": str}
CUSTOM: dict[str, dict[str, Any]] = {
    "Issuer": {"spec": {"selfSigned": {}, "ca": {"secretName": str}}},
    "Certificate": {
        "spec": {
            "isCA": bool,
            "commonName": str,
            "dnsNames": [str],
            "ipAddresses": [str],
            "usages": [str],
            "duration": str,
            "privateKey": {"algorithm": str, "size": int, "rotationPolicy": str},
            "secretName": str,
            "issuerRef": {"name": str, "kind": str},
        }
    },
    "ServiceMonitor": {
        "spec": {
            "selector": {"matchLabels": dict},
            "endpoints": [
                {
                    "port": str,
                    "path": str,
                    "interval": str,
                    "relabelings": [RELABELING],
                    "scheme": str,
                    "tlsConfig": {
                        "ca": {"secret": {"name": str, "key": str}},
                        "serverName": str,
                    },
                }
            ],
        }
    },
    "PodMonitor": {
        "spec": {
            "selector": {"matchLabels": dict},
            "podMetricsEndpoints": [
                {"port": str, "path": str, "interval": str, "relabelings": [RELABELING]}
            ],
        }
    },
    "JobSet": {
        "spec": {
            "failurePolicy": {"maxRestarts": int},
            "successPolicy": {"operator": str},
            "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
        }
    },
}
"""The fields of other people's kinds that the files use, and their types."""


def fits(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, dict):
        known = isinstance(value, dict) and value.keys() <= pattern.keys()
        return known and all(fits(each, pattern[name]) for name, each in value.items())
    if isinstance(pattern, list):
        return isinstance(value, list) and all(fits(each, pattern[0]) for each in value)
    return type(value) is pattern


# Kubernetes understands it


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_fits_the_schema_that_kubernetes_publishes(
    form: Manifests, version: str
) -> None:
    for document in form.documents:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_job_in_the_jobset_fits_the_schema_of_a_job(version: str) -> None:
    spec = render("gpu", "jobset").job
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}

    kubernetes_validate.validate(job, version, strict=True)


def test_a_typing_error_in_a_probe_would_be_found(gpu: Manifests) -> None:
    wrong = gpu.of("StatefulSet")["andon"]
    probe = wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"]
    probe["prot"] = probe.pop("port")

    try:
        with pytest.raises(kubernetes_validate.ValidationError, match="prot"):
            kubernetes_validate.validate(wrong, NEWEST, strict=True)
    finally:
        probe["port"] = probe.pop("prot")


def test_the_kinds_of_others_have_only_fields_that_they_define(form: Manifests) -> None:
    for document in form.documents:
        if document["kind"] in CUSTOM:
            pattern = {"apiVersion": str, "kind": str, "metadata": dict, **CUSTOM[document["kind"]]}
            assert fits(document, pattern), document


def test_a_jobset_runs_the_same_workers_as_the_job() -> None:
    for others in ((), ("tls",)):
        assert render("gpu", *others, "jobset").job == render("gpu", *others).job
        assert not render("gpu", *others, "jobset").of("Job")


def test_the_overlay_on_the_page_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs/places/kubernetes.md").read_text("utf-8")
    _, _, rest = page.partition("```yaml\n# line/kustomization.yaml\n")
    text = rest.partition("```")[0].replace("../deploy", os.path.relpath(ROOT / "deploy", tmp_path))
    (tmp_path / "kustomization.yaml").write_text(text, "utf-8")

    manifests = build(tmp_path)

    pod = manifests.pods["workers"]
    assert pod.command == ["python", "train.py"]
    assert pod.container["image"] == "registry.example.com/mine:3"
    assert pod.environment()["ANDON_RUN_ID"] == "mine-3"
    assert manifests.of("ServiceMonitor")["andon"]["spec"]["endpoints"][0]["scheme"] == "https"
    assert manifests.of("ConfigMap")["andon-run"]["data"]["ANDON_WORKERS"] == "2"


# Metrics


def test_prometheus_finds_every_pod_by_its_annotations(form: Manifests) -> None:
    for pod in form.pods.values():
        assert pod.annotations["prometheus.io/scrape"] == "true"
        assert pod.annotations["prometheus.io/port"] == str(pod.ports["metrics"])
        # The port answers in the clear, too, and an annotation names no CA.
        assert "prometheus.io/scheme" not in pod.annotations


def test_the_prometheus_operator_finds_every_pod() -> None:
    manifests = render("gpu", "prometheus-operator", "tls")
    monitor = manifests.of("ServiceMonitor")["andon"]["spec"]
    (endpoint,) = monitor["endpoints"]
    (pods,) = manifests.of("PodMonitor")["andon-workers"]["spec"]["podMetricsEndpoints"]

    for service in manifests.of("Service").values():
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "localhost")
    assert pods["port"] in manifests.pods["workers"].ports
    assert (
        "scheme"
        not in render("gpu", "prometheus-operator").of("ServiceMonitor")["andon"]["spec"][
            "endpoints"
        ][0]
    )


def test_the_prometheus_operator_gives_the_labels_that_dashboards_select_by() -> None:
    manifests = render("gpu", "prometheus-operator")
    (endpoint,) = manifests.of("ServiceMonitor")["andon"]["spec"]["endpoints"]
    (pods,) = manifests.of("PodMonitor")["andon-workers"]["spec"]["podMetricsEndpoints"]
    named, reducers = endpoint["relabelings"]

    assert named == pods["relabelings"][0]
    assert named == {"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "run"}
    assert reducers["targetLabel"] == "reducer"
    name = manifests.of("StatefulSet")["andon-reducers"]["metadata"]["name"]
    assert re.fullmatch(reducers["regex"], f"{name}-1")
    assert not re.fullmatch(reducers["regex"], "andon-0")
    assert pods["relabelings"][1] == {
        "sourceLabels": ["__meta_kubernetes_pod_label_batch_kubernetes_io_job_completion_index"],
        "targetLabel": "worker",
    }
    assert manifests.job["completionMode"] == "Indexed"


def test_a_grafana_of_the_cluster_gets_every_dashboard() -> None:
    maps = {
        name: each
        for name, each in render("cpu", "grafana").of("ConfigMap").items()
        if "grafana_dashboard" in each["metadata"].get("labels", {})
    }

    held = {file: text for each in maps.values() for file, text in each["data"].items()}
    assert held == written()
    # `kubectl apply` keeps an object once more, as an annotation of at most this length.
    assert all(len(json.dumps(each)) < 256 * 1024 for each in maps.values())


# The overlays


def test_with_gpus_each_worker_has_one(gpu: Manifests) -> None:
    limits = gpu.pods["workers"].container["resources"]["limits"]

    assert limits["nvidia.com/gpu"] == "1"
    assert gpu.pods["workers"].spec["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_on_several_nodes_all_of_them_reach_the_checkpoints(gpu: Manifests) -> None:
    claim = gpu.of("PersistentVolumeClaim")["andon-checkpoints"]["spec"]

    assert claim["accessModes"] == ["ReadWriteMany"]


def test_without_gpus_all_pods_of_a_volume_of_one_node_are_on_it() -> None:
    cpu = render("cpu")
    pod = cpu.pods["workers"]
    claim = cpu.of("PersistentVolumeClaim")["andon-checkpoints"]["spec"]
    (near,) = pod.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert near["topologyKey"] == "kubernetes.io/hostname"
    assert near["labelSelector"]["matchLabels"].items() <= cpu.pods["line"].labels.items()
    assert "nvidia.com/gpu" not in pod.container["resources"]["limits"]
    assert "reducers" not in cpu.pods, "on one node they bring nothing"
