"""The manifests for Kubernetes as data: what kustomize makes of them, and what a pod sees of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from andon_cli.app import read_config
from andon_server.settings import ServeConfig
from unit.project.documents import ROOT
from unit.project.watched import Watched

__all__ = [
    "COMPONENTS",
    "FORMS",
    "KUBERNETES",
    "OVERLAYS",
    "Manifests",
    "Pod",
    "build",
    "environment",
    "kubectl",
    "render",
    "served",
]

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu")
COMPONENTS = ("prometheus-operator", "tls", "jobset")
"""What an overlay can be combined with, in this order."""
FORMS = [(overlay, *more) for overlay in OVERLAYS for more in ((), ("tls",), COMPONENTS)]
_OLDEST = (5, 0)
"""The kustomize that knows all that the files use."""
_REFERENCE = re.compile(r"\$\(([A-Z_]+)\)")


def kubectl() -> str | None:
    """The path of a kubectl whose kustomize is new enough; None if there is none."""
    tool = shutil.which("kubectl")
    if tool is None:
        return None
    version = [tool, "version", "--client"]
    said = subprocess.run(version, capture_output=True, text=True, check=False).stdout
    found = re.search(r"Kustomize Version: v(\d+)\.(\d+)", said)
    return tool if found and (int(found[1]), int(found[2])) >= _OLDEST else None


@cache
def render(overlay: str, *components: str) -> Manifests:
    """What kustomize makes of an overlay with components, in an overlay of a user's own."""
    with TemporaryDirectory() as folder:
        own = Path(os.path.realpath(folder))
        text = {
            "kind": "Kustomization",
            "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, own)],
            "components": [
                os.path.relpath(KUBERNETES / "components" / component, own)
                for component in components
            ],
        }
        (own / "kustomization.yaml").write_text(yaml.safe_dump(text), "utf-8")
        return build(own)


def build(folder: Path) -> Manifests:
    """What kustomize makes of a folder."""
    tool = kubectl()
    assert tool is not None
    words = [tool, "kustomize", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return Manifests(documents=tuple(yaml.safe_load_all(done.stdout)))


@dataclass(frozen=True, slots=True)
class Manifests:
    """The objects that one `kubectl apply` would make."""

    documents: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """The objects of a kind, by name."""
        found = (each for each in self.documents if each["kind"] == kind)
        return {each["metadata"]["name"]: each for each in found}

    @property
    def job(self) -> dict[str, Any]:
        """The spec of the workers' Job, or of that in the JobSet."""
        spec: dict[str, Any]
        if sets := self.of("JobSet"):
            spec = sets["andon"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        else:
            spec = self.of("Job")["andon-workers"]["spec"]
        return spec

    @property
    def pods(self) -> dict[str, Pod]:
        """A pod of each kind, by its component: line, workers and, if there are any, reducers."""
        templates = [(f"{name}-0", each["spec"]) for name, each in self.of("StatefulSet").items()]
        pods = [
            Pod(name=name, manifests=self, template=spec["template"])
            for name, spec in [*templates, ("andon-workers-0-x", self.job)]
        ]
        return {pod.labels["app.kubernetes.io/component"]: pod for pod in pods}


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod, as its template describes it."""

    name: str
    manifests: Manifests
    template: dict[str, Any]
    index: int = 0
    """Of an indexed Job's."""

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations, with that of an indexed Job."""
        own: dict[str, str] = self.template["metadata"].get("annotations", {})
        return {**own, "batch.kubernetes.io/job-completion-index": str(self.index)}

    @property
    def spec(self) -> dict[str, Any]:
        """Its spec."""
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """Its only container."""
        (container,) = self.spec["containers"]
        found: dict[str, Any] = container
        return found

    @property
    def command(self) -> list[str]:
        """What it runs."""
        command: list[str] = self.container["command"]
        return command

    @property
    def ports(self) -> dict[str, int]:
        """Its ports, by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def environment(self) -> dict[str, str]:
        """Its variables, as the kubelet puts them together: in their order."""
        known: dict[str, str] = {}
        for variable in self.container["env"]:
            known[variable["name"]] = self._value(variable, known)
        return known

    def mounts(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Path, mount and volume of everything that is mounted."""
        claims = {
            each["metadata"]["name"]: each
            for owner in self.manifests.of("StatefulSet").values()
            for each in owner["spec"].get("volumeClaimTemplates", [])
        }
        volumes = {**claims, **{volume["name"]: volume for volume in self.spec["volumes"]}}
        for mount in self.container["volumeMounts"]:
            yield mount["mountPath"], mount, volumes[mount["name"]]

    def files(self) -> set[str]:
        """The paths of the files that secrets put there."""
        return {
            f"{path}/{name}"
            for path, _, volume in self.mounts()
            if "secret" in volume
            for name in _names(volume["secret"])
        }

    def _value(self, variable: dict[str, Any], known: Mapping[str, str]) -> str:
        if "value" in variable:
            return _REFERENCE.sub(lambda found: known[found[1]], variable["value"])
        (kind, source), *more = variable["valueFrom"].items()
        assert not more
        if kind == "configMapKeyRef":
            text: str = self.manifests.of("ConfigMap")[source["name"]]["data"][source["key"]]
            return text
        assert kind == "fieldRef"
        if source["fieldPath"] == "metadata.name":
            return self.name
        found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldPath"])
        assert found is not None
        return self.annotations[found[1]]


def _names(secret: dict[str, Any]) -> Sequence[str]:
    """The files of a secret's volume; those of a whole secret are cert-manager's."""
    if "items" in secret:
        return [item["path"] for item in secret["items"]]
    return ("tls.crt", "tls.key", "ca.crt")


def environment(pod: Pod, disk: Path) -> Watched:
    """A pod's variables; the files of its secrets are below `disk`."""
    places = {}
    for path in pod.files():
        place = disk / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("0123456789abcdef", "utf-8")
        place.chmod(0o440)
        places[path] = str(place)
    return Watched({name: places.get(text, text) for name, text in pod.environment().items()})


def served(pod: Pod, variables: Mapping[str, str]) -> ServeConfig:
    """What a pod of the service's image serves."""
    assert pod.command[0] == "andon"
    config = read_config(pod.command[1:], variables)
    assert isinstance(config, ServeConfig)
    return config
